"""Bytes of any chunking to the lines worth reading: bounded, and fast where nothing is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LONGEST = 8192  # characters of a line that are kept
_BLOCK = 1 << 20  # a longer piece without a newline is cut
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_ACTOR = re.compile(r"^(?:[\w.\-]*\s*\|\s+)?(\([A-Za-z][^()\n]{0,200}?(?:\([^()\n]*\)[^()\n]*)?\))\s?")
_RANK = re.compile(r"^\[?(?:rank)?(\d{1,6})\]?:(?=\s|\[|$)\s?|^\[rank(\d{1,6})\]:?\s?")
_LEVEL = re.compile(
    r"^(?:\[?[\d\-]{8,10}[T ][\d:.,]+Z?\]?\s+|<time>Z?\s+|\[<time>[^\]]*\]\s+|"
    r"(?:ERROR|WARNING|INFO|CRITICAL)\b:?\s*"
    r"(?:\d\d-\d\d [\d:]+ |<time> )?|\[?\w+\.py:\d+\]\s?|\[(?:ERROR|INFO|WARNING)\]\s+|:\w+:\w+: )"
)


class Line(NamedTuple):
    """A line without its prefixes."""

    text: str  # as printed, without escapes
    bare: str  # without the prefixes of process and logger
    tag: str  # the process that printed it; empty where nothing says
    rank: int | None


def parsed(text: str) -> Line:
    """Return a line apart from the prefixes of Ray, torchrun and loggers."""
    text = _ANSI.sub("", text[:LONGEST]) if "\x1b" in text else text[:LONGEST]
    text = text.rstrip()
    bare, tag, rank = text, "", None
    for _ in range(4):
        if (match := _ACTOR.match(bare)) and ("pid=" in match[1] or match[1] == "(raylet)"):
            tag += match[1].split(",")[0].rstrip(")")
        elif match := _RANK.match(bare):
            rank = int(match[1] or match[2])
            tag += f"[{rank}]"
        elif not (match := _LEVEL.match(bare)):
            break
        bare = bare[match.end() :]
    if "[repeated" in bare:
        bare = _REPEATED.sub("", bare)
    return Line(text=text, bare=bare, tag=tag, rank=rank)


def blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes cut at newlines; a piece without one is cut where it grows too long."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        for start in range(0, len(chunk), _BLOCK):
            piece = chunk[start : start + _BLOCK]
            end = piece.rfind(b"\n") + 1
            if end:
                yield b"".join((*held, piece[:end]))
                held, size = [], 0
            if end < len(piece):
                held.append(piece[end:])
                size += len(piece) - end
            if size > _BLOCK:
                yield b"".join(held)
                held, size = [], 0
    if held:
        yield b"".join(held)


class Reader:
    """Finds the lines of blocks that hold one of the needles, and what stands around them."""

    def __init__(self, needles: Iterable[str]) -> None:
        self._needles = tuple(needle.encode() for needle in needles)
        self.number = 1  # of the line that begins next
        self._tail = b""  # of the block before, to look back into

    def hits(self, block: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield (line number, start, end) of the lines with a needle, in order."""
        starts: set[tuple[int, int]] = set()
        for needle in self._needles:
            at = block.find(needle)
            while at >= 0:
                start = block.rfind(b"\n", 0, at) + 1
                end = block.find(b"\n", at)
                end = len(block) if end < 0 else end
                if end - start > LONGEST:
                    starts.add((max(start, at - LONGEST // 4), min(end, at + LONGEST // 2)))
                    at = block.find(needle, min(end, at + LONGEST // 2))
                else:
                    starts.add((start, end))
                    at = block.find(needle, end)
        number, seen = self.number, 0
        for start, end in sorted(starts):
            number += block.count(b"\n", seen, start)
            seen = start
            yield number, start, end

    def before(self, block: bytes, start: int, *, reach: int) -> list[str]:
        """Return the lines before a position, oldest first, at most `reach` bytes of them."""
        lead = block[max(0, start - reach) : start]
        if start < reach:
            lead = self._tail[-(reach - start) :] + lead
        lines = lead.decode("utf-8", "replace").split("\n")
        return [line for line in lines[1 if len(lead) == reach else 0 :] if line]

    def leave(self, block: bytes, *, reach: int) -> None:
        """Take note that a block is done."""
        self.number += block.count(b"\n")
        self._tail = block[-reach:] if len(block) >= reach else (self._tail + block)[-reach:]
