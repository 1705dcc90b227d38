"""Which lines have been read often enough to know that their like says nothing: a log repeats itself."""

from __future__ import annotations

import re

# Numbers that a rule, or what tells a rule's line from a harmless one, gives a meaning; all others are alike.
TELLING_NUMBERS = (
    "0", "1", "2", "5", "7", "9", "12", "15", "28", "30", "50", "122", "137", "429", "500", "501", "502",
    "503", "504", "1455", "0004", "0007", "207001",
)  # fmt: skip
LONG_NUMBER = 9  # digits; a rule may tell a size that no memory has by its length
_TELLING = "|".join(f"(?<={one[0]}){one[1:]}(?!\\d)" for one in TELLING_NUMBERS)
# It begins with a digit, which is what makes the search for it fast.
_ALIKE = re.compile(
    rf"\d(?<!\d\d)(?:(?<=\.\d)|(?!{_TELLING}))\d{{0,{LONG_NUMBER - 2}}}(?!\d)".encode(), re.ASCII
)
_ENOUGH = 8  # of one shape, each read together with the row below it
_KEPT = 4096  # shapes; a log of ever new text starts anew
_LONGEST = 1024  # bytes of a line that is remembered
_NEVER = -(1 << 40)


def shape_of(line: bytes) -> bytes:
    """Return a line with all numbers alike but those that a rule may tell apart."""
    return _ALIKE.sub(b"3", line) if len(line) <= _LONGEST else b""


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
