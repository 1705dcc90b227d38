"""What an unknown name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MISSPELT = 0.84  # likeness from which on an unknown name is taken for a misspelt one


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name that is most like another one, of at least that likeness; empty: none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def suggestion(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `did you mean ...?` for the nearest known name, or the empty string."""
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean `{near}`?" if near else ""
