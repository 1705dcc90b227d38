"""The log of an attempt, as it is recorded and read again: `run.log`, and compressed parts before it.

`run.log` holds the newest lines. When it is full it becomes `run.log.0001.gz`, `run.log.0002.gz` and so on.
Over the run's limit the oldest parts but the first go, of older attempts before newer ones: the beginning
holds the settings, the end the failure. A line in their place says what is missing, so that numbers of lines
stay what they were: `zcat -f run.log.* run.log` reads all that is left.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from autotune.launchers.base import OWN_SOURCE
from autotune.orchestrator.run.storage import Pause, append, is_absent

LIMIT_BYTES = 1 << 30  # of all logs of a run, on the disk
_LARGEST_PART_BYTES = 16 << 20  # compressed in about 0.1 s; nothing is polled meanwhile
_PARTS = 64  # that the limit is worth at least
_SOURCE = re.compile(rb"\[@([^\]\n]{0,200})\] ")
_PREFIXED = re.compile(rb"^(?=\[@)", re.MULTILINE)
_GAP = re.compile(rb"\[@%s\] \d+ lines are not recorded here \([^)\n]*\): (\{.*\})" % OWN_SOURCE.encode())
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_PART = re.compile(r"run\.log\.(\d+)(\.gap|\.gz|)")


class Line(NamedTuple):
    """A recorded line."""

    number: int  # from 1, lines that are missing counted
    source: str
    data: bytes


class Row(NamedTuple):
    """A line of a part, or the counts by source of lines that are missing."""

    source: str
    data: bytes
    missing: dict[str, int] | None = None


class LogParts:
    """The log of one attempt, open for writing; lines that cannot be written are counted.

    Who adds to a log that holds lines already says first, with `follow`, how many there are. A last line that
    was not written whole is to be cut before, by `mend`.
    """

    def __init__(self, path: Path, *, pause: Pause, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._pause, self._limit = path, pause, limit_bytes
        self._part_bytes = max(1, min(_LARGEST_PART_BYTES, limit_bytes // _PARTS))
        self._full_at = self._part_bytes
        self._descriptor: int | None = None
        self._pending: list[bytes] = []
        self._sources: Counter[str] = Counter()  # of the pending lines
        self._missed: Counter[str] = Counter()  # lines that could not be written since the last one that was
        self._number = 0

    def follow(self, lines: int) -> None:
        """Begin to number what is added after so many lines."""
        self._number = lines

    @property
    def whole(self) -> bool:
        """Whether everything that was added is written, or counted in a line that is."""
        return not (self._pending or self._missed)

    def sync(self) -> None:
        """Wait until the disk has what was written; raises OSError."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def add(self, source: str, data: bytes) -> int:
        """Append lines without their last newline and return the number of the first; `flush` writes."""
        first, newlines = self._number + 1, data.count(b"\n")
        self._number = first + newlines
        if source:
            prefix = f"[@{source}] ".encode()
            data = prefix + (data.replace(b"\n", b"\n" + prefix) if newlines else data)
        elif b"[@" in data:  # a line that would be read back as another source's
            data = _PREFIXED.sub(b"[@] ", data)
        self._pending.append(data + b"\n")
        self._sources[source] += newlines + 1
        return first

    def flush(self) -> None:
        """Write what was added."""
        if not self._pending and not self._missed and self._descriptor is not None:
            return
        if self._pause.tries(self._write):
            self._missed.clear()
        else:
            self._missed += self._sources
        self._pending.clear()
        self._sources.clear()

    def close(self) -> None:
        """Write what was added and close."""
        self.flush()
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _write(self) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        gap = [_gap(self._missed, "they could not be written")] if self._missed else []
        try:
            append(self._descriptor, b"".join(gap + self._pending))
        except OSError:
            self._close()  # after an outage a descriptor may stay dead for ever
            raise
        with suppress(OSError):  # what was added is written
            size = os.fstat(self._descriptor).st_size
            if size >= self._full_at:
                self._full_at = self._part_bytes if self._rotated() else size + self._part_bytes

    def _rotated(self) -> bool:
        """Begin a new run.log; false where that cannot be done now."""
        number = max((number for number, _ in parts_of(self._path)), default=0) + 1
        plain = self._path.with_name(f"{self._path.name}.{number:04d}")
        partial, packed = (plain.with_name(f"{plain.name}.{kind}") for kind in ("partial", "gz"))
        try:
            _compress(self._path, partial)
            self._path.rename(plain)  # a crash from here on leaves a plain part
        except OSError:
            partial.unlink(missing_ok=True)
            return False
        self._close()
        partial.rename(packed)
        plain.unlink()
        keep_within(self._path, limit_bytes=self._limit)
        return True


def keep_within(log: Path, *, limit_bytes: int) -> None:
    """Drop parts of a run's logs until they take at most `limit_bytes`; the first and newest of each stay."""
    logs = sorted(log.parent.parent.glob(f"*/{log.name}"))
    if log not in logs:
        logs.append(log)
    files = [file for each in logs for file in each.parent.glob(f"{log.name}*")]
    total = sum(file.stat().st_size for file in files)
    for each in logs:
        parts = parts_of(each)
        for number, file in parts[1:]:
            if total <= limit_bytes:
                return
            if file.suffix == ".gap":
                continue
            size = file.stat().st_size
            try:
                _drop(each, number, file, limit_bytes)
            except OSError:
                continue  # what cannot be dropped stays
            total -= size


def read(log: Path, *, strict: bool = False) -> Iterator[Line]:
    """Return the lines that are recorded of an attempt, from the oldest; `strict` as for `rows`."""
    number = 0
    for row in rows(log, strict=strict):
        if row.missing is not None:
            number += sum(row.missing.values())
            continue
        number += 1
        yield Line(number, row.source, row.data)


