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


def is_slip(name: str, known: str) -> bool:
    """Return whether two names differ by a typing slip: one letter too many or too few, or two swapped.

    A replaced letter is no slip: `top_k` and `top_p` are both names.
    """
    start = next(
        (i for i, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), min(len(name), len(known))
    )
    ours, theirs = name[start:], known[start:]
    swapped = ours[:2] == theirs[1::-1] and ours[2:] == theirs[2:] and len(ours) > 1
    return swapped or ours[1:] == theirs or theirs[1:] == ours
