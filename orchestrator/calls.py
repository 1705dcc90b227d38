"""The commands that autotune prints about a run: each works where it is pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

DEFAULT_ROOT = Path("runs")  # in the folder where autotune is called


def call(verb: str, folder: Path, *options: str) -> str:
    """Return the command for the run in `folder`; it works where this process was started."""
    return f"autotune {' '.join((verb, folder.name, *options))}{option_of(folder.parent)}"


def call_anywhere(verb: str, folder: Path, *options: str) -> str:
    """Return the command for the run in `folder`; it works in every folder of this machine."""
    return call(verb, folder.absolute(), *options)


def option_of(root: Path) -> str:
    """Return the option that names a folder of runs, with a space in front; empty for the default."""
    return "" if root == DEFAULT_ROOT else f" --runs-dir {shlex.quote(str(root))}"
