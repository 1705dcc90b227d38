"""The log of an attempt on disk: `run.log` and older, compressed parts.

`run.log` holds the newest lines. When it is full it becomes `run.log.0001.gz`, `run.log.0002.gz` and so on.
Over the run's limit the oldest parts are dropped, of older attempts first, but never an attempt's first and
newest part, with the settings and the failure. A line in place of dropped parts counts the missing lines, so
that line numbers stay valid: `zcat -f run.log.* run.log` reads everything that is left.
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
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec

from autotune.launchers.base import OWN_SOURCE
from autotune.orchestrator.run.storage import Pause, append, is_absent

LIMIT_BYTES = 1 << 30  # of all logs of a run, on disk
_LARGEST_PART_BYTES = 16 << 20  # compressed in about 0.1 s, during which nothing is polled
_PARTS = 64  # minimum number of parts within the limit
_SOURCE = re.compile(rb"\[@([^\]\n]{0,200})\] ")
_PREFIXED = re.compile(rb"^(?=\[@)", re.MULTILINE)
_GAP = re.compile(rb"\[@%s\] \d+ lines are not recorded here \([^)\n]*\): (\{.*\})" % OWN_SOURCE.encode())
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_PART = re.compile(r"run\.log\.(\d+)(\.gap|\.gz|)")


class Line(NamedTuple):
    """A recorded line."""

    number: int  # from 1, including missing lines
    source: str
    data: bytes


class Row(NamedTuple):
    """A line of a part, or the number of missing lines by source."""

    source: str
    data: bytes
    missing: dict[str, int] | None = None


class LogParts:
    """The log of one attempt, open for writing; lines that cannot be written are counted.

    To append to an existing log, call `mend` first to cut an incomplete last line, and `follow` with its
    number of lines.
    """

    def __init__(self, path: Path, *, pause: Pause, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._pause, self._limit = path, pause, limit_bytes
        self._part_bytes = max(1, min(_LARGEST_PART_BYTES, limit_bytes // _PARTS))
        self._full_at = self._part_bytes
        self._descriptor: int | None = None
        self._pending: list[bytes] = []
        self._sources: Counter[str] = Counter()  # of the pending lines
        self._missed: Counter[str] = Counter()  # lines that failed to be written since the last success
        self._number = 0

    def follow(self, lines: int) -> None:
        """Set the number of lines that precede added ones."""
        self._number = lines

    @property
    def whole(self) -> bool:
        """Whether every added line is written, or counted in a written line."""
        return not (self._pending or self._missed)

    def sync(self) -> None:
        """Flush written lines to the disk; raises OSError."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def add(self, source: str, data: bytes) -> int:
        """Append lines, without the last newline, and return the number of the first; `flush` writes them."""
        first, newlines = self._number + 1, data.count(b"\n")
        self._number = first + newlines
        if source:
            prefix = f"[@{source}] ".encode()
            data = prefix + (data.replace(b"\n", b"\n" + prefix) if newlines else data)
        elif b"[@" in data:  # would be read back as a line of another source
            data = _PREFIXED.sub(b"[@] ", data)
        self._pending.append(data + b"\n")
        self._sources[source] += newlines + 1
        return first

    def flush(self) -> None:
        """Write added lines."""
        if not self._pending and not self._missed and self._descriptor is not None:
            return
        if self._pause.tries(self._write):
            self._missed.clear()
        else:
            self._missed += self._sources
        self._pending.clear()
        self._sources.clear()

    def close(self) -> None:
        """Write added lines and close."""
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
            self._close()  # after an outage a descriptor may stay unusable
            raise
        with suppress(OSError):  # what was added is written
            size = os.fstat(self._descriptor).st_size
            if size >= self._full_at:
                self._full_at = self._part_bytes if self._rotated() else size + self._part_bytes

    def _rotated(self) -> bool:
        """Begin a new run.log; return false if that fails for now."""
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
    """Drop parts of a run's logs until they take at most `limit_bytes`; keep the first and newest of each."""
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
                continue  # it cannot be dropped
            total -= size


def read(log: Path, *, strict: bool = False) -> Iterator[Line]:
    """Return the recorded lines of an attempt, oldest first; `strict` as for `rows`."""
    number = 0
    for row in rows(log, strict=strict):
        if row.missing is not None:
            number += sum(row.missing.values())
            continue
        number += 1
        yield Line(number, row.source, row.data)


def rows(log: Path, *, strict: bool = False) -> Iterator[Row]:
    """Yield the recorded rows of an attempt, oldest first; `strict`: raise OSError."""
    for file in [*(file for _, file in parts_of(log)), log]:
        if not (strict and is_absent(file)):
            yield from rows_of(file, strict=strict)


def rows_of(file: Path, *, strict: bool = False) -> Iterator[Row]:
    """Yield the readable rows of one part."""
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
    """Parse a recorded line."""
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
    """Return the parts before run.log in order; if a crash left two of a number, the complete one.

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
    """Cut an incomplete last line; raises OSError."""
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
    """Replace a part, and those dropped before it, by a line that counts what is missing."""
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
        os.fsync(descriptor)  # once acknowledged, its lines may be deleted everywhere else


_TRIES = 3  # to open a part, which is renamed while it is compressed; then it is skipped
_REPLACED_S = 0.05  # seconds between tries


class LogReader:
    """Reads a log from its oldest line; every call of `new` continues where the last one ended."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._number = 0
        self._part = 0  # the newest part read
        self._file: IO[bytes] | None = None

    def new(self) -> Iterator[Line]:
        """Yield complete lines recorded since the last call."""
        while True:
            if self._file is None and not (yield from self._opened()):
                return
            yield from self._read()
            if not self._rotated():
                return
            yield from self._read()  # lines written before it was renamed
            self.close()
            self._part += 1

    def close(self) -> None:
        """Close the part that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> Generator[Line, None, bool]:
        """Yield the lines of complete parts and open `run.log`; return whether it exists."""
        while True:
            yield from self._parts()
            try:
                file = self._log.open("rb", buffering=0)
            except FileNotFoundError:
                return False
            if all(number <= self._part for number, _ in parts_of(self._log)):
                self._file = file
                return True
            file.close()  # a later part than the next

    def _parts(self) -> Iterator[Line]:
        tries = 0
        while True:
            number, file = next(
                (entry for entry in parts_of(self._log) if entry[0] > self._part), (0, self._log)
            )
            if not number:
                return
            part = rows_of(file, strict=True)
            try:
                first = next(part, None)
            except OSError:  # since it was listed, its compressed form has taken its place
                tries += 1
                if tries == _TRIES:
                    self._part, tries = number, 0
                else:
                    time.sleep(_REPLACED_S)
                continue
            with suppress(OSError):
                for row in chain(() if first is None else (first,), part):
                    yield from self._line(row)
            self._part, tries = number, 0

    def _read(self) -> Iterator[Line]:
        assert self._file is not None
        torn = b""
        while data := self._file.read(1 << 20):
            *whole, torn = (torn + data).split(b"\n")
            for line in whole:
                yield from self._line(row_of(line))
        # Read again once it is complete; if the driver dies, the next one cuts it.
        self._file.seek(-len(torn), os.SEEK_CUR)

    def _rotated(self) -> bool:
        """Return whether the open file is no longer the part that is being written."""
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
