"""A one-sentence description of each knob, as used by `--set`, `search.vary` and `recovery.deny`."""

from __future__ import annotations

import msgspec

from autotune.policies.values.formatting import BYTE_KNOBS
from autotune.policies.values.knobs import KNOBS, Knobs

KINDS: dict[object, str] = {
    int | None: "a whole number",
    float | None: "a number",
    bool | None: "true or false",
}


def kind(name: str) -> str:
    """Return the kind of a knob's value in words, such as `a whole number`."""
    if name in BYTE_KNOBS:
        return "a size such as `64MiB`"
    return KINDS.get(value_type(name), "text")


def value_type(name: str) -> object:
    """Return the type of a knob's value."""
    return next(field.type for field in msgspec.structs.fields(Knobs) if field.name == name)


def table() -> list[tuple[str, str, str]]:
    """Return the name, kind and meaning of every knob."""
    from autotune.orchestrator.config.field_comments import descriptions  # for generated pages alone

    # Journals have bytes where a person writes `64MiB`.
    meanings = {name: text.removesuffix(", in bytes") for name, text in descriptions(Knobs).items()}
    return [(name, kind(name), f"{meanings[name][0].upper()}{meanings[name][1:]}.") for name in KNOBS]
