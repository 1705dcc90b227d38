"""The merged log of an attempt: every line of every source, numbered as written."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from autotune.launchers.base import OWN_SOURCE, Chunk
from autotune.orchestrator.run import log_parts
from autotune.orchestrator.run.full_disk import Pause
from autotune.orchestrator.run.log_parts import LIMIT_BYTES, LogParts
from autotune.orchestrator.run.memory_record import MemoryRecord
from autotune.policies.values.observation import Sample

_LONGEST_LINE = 64 * 1024  # bytes; a longer line is cut here, wherever its chunks end
_TOGETHER = 8 * 1024  # bytes of lines that are looked at together


class LogLine(msgspec.Struct, frozen=True):
    """A line of run.log without its source prefix."""

    number: int  # from 1
    source: str
    text: str


class LogLines(msgspec.Struct, frozen=True):
    """Lines of run.log that follow one another, of one source."""

    number: int  # of the first
    source: str
    data: bytes  # without the last newline

    def __iter__(self) -> Iterator[LogLine]:
        """Yield what the lines show: a progress bar rewrites its line, and a message may follow it."""
        for number, line in enumerate(self.data.split(b"\n"), self.number):
            for part in [part for part in line.split(b"\r") if part] or [b""]:
                yield LogLine(number, self.source, part.decode("utf-8", "replace"))


class LogWriter:
    """Writes the log and the memory of an attempt and returns the lines as they become whole.

    After an attach every source is delivered from its start once more: what is recorded of it is returned
    with the number that it has, and not written again. What cannot be written is told by `say`, not raised.
    """

    def __init__(
        self,
        log: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        pause = Pause(log, say=say)
        self._log = LogParts(log, pause=pause, limit_bytes=limit_bytes)
        self._memory = MemoryRecord(log.parent, pause=pause)
        self._partial: dict[str, bytes] = {}
        known = self._log.recorded
        self._first = dict(known.first)
        self._again: dict[str, Iterator[int]] = {
            source: chain.from_iterable(ranges) for source, ranges in known.numbers.items()
        }
        self._own_again = {data: deque(numbers) for data, numbers in known.own.items()}

    def write(self, chunks: tuple[Chunk, ...], samples: tuple[Sample, ...]) -> list[LogLines]:
        """Append what is new; returns the lines that are whole now."""
        lines = [part for chunk in chunks for part in self._add(chunk.source, chunk.data)]
        self._log.flush()
        self._memory.add(samples)
        return lines

    def finish(self) -> list[LogLines]:
        """Write lines that never ended and close; returns them."""
        partial = sorted(self._partial.items())
        lines = [self._line(source, data) for source, data in partial if data]
        self._partial = {}
        self._log.close()
        self._memory.close()
        return lines

    def _add(self, source: str, data: bytes) -> list[LogLines]:
        ended, newline, rest = (self._partial.pop(source, b"") + data).rpartition(b"\n")
        *cut, self._partial[source] = _cut(rest)
        pieces = list(_pieces(ended)) if newline else []
        if source in self._again or source == OWN_SOURCE or cut:
            pieces = [part for piece in pieces for line in piece.split(b"\n") for part in _cut(line)]
        return [self._line(source, piece) for piece in (*pieces, *cut)]

    def _line(self, source: str, data: bytes) -> LogLines:
        number = self._recorded(source, data)
        if number is None:
            number = self._log.add(source, data)
        return LogLines(number, source, data)

    def _recorded(self, source: str, data: bytes) -> int | None:
        """Return the number of a line that is delivered once more after an attach."""
        if source == OWN_SOURCE and self._own_again.get(data):
            return self._own_again[data].popleft()
        if source not in self._again:
            return None
        if self._first.pop(source, None) not in (None, zlib.crc32(data)):
            del self._again[source]  # its beginning is gone: what comes was never here
            return None
        number = next(self._again[source], None)
        if number is None:
            del self._again[source]
        return number


def reread(log: Path) -> Iterator[LogLine]:
    """Return the lines of a run.log that was written before."""
    for line in log_parts.read(log):
        yield from LogLines(line.number, line.source, line.data)


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Yield whole lines a few at a time; a line that is too long comes by itself, in pieces."""
    at = 0
    while at <= len(lines):
        end = lines.rfind(b"\n", at, at + _TOGETHER) if len(lines) - at > _TOGETHER else len(lines)
        if end < 0:
            end = lines.find(b"\n", at)
            end = len(lines) if end < 0 else end
        yield from _cut(lines[at:end]) if end - at > _LONGEST_LINE else (lines[at:end],)
        at = end + 1


def _cut(line: bytes) -> list[bytes]:
    """Return a line in pieces of the greatest length, at least one."""
    return [line[at : at + _LONGEST_LINE] for at in range(0, max(1, len(line)), _LONGEST_LINE)]
