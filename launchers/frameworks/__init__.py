"""One file per framework: what to run, rendered from a job and its knobs without any effect."""

from __future__ import annotations

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.areal.adapter import Areal
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.launchers.frameworks.command.adapter import AnyCommand
from autotune.launchers.frameworks.miles.adapter import Miles
from autotune.launchers.frameworks.ms_swift.adapter import MsSwift
from autotune.launchers.frameworks.nemo_rl.adapter import NemoRL
from autotune.launchers.frameworks.openrlhf.adapter import OpenRlhf
from autotune.launchers.frameworks.relax.adapter import Relax
from autotune.launchers.frameworks.skyrl.adapter import SkyRL
from autotune.launchers.frameworks.slime.adapter import Slime
from autotune.launchers.frameworks.trl.adapter import Trl
from autotune.launchers.frameworks.verl.adapter import Verl

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Builtin(),
        Verl(),
        Areal(),
        Relax(),
        Slime(),
        Miles(),
        OpenRlhf(),
        SkyRL(),
        NemoRL(),
        Trl(),
        MsSwift(),
        AnyCommand(),
    )
}


def find(name: str) -> Framework:
    """Return the framework of that name; raises KeyError for an unknown one."""
    return FRAMEWORKS[name]
