"""Colour for the few lines that are printed without a console."""

from __future__ import annotations

import os
import re
import sys

import click

_STYLES = (
    (re.compile(r"^error(\[\w+\])?:", re.MULTILINE), {"fg": "red", "bold": True}),
    (re.compile(r"^hint:", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"^\s*-->.*$", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"\^+$", re.MULTILINE), {"fg": "red"}),
)


def painted(text: str, *, color: str) -> str:
    """Return a message with colour where stderr takes it."""
    wanted = color == "always"
    if color == "auto" and not os.environ.get("NO_COLOR"):
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        wanted = bool(os.environ.get("FORCE_COLOR")) or terminal
    if not wanted:
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(lambda match, style=style: click.style(match[0], **style), text)  # type: ignore[misc]
    return text
