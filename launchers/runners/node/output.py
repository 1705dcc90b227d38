"""The framework's own output on a node: a file that its processes append to and that cannot fill the disk.

They write to the file directly, so that autotune cannot block them. What a driver has recorded is freed from
the beginning of the file by punching a hole, which keeps all offsets. If no driver records it, the oldest
bytes are dropped once the file is too large. If the file system does not support holes, the whole file is
then emptied, and `output.base` next to it stores the number of bytes removed so far.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 4 << 30  # of unrecorded output: 80 s at 50 MB/s, more than a day of a verbose job
LEAST_BYTES = 16 << 20  # kept even on a full disk
_SHARE = 4  # divisor: the file may take this part of the available disk space
_GRANULE = 2 << 20  # largest block of a file system; a part of a block would be zeroed, not freed
_LONGEST_LINE = 64 << 10  # bytes searched for the end of a line whose beginning was dropped
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_LIBC = ctypes.CDLL(None, use_errno=True)


class Span(NamedTuple):
    """Offsets of readable bytes."""

    begin: int
    end: int
    dropped: int = 0  # bytes before `begin` that were lost without being recorded


class Output:
    """One output file, for readers that free what is recorded."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES, fault: Callable[[str], None]) -> None:
        self.path = path
        self._most_bytes, self._fault = most_bytes, fault
        self._base_file = path.with_name("output.base")
        self._lock = threading.Lock()

    def span(self, offset: int) -> Span:
        """Return the span after an offset; raises OSError if the file is gone."""
        with self._lock, self.path.open("rb", buffering=0) as file:
            base, size = self._base(), os.fstat(file.fileno()).st_size
            if offset > base + size:
                return Span(base, base + size)  # the job itself emptied it
            at = _first_data(file.fileno(), max(0, offset - base))
            if base + at <= offset:
                return Span(offset, base + size)
            at = min(at, size)
            cut = os.pread(file.fileno(), _LONGEST_LINE, at).find(b"\n") + 1
            return Span(base + at + cut, base + size, dropped=base + at + cut - offset)

    def read(self, begin: int, most: int) -> bytes:
        """Return bytes from the beginning of a span; raises OSError if the file is gone."""
        with self._lock, self.path.open("rb", buffering=0) as file:
            at = max(0, begin - self._base())
            data = os.pread(file.fileno(), most, at)
            return data if _first_data(file.fileno(), at) <= at else b""  # dropped meanwhile

    def give_back(self, recorded: int) -> None:
        """Free the disk space of recorded bytes, up to an offset."""
        with self._lock, self.path.open("r+b", buffering=0) as file:
            upto = (recorded - self._base()) // _GRANULE * _GRANULE
            if _first_data(file.fileno(), 0) < upto <= os.fstat(file.fileno()).st_size:
                _punch(file.fileno(), upto)

    def keep_within(self) -> None:
        """Drop the oldest bytes if the file is too large, recorded or not."""
        with self._lock, self.path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            held = size - min(size, _first_data(file.fileno(), 0))
            if held <= LEAST_BYTES:
                return
            disk = os.fstatvfs(file.fileno())
            room = (disk.f_bavail * disk.f_frsize + held) // _SHARE
            most = max(LEAST_BYTES, min(self._most_bytes, room))
            if held > most and not _punch(file.fileno(), (size - most * 3 // 4) // _GRANULE * _GRANULE):
                self._empty(file.fileno(), size)

    def _empty(self, descriptor: int, size: int) -> None:
        """Empty the file; its processes append, so that they continue at its beginning."""
        self._fault(
            "the file system cannot give back a part of the job's output: all of it is dropped at times"
        )
        base = self._base() + size
        os.ftruncate(descriptor, 0)  # first, because nothing can be written to a full disk
        self._base_file.write_text(str(base))

    def _base(self) -> int:
        try:
            return int(self._base_file.read_text())
        except (OSError, ValueError):
            return 0


def _first_data(descriptor: int, offset: int) -> int:
    """Return the offset of the next data at or after an offset; the end of the file if there is none."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(descriptor).st_size if error.errno == errno.ENXIO else offset


def _punch(descriptor: int, upto: int) -> bool:
    """Free a file's blocks before an offset; returns false if its file system does not support it."""
    length = ctypes.c_int64(upto)
    if upto <= 0 or not _LIBC.fallocate64(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), length):
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))
