"""Finds fixed strings in blocks of bytes: with hyperscan if installed, otherwise the standard library."""

from __future__ import annotations

import functools
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

hyperscan: Any
try:
    hyperscan = importlib.import_module("hyperscan")
except ImportError:  # no wheel for this platform: slower, with the same results
    hyperscan = None

# Bytes in which lines of one kind differ: digits, progress bars, punctuation around them.
_NOISE = b"0123456789.,:;#=%|/<>()+-_ \xe2\x96\x88\x8f\x8e\x8d\x8c\x8b\x8a\x89"

# Sorted end positions of the strings of the first and of the second group.
Ends: TypeAlias = tuple[list[int], list[int]]
Matcher: TypeAlias = Callable[[bytes], Ends]
Groups: TypeAlias = tuple[tuple[bytes, ...], ...]
_APART = "\0"  # which no string to search for contains
_HEAD = 4  # leading characters by which strings are looked up in a short text
_WALKED = 600  # characters; in a longer text each string is searched separately


def minimal(literals: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct literals, in order, without those that contain another one.

    Wherever the longer one is, the shorter is found.
    """
    distinct = tuple(dict.fromkeys(literals))
    joined = _APART.join(distinct)
    inner = [one for one in distinct if joined.find(one, joined.find(one) + 1) >= 0]  # in another one too
    return tuple(text for text in distinct if not any(one in text for one in inner if one != text))


class Search:
    """Two groups of fixed strings to search for."""

    def __init__(self, first: Iterable[str], second: Iterable[str]) -> None:
        self.groups = (tuple(one.encode() for one in first), tuple(one.encode() for one in second))

    def matcher(self) -> Matcher:
        """Return the fastest available matcher, for use in one thread; it is built at its first use."""
        built: list[Matcher] = []

        def ends(block: bytes) -> Ends:
            if not built:
                first, second = self.groups
                database = None if hyperscan is None else _compiled(first + second)
                built.append(self.plain() if database is None else _scanning(database, len(first)))
            return built[0](block)

        return ends

    def plain(self) -> Matcher:
        """Return a matcher that uses the standard library."""
        return _plain(self.groups)


class Naming:
    """Finds which of many fixed strings a text contains."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = tuple(literals)
        self._encoded = tuple(literal.encode() for literal in self._literals)
        self._heads: dict[str, list[tuple[str, int]]] = {}
        for number, literal in enumerate(self._literals):
            self._heads.setdefault(literal[:_HEAD], []).append((literal, number))
        self._thread = threading.local()

    def named(self, text: str) -> Iterable[int]:
        """Return the numbers of the strings that a text contains, possibly with repetitions."""
        search = getattr(self._thread, "search", None)
        if search is None:
            database = None if hyperscan is None else _compiled(self._encoded)
            search = self._thread.search = self.plain if database is None else _numbers(database)
        result: Iterable[int] = search(text)
        return result

    def counted(self, text: str) -> dict[str, int]:
        """Return the strings in a text of any length, each with its number of occurrences."""
        if hyperscan is None or _compiled(self._encoded) is None:
            data = text.encode("utf-8", "replace")
            counts = {one: sum(1 for _ in _ends_of(one.encode(), data)) for one in self._literals}
            return {one: count for one, count in counts.items() if count}
        return {self._literals[number]: count for number, count in Counter(self.named(text)).items()}

    def plain(self, text: str) -> Iterable[int]:
        """Return the numbers without hyperscan; a short text is walked once, not once for each string."""
        if len(text) > _WALKED:
            return {number for number, literal in enumerate(self._literals) if literal in text}
        result: set[int] = set()
        begins = self._heads.get
        for at in range(len(text) - _HEAD + 1):
            for literal, number in begins(text[at : at + _HEAD], ()):
                if text.startswith(literal, at):
                    result.add(number)
        return result


def _plain(groups: Groups) -> Matcher:
    """Return a matcher that uses the standard library.

    Searching a block for each of a hundred strings is slow. Most lines of a log differ only in figures, so
    one line of each kind is searched first, and the block only for strings found there.
    """
    reduced = [
        (literal, literal.translate(None, _NOISE), n) for n, group in enumerate(groups) for literal in group
    ]

    def ends(block: bytes) -> Ends:
        kinds = b"\n".join(set(block.translate(None, _NOISE).split(b"\n")))
        result: tuple[set[int], set[int]] = (set(), set())
        for literal, essence, group in reduced:
            if essence in kinds:
                result[group].update(_ends_of(literal, block))
        return sorted(result[0]), sorted(result[1])

    return ends


def _ends_of(literal: bytes, block: bytes) -> Iterator[int]:
    at = block.find(literal)
    while at >= 0:
        yield at + len(literal)
        at = block.find(literal, at + 1)


@functools.cache
def _compiled(literals: tuple[bytes, ...]) -> Any:
    """Return a hyperscan database whose match ids are the strings' numbers; None if the CPU lacks SSSE3.

    Compiling strings that share an id takes seven times as long.
    """
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    try:
        database.compile(
            expressions=literals, ids=list(range(len(literals))), elements=len(literals), literal=True
        )
    except hyperscan.error:  # a processor without SSSE3
        return None
    return database


def _scanning(database: Any, firsts: int) -> Matcher:
    scratch = database.scratch.clone()  # only one search at a time may use it

    def ends(block: bytes) -> Ends:
        first: list[int] = []
        second: list[int] = []
        one, other = first.append, second.append

        def report(number: int, _start: int, end: int, _flags: int, _context: object) -> None:
            if number < firsts:
                one(end)
            else:
                other(end)

        database.scan(block, match_event_handler=report, scratch=scratch)
        return sorted(set(first)), sorted(set(second))

    return ends


def _numbers(database: Any) -> Callable[[str], Iterable[int]]:
    scratch = database.scratch.clone()

    def numbers(text: str) -> Iterable[int]:
        named: list[int] = []
        name = named.append

        def report(number: int, _start: int, _end: int, _flags: int, _context: object) -> None:
            name(number)

        database.scan(text.encode("utf-8", "replace"), match_event_handler=report, scratch=scratch)
        return named

    return numbers
