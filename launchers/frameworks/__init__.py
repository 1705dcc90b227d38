"""One file per framework: what to run, rendered from a job and its knobs without any effect."""

from __future__ import annotations

from launchers.base import Framework
from launchers.frameworks.builtin import Builtin

FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in (Builtin(),)}


def find(name: str) -> Framework:
    """Return the framework of that name; raises KeyError for an unknown one."""
    return FRAMEWORKS[name]
