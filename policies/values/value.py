"""The base of all values."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of all values: immutable, compared by content, written as JSON by msgspec.

    Values have no reference cycles, so the garbage collector need not scan long histories.
    """
