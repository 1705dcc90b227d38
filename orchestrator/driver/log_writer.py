"""Writes the merged log of an attempt, with numbered lines of all sources, and the read position.

`cursor.json`, from which the next driver continues, is written after the lines that it counts. A driver that
dies in between leaves lines beyond it; the next driver receives them again and recognizes them by their
number.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from autotune.launchers.base import OWN_SOURCE, Chunk
from autotune.orchestrator.run import log_parts
from autotune.orchestrator.run.log_parts import LIMIT_BYTES, LogParts, Row
from autotune.orchestrator.run.memory_record import MemoryRecord
from autotune.orchestrator.run.storage import Pause, Persist, at_once, is_absent, steadily, sync_folder
from autotune.policies.values.observation import Sample
from autotune.policies.values.value import Value

_LONGEST_LINE = 64 * 1024  # bytes; a longer line is split here, wherever its chunks end
_TOGETHER = 8 * 1024  # bytes of lines that are processed together
_TOGETHER_LINES = 64  # recorded lines that are processed together
_SLICE = 4 << 20  # bytes of the record that are processed per poll
_ACKNOWLEDGED_BYTES = 64 << 20  # of the job's output, before the driver waits for the disk


class LogLine(msgspec.Struct, frozen=True):
    """A line of run.log without its source prefix."""

    number: int  # from 1
    source: str
    text: str


class LogLines(msgspec.Struct, frozen=True):
    """Consecutive lines of run.log from one source."""

    number: int  # of the first
    source: str
    data: bytes  # without the last newline

    def __iter__(self) -> Iterator[LogLine]:
        """Yield the lines as a terminal shows them: progress bars rewrite their line."""
        for number, line in enumerate(self.data.split(b"\n"), self.number):
            for part in [part for part in line.split(b"\r") if part] or [b""]:
                yield LogLine(number, self.source, part.decode("utf-8", "replace"))


class LogWriter:
    """Writes the log and the memory samples of an attempt and returns completed lines.

    After an attach, `catch_up` first returns recorded lines with their numbers. Then every file is delivered
    from the saved cursor; lines recorded beyond it are neither written nor returned again. Write errors are
    reported by `say`, not raised; `persist` retries what has to be read.
    """

    def __init__(
        self,
        log: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        say: Callable[[str], None] = lambda _: None,
        persist: Persist = at_once,
    ) -> None:
        persist(lambda: log_parts.mend(log), path=log)
        pause = Pause(log, say=say)
        self._say, self._pause = say, pause
        self._log = LogParts(log, pause=pause, limit_bytes=limit_bytes)
        self._memory = MemoryRecord(log.parent, pause=pause, persist=persist)
        self._cursor_file = CursorFile(log.parent)
        cursor = persist(lambda: read_cursor(log.parent), path=log.parent / CURSOR)
        self._ends = dict(cursor.offsets)  # file -> offset after what was delivered of it
        self._partial: dict[str, _Partial] = {}  # by file, or by source where it has none
        self._lines: Counter[str] = Counter()  # source -> lines in the log
        self._again = _Again(cursor)
        rows = steadily(lambda: log_parts.rows(log, strict=True), persist=persist, path=log)
        self._record = self._recorded(rows)
        self._remarks: list[bytes] = []  # own lines, written while catching up
        self._saved: dict[str, int] = {}
        self.caught_up = False
        self.acknowledged: dict[str, int] = {}  # the job's own output: file -> bytes that the disk has

    def catch_up(self, most_bytes: int = _SLICE) -> list[LogLines]:
        """Return the next recorded lines, about `most_bytes` of them."""
        lines, size = list[LogLines](), 0
        for part in self._record:
            lines.append(part)
            size += len(part.data)
            if size >= most_bytes:
                return lines
        self.caught_up = True
        new = [data for data in self._remarks if not self._again.has_own(data)]
        return lines + [line for data in new for line in self._line(OWN_SOURCE, data)]

    def write(self, chunks: tuple[Chunk, ...], samples: tuple[Sample, ...]) -> list[LogLines]:
        """Append new data; return the lines completed by it."""
        while not self.caught_up:
            self.catch_up()
        lines = [part for chunk in chunks for part in self._add(chunk)]
        self._log.flush()
        self._keep_place()
        self._memory.add(samples)
        return lines

    def remark(self, text: str) -> list[LogLines]:
        """Write a line of autotune's own, unless it is already recorded."""
        if not self.caught_up:
            self._remarks.append(text.encode())
            return []
        lines = self._line(OWN_SOURCE, text.encode())
        self._log.flush()
        return lines

    def finish(self) -> list[LogLines]:
        """Write and return incomplete lines, and close."""
        partial = sorted(self._partial.values())
        lines = [line for source, data in partial if data for line in self._line(source, data)]
        self._partial = {}
        self._log.close()
        self._memory.close()
        return lines

    def _recorded(self, rows: Iterator[Row]) -> Iterator[LogLines]:
        """Yield and count recorded lines, grouping consecutive ones of a source."""
        number, first, source = 0, 1, ""
        together: list[bytes] = []
        for row in rows:
            if together and (
                row.missing is not None or row.source != source or len(together) == _TOGETHER_LINES
            ):
                yield LogLines(first, source, b"\n".join(together))
                together = []
            for name, count in (row.missing or {}).items():
                self._again.count(name, count, None)
                number += count
            if row.missing is None:
                self._again.count(row.source, 1, row.data)
                number += 1
                first, source = first if together else number, row.source
                together.append(row.data)
        if together:
            yield LogLines(first, source, b"\n".join(together))
        self._lines += self._again.lines
        self._log.follow(number)

    def _add(self, chunk: Chunk) -> list[LogLines]:
        key, source = chunk.file or chunk.source, chunk.source
        before = self._partial.pop(key, _Partial(source, b"")).data
        lines: list[LogLines] = []
        if chunk.file and chunk.end - len(chunk.data) != self._ends.get(chunk.file, 0):  # a gap
            lines += self._line(source, before) if before else []
            before = b""
            self._again.forget(source)
        if chunk.dropped:
            notice = f"{chunk.dropped} bytes of output were dropped before they could be recorded"
            lines += self._line(OWN_SOURCE, f"autotune: {notice}".encode())
            self._say(notice)
        ended, newline, rest = (before + chunk.data).rpartition(b"\n")
        *cut, rest = _cut(rest)
        self._partial[key] = _Partial(source, rest)
        if chunk.file:
            self._ends[chunk.file] = chunk.end
        pieces = list(_pieces(ended)) if newline else []
        if self._again.expects(source) or cut:
            pieces = [part for piece in pieces for line in piece.split(b"\n") for part in _cut(line)]
        return lines + [line for piece in (*pieces, *cut) for line in self._line(source, piece)]

    def _line(self, source: str, data: bytes) -> list[LogLines]:
        """Write lines of a source and return them; none if they are already recorded."""
        if self._again.takes(source, data):
            return []
        self._lines[source] += data.count(b"\n") + 1
        return [LogLines(self._log.add(source, data), source, data)]

    def _keep_place(self) -> None:
        """Save the read position for the next driver that attaches."""
        if not (self._cursor_file.due and self._log.whole):
            return
        partial = {file: len(each.data) for file, each in self._partial.items()}
        offsets = {file: end - partial.get(file, 0) for file, end in self._ends.items()}
        if offsets == self._saved:
            return
        own = {
            file: offsets[file] for file, each in self._partial.items() if not each.source and file in offsets
        }
        safely = sum(end - self.acknowledged.get(file, 0) for file, end in own.items()) >= _ACKNOWLEDGED_BYTES
        counted = {source: count - self._again.left(source) for source, count in self._lines.items()}
        cursor = Cursor(offsets=offsets, lines=counted)

        def save() -> None:
            if safely:
                self._log.sync()
            self._cursor_file.write(cursor, durable=safely)

        if self._pause.tries(save):
            self._saved = offsets
            self.acknowledged = own if safely else self.acknowledged


