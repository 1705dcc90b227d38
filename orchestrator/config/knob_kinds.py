"""What the value of each knob is, as used by `--set`, `search.vary` and `recovery.deny`."""

from __future__ import annotations

import msgspec

from autotune.policies.values.formatting import BYTE_KNOBS
from autotune.policies.values.knobs import Knobs

_KINDS: dict[object, str] = {
    int | None: "a whole number",
    float | None: "a number",
    bool | None: "true or false",
}


def kind(name: str) -> str:
    """Return the kind of a knob's value in words, such as `a whole number`."""
    if name in BYTE_KNOBS:
        return "a size such as `64MiB`"
    return _KINDS.get(value_type(name), "text")


def value_type(name: str) -> object:
    """Return the type of a knob's value."""
    return next(field.type for field in msgspec.structs.fields(Knobs) if field.name == name)
