"""stdout and stderr whose failure ends no command: what they no longer take is discarded.

Only a write to the stream itself can fail here, so that no error of a file, a socket or a child process is
taken for a reader that has gone away.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO


class _Output(io.FileIO):
    """The descriptor of a standard stream. After the first error it leads nowhere."""

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
    """Put such streams in the place of this process's own; a closed one leads nowhere from the start."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would become a standard stream
            os.open(os.devnull, os.O_RDWR)
        stream, original = getattr(sys, name), getattr(sys, f"__{name}__")
        if number and stream is original:  # else somebody has replaced it
            setattr(sys, name, _guarded(number, stream))


def failure(stream: TextIO | None) -> OSError | None:
    """Return the error for which a stream takes no more output, once: later calls return None.

    None too for a stream that is not of `guard`.
    """
    raw = _raw(stream)
    if raw is None:
        return None
    error, raw.error = raw.error, None
    return error


def was_left(stream: TextIO | None) -> bool:
    """Return whether the reader of a stream has gone away, as `head` does."""
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
