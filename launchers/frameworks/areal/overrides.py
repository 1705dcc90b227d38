"""AReaL's settings as its command line spells them: overrides in Hydra's grammar, written and read back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from autotune.launchers.frameworks.areal.keys import kind_of

_PLAIN = re.compile(
    r"[A-Za-z_][\w./:@%+-]*|\$\{[\w.]+\}|/[\w./@%+-]*"
)  # what the grammar reads without quotes
_SPECIAL = frozenset({"true", "false", "null", "nan", "inf", "yes", "no", "on", "off"})
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_COMMAND = re.compile(r"(?:^|\s)\S*--config[= ]\S+")


def words(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides that hold whether or not the job's YAML names the key."""
    return tuple(f"++{name}={value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{value_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(value_text(each) for each in value) + "]"
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL:
            return value
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)


def printed(text: str) -> dict[str, Any]:
    """Return the overrides of the command lines that a log shows, by AReaL's own names."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        if _COMMAND.search(line) is None:
            continue
        try:
            argv = shlex.split(line)
        except ValueError:  # a quote in prose
            continue
        for word in argv:
            override = _OVERRIDE.fullmatch(word)
            if override is not None and kind_of(override[1]) is not None:
                result[override[1]] = _read(override[2])
    return result


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(re.sub(r"([{,]\w+):(?=\S)", r"\1: ", text))
    except yaml.YAMLError:
        return text
