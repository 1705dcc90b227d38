"""The environment variables that stand for options of `autotune`: a closed list.

docs/install.md names them and those that autotune sets.
"""

from __future__ import annotations

from collections.abc import Mapping

# How it prints and where runs are. What decides what is done is no variable: a node, a container or a shell
# would hand it on to every command and every job that starts there.
OPTIONS: Mapping[str, str] = {
    "--runs-dir": "AUTOTUNE_RUNS_DIR",
    "--color": "AUTOTUNE_COLOR",
    "--json": "AUTOTUNE_JSON",
    "--quiet": "AUTOTUNE_QUIET",
    "--verbose": "AUTOTUNE_VERBOSE",
}


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a process that autotune starts inherits: the options are meant for one command alone."""
    return {name: value for name, value in environment.items() if name not in OPTIONS.values()}
