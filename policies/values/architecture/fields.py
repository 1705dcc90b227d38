"""Read single entries of a config.json; an invalid one raises a ValueError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST = 1 << 24  # any dimension; a larger one is a typing error or an attack


def count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first entry that is present, else `default`; raises ValueError if it is no count."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise wrong(name, value, "count")
        if value or default is not None:
            return value
        raise ValueError(f"{name} is 0")
    if default is None:
        raise ValueError(f"{' or '.join(names)} is missing")
    return default


def flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean entry, `default` if absent; raises ValueError if it is not boolean."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "yes or no")
    return value


def wrong(name: str, value: object, wanted: str) -> ValueError:
    """Return the error for an entry that is not what `wanted` names."""
    text = repr(value) if isinstance(value, float | str | bool) else type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 64:
        text = str(value)
    return ValueError(f"{name} is {text if len(text) <= 40 else text[:37] + '...'}, no {wanted}")
