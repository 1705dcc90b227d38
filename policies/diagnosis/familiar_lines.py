"""Which lines need no reading: those whose like has said nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

from autotune.policies.diagnosis.log_prefixes import Line
from autotune.policies.diagnosis.phase_patterns import STAGE_LITERALS, is_frame
from autotune.policies.diagnosis.survived_failures import NEEDLES

# Numbers that a rule, or what tells a rule's line from a harmless one, gives a meaning; all others are alike.
TELLING_NUMBERS = (
    "0", "1", "2", "5", "7", "9", "12", "15", "28", "30", "50", "122", "137", "429", "500", "501", "502",
    "503", "504", "1455", "0004", "0007", "207001",
)  # fmt: skip
LONG_NUMBER = 9  # digits; a rule may tell a size that no memory has by its length
_TELLING = "|".join(f"(?<={one[0]}){one[1:]}(?!\\d)" for one in TELLING_NUMBERS)
# It begins with a digit, which is what makes the search for it fast.
_ALIKE = re.compile(
    rf"\d(?<!\d\d)(?:(?<=\.\d)|(?<=\d:\d)|(?<=\d-\d)|(?!{_TELLING}))\d{{0,{LONG_NUMBER - 2}}}(?!\d)".encode(),
    re.ASCII,
)
_ENOUGH = 8  # of one shape, each read together with the row below it
_KEPT = 4096  # shapes; a log of ever new text starts anew
_LONGEST = 1024  # bytes of a line that is remembered
WIDEST = 500  # characters of a row
_WRAPPED = 60  # and more: it may go on in the next one
# A line that marks a phase, a stage or an end holds one of them.
MARKING = ("builtin: ", *STAGE_LITERALS, *NEEDLES)
_MARK = re.compile("|".join(map(re.escape, MARKING)))
_NEVER = -(1 << 40)


def shape_of(line: bytes) -> bytes:
    """Return a line with all numbers alike but those that a rule may tell apart."""
    return _ALIKE.sub(b"3", line) if len(line) <= _LONGEST else b""


def marks(text: str) -> bool:
    """Return whether a text may mark a phase, a stage or an end."""
    return _MARK.search(text) is not None


class Familiar:
    """Counts, for each shape of a line, how often it said nothing."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}

    def __contains__(self, shape: bytes) -> bool:
        return self._seen.get(shape, 0) >= _ENOUGH

    def dull(self, shape: bytes) -> None:
        """Take note that a line of a shape, alone or with the row below it, has said nothing so far."""
        if shape:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[shape] = self._seen.get(shape, 0) + 1

    def telling(self, shape: bytes) -> None:
        """Take note that lines of a shape may say something: they are always read."""
        if shape:
            self._seen[shape] = _NEVER


class Row(NamedTuple):
    """A line that may be the first part of one."""

    number: int
    line: Line
    shape: bytes  # empty: not known

    def joined(self, line: Line, number: int) -> tuple[str, ...]:
        """Return the row and a line as one, with and without a space; empty where they are two."""
        if number - self.number > 1 or not self.line.tag.startswith(line.tag) or len(line.text) > WIDEST:
            return ()
        return f"{self.line.bare} {line.bare.lstrip()}", f"{self.line.bare}{line.bare}"


def row_of(line: Line, number: int, shape: bytes = b"") -> Row | None:
    """Return a line as the first part of one; None if its length or kind says that it is none."""
    wrapped = _WRAPPED <= len(line.text) <= WIDEST and not is_frame(line.bare)
    return Row(number, line, shape) if wrapped else None
