"""What a run is driven with: its record, what runs and where, the clock, and who may watch and end it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from autotune.launchers.base import Framework, Runner
from autotune.orchestrator.clock import Clock, timestamp
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.run.directory import Run
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Event
from autotune.policies.values.job import Job


class Audience(Protocol):
    """Who watches a run."""

    def watch(self, progress: Progress, *, now: float) -> None:
        """See where the running attempt is; called at every poll."""

    def say(self, text: str) -> None:
        """Hear what is done beside the events."""


class Unseen:
    """Nobody watches."""

    def watch(self, progress: Progress, *, now: float) -> None:
        """See nothing."""

    def say(self, text: str) -> None:
        """Hear nothing."""


class Rig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that driving a run takes."""

    journal: Journal
    framework: Framework
    runner: Runner
    clock: Clock
    folder: Run
    job: Job
    interrupts: Interrupts
    audience: Audience = Unseen()

    def record(self, event: Event) -> None:
        """Append an event to the journal, as of now."""
        self.journal.append(msgspec.structs.replace(event, at=timestamp(self.clock.now())))
