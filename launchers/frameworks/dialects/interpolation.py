"""Resolves OmegaConf's references, `${a.b}` and `${.c}`, and arithmetic on them, `${mul:${a.b},2}`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

_MOST = 256  # references and operations resolved for one key
_INNERMOST = re.compile(r"\$\{(?:([\w.]+):)?([^${}]*)\}")
_NUMBER = re.compile(r"[+-]?\d{1,18}(\.\d{1,18})?")
# Resolvers that frameworks register; NeMo-RL in nemo_rl/utils/config.py.
_RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}


def resolved(key: str, raw: Callable[[str], Any]) -> Any:
    """Return a key's value with references resolved; its text if a part is unknown.

    A reference to a missing key is None.
    """
    left = _MOST

    def value_of(key: str) -> Any:
        nonlocal left
        value = raw(key)
        while isinstance(value, str) and left > 0 and (match := _INNERMOST.search(value)):
            left -= 1
            name, text = match[1], match[2].strip()
            own = value_of(_absolute(text, key)) if name is None else _computed(name, text)
            if own is None:
                return None if name is None and match[0] == value.strip() else value
            if isinstance(own, str) and "${" in own:  # it cannot be followed to its end
                return value
            value = own if match[0] == value.strip() else value.replace(match[0], str(own), 1)
        return value

    return value_of(key)


def _absolute(name: str, key: str) -> str:
    """Return the absolute key of a relative reference: each leading dot goes up one section."""
    up = len(name) - len(name.lstrip("."))
    return ".".join((*(key.split(".")[:-up] if up else ()), name[up:]))


def _computed(name: str, text: str) -> int | float | None:
    words = [word.strip() for word in text.split(",")]
    if name not in _RESOLVERS or len(words) != 2 or not all(map(_NUMBER.fullmatch, words)):
        return None
    first, second = (float(word) if "." in word else int(word) for word in words)
    if name == "div" and not second:
        return None
    value = float(_RESOLVERS[name](first, second))
    return int(value) if value.is_integer() else value
