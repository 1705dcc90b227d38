"""Joins the lines of a log that a terminal wrapped at its width: a paste, a capture of tmux or screen."""

from __future__ import annotations

import re
from unicodedata import combining, east_asian_width

LARGEST = 4 << 20  # bytes; more than a terminal keeps of its output
_NARROWEST = 40  # minimum columns of a terminal
_MOST_ROWS = 8  # maximum rows of a wrapped line that proves the width
_BEGUN, _BROKEN = 3, 2  # minimum rows with a prefix, and wrapped rows, that prove it together
# Text that is printed on one line, so that only a terminal wraps it: its beginning, and the whole.
_PRINTED_WHOLE = (
    (re.compile(r"\bFile \"[^\"]"), re.compile(r"\bFile \"[^\"\n]+\", line \d+, in \S")),
    (
        re.compile(r"\b[A-Z]{3,4} out of memory\.?(?: T|\s*$)"),
        re.compile(r"out of memory\. Tried to allocate [\d.]+ \w+[. ].{0,200}?\bfree\b"),
    ),
)
# Beginnings of lines, which never continue another line.
_BEGINS = re.compile(
    r" {2,}File \"|Traceback \(|\((?:[A-Za-z_]\w*[ =][^()\n]{0,60})?pid=\d|\(raylet|\[rank\d+\]:|"
    r"\[?\d{4}-\d\d-\d\d[ T]|(?:INFO|WARNING|ERROR|DEBUG)\b"
)
_WORDS = (b'File "', b" out of memory", b"pid=")
_QUOTE = re.compile(r"^> ?")


def whole_lines(text: bytes) -> bytes:
    """Return a log with the lines that a terminal wrapped joined; any other log unchanged.

    The width is proven by a frame or PyTorch's message that continues after a row as wide as the widest, or
    by prefixes that only rows after a widest one lack. A joined line is followed by an empty line for each
    row joined to it, so that all other lines keep their numbers.
    """
    if len(text) > LARGEST or not any(word in text for word in _WORDS):
        return text
    lines = text.decode("utf-8", "surrogateescape").split("\n")
    rows = _Rows([line.rstrip() for line in _unquoted(lines)])
    if rows.width < _NARROWEST or not (rows.cut_a_message() or rows.cut_lines_with_prefixes()):
        return text
    return "\n".join(rows.joined()).encode("utf-8", "surrogateescape")


def _unquoted(lines: list[str]) -> list[str]:
    """Return the lines without `>` quotation marks, if all nonempty lines have one."""
    if all(line.startswith(">") for line in lines if line.strip()):
        return [_QUOTE.sub("", line) for line in lines]
    return lines


class _Rows:
    """The rows of a log without the terminal's padding, with those marked that fill its width."""

    def __init__(self, rows: list[str]) -> None:
        self._rows = rows
        widths = [_columns(row) for row in rows]
        self.width = max(widths)
        # A row that is one column narrower may have ended with a space.
        self._full = [width >= self.width - 1 for width in widths]
        self._lost = ["" if width == self.width else " " for width in widths]
        self._begins = [_BEGINS.match(row) is not None for row in rows]

    def cut_a_message(self) -> bool:
        """Return whether a full row ends within text that is always printed on one line."""
        for at, row in enumerate(self._rows):
            for begins, whole in _PRINTED_WHOLE if self._full[at] else ():
                start = begins.search(row)
                if start is None or whole.search(row, start.start()) is not None:
                    continue
                line = row[start.start() :]
                for below in range(at, min(at + _MOST_ROWS, len(self._rows) - 1)):
                    if not self._goes_on(below):
                        break
                    line += self._lost[below] + self._rows[below + 1]
                    if whole.search(line) is not None:
                        return True
        return False

    def cut_lines_with_prefixes(self) -> bool:
        """Return whether the rows without a prefix all follow full rows, with enough rows of both kinds."""
        without = [at for at, row in enumerate(self._rows) if row and not self._begins[at]]
        above = {self._rows[at - 1] for at in without if at and self._full[at - 1]}
        lacking = all(at and self._full[at - 1] for at in without)
        return lacking and len(above) >= _BROKEN and sum(self._begins) >= _BEGUN

    def joined(self) -> list[str]:
        """Return the rows with those of one line joined, followed by an empty row for each joined one."""
        joined: list[str] = []
        at = 0
        while at < len(self._rows):
            line, first = self._rows[at], at
            while at + 1 < len(self._rows) and self._goes_on(at):
                line += self._lost[at] + self._rows[at + 1]
                at += 1
            joined.append(line)
            joined.extend([""] * (at - first))
            at += 1
        return joined

    def _goes_on(self, at: int) -> bool:
        """Return whether the next row may continue a row."""
        return self._full[at] and self._rows[at + 1] != "" and not self._begins[at + 1]


def _columns(row: str) -> int:
    """Return the terminal columns of a row."""
    if row.isascii():
        return len(row)
    return sum(1 + (east_asian_width(letter) in "WF") for letter in row if not combining(letter))
