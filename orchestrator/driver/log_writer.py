"""The merged log of an attempt: every line of every source, numbered as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from autotune.launchers.base import Chunk
from autotune.orchestrator.errors import Failure
from autotune.policies.values.observation import Sample

_LONGEST_LINE = 64 * 1024  # bytes; a program that never ends its line is cut here
_SOURCE = re.compile(r"\[@([^\]]*)\] ")


class LogLine(msgspec.Struct, frozen=True):
    """A line of run.log without its source prefix."""

    number: int
    source: str
    text: str


class LogWriter:
    """Writes run.log and samples.jsonl of an attempt anew and returns the lines as they become whole."""

    def __init__(self, log: Path, samples: Path) -> None:
        self._path = log
        self._partial: dict[str, bytes] = {}
        self._number = 0
        with _writing(log):
            self._log: BinaryIO = log.open("wb")
            self._samples: BinaryIO = samples.open("wb")
            log.chmod(0o600)
            samples.chmod(0o600)

    def write(self, chunks: tuple[Chunk, ...], samples: tuple[Sample, ...]) -> list[LogLine]:
        """Append what is new; returns the lines that are whole now."""
        with _writing(self._path):
            lines = [line for chunk in chunks for line in self._add(chunk.source, chunk.data)]
            for sample in samples:
                self._samples.write(msgspec.json.encode(sample) + b"\n")
            self._log.flush()
            self._samples.flush()
        return lines

    def finish(self) -> list[LogLine]:
        """Write lines that never ended and close; returns them."""
        with _writing(self._path):
            partial = sorted(self._partial.items())
            lines = [line for source, data in partial if data for line in self._line(source, data)]
            self._partial = {}
            self._log.close()
            self._samples.close()
        return lines

    def _add(self, source: str, data: bytes) -> list[LogLine]:
        *whole, rest = (self._partial.pop(source, b"") + data).split(b"\n")
        while len(rest) > _LONGEST_LINE:
            whole.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._partial[source] = rest
        return [line for part in whole for line in self._line(source, part)]

    def _line(self, source: str, data: bytes) -> list[LogLine]:
        self._number += 1
        prefix = f"[@{source}] ".encode() if source else b""
        self._log.write(prefix + data + b"\n")
        return list(_readings(self._number, source, data))


def reread(log: Path) -> Iterator[LogLine]:
    """Return the lines of a run.log that was written before."""
    with log.open("rb") as file:
        for number, data in enumerate(file, start=1):
            prefix = _SOURCE.match(data[:300].decode("utf-8", "replace"))
            source = prefix[1] if prefix else ""
            body = data.rstrip(b"\n")
            yield from _readings(number, source, body[len(f"[@{source}] ".encode()) :] if prefix else body)


def _readings(number: int, source: str, data: bytes) -> Iterator[LogLine]:
    """Return what a line shows: a progress bar rewrites its line, and a message may follow it."""
    parts = [part for part in data.split(b"\r") if part] or [b""]
    for part in parts:
        yield LogLine(number, source, part.decode("utf-8", "replace"))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        run = path.parent.parent.parent.name
        raise Failure(
            f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
            hint=f"make room, then `autotune resume {run}` continues this run",
        ) from None
