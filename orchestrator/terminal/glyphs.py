"""What stands for our glyphs where a stream cannot show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

ASCII: Mapping[str, str] = {
    "✓": "ok",
    "✗": "x",
    "→": "->",
    "↳": "#",
    "·": "-",
    "×": "x",
    "…": "...",
    "█": "#",
    "–": "-",
    "±": "+-",
}


def shows_glyphs(stream: TextIO) -> bool:
    """Return whether a stream takes UTF-8."""
    return "utf" in (getattr(stream, "encoding", None) or "ascii").lower()


def shown_on(text: str, stream: TextIO, *, glyphs: Mapping[str, str] = ASCII) -> str:
    """Return a text with its glyphs replaced where the stream cannot show them."""
    if shows_glyphs(stream):
        return text
    for glyph, word in glyphs.items():
        text = text.replace(glyph, word)
    return text