def rows(log: Path, *, strict: bool = False) -> Iterator[Row]:
    """Yield what is recorded of an attempt, the parts first; `strict`: raise OSError."""
    for file in [*(file for _, file in parts_of(log)), log]:
        if not (strict and is_absent(file)):
            yield from rows_of(file, strict=strict)


def rows_of(file: Path, *, strict: bool = False) -> Iterator[Row]:
    """Yield the rows of one part, as far as it can be read."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for line in lines:
                yield row_of(line.rstrip(b"\n"))
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return
    except OSError:
        if strict:
            raise


def row_of(data: bytes) -> Row:
    """Return what a recorded line says."""
    gap = _GAP.fullmatch(data)
    prefix = _SOURCE.match(data)
    if gap is not None and (missing := _counts(gap[1])) is not None:
        return Row("", b"", missing)
    if prefix is not None:
        return Row(prefix[1].decode("utf-8", "replace"), data[prefix.end() :])
    return Row("", data)


def _counts(text: bytes) -> dict[str, int] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, _Count])
    except msgspec.DecodeError:
        return None


def parts_of(log: Path) -> list[tuple[int, Path]]:
    """Return the parts before run.log in order; where a crash left two of one number, the whole one.

    Raises OSError.
    """
    parts: dict[int, Path] = {}
    order = (".gap", ".gz", "")
    try:
        files = list(log.parent.iterdir())
    except FileNotFoundError:
        return []
    for file in files:
        part = _PART.fullmatch(file.name)
        if part is None:
            continue
        number = int(part[1])
        if number not in parts or order.index(part[2]) < order.index(_PART.fullmatch(parts[number].name)[2]):  # type: ignore[index]
            parts[number] = file
    return sorted(parts.items())


def mend(log: Path) -> None:
    """Cut a last line that was not written whole; raises OSError."""
    if is_absent(log):
        return
    with log.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            begin = max(0, end - 65536)
            file.seek(begin)
            at = file.read(end - begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        if end < size:
            file.truncate(end)


def _drop(log: Path, number: int, file: Path, limit_bytes: int) -> None:
    """Put a line that says what is missing in the place of a part and of those dropped before it."""
    missing: Counter[str] = Counter()
    before = log.with_name(f"{log.name}.{number - 1:04d}.gap")
    for part in (before, file):
        for row in rows_of(part):
            missing.update({row.source: 1} if row.missing is None else row.missing)
    gap = log.with_name(f"{log.name}.{number:04d}.gap")
    descriptor = os.open(gap, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        append(descriptor, _gap(missing, f"logs of a run take at most {limit_bytes >> 20} MiB"))
    finally:
        os.close(descriptor)
    file.unlink()
    before.unlink(missing_ok=True)


def _gap(missing: Counter[str], why: str) -> bytes:
    counts = msgspec.json.encode(dict(missing))
    return b"[@%s] %d lines are not recorded here (%s): %s\n" % (
        OWN_SOURCE.encode(),
        missing.total(),
        why.encode(),
        counts,
    )


def _compress(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with source.open("rb") as plain, os.fdopen(descriptor, "wb") as raw:
        with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
        raw.flush()
        os.fsync(descriptor)  # once they are acknowledged its lines may be gone everywhere else


_TRIES = 3  # a part is renamed while it is compressed; one that cannot be opened then is passed over
_REPLACED_S = 0.05  # between two tries


class LogReader:
    """One reading of a log, from its oldest line; every call of `new` continues where the last one ended."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._number = 0
        self._part = 0  # the newest that is read
        self._file: IO[bytes] | None = None

    def new(self) -> Iterator[Line]:
        """Yield what was recorded since the last call, as far as it is whole."""
        while True:
            if self._file is None and not (yield from self._opened()):
                return
            yield from self._read()
            if not self._rotated():
                return
            yield from self._read()  # what was written before it was renamed
            self.close()
            self._part += 1

    def close(self) -> None:
        """Read no more of the part that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> Generator[Line, None, bool]:
        """Yield the lines of whole parts and open `run.log`; returns whether it is there."""
        while True:
            yield from self._parts()
            try:
                file = self._log.open("rb", buffering=0)
            except FileNotFoundError:
                return False
            if all(number <= self._part for number, _ in parts_of(self._log)):
                self._file = file
                return True
            file.close()  # of a later part than the next

    def _parts(self) -> Iterator[Line]:
        tries = 0
        while True:
            number, file = next(
                (entry for entry in parts_of(self._log) if entry[0] > self._part), (0, self._log)
            )
            if not number:
                return
            try:
                with file.open("rb"):
                    pass
            except OSError:
                tries += 1
                if tries == _TRIES:
                    self._part, tries = number, 0
                else:
                    time.sleep(_REPLACED_S)
                continue
            for row in rows_of(file):
                yield from self._line(row)
            self._part, tries = number, 0

    def _read(self) -> Iterator[Line]:
        assert self._file is not None
        torn = b""
        while data := self._file.read(1 << 20):
            *whole, torn = (torn + data).split(b"\n")
            for line in whole:
                yield from self._line(row_of(line))
        # Read again once it is whole: a driver that dies in it leaves it to the next, which cuts it off.
        self._file.seek(-len(torn), os.SEEK_CUR)

    def _rotated(self) -> bool:
        """Return whether what is being read is no longer the part that is written."""
        assert self._file is not None
        try:
            there = self._log.stat()
        except FileNotFoundError:
            return True
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _line(self, row: Row) -> Iterator[Line]:
        if row.missing is not None:
            self._number += sum(row.missing.values())
            return
        self._number += 1
        yield Line(self._number, row.source, row.data)
