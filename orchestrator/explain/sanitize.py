"""Makes text of a log safe to print: removes secrets and control sequences, and truncates long lines."""

from __future__ import annotations

import re

from autotune.policies.explain.secrets import masked

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|[@-Z\\-_])")


def uncoloured(text: str) -> str:
    """Return a text without terminal control sequences."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def plain(text: str) -> str:
    """Return text of a log with secrets masked and control characters replaced."""
    text = uncoloured(text).replace("\t", " ")
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "?" for char in text)
    return masked(text)


def clipped(text: str, span: tuple[int, int], *, width: int) -> tuple[str, int, int]:
    """Return at most `width` characters of a text around a span, and the span within them."""
    start, end = span
    if len(text) <= width:
        return text, start, min(end, len(text))
    end = min(end, start + width // 2)
    left = 0
    if end > width - 1:
        left = min(start - width // 3, len(text) - width)
    part = text[left : left + width]
    if left:
        part = "…" + part[1:]
    if left + width < len(text):
        part = part[:-1] + "…"
    return part, start - left, min(end - left, width)
