"""Values as people read them."""

from __future__ import annotations

_GIB = 1 << 30
_MIB = 1 << 20


def show_gib(size: float, *, digits: int = 2) -> str:
    """Return `13.91 GiB`; small sizes in MiB so that a CPU budget can be read."""
    if abs(size) >= _GIB:
        return f"{size / _GIB:,.{digits}f} GiB"
    return f"{size / _MIB:,.{max(digits - 1, 0)}f} MiB"


def show_value(value: object) -> str:
    """Return a setting's value as a person would type it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
