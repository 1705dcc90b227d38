"""Collects the last distinct lines that look like errors but match no rule."""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from autotune.policies.diagnosis.literal_search import Matcher
from autotune.policies.diagnosis.log_blocks import Backward
from autotune.policies.diagnosis.log_prefixes import Line as Parsed
from autotune.policies.diagnosis.log_prefixes import parsed, segments
from autotune.policies.values.diagnosis import Line

_KEPT = 20
_TEXT = 2000  # characters kept of a line
_COMPARED = 200  # leading characters by which lines are compared
_TOGETHER = 8  # blocks searched together, last first: its lines mostly make the others needless
_SMALL = 1 << 16  # bytes; a smaller block is searched immediately
_SEARCHED = 1 << 16  # bytes of a block to search for error words at once
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_WORDS = ("error", "exception", "fatal", "failed")
_LOOKS_WRONG = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
# Nearly every line that looks like an error contains one of them; mixed case is not worth a search.
WRONG = tuple(spelling for word in _WORDS for spelling in (word, word.capitalize(), word.upper()))
_LONGEST = max(map(len, WRONG))


def looks_wrong(line: str) -> bool:
    """Return whether a line reports an error."""
    lowered = line.lower()
    for word in _WORDS:
        if word in lowered:
            return _LOOKS_WRONG.search(line) is not None
    return False


class Suspects(NamedTuple):
    """A block with the positions of error words."""

    block: bytes
    wrong: list[int] | None  # end positions of error words; None: not searched for
    read: list[int]  # end positions of needles, whose pieces are already read
    number: int  # of the line after the block
    place: int  # bytes of the log before the block


class LastErrors:
    """Keeps the last distinct lines that look like errors, in any order of `note`."""

    def __init__(self, harmless: Callable[[str], bool], match: Matcher) -> None:
        self._harmless = harmless
        self._match = match  # finds error words; most blocks are never searched
        self._waiting: list[Suspects] = []
        self._kept: dict[str, tuple[int, Line]] = {}
        self._places: list[tuple[int, str]] = []  # of the kept lines, sorted
        self._oldest = -1  # the lowest place kept, once the limit is reached

    def suspect(self, suspects: Suspects) -> None:
        """Add a block; only its last lines that look like errors are kept."""
        self._waiting.append(suspects)
        if len(self._waiting) >= _TOGETHER or len(suspects.block) < _SMALL:
            self._look()

    def _look(self) -> None:
        while self._waiting:
            self._note_last(self._waiting.pop())

    def _note_last(self, suspects: Suspects) -> None:
        """Note lines from the last one backward, until older ones would not be kept."""
        block, wrong, read, number, begin = suspects
        if begin + len(block) <= self._oldest:
            return
        walk = Backward(block, number=number)
        shapes = set()
        for end in self._from_last(block) if wrong is None else reversed(wrong):
            if begin + end <= self._oldest:
                return
            piece = walk.piece_of(end - 1)
            if piece is None:
                continue
            number, start, stop = piece
            examined = bisect_right(read, start)
            shape = block[start:stop].translate(_ZEROS)
            if shape in shapes or (examined < len(read) and read[examined] <= stop):
                continue
            shapes.add(shape)
            for part in segments(block[start:stop].decode("utf-8", "replace")):
                line = parsed(part)
                if looks_wrong(line.bare) and not self._harmless(line.bare):
                    self.note(line, number=number, place=begin + start)

    def _from_last(self, block: bytes) -> Iterator[int]:
        """Yield the end positions of error words, last first; earlier bytes are searched only on demand."""
        for stop in range(len(block), 0, -_SEARCHED):
            start = max(0, stop - _SEARCHED)
            first = max(0, start - _LONGEST)
            yield from (
                first + end for end in reversed(self._match(block[first:stop])[1]) if first + end > start
            )

    def note(self, line: Parsed, *, number: int, place: int) -> None:
        """Keep a line; `place`, bytes of the log before it, orders the lines."""
        key = _DIGITS.sub("0", line.bare[:_COMPARED])
        known = self._kept.get(key)
        if known is not None:
            if known[0] >= place:
                return
            self._places.remove((known[0], key))
        self._kept[key] = (place, Line(line=number, text=line.text[:_TEXT], rule=""))
        insort(self._places, (place, key))
        if len(self._places) > _KEPT:
            del self._kept[self._places.pop(0)[1]]
        if len(self._places) == _KEPT:
            self._oldest = self._places[0][0]

    def lines(self) -> tuple[Line, ...]:
        """Return the kept lines in the order of the log."""
        self._look()
        return tuple(line for _, line in sorted(self._kept.values(), key=lambda one: one[0]))
