"""branches_of(signature): splits it into its alternatives, since most lines can match only one of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from autotune.policies.diagnosis.literal_search import minimal

# An escape, a class, a quantifier, plain text without a quantified last character, or a character.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|[\w ]+(?![?*+{])|.", re.DOTALL)
_WIDTHLESS = ("^", "$", r"\b", r"\B")
_LOOKS = (("?", "="), ("?", "!"), ("?", "<"))  # how a lookaround begins, which has no width
_COUNTS = "?*+{"
_DEPTH = {"(": 1, ")": -1}
_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # of a whole pattern
_MOST = 24  # maximum texts enumerated for one stretch of a pattern
_SHORTEST = 3  # minimum characters of a text worth searching for
_LONGEST = 20  # maximum characters of a literal: wrapping by a terminal would split a longer one more often

# Texts of which every match of a pattern contains at least one.
Words: TypeAlias = frozenset[str]


class Branch(NamedTuple):
    """Alternatives of a signature with the same requirements on a line."""

    needs: frozenset[int]  # numbers of the rule's literals that the line must all contain
    words: tuple[Words, ...]  # the line must contain one text of each
    signature: str


@functools.cache
def literals_of(signature: str) -> tuple[str, ...]:
    """Return short texts of which every match of a signature contains at least one; none contains another.

    Raises ValueError if an alternative requires no fixed text, or the signature ignores case.
    """
    result: list[str] = []
    for pieces in _alternatives(_PIECE.findall(signature)):
        words = () if _FLAGS.match(signature) else _longest_first(_required(pieces))
        if not words:
            raise ValueError(f"no fixed text is in all that {''.join(pieces)} matches")
        result += sorted(text[:_LONGEST] for text in words[0])
    return minimal(result)


def branches_of(signature: str, literals: Iterable[str], numbers: Mapping[str, int]) -> tuple[Branch, ...]:
    """Return patterns of which one matches wherever the signature does, each with its requirements.

    `numbers`: the number of each literal.
    """
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


def _longest_first(words: Iterable[Words]) -> tuple[Words, ...]:
    shortest = (
        frozenset(one for one in texts if not any(other in one for other in texts - {one})) for texts in words
    )
    kept = {texts for texts in shortest if min(map(len, texts)) >= _SHORTEST}
    return tuple(sorted(kept, key=lambda texts: (-min(map(len, texts)), sorted(texts))))


def _alternatives(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield the pieces between the bars outside groups."""
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
    """Yield each character, class or group of an alternative, with its quantifier ('' if it has none)."""
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
            stop += stop < len(pieces) and pieces[stop] in ("?", "+")  # lazy or possessive
        yield item, count
        at = stop


def _inner(item: Sequence[str]) -> Sequence[str] | None:
    """Return the contents of a group; None if it has a flag or a name."""
    if item[1] != "?":
        return item[1:-1]
    return item[3:-1] if item[2] == ":" else None


def _required(pieces: Sequence[str]) -> Iterator[Words]:
    """Yield sets of texts; every match of an alternative contains one text of each set."""
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
    """Return every text that an item matches; None if they are too many or unknown."""
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
