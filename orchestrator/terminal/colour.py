"""Whether a stream gets colour."""

from __future__ import annotations

import os
from typing import TextIO


def wants_color(color: str, stream: TextIO) -> bool:
    """Return whether a stream gets colour, by --color, NO_COLOR, FORCE_COLOR and TERM."""
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")
