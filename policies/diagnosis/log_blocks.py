"""Groups chunks of bytes into blocks of whole lines, and finds the piece of a block around a position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotune.policies.diagnosis.log_prefixes import LONGEST

BLOCK = 1 << 20  # maximum bytes; a longer line is cut
_LEAD = LONGEST // 4  # bytes of a very long line to keep before a match
_CUT_REACH = 4096  # bytes at the end of a block in which to search for a space to cut a long line at


def blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks that end at newlines, at the same positions for every chunking."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        at, view = 0, memoryview(chunk)
        while size + len(chunk) - at >= BLOCK:
            stop = at + BLOCK - size
            end = chunk.rfind(b"\n", at, stop) + 1
            if end <= at:  # no newline: cut a line longer than a block, or at one in the chunks held
                whole = b"".join((*held, view[at:]))
                cut = _cut(whole, 0)
                yield whole[:cut]
                held, size, at = [whole[cut:]], len(whole) - cut, len(chunk)
                continue
            yield b"".join((*held, view[at:end]))  # the only copy of a byte that is not left over
            held, size, at = [], 0, end
        if at < len(chunk):
            held.append(chunk[at:])
            size += len(chunk) - at
    if size:
        yield b"".join(held)


def _cut(data: bytes, at: int) -> int:
    """Return the end of a block that starts at `at`: after a newline, carriage return or space if any."""
    stop = at + BLOCK
    end = data.rfind(b"\n", at, stop) + 1
    if end <= at:
        end = data.rfind(b"\r", at, stop) + 1
    if end <= at:
        end = data.rfind(b" ", stop - _CUT_REACH, stop) + 1
    return end if end > at else stop


class Cursor:
    """Walks a block forward from piece to piece; carriage returns and newlines separate pieces."""

    def __init__(self, block: bytes, *, number: int) -> None:
        self.block = block
        self.at = 0
        self.number = number  # of the line at `at`
        self._line_end = 0
        self._piece_end = 0

    def line_of(self, position: int) -> int:
        """Return the start of the line at a position, or the cursor if that is later."""
        return max(self.at, self.block.rfind(b"\n", self.at, position) + 1)

    def piece_of(self, position: int) -> tuple[int, int]:
        """Return the bounds of the piece around a position; of a piece over LONGEST, the part around it."""
        block = self.block
        if position >= self._line_end:
            self._line_end = _index(block, b"\n", position, len(block))
            self._piece_end = 0
        if position >= self._piece_end:
            self._piece_end = _index(block, b"\r", position, self._line_end)
        line = self.line_of(position)
        start = max(line, block.rfind(b"\r", line, position) + 1)
        end = self._piece_end
        if end - start > LONGEST:
            start = max(start, position - _LEAD)
            end = min(end, start + LONGEST)
        return start, end

    def pass_to(self, position: int) -> None:
        """Move forward, counting lines."""
        self.number += self.block.count(b"\n", self.at, position)
        self.at = position

    def leave(self, stop: int) -> None:
        """Move past the piece that begins at `at` and ends at `stop`, and past its newline."""
        newline = self.block[stop : stop + 1] == b"\n"
        self.number += newline
        self.at = stop + newline

    def next_line(self, stop: int) -> tuple[int, int, int] | None:
        """Pass a whole line before `stop`; return its number and the bounds of what a terminal shows of it.

        None if no whole line is left.
        """
        block = self.block
        end = block.find(b"\n", self.at, stop)
        if end < 0:
            if stop < len(block) or self.at >= stop:
                return None
            end = stop
        last = end
        while last > self.at and block[last - 1] == _RETURN:
            last -= 1
        start = max(self.at, block.rfind(b"\r", self.at, last) + 1, last - LONGEST)
        passed = self.number, start, last
        self.pass_to(min(end + 1, len(block)))
        return passed


class Backward:
    """Walks the pieces of a block backward from its end."""

    def __init__(self, block: bytes, *, number: int) -> None:
        self._block = block
        self._at = len(block)
        self._number = number  # of the line at `_at`
        self._line = len(block)

    def piece_of(self, position: int) -> tuple[int, int, int] | None:
        """Return the line number, start and end of the piece at a position; None if already passed."""
        if position >= self._at:
            return None
        block = self._block
        if position < self._line:
            self._line = block.rfind(b"\n", 0, position) + 1
        start = max(self._line, block.rfind(b"\r", self._line, position) + 1)
        end = _index(block, b"\n", position, self._at)
        end = _index(block, b"\r", position, end)
        self._number -= block.count(b"\n", start, self._at)
        self._at = start
        if end - start > LONGEST:
            first = max(start, position - _LEAD)
            return self._number, first, min(end, first + LONGEST)
        return self._number, start, end


_RETURN = ord("\r")


def _index(block: bytes, mark: bytes, start: int, stop: int) -> int:
    at = block.find(mark, start, stop)
    return stop if at < 0 else at


def last_lines(data: bytes, *, reach: int, most: int) -> list[str]:
    """Return the last lines of `data` as a terminal shows them, oldest first.

    At most `most` lines within the last `reach` bytes; empty lines are left out.
    """
    lines = data[-reach:].split(b"\n")
    if len(data) > reach:
        lines = lines[1:]
    texts = (line.rstrip(b"\r").rpartition(b"\r")[2][:LONGEST] for line in lines[-most - 1 :])
    return [line.decode("utf-8", "replace") for line in texts if line][-most:]
