"""`autotune` over a scripted place to run: `python -m tests.orchestrator.cli.scripted_main PLAY ARGS…`.

`PLAY@HOST:PORT+80` plays on a cluster at that address, with a card of 80 GiB; `PLAY:silent@…` has a node that
does not answer, `PLAY:undead@…` a process that cannot be ended. On a cluster that grows (`GROWS`) two nodes
are there, or as many as the file `nodes` in the working folder says.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from autotune.launchers.base import Capacity, Exit, Unreachable
from autotune.orchestrator.cli import main
from autotune.orchestrator.cli.shared import connect, drive
from autotune.orchestrator.clock import Clock
from autotune.orchestrator.driver import reconcile, signals
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.report import at_end
from autotune.orchestrator.run import directory, export
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.command import Command
from tests.orchestrator.scripted import (
    Place,
    Script,
    World,
    forever,
    phase,
    reported,
    silent,
    step,
    tight_memory,
)

_FASTER = 20
_FOREVER_S = 600.0


class Fast(Clock):
    """A clock whose waits are twenty times shorter than what its `monotonic` counts for them."""

    _skipped = 0.0  # seconds, of all instances: driver and scripted place share one time

    def monotonic(self) -> float:
        return time.monotonic() + Fast._skipped

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / _FASTER)
        Fast._skipped += seconds - seconds / _FASTER


def never_fits(_: World, __: Command) -> tuple[Script, Exit | None]:
    return [phase("rollout", 1), reported("rollout_init", 1, component="rollout")], Exit(code=1)


def own_failure(_: World, __: Command) -> tuple[Script, Exit | None]:
    lines = 'Traceback (most recent call last):\n  File "job.py", line 3, in <module>\nKeyError: "reward"\n'
    return [lines], Exit(code=1)


def ends_early(_: World, __: Command) -> tuple[Script, Exit | None]:
    return [step(1), step(2)], Exit(code=0)


def never_starts(_: World, __: Command) -> tuple[Script, Exit | None]:
    time.sleep(_FOREVER_S)
    raise AssertionError("waited for ever")


def deaf(_: World, __: Command) -> tuple[Script, Exit | None]:
    hear_nothing()
    raise AssertionError("waited for ever")


def hear_nothing() -> None:
    """Wait for ever in compiled code that looks for no signal, as Ray's does for a head that is silent."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def never_drains(world: World, command: Command) -> tuple[Script, Exit | None]:
    def drain(_: int) -> None:
        (run,) = Path("runs").iterdir()
        (run / "draining").touch()
        time.sleep(_FOREVER_S)

    world.draining = drain
    return own_failure(world, command)


def no_stable_file(world: World, command: Command) -> tuple[Script, Exit | None]:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    export.write = full
    return tight_memory(world, command)


def own_report(world: World, command: Command) -> tuple[Script, Exit | None]:
    return tight_memory(world, command)


def foreign_report(world: World, command: Command) -> tuple[Script, Exit | None]:
    (run,) = Path("runs").iterdir()
    (run / "report.html").write_text("my notes")
    return tight_memory(world, command)


def endless_report(world: World, command: Command) -> tuple[Script, Exit | None]:
    (run,) = Path("runs").iterdir()
    if not (run / "report.html").exists():
        os.mkfifo(run / "report.html")  # nobody writes into it: who reads it waits
    return tight_memory(world, command)


def no_certificate(world: World, command: Command) -> tuple[Script, Exit | None]:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    export.write_certificate = full
    return tight_memory(world, command)


def bug(_: World, __: Command) -> tuple[Script, Exit | None]:
    raise ZeroDivisionError("a bug")


def shut_down(_: World, __: Command) -> tuple[Script, Exit | None]:
    raise BrokenPipeError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown")


def asked_while_opening(how: str) -> type[Journal]:
    """Return a journal whose driver is asked to end while it opens it, when others can see the driver."""

    class Asked(Journal):
        def __init__(self, folder: Path, **options: Any) -> None:
            super().__init__(folder, **options)
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                (folder / "stop").touch()

    return Asked


def grows(world: World) -> Capacity:
    file = Path("nodes")
    there = int(file.read_text()) if file.exists() else 2
    return Capacity(ready=there == 2, nodes=there, wanted=2, gpus=8, note="1 × gpu starting")


PLAYS = {
    f.__name__: f
    for f in (
        tight_memory,
        forever,
        silent,
        never_fits,
        own_failure,
        ends_early,
        bug,
        shut_down,
        never_starts,
        deaf,
        never_drains,
        no_stable_file,
        own_report,
        foreign_report,
        endless_report,
        no_certificate,
    )
}


def open_runner(*_: object, **__: object) -> Place:
    if play == "unreachable":
        raise Unreachable("cannot reach Ray at gpu-01:6379 (connection refused)", hint="start the cluster")
    if play == "half_connected":
        atexit.register(os.abort)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    if play == "deaf_connection":
        Path("connecting").touch()
        hear_nothing()
    if play == "elsewhere":
        return Place(World(tight_memory, address="10.0.0.1:6379"), Fast())  # type: ignore[arg-type]
    name, _, where = play.partition("@")
    name, _, trouble = name.partition(":")
    address, _, gib = where.partition("+")
    world = World(
        PLAYS[name], address=address or "local", gpus=int(bool(gib)), card_bytes=int(gib or 0) << 30
    )
    world.silent = "gpu-03" if trouble == "silent" else ""
    world.undead = ("pid 7 (python) of mia on gpu-02",) if trouble == "undead" else ()
    world.nodes = grows if os.environ.get("GROWS") else None
    return Place(world, Fast())  # type: ignore[arg-type]


def report_here(run: directory.RunFolder, **_: object) -> None:
    """Write the report in this process: the one that `at_end` starts takes half a second to begin."""
    done = CliRunner().invoke(main, ["report", run.id, "--runs-dir", str(run.path.parent)])
    if done.exit_code:
        raise Failure(done.stderr)


if __name__ == "__main__":
    play = sys.argv.pop(1)
    if not play.endswith("_report"):
        at_end.write = report_here
    if ":asked-by-" in play:
        drive.Journal = asked_while_opening(play.partition(":asked-by-")[2])  # type: ignore[misc]
    connect.open_runner = open_runner  # type: ignore[assignment]
    drive.Clock = Fast  # type: ignore[misc]
    reconcile.LAST_WORDS_S = 0.5
    signals.KILLED_S = 3.0
    main(prog_name="autotune")
