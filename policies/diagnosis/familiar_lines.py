"""Recognises lines that need no reading because similar ones contained no evidence."""

from __future__ import annotations

import re
from typing import NamedTuple

from autotune.policies.diagnosis.log_prefixes import Line
from autotune.policies.diagnosis.phase_patterns import STAGE_LITERALS, is_frame
from autotune.policies.diagnosis.survived_failures import NEEDLES

# Numbers that have a meaning in a rule or a harmless line's pattern; all others are equivalent.
TELLING_NUMBERS = (
    "0", "1", "2", "5", "7", "9", "12", "15", "28", "30", "50", "122", "137", "429", "500", "501", "502",
    "503", "504", "1455", "0004", "0007", "207001", "207003", "207004", "207005", "507015", "507035",
)  # fmt: skip
LONG_NUMBER = 9  # digits; a rule may recognise an impossible size by its length
_TELLING = "|".join(f"(?<={one[0]}){one[1:]}(?!\\d)" for one in TELLING_NUMBERS)
# Begins with a digit, which makes the search fast.
_ALIKE = re.compile(
    rf"\d(?<!\d\d)(?:(?<=\.\d)|(?<=\d:\d)|(?<=\d-\d)|(?!{_TELLING}))\d{{0,{LONG_NUMBER - 2}}}(?!\d)".encode(),
    re.ASCII,
)
_ENOUGH = 8  # lines of one shape without evidence, each read together with the row below it
_KEPT = 4096  # maximum shapes; then counting starts again
_LONGEST = 1024  # maximum bytes of a remembered line
WIDEST = 500  # maximum characters of a row
_WRAPPED = 60  # minimum characters of a row that the next one may continue
# Every line that marks a phase, a stage or an end contains one of them.
MARKING = ("builtin: ", *STAGE_LITERALS, *NEEDLES)
_MARK = re.compile("|".join(map(re.escape, MARKING)))
_NEVER = -(1 << 40)


def shape_of(line: bytes) -> bytes:
    """Return a line with all numbers replaced by 3, except those that a rule may distinguish.

    Empty for a line over _LONGEST bytes.
    """
    return _ALIKE.sub(b"3", line) if len(line) <= _LONGEST else b""


def marks(text: str) -> bool:
    """Return whether a text may mark a phase, a stage or an end."""
    return _MARK.search(text) is not None


class Familiar:
    """Counts, for each shape of a line, how often it contained no evidence."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}

    def __contains__(self, shape: bytes) -> bool:
        return self._seen.get(shape, 0) >= _ENOUGH

    def dull(self, shape: bytes) -> None:
        """Count a line of a shape that, alone or with the row below it, contained no evidence."""
        if shape:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[shape] = self._seen.get(shape, 0) + 1

    def telling(self, shape: bytes) -> None:
        """Record that lines of a shape may contain evidence and must always be read."""
        if shape:
            self._seen[shape] = _NEVER


class Row(NamedTuple):
    """A line that the next one may continue."""

    number: int
    line: Line
    shape: bytes  # empty: unknown

    def joined(self, line: Line, number: int) -> tuple[str, ...]:
        """Return the row joined with a line, with and without a space; empty if it cannot continue it."""
        if number - self.number > 1 or not self.line.tag.startswith(line.tag) or len(line.text) > WIDEST:
            return ()
        return f"{self.line.bare} {line.bare.lstrip()}", f"{self.line.bare}{line.bare}"


def row_of(line: Line, number: int, shape: bytes = b"") -> Row | None:
    """Return a line as a row that the next one may continue; None if its length or a frame excludes that."""
    wrapped = _WRAPPED <= len(line.text) <= WIDEST and not is_frame(line.bare)
    return Row(number, line, shape) if wrapped else None
