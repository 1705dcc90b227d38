"""stdout and stderr that never make a command fail: after an error, further output is discarded.

Only writes to the stream itself are guarded, so that an error of a file, a socket or a child process is not
mistaken for a closed pipe.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO


class _Output(io.FileIO):
    """The descriptor of a standard stream, redirected to /dev/null after the first error."""

    error: OSError | None = None
    was_left = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error, self.was_left = error, error.errno == errno.EPIPE
            _discard(self.fileno())
            return memoryview(data).nbytes


def guard() -> None:
    """Replace this process's standard streams by guarded ones; a closed one becomes /dev/null."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # otherwise the next opened file would become a standard stream
            os.open(os.devnull, os.O_RDWR)
        stream, original = getattr(sys, name), getattr(sys, f"__{name}__")
        if number and stream is original:  # otherwise it was replaced, for example by a test
            setattr(sys, name, _guarded(number, stream))


def failure(stream: TextIO | None) -> OSError | None:
    """Return the error after which a stream discards output; later calls return None.

    None also for a stream that was not created by `guard`.
    """
    raw = _raw(stream)
    if raw is None:
        return None
    error, raw.error = raw.error, None
    return error


def was_left(stream: TextIO | None) -> bool:
    """Return whether the reader of a stream has closed the pipe, as `head` does."""
    raw = _raw(stream)
    return raw is not None and raw.was_left


def _raw(stream: TextIO | None) -> _Output | None:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Output) else None


def _guarded(number: int, stream: TextIO | None) -> TextIO:
    raw = _Output(number, "wb", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _discard(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
