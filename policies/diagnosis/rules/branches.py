"""branches_of(pattern): the alternatives of a signature, apart: most lines with one's words can show no other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

# What a line must hold, by number, for the pattern beside it to match.
Branch: TypeAlias = tuple[frozenset[int], re.Pattern[str]]

# An escape, a class, a count, or a character.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_WIDTHLESS = ("^", "$", r"\b", r"\B")
_REPEATS = "?*+{"
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # of a whole pattern


def branches_of(
    signature: str, literals: Iterable[str], numbers: Mapping[str, int]
) -> tuple[Branch, ...]:
    """Return patterns of which one matches wherever the whole does, each with the literals it cannot do without."""
    if _FLAGS.match(signature) is not None:
        return ((frozenset(), re.compile(signature)),)
    found: dict[frozenset[int], list[str]] = {}
    for tokens in _alternatives(signature):
        runs = tuple(_runs(tokens))
        needs = frozenset(numbers[one] for one in literals if any(one in run for run in runs))
        found.setdefault(needs, []).append("".join(tokens))
    return tuple((needs, re.compile("|".join(texts))) for needs, texts in found.items())


def _alternatives(signature: str) -> Iterator[list[str]]:
    """Yield the tokens between the bars that stand in no group."""
    depth = 0
    part: list[str] = []
    for token in _TOKEN.findall(signature):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            yield part
            part = []
        else:
            part.append(token)
    yield part


def _runs(tokens: list[str]) -> Iterator[str]:
    """Yield texts of which each stands in all that an alternative matches."""
    depth = 0
    run = ""
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if not depth and token in _WIDTHLESS:
            continue
        if not depth and token[0] == "\\" and not token[1].isalnum():
            run += token[1]
        elif not depth and len(token) == 1 and token not in _REPEATS + ".)":
            run += token
        else:
            yield run[:-1] if token[0] in _REPEATS else run  # what is repeated may be absent
            run = ""
    yield run
