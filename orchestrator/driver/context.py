"""Everything that the driver of a run needs: journal, framework, runner, clock, observer, interrupts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from autotune.launchers.base import Framework, Runner
from autotune.orchestrator.clock import Clock, timestamp
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.directory import RunFolder
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Event, Finished
from autotune.policies.values.job import Job

T = TypeVar("T")


class Observer:
    """Receives progress and messages; this one discards them."""

    def watch(self, running: Mapping[int, Progress], *, now: float) -> None:
        """Receive the progress of what runs, by the numbers of the attempts; called at every poll."""

    def say(self, text: str) -> None:
        """Receive a progress message that is not an event."""

    def warn(self, text: str) -> None:
        """Receive a warning, shown even with errors only."""

    def write_view(self, name: str, write: Callable[[], None]) -> None:
        """Write a view of the journal; an observer may handle its errors."""
        write()


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the driver of a run needs."""

    journal: Journal
    framework: Framework
    runner: Runner
    clock: Clock
    folder: RunFolder
    job: Job
    rehearses: Job | None = None  # the job to rehearse, if it is not `job`
    interrupts: Interrupts
    observer: Observer = Observer()

    def persist(self, do: Callable[[], T], *, path: Path) -> T:
        """Call something that the run cannot continue without; see `Persistence`."""
        with self.interrupts.shielded():
            return self.journal.persist(do, path=path)

    def watched_s(self, attempt: int, *, until_now: bool = False) -> float:
        """Return the seconds for which drivers have watched an attempt, until the last row or now."""
        rows = self.journal.history()[self.journal.view.attempts[attempt].place + 1 :]
        unrecorded_s = self.journal.unrecorded_s(self.clock.monotonic()) if until_now else 0.0
        return round(sum(row.after_s or 0.0 for row in rows) + unrecorded_s, 3)

    def record(self, event: Event) -> None:
        """Append an event to the journal with the current time."""
        with self.interrupts.shielded():
            at, worked_s = timestamp(self.clock.now()), self.journal.worked_s(self.clock.monotonic())
            self.journal.append(msgspec.structs.replace(event, at=at, after_s=round(worked_s, 3)))


class EndingContext(RunContext, frozen=True, kw_only=True):
    """What is needed to end a run; its end is recorded once no process is left on any node."""

    def record(self, event: Event) -> None:
        """Append an event; raises Failure or Unreachable if a process may still run."""
        if isinstance(event, Finished):
            require_gone(self.folder, self.runner.end_all(run=self.folder.id))
            event = msgspec.structs.replace(event, gone=True)
        super().record(event)


def require_gone(run: RunFolder, left: tuple[str, ...]) -> None:
    """Raise Failure if processes of a run are still running."""
    if left:
        raise Failure(
            f"run {run.id} is not stopped; its processes could not be ended: {', '.join(left)}",
            hint=f"end them there, then `{run.call('stop')}` again",
        )
