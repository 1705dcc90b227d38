"""A few numbers shared by an engine's caller and its scheduler process."""

import mmap
import struct
from pathlib import Path
from typing import Literal

_NUMBER = struct.Struct("q")
_SLOTS = ("step", "scheduler_pid", "baseline_bytes", "peak_bytes")
Slot = Literal["step", "scheduler_pid", "baseline_bytes", "peak_bytes"]


class Board:
    """Named 64-bit numbers in a mapped file; the last writer of a number wins."""

    def __init__(self, path: Path) -> None:
        size = _NUMBER.size * len(_SLOTS)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def read(self, slot: Slot) -> int:
        """Return the number in a slot; 0 until someone writes it."""
        return int(_NUMBER.unpack_from(self._map, self._offset(slot))[0])

    def write(self, slot: Slot, number: int) -> None:
        """Set the number in a slot."""
        _NUMBER.pack_into(self._map, self._offset(slot), number)

    @staticmethod
    def _offset(slot: Slot) -> int:
        return _SLOTS.index(slot) * _NUMBER.size
