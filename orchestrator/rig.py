"""What a run is driven with: its record, what runs and where, the clock, and who may watch and end it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from launchers.base import Framework, Runner
from orchestrator.clock import Clock, timestamp
from orchestrator.interrupts import Interrupts
from orchestrator.journal import Journal
from orchestrator.runs import Run
from orchestrator.watch import Progress
from policies.events import Event
from policies.types import Job


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
