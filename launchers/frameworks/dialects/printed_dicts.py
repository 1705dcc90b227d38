"""Metrics that a program prints as a Python dict."""

from __future__ import annotations

import ast
import re
from math import isfinite

_UNREADABLE = re.compile(r"(?<![\w/])-?(?:nan|inf)\b")
_NUMPY = re.compile(r"\bnp\.\w+\(([^()]*)\)")


def numbers_in(text: str) -> dict[str, float] | None:
    """Return the finite numbers of a printed dict by name; None where a crash tore the line."""
    try:
        values = ast.literal_eval(_UNREADABLE.sub("None", _NUMPY.sub(r"\1", text)))
    except (ValueError, SyntaxError):
        return None
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, int | float) and isfinite(value)
    }
