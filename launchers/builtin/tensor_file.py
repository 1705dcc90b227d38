"""Tensors on disk in the safetensors layout, written and read without a second copy in memory.

The safetensors package serialises a whole file's tensors before it writes, and maps a file privately when it
reads; under a memory budget both count.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


class Entry(NamedTuple):
    """Name, type (as safetensors spells it) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * _ITEM_BYTES[self.dtype]


Raw = npt.NDArray[np.uint8]


def write(path: Path, entries: Sequence[Entry], blocks: Iterable[Raw]) -> int:
    """Write tensors in the order of `entries`, taking one block at a time, and return the file's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for entry, block in zip(entries, blocks, strict=True):
            assert block.nbytes == entry.nbytes
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def read(path: Path) -> Iterator[tuple[Entry, Raw]]:
    """Yield every tensor's entry and a read-only view of its bytes."""
    with path.open("rb") as file:
        # Not closed by hand: it goes with the last view of it.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    length = int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8 : 8 + length])
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        begin, end = fields["data_offsets"]
        view = np.frombuffer(mapped, dtype=np.uint8, count=end - begin, offset=8 + length + begin)
        yield Entry(name, fields["dtype"], tuple(fields["shape"])), view
