"""`autotune` with shorter waits and a clock that can be set: `python -m tests.faults.product SCALE ARGS…`.

Every constant of the driver and the runner that is a wait is multiplied by SCALE, none below what a busy
machine of two cores needs; only the wait before a relaunch may become as short as half a second. The wall
clock of this process runs ahead by the number of seconds in the file that FAULTS_CLOCK names. FAULTS_GRACE is
the seconds that a job is given to end after SIGTERM.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import msgspec

_SECONDS = re.compile(r"_?[A-Z][A-Z0-9_]*_S")
_ROOMS = {  # and the least seconds of their waits
    "autotune.launchers.runners": 5.0,
    "autotune.orchestrator.driver": 5.0,
    "autotune.policies.recovery": 0.5,
}


def shorten(scale: float) -> None:
    """Multiply the waits of the product by `scale`."""
    for name, least_s in _ROOMS.items():
        room = importlib.import_module(name)
        for result in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if not result.name.endswith(("local_ray_reaper", "shim")):  # programs, not modules
                _shorten(importlib.import_module(result.name), scale, least_s)


def _shorten(module: ModuleType, scale: float, least_s: float) -> None:
    for name, value in vars(module).items():
        if _SECONDS.fullmatch(name) and isinstance(value, float):
            setattr(module, name, _scaled(value, scale, least_s))
        elif name == "WAITS" and module.__name__.endswith(".waits"):
            for field in value.__struct_fields__:
                if isinstance(getattr(value, field), float):
                    seconds = _scaled(getattr(value, field), scale, least_s)
                    msgspec.structs.force_setattr(value, field, seconds)


def _scaled(seconds: float, scale: float, least_s: float) -> float:
    return max(least_s, seconds * scale) if seconds > least_s else seconds


def shift_clock(file: Path) -> None:
    """Let the wall clock of this process run ahead by what `file` says at the moment."""
    real = time.time

    def shifted() -> float:
        try:
            return real() + float(file.read_text())
        except (OSError, ValueError):
            return real()

    time.time = shifted


if __name__ == "__main__":
    factor = float(sys.argv.pop(1))
    if "FAULTS_CLOCK" in os.environ:
        shift_clock(Path(os.environ["FAULTS_CLOCK"]))
    if factor != 1.0:
        shorten(factor)
    if "FAULTS_GRACE" in os.environ:
        from autotune.orchestrator.driver import attempt

        attempt.STOP_GRACE_S = float(os.environ["FAULTS_GRACE"])
    from autotune.orchestrator.cli import main

    main(prog_name="autotune")
