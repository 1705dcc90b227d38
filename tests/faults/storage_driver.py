"""A driver whose storage fails: `python -m tests.faults.storage_driver MOMENT SECONDS ADDRESS ...`.

It is `autotune ...` over a scripted job of 12 steps, preloaded with storage_shim.c. At MOMENT, of MOMENTS,
FAULT becomes the content of FAULT_CONTROL, after SECONDS nothing. ATTACHING is the moment at which `autotune
resume` has opened the journal of a run whose driver was killed and whose job trains. The job keeps its own
record of its starts and steps in FAULT_CONTROL.job, whatever its driver records.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from autotune.launchers.base import Exit, Observed
from autotune.orchestrator.cli import main
from autotune.orchestrator.cli.shared import connect, drive
from autotune.orchestrator.driver import attempt
from autotune.orchestrator.run import storage
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.command import Command
from autotune.policies.values.events import Accepted, Event, Progressed, StopRequested
from tests.orchestrator.cli.scripted_main import Fast
from tests.orchestrator.scripted import Attempt, Killed, Place, Script, World, step

STEPS = 12
ATTACHING = "while attaching"
MOMENTS = {
    "before the first step": lambda event: isinstance(event, Accepted),
    "between steps": lambda event: isinstance(event, Progressed) and event.step == 4,
    "while stopping": lambda event: isinstance(event, StopRequested),
    ATTACHING: lambda _: False,
}


def note(text: str) -> None:
    """Add a line to the job's own record."""
    with Path(f"{os.environ['FAULT_CONTROL']}.job").open("a") as file:
        file.write(f"{text}\n")


def play(world: World, _: Command) -> tuple[Script, Exit | None]:
    """The job: it continues after the last step that it has saved."""
    note("start")
    steps = [step(n, STEPS) for n in range(world.saved + 1, STEPS + 1)]
    return [*steps, f"builtin: done steps={STEPS}\n"], Exit(code=0)


def watched(poll: object) -> object:
    """Return `poll` of an attempt, with a record of the steps that it printed."""

    def polled(self: Attempt) -> Observed:
        before = len(self.life.written)
        observed: Observed = poll(self)  # type: ignore[operator]
        for chunk in self.life.written[before:]:
            for line in chunk.data.decode().splitlines():
                if line.startswith("builtin: step "):
                    note(f"step {line.split()[2].split('/')[0]}")
        return observed

    return polled


class FailingJournal(Journal):
    """The journal, and what begins at a row of it, or once it is open again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if moment == ATTACHING and self.history():
            begin()

    def append(self, event: Event) -> None:
        """Record an event, then let the storage fail, or end the driver, where it is the moment."""
        super().append(event)
        at_step_4 = isinstance(event, Progressed) and event.step == 4
        if moment == "while stopping" and at_step_4:
            os.kill(os.getpid(), signal.SIGTERM)
        if moment == ATTACHING and at_step_4 and not begun:
            raise Killed
        if MOMENTS[moment](event) and not begun:
            begin()


def begin() -> None:
    """Let the storage fail for a while."""
    begun.append(True)
    control.write_text(os.environ["FAULT"])
    over = threading.Timer(seconds, control.write_text, ("",))
    over.daemon = True
    over.start()


if __name__ == "__main__":
    moment, seconds, address = sys.argv.pop(1), float(sys.argv.pop(1)), sys.argv.pop(1)
    control, begun = Path(os.environ["FAULT_CONTROL"]), list[bool]()
    Attempt.poll = watched(Attempt.poll)  # type: ignore[method-assign, assignment]
    world = World(play, address=address)
    connect.open_runner = lambda *_, **__: Place(world, Fast())  # type: ignore[assignment, arg-type]
    drive.Journal, drive.Clock = FailingJournal, Fast  # type: ignore[misc]
    attempt.LAST_WORDS_S = attempt.WATCH_S = storage.RETRY_S = 0.1
    try:
        main(prog_name="autotune")
    except Killed:
        main(["resume"], prog_name="autotune")
