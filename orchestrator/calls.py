"""The commands about a run that autotune prints, which work where they are pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

DEFAULT_ROOT = Path("runs")  # relative to the folder where autotune is called


def call(verb: str, folder: Path, *options: str) -> str:
    """Return the command for the run in `folder`, which works in this process's working directory."""
    return f"autotune {' '.join((verb, folder.name, *options))}{option_of(folder.parent)}"


def call_anywhere(verb: str, folder: Path, *options: str) -> str:
    """Return the command for the run in `folder`, which works in every folder of this machine."""
    return call(verb, folder.absolute(), *options)


def option_of(root: Path) -> str:
    """Return the option for a folder of runs, with a leading space; empty for the default."""
    return "" if root == DEFAULT_ROOT else f" --runs-dir {shlex.quote(str(root))}"
