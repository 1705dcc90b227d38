"""Pieces of a line on the terminal: bars, two ends, and glyphs for terminals without UTF-8."""

from __future__ import annotations

from rich.text import Text

from autotune.orchestrator.terminal.glyphs import ASCII
from autotune.orchestrator.units import show_gib

_BAR = 24


def in_ascii(text: Text) -> Text:
    """Return a text whose glyphs every terminal has."""
    for glyph, word in ASCII.items():
        text = _replaced(text, glyph, word)
    return text


def _replaced(text: Text, glyph: str, word: str) -> Text:
    return (
        Text(word, style=text.style).join(text.split(glyph, allow_blank=True))
        if glyph in text.plain
        else text
    )


def apart(left: str, right: str, width: int) -> Text:
    """Return two texts at the ends of a line."""
    room = max(1, min(width, 100) - len(left) - len(right))
    return Text.assemble((left, "bold"), " " * room, (right, "dim"))


def cut(text: Text, width: int) -> Text:
    """Return a text that fits into a line."""
    text.truncate(max(10, width), overflow="ellipsis")
    return text


def bar(name: str, used: int, total: int) -> Text:
    """Return a bar of how full a memory is; yellow from 90 %, red from 95 %."""
    part = used / total if total else 0.0
    style = "red" if part >= 0.95 else "yellow" if part >= 0.9 else ""
    filled = ("█" * round(part * _BAR)).ljust(_BAR, "·")
    return Text.assemble(f"    {name:6}", (filled, style), f"  {show_gib(used)} / {show_gib(total)}")
