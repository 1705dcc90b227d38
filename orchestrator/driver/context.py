"""What driving a run takes: journal, framework, runner, clock, and who observes and interrupts it."""

from __future__ import annotations

import msgspec

from autotune.launchers.base import Framework, Runner
from autotune.orchestrator.clock import Clock, timestamp
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.run.directory import Run
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Event
from autotune.policies.values.job import Job


class Observer:
    """Receives progress and messages; this one discards them."""

    def watch(self, progress: Progress, *, now: float) -> None:
        """Receive the progress of the running attempt; called at every poll."""

    def say(self, text: str) -> None:
        """Receive a message about what is done besides the events."""


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that driving a run takes."""

    journal: Journal
    framework: Framework
    runner: Runner
    clock: Clock
    folder: Run
    job: Job
    interrupts: Interrupts
    observer: Observer = Observer()

    def record(self, event: Event) -> None:
        """Append an event to the journal, as of now."""
        self.journal.append(msgspec.structs.replace(event, at=timestamp(self.clock.now())))
