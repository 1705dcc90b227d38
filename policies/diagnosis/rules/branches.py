"""branches_of(signature): its alternatives apart, since most lines with its words can show but one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

# What a line must hold, by number, for the pattern beside it to match.
Branch: TypeAlias = tuple[frozenset[int], re.Pattern[str]]

# An escape, a class, a count, or a character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_WIDTHLESS = ("^", "$", r"\b", r"\B")
_REPEATS = "?*+{"
_DEPTH = {"(": 1, ")": -1}
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # of a whole pattern


def branches_of(signature: str, literals: Iterable[str], numbers: Mapping[str, int]) -> tuple[Branch, ...]:
    """Return patterns of which one matches wherever the whole does, each with the literals that it needs."""
    if _FLAGS.match(signature) is not None:
        return ((frozenset(), re.compile(signature)),)
    found: dict[frozenset[int], list[str]] = {}
    for pieces in _alternatives(signature):
        runs = tuple(_runs(pieces))
        needs = frozenset(numbers[one] for one in literals if any(one in run for run in runs))
        found.setdefault(needs, []).append("".join(pieces))
    return tuple((needs, re.compile("|".join(texts))) for needs, texts in found.items())


def _alternatives(signature: str) -> Iterator[list[str]]:
    """Yield the pieces between the bars that stand in no group."""
    depth = 0
    part: list[str] = []
    for piece in _PIECE.findall(signature):
        depth += _DEPTH.get(piece, 0)
        if piece == "|" and not depth:
            yield part
            part = []
        else:
            part.append(piece)
    yield part


def _runs(pieces: list[str]) -> Iterator[str]:
    """Yield texts of which each stands in all that an alternative matches."""
    depth = 0
    run = ""
    for piece in pieces:
        depth += _DEPTH.get(piece, 0)
        if not depth and piece in _WIDTHLESS:
            continue
        if not depth and piece[0] == "\\" and not piece[1].isalnum():
            run += piece[1]
        elif not depth and len(piece) == 1 and piece not in _REPEATS + ".)":
            run += piece
        else:
            yield run[:-1] if piece[0] in _REPEATS else run  # what is repeated may be absent
            run = ""
    yield run
