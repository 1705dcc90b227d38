"""Format values for people."""

from __future__ import annotations

_GIB = 1 << 30
_MIB = 1 << 20
BYTE_KNOBS = ("sync_buffer", "memory_margin", "multimodal_cache")


def show_gib(size: float, *, digits: int = 2) -> str:
    """Return `13.91 GiB`; small sizes in MiB, KiB or bytes."""
    if abs(size) >= _GIB:
        return f"{size / _GIB:,.{digits}f} GiB"
    if 0 < abs(size) < 1024:
        return f"{size:,.0f} bytes"
    if 0 < abs(size) < 0.05 * _MIB:
        return f"{size / 1024:,.1f} KiB"
    return f"{size / _MIB:,.{max(digits - 1, 0)}f} MiB"


def show_value(value: object) -> str:
    """Return a setting's value as a person would type it."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_size(size: int) -> str:
    """Return `2 GiB` or `512 MiB` if that is exact, otherwise the size as `show_gib` does."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if size and size % unit == 0:
            return f"{size // unit:,} {name}"
    return show_gib(size)


def show_setting(knob: str, value: object) -> str:
    """Return a knob's value as `show_value` does; sizes in bytes as `show_size` does."""
    if knob in BYTE_KNOBS and isinstance(value, int):
        return show_size(value)
    return show_value(value)
