"""verl's settings on a command line: Hydra's overrides, one of them without a section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.launchers.frameworks.dialects import hydra


def overrides_in(words: Iterable[str]) -> dict[str, Any]:
    """Return the overrides among the words of a command line, under their keys as written."""
    return hydra.overrides_in(words, top=("model_engine",))
