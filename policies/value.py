"""The base of all values."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values: immutable, compared by content, written as JSON by msgspec."""
