"""Whether a value is of the type that a framework declares for a setting."""

from __future__ import annotations

import re
from typing import Any

# Whole numbers with a unit, as some engine arguments accept them: `human_readable_int` of SGLang and vLLM.
_COUNT = re.compile(r"\d+(\.\d+)?[kKmMgGtT]i?")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def misfit(kind: str | None, value: Any) -> str:
    """Return what a value should have been; empty if it fits or only the framework can decide.

    `kind` is int, float, bool or count (`16k` is one), with `?` if null is allowed; any other kind accepts
    every value. A numeric text counts as its number, 0 and 1 as false and true; a text with `${` refers to
    another setting.
    """
    if not kind or value is None or (isinstance(value, str) and "${" in value):
        return ""
    base = kind.rstrip("?")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text_number = isinstance(value, str) and _NUMBER.fullmatch(value) is not None
    if base == "count" and is_count(value):
        return ""
    if base in ("int", "count") and not (number and float(value).is_integer()) and not text_number:
        return "a whole number"
    if base == "float" and not number and not text_number:
        return "a number"
    if base == "bool" and str(value).lower() not in ("true", "false", "0", "1"):
        return "true or false"
    return ""


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number with a unit, such as 16k."""
    return isinstance(value, str) and _COUNT.fullmatch(value.strip()) is not None
