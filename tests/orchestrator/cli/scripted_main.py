"""`autotune` over a scripted place to run: `python -m tests.orchestrator.cli.scripted_main PLAY ARGS…`."""

from __future__ import annotations

import sys
import time

from autotune.launchers.base import Exit, Unreachable
from autotune.orchestrator.cli import drive, main
from autotune.orchestrator.clock import Clock
from autotune.orchestrator.driver import reconcile
from autotune.policies.values.command import Command
from tests.orchestrator.scripted import Place, Script, World, forever, phase, reported, silent, tight_memory

_FASTER = 20


class Fast(Clock):
    """The real time, waited for twenty times shorter."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / _FASTER)


def never_fits(_: World, __: Command) -> tuple[Script, Exit | None]:
    return [phase("rollout", 1), reported("rollout_init", 1, component="rollout")], Exit(code=1)


def own_failure(_: World, __: Command) -> tuple[Script, Exit | None]:
    lines = 'Traceback (most recent call last):\n  File "job.py", line 3, in <module>\nKeyError: "reward"\n'
    return [lines], Exit(code=1)


def bug(_: World, __: Command) -> tuple[Script, Exit | None]:
    raise ZeroDivisionError("a bug")


PLAYS = {f.__name__: f for f in (tight_memory, forever, silent, never_fits, own_failure, bug)}


def open_runner(*_: object, **__: object) -> Place:
    if play == "unreachable":
        raise Unreachable("cannot reach Ray at gpu-01:6379 (connection refused)", hint="start the cluster")
    return Place(World(PLAYS[play]), Fast())  # type: ignore[arg-type]


if __name__ == "__main__":
    play = sys.argv.pop(1)
    drive.open_runner = open_runner  # type: ignore[assignment]
    drive.Clock = Fast  # type: ignore[misc]
    reconcile.LAST_WORDS_S = 0.5
    main(prog_name="autotune")
