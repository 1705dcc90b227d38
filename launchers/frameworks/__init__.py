"""One file per framework: what to run, rendered from a job and its knobs without any effect."""

from __future__ import annotations

from launchers.base import Framework
from launchers.frameworks.areal import Areal
from launchers.frameworks.builtin import Builtin
from launchers.frameworks.command import AnyCommand
from launchers.frameworks.relax import Relax
from launchers.frameworks.slime import Slime
from launchers.frameworks.verl import Verl

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (Builtin(), Verl(), Areal(), Relax(), Slime(), AnyCommand())
}


def find(name: str) -> Framework:
    """Return the framework of that name; raises KeyError for an unknown one."""
    return FRAMEWORKS[name]