class _Partial(NamedTuple):
    """An incomplete line."""

    source: str
    data: bytes


class _Again:
    """Lines that are recorded beyond the cursor and will be delivered again."""

    def __init__(self, cursor: Cursor) -> None:
        self._counted = cursor.lines
        self.lines: Counter[str] = Counter()  # source -> recorded lines
        self._left: dict[str, int] = {}  # source -> lines that will be delivered again
        self._first: dict[str, int] = {}  # source -> checksum of the first of them, if available
        self._own: set[bytes] = set()  # all lines of autotune's own, which have several origins
        self._own_left: Counter[bytes] = Counter()

    def count(self, source: str, count: int, data: bytes | None) -> None:
        """Count a recorded line, or lines that are missing."""
        self.lines[source] += count
        beyond = min(count, self.lines[source] - self._counted.get(source, 0))
        if source == OWN_SOURCE and data is not None:
            self._own.add(data)
            self._own_left[data] += beyond > 0
        elif beyond > 0:
            if source not in self._left and data is not None:
                self._first[source] = zlib.crc32(data)
            self._left[source] = self._left.get(source, 0) + beyond

    def has_own(self, data: bytes) -> bool:
        """Return whether a line of autotune's own is recorded."""
        return data in self._own

    def left(self, source: str) -> int:
        """Return how many lines of a source will be delivered again."""
        return self._own_left.total() if source == OWN_SOURCE else self._left.get(source, 0)

    def expects(self, source: str) -> bool:
        """Return whether lines have to be checked one by one."""
        return source == OWN_SOURCE or source in self._left

    def takes(self, source: str, data: bytes) -> bool:
        """Return whether a line is already recorded."""
        if source == OWN_SOURCE and self._own_left[data]:
            self._own_left[data] -= 1
            return True
        if source not in self._left:
            return False
        if self._first.pop(source, None) not in (None, zlib.crc32(data)):
            self.forget(source)  # its beginning is lost: what arrives was never recorded
            return False
        self._left[source] -= 1
        if not self._left[source]:
            del self._left[source]
        return True

    def forget(self, source: str) -> None:
        """Expect no repeated lines of a source, because different ones arrived."""
        self._left.pop(source, None)
        self._first.pop(source, None)


