"""Parses and fills the placeholders in the words of a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from autotune.policies.values.knobs import KNOBS, Setting
from autotune.policies.values.value import Value

# `{attempt}` and `{python}` are filled in on the node.
LATER = ("attempt", "python")
OWN = ("run", "steps", "folder")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_OFF = (False, None, "off", "default", 0)
# `{name}`, `{name:MiB}`, `{name?text}`; `{{name}}` stands for itself, and `${name}` is the shell's.
_PLACEHOLDER = re.compile(r"(?<![${])\{(?P<name>[A-Za-z_]\w*)(?::(?P<unit>\w+)|\?(?P<text>[^{}]*))?\}(?!\})")
_ESCAPED = re.compile(r"\{\{(\w+)\}\}")


class Placeholder(Value, frozen=True, kw_only=True):
    """A placeholder as written."""

    name: str
    unit: str = ""
    conditional: bool = False  # its text is used only while the knob is enabled

    @property
    def is_knob(self) -> bool:
        """Whether it names a knob."""
        return self.name in KNOBS


def placeholders(text: str) -> Iterator[Placeholder]:
    """Yield the placeholders of one word."""
    for match in _PLACEHOLDER.finditer(text):
        yield Placeholder(name=match["name"], unit=match["unit"] or "", conditional=match["text"] is not None)


def filled(text: str, values: Mapping[str, Setting]) -> str:
    """Return a word with placeholders filled in, except those that are filled on the node."""

    def value_of(match: re.Match[str]) -> str:
        name = match["name"]
        if name in LATER or name not in values:
            return match[0]
        value = values[name]
        if match["text"] is not None:
            return match["text"] if value not in _OFF else ""
        if match["unit"] and isinstance(value, int | float):
            return f"{value / UNITS[match['unit']]:g}"
        return as_argument(value)

    return _ESCAPED.sub(r"{\1}", _PLACEHOLDER.sub(value_of, text))


def argv_of(words: tuple[str, ...], values: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the words of a command, without those that a disabled knob leaves empty."""
    return tuple(now for word in words if (now := filled(word, values)) or not is_conditional(word))


def environment(variables: Mapping[str, str], values: Mapping[str, Setting]) -> dict[str, str]:
    """Return environment variables, without those that a disabled knob leaves empty."""
    pairs = ((name, text, filled(text, values)) for name, text in variables.items())
    return {name: now for name, text, now in pairs if now or not is_conditional(text)}


def is_conditional(text: str) -> bool:
    """Return whether a text has a part that depends on an enabled knob."""
    return any(placeholder.conditional for placeholder in placeholders(text))


def as_argument(value: Setting) -> str:
    """Return a value as a command-line argument."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
