"""branches_of(signature): its alternatives apart, since most lines with its words can show but one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from autotune.policies.diagnosis.literal_search import minimal

# An escape, a class, a count, plain text up to what is counted, or a character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|[\w ]+(?![?*+{])|.", re.DOTALL)
_WIDTHLESS = ("^", "$", r"\b", r"\B")
_LOOKS = (("?", "="), ("?", "!"), ("?", "<"))  # how a group begins that has no width itself
_COUNTS = "?*+{"
_DEPTH = {"(": 1, ")": -1}
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # of a whole pattern
_MOST = 24  # texts written out of one stretch of a pattern
_SHORTEST = 3  # characters of a text that is worth a look
_LONGEST = 20  # characters of a literal: a terminal's end of row would cut a longer one more often

# Texts of which one stands in all that a pattern matches.
Words: TypeAlias = frozenset[str]


class Branch(NamedTuple):
    """Alternatives of a signature that need the same of a line."""

    needs: frozenset[int]  # literals of the rule, by number: each is in the line
    words: tuple[Words, ...]  # of each, one text is in the line
    signature: str


@functools.cache
def literals_of(signature: str) -> tuple[str, ...]:
    """Return short texts of which one is in all that a signature matches, and none in another.

    Raises ValueError for a signature with an alternative that needs no fixed text, or any case of it.
    """
    result: list[str] = []
    for pieces in _alternatives(_PIECE.findall(signature)):
        words = () if _FLAGS.match(signature) else _longest_first(_required(pieces))
        if not words:
            raise ValueError(f"no fixed text is in all that {''.join(pieces)} matches")
        result += sorted(text[:_LONGEST] for text in words[0])
    return minimal(result)


def branches_of(signature: str, literals: Iterable[str], numbers: Mapping[str, int]) -> tuple[Branch, ...]:
    """Return patterns of which one matches wherever the whole does, each with what it needs."""
    if _FLAGS.match(signature) is not None:
        return (Branch(frozenset(), (), signature),)
    result: dict[tuple[frozenset[int], tuple[Words, ...]], list[str]] = {}
    for pieces in _alternatives(_PIECE.findall(signature)):
        words = _longest_first(_required(pieces))
        needs = frozenset(
            numbers[one] for one in literals if any(all(one in text for text in texts) for texts in words)
        )
        result.setdefault((needs, words), []).append("".join(pieces))
    return tuple(Branch(needs, words, "|".join(texts)) for (needs, words), texts in result.items())


def _longest_first(found: Iterable[Words]) -> tuple[Words, ...]:
    shortest = (
        frozenset(one for one in texts if not any(other in one for other in texts - {one})) for texts in found
    )
    kept = {texts for texts in shortest if min(map(len, texts)) >= _SHORTEST}
    return tuple(sorted(kept, key=lambda texts: (-min(map(len, texts)), sorted(texts))))


def _alternatives(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield the pieces between the bars that stand in no group."""
    depth = 0
    part: list[str] = []
    for piece in pieces:
        depth += _DEPTH.get(piece, 0)
        if piece == "|" and not depth:
            yield part
            part = []
        else:
            part.append(piece)
    yield part


def _items(pieces: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    """Yield each character, class or group of an alternative, and how often it may stand there."""
    at = 0
    while at < len(pieces):
        stop, depth = at + 1, _DEPTH.get(pieces[at], 0)
        while depth:
            depth += _DEPTH.get(pieces[stop], 0)
            stop += 1
        item, count = pieces[at:stop], ""
        if stop < len(pieces) and pieces[stop][0] in _COUNTS:
            count = pieces[stop]
            stop += 1
            stop += stop < len(pieces) and pieces[stop] in ("?", "+")  # as few or as many as possible
        yield item, count
        at = stop


def _inner(item: Sequence[str]) -> Sequence[str] | None:
    """Return what stands in a group; None where it has a flag or a name."""
    if item[1] != "?":
        return item[1:-1]
    return item[3:-1] if item[2] == ":" else None


def _required(pieces: Sequence[str]) -> Iterator[Words]:
    """Yield texts of which one stands in all that an alternative matches, and so on."""
    stretch = {""}
    for item, count in _items(pieces):
        if item[0] in _WIDTHLESS or tuple(item[1:3]) in _LOOKS:
            continue
        texts = _texts(item, count)
        longer = set() if texts is None else {before + text for before in stretch for text in texts}
        if longer and len(longer) <= _MOST:
            stretch = longer
            continue
        yield frozenset(stretch)
        if texts is None and item[0] == "(" and not (count and _may_be_absent(count)):
            yield from _required_of_group(item)
        stretch = texts or {""}
    yield frozenset(stretch)


def _may_be_absent(count: str) -> bool:
    return count[0] in "?*" or count.startswith(("{0", "{,"))


def _required_of_group(item: Sequence[str]) -> Iterator[Words]:
    inner = _inner(item)
    if inner is None:
        return
    result: set[str] = set()
    for alternative in _alternatives(inner):
        words = _longest_first(_required(alternative))
        if not words:
            return
        result |= words[0]
    if len(result) <= _MOST:
        yield frozenset(result)


def _texts(item: Sequence[str], count: str) -> set[str] | None:
    """Return every text that an item matches; None where they are too many or not known."""
    if count not in ("", "?"):
        return None
    first = item[0]
    texts: set[str] | None
    if first == "(":
        texts = _texts_of_group(item)
    elif first[0] == "[":
        texts = set(first[1:-1]) if first[1:-1].isalpha() else None
    elif first[0] == "\\":
        texts = None if first[1].isalnum() else {first[1]}
    else:
        texts = None if first == "." else {first}
    return texts if texts is None or not count else texts | {""}


def _texts_of_group(item: Sequence[str]) -> set[str] | None:
    inner = _inner(item)
    if inner is None:
        return None
    result: set[str] = set()
    for alternative in _alternatives(inner):
        whole = {""}
        for part, count in _items(alternative):
            texts = _texts(part, count)
            if texts is None or part[0] in _WIDTHLESS or len(whole) * len(texts) > _MOST:
                return None
            whole = {before + text for before in whole for text in texts}
        result |= whole
    return result
