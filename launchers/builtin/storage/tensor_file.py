"""Tensors on disk in the safetensors layout, written one at a time.

The safetensors package takes all tensors of a file at once: with several ranks that is the whole gathered
model, and with a card a second copy in host memory, for which a memory budget need have no room.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8
_ITEM_BYTES = {"F32": 4, "I64": 8, "U8": 1}


class Entry(NamedTuple):
    """Name, type (as safetensors spells it) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the data."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


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
