"""Memory of one instant as an array: one row per part, one column per configuration."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

PARTS: tuple[str, ...] = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "kv_pool",
    "buffers",
    "graphs",
    "residue",
    "outside",
)
_ROW = {name: row for row, name in enumerate(PARTS)}
OUTSIDE = _ROW["outside"]


def instant(count: int, **sizes: Floats | float) -> Floats:
    """Return parts by configuration; what is not named is zero."""
    found = np.zeros((len(PARTS), count))
    for name, size in sizes.items():
        found[_ROW[name]] = size
    return found


def summed(parts: Floats, *names: str) -> Floats:
    """Return the bytes of some of an instant's parts together, by configuration."""
    total: Floats = parts[[_ROW[name] for name in names]].sum(axis=0)
    return total


def heaviest(*instants: Floats) -> Floats:
    """Return, for each configuration, the parts of its largest instant."""
    largest = instants[0]
    total = largest.sum(axis=0)
    for other in instants[1:]:
        size = other.sum(axis=0)
        largest = np.where(size > total, other, largest)
        total = np.maximum(total, size)
    return largest
