"""Colour for the few lines that are printed without a console."""

from __future__ import annotations

import re
import sys
from typing import TextIO

import click

from autotune.orchestrator.terminal.colour import wants_color

_STYLES = (
    (re.compile(r"^(error(\[[\w-]+\])?|unknown):", re.MULTILINE), {"fg": "red", "bold": True}),
    (re.compile(r"^(hint|help):", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"^(info|note):", re.MULTILINE), {"dim": True}),
    (re.compile(r"^\s*-->.*$", re.MULTILINE), {"fg": "cyan"}),
    (re.compile(r"\^+$", re.MULTILINE), {"fg": "red"}),
)


def painted(text: str, *, color: str, stream: TextIO | None = None) -> str:
    """Return a message with colour where its stream, stderr unless it is named, takes it."""
    if not wants_color(color, sys.stderr if stream is None else stream):
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(lambda match, style=style: click.style(match[0], **style), text)  # type: ignore[misc]
    return text