def reread(log: Path) -> Iterator[LogLine]:
    """Return the lines of an existing run.log; raises OSError."""
    for line in log_parts.read(log, strict=True):
        yield from LogLines(line.number, line.source, line.data)


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Yield complete lines in small groups; a line that is too long is yielded alone, in pieces."""
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


CURSOR = "cursor.json"
_CURSOR_EVERY_S = 1.0
_CURSOR_SHARE = 0.01  # of the time, at most, spent on writing the cursor
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Cursor(Value, frozen=True, kw_only=True):
    """The read position of every file; everything before it is recorded."""

    offsets: dict[str, _Count] = {}  # file -> offset of its first unrecorded line
    lines: dict[str, _Count] = {}  # source -> number of recorded lines


def read_cursor(folder: Path) -> Cursor:
    """Return the read position of an attempt, the beginning if its file is damaged; raises OSError."""
    if is_absent(folder / CURSOR):
        return Cursor()
    try:
        return msgspec.json.decode((folder / CURSOR).read_bytes(), type=Cursor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Cursor()


class CursorFile:
    """Writes the cursor of an attempt, at a bounded share of the time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due_at = time.monotonic() + _CURSOR_EVERY_S

    @property
    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due_at

    def write(self, cursor: Cursor, *, durable: bool) -> None:
        """Replace the saved cursor; `durable` waits for the disk. Raises OSError."""
        begun = time.monotonic()
        partial = self._folder / f".{CURSOR}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(cursor))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(self._folder / CURSOR)
        if durable:
            sync_folder(self._folder)
        ended = time.monotonic()
        self._due_at = ended + max(_CURSOR_EVERY_S, (ended - begun) / _CURSOR_SHARE)
