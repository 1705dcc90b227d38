"""Memory of one instant as an array: one row per part, one column per configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

Sizes = TypeVar("Sizes")  # a dataclass of sizes

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


Outside: TypeAlias = Callable[[Floats], "Floats | float"]  # of instants by parts by configurations


def instant(count: int, **sizes: Floats | float) -> Floats:
    """Return the parts of an instant, (part, configuration); parts that are not named are zero."""
    result = np.zeros((len(PARTS), count))
    for name, size in sizes.items():
        result[_ROW[name]] = size
    return result


def largest(count: int, instants: Iterable[Mapping[str, Floats | float]], outside: Outside) -> Floats:
    """Return the parts of the largest instant of each configuration, with `outside` of each added."""
    chosen = list(instants)
    result = np.zeros((len(chosen), len(PARTS), count))
    for parts, sizes in zip(result, chosen, strict=True):
        for name, size in sizes.items():
            parts[_ROW[name]] = size
    result[:, OUTSIDE] += outside(result)
    if len(chosen) == 1:
        only: Floats = result[0]
        return only
    first: Floats = result[result.sum(axis=1).argmax(axis=0), :, np.arange(count)].T
    return first


def summed(parts: Floats, *names: str) -> Floats:
    """Return the sum of some parts, by instant and configuration."""
    total: Floats = parts[..., [_ROW[name] for name in names], :].sum(axis=-2)
    return total


def of_first(sizes: Sizes, count: int) -> Sizes:
    """Return a dataclass of arrays, or of tuples of them, cut to the first `count` configurations."""
    whole: Any = sizes
    result: Sizes = replace(
        whole, **{field.name: _cut(getattr(whole, field.name), count) for field in fields(whole)}
    )
    return result


def _cut(value: Any, count: int) -> Any:
    if isinstance(value, np.ndarray):
        return value[:count]
    if isinstance(value, tuple):
        return value._make(_cut(each, count) for each in value)  # type: ignore[attr-defined]
    return of_first(value, count) if is_dataclass(value) else value


def heaviest(*instants: Floats) -> Floats:
    """Return, for each configuration, the parts of its largest instant."""
    largest = instants[0]
    total = largest.sum(axis=0)
    for other in instants[1:]:
        size = other.sum(axis=0)
        largest = np.where(size > total, other, largest)
        total = np.maximum(total, size)
    return largest
