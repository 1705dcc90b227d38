"""Reads the recorded log of an attempt while it grows: its parts first, then `run.log` from part to part."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

from autotune.orchestrator.run.log_parts import Line, Row, parts_of, row_of, rows_of

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
            if not self._behind():
                self._file = file
                return True
            file.close()  # of a later part than the next

    def _behind(self) -> bool:
        return any(number > self._part for number, _ in parts_of(self._log))

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
