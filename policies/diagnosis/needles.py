"""Literals that every match of a pattern holds, so that a search for fixed strings finds all its lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from autotune.policies.diagnosis.chatter import frequency

_MOST = 24  # alternatives followed; a pattern with more falls back to its declared needles
_WIDEST_CLASS = 4  # characters of a class that is written out
_LONGEST = 20  # characters of a literal: more say nothing new, and a wrapped line would break them
_ZERO_WIDTH = (op.AT, op.ASSERT, op.ASSERT_NOT)

Literals = frozenset[str]


def sharpest(pattern: re.Pattern[str], needles: Iterable[str]) -> Literals:
    """Return the rarer of the pattern's own literals and the needles declared for it."""
    declared = frozenset(needles)
    own = required(pattern)
    best = declared if own is None or (declared and _chatter(declared) <= _chatter(own)) else own
    return frozenset(one[:_LONGEST] for one in best)


def required(pattern: re.Pattern[str]) -> Literals | None:
    """Return literals of which one is in every match; None where no set of them is."""
    if pattern.flags & re.IGNORECASE:
        return None
    return _of_sequence(_parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))[1]


def without_covered(literals: Iterable[str]) -> tuple[str, ...]:
    """Return the literals, in order, that hold no other one: the shorter finds the longer."""
    distinct = tuple(dict.fromkeys(literals))
    return tuple(one for one in distinct if not any(other != one and other in one for other in distinct))


def _chatter(literals: Literals) -> float:
    """Return how often healthy text may hold one of the literals."""
    return sum(map(frequency, literals))


def _of_sequence(items: Iterable[tuple[Any, Any]]) -> tuple[Literals | None, Literals | None]:
    """Return the texts that the sequence is, where they are few, and the literals that it requires."""
    found: list[Literals] = []
    run: Literals = frozenset([""])
    whole = True
    for kind, value in items:
        if kind in _ZERO_WIDTH:
            continue
        exact, needed = _of_item(kind, value)
        joined = None if exact is None else frozenset(a + b for a in run for b in exact)
        if joined is not None and len(joined) <= _MOST:
            run = joined
            continue
        whole = False
        found.append(run)
        run = exact if exact is not None else frozenset([""])
        if needed is not None:
            found.append(needed)
    found.append(run)
    usable = [one for one in found if one and "" not in one]
    return (run if whole else None), (min(usable, key=_chatter) if usable else None)


def _of_item(kind: Any, value: Any) -> tuple[Literals | None, Literals | None]:
    if kind is op.LITERAL:
        text = frozenset([chr(value)])
        return text, text
    if kind is op.IN and len(value) <= _WIDEST_CLASS and all(part[0] is op.LITERAL for part in value):
        text = frozenset(chr(part[1]) for part in value)
        return text, text
    if kind is op.SUBPATTERN:
        _, added, _, inner = value
        return (None, None) if added & re.IGNORECASE else _of_sequence(inner)
    if kind is op.BRANCH:
        return _of_branches(value[1])
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        least, most, inner = value
        exact, needed = _of_sequence(inner)
        if least == most == 1:
            return exact, needed
        return None, needed if least else None
    return None, None


def _of_branches(branches: Iterable[Any]) -> tuple[Literals | None, Literals | None]:
    exact: set[str] | None = set()
    needed: set[str] | None = set()
    for branch in branches:
        texts, literals = _of_sequence(branch)
        exact = None if exact is None or texts is None else exact | texts
        needed = None if needed is None or literals is None else needed | literals
    if exact is not None and len(exact) > _MOST:
        exact = None
    return (
        None if exact is None else frozenset(exact),
        None if needed is None else frozenset(needed),
    )
