"""Metrics and settings that a program prints as a Python dict."""

from __future__ import annotations

import ast
import re
from math import isfinite

_LONGEST = 100_000  # characters of printed settings
_UNREADABLE = re.compile(r"(?<![\w/])-?(?:nan|inf)\b")
_NUMPY = re.compile(r"\bnp\.\w+\(([^()]*)\)")


def numbers_in(text: str) -> dict[str, float] | None:
    """Return the finite numbers of a printed dict by name; None if the line is truncated."""
    try:
        values = ast.literal_eval(_UNREADABLE.sub("None", _NUMPY.sub(r"\1", text)))
    except (ValueError, SyntaxError):
        return None
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, int | float) and isfinite(value)
    }


def braced(text: str, start: int) -> str:
    """Return the text from a brace to its closing brace; raises ValueError beyond `_LONGEST` characters."""
    depth = 0
    for at in range(start, min(len(text), start + _LONGEST)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start : at + 1]
    raise ValueError("no closing brace")
