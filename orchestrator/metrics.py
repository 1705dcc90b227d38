"""A run as figures for Prometheus: attempts, relaunches, steps, free memory per phase, state."""

from __future__ import annotations

from enum import StrEnum

from autotune.launchers.runners.cluster.metrics import ClusterMetrics
from autotune.orchestrator.verdicts import shown
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Edited,
    Ended,
    Event,
    Finished,
    GoalReached,
    Progressed,
    Started,
)


class State(StrEnum):
    """Where a run stands."""

    STARTING = "starting"  # until the first step of the training; a rehearsal is before it
    RUNNING = "running"
    RECOVERING = "recovering"  # between attempts, or in one that has completed no step
    STABLE = "stable"
    SEARCHING = "searching"
    COMPLETED = "completed"
    GAVE_UP = "gave_up"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


class Metrics:
    """The figures of one run, exported while its driver is connected to a cluster that is not its own."""

    def __init__(self) -> None:
        self._cluster: ClusterMetrics | None = None
        self._attempts = self._launches = 0  # launches: of the training itself
        self._rehearses = False
        self._step: int | None = None
        self._headroom: dict[str, float] = {}  # phase -> share of its memory that was free at its peak
        self._state = State.STARTING
        self._pending = False  # a row changed figures that are not exported yet

    def take(self, event: Event) -> None:
        """Take in a row of the journal and export what it changed; that of a step waits for `settle`."""
        self.note(event)
        if not isinstance(event, Progressed):
            self.export()

    def settle(self) -> None:
        """Export what the steps since the last call changed."""
        if self._pending:
            self.export()

    def note(self, event: Event) -> None:
        """Take in a row of the journal."""
        self._pending = True
        match event:
            case Accepted(cluster=cluster, run=run, job=job):
                tags = {"run": run, "job": job.name, "framework": job.framework}
                self._cluster = None if cluster.address == "local" else ClusterMetrics(common=tags)
            case Started(trial=trial, rehearsal=part):
                self._attempts += 1
                self._launches += event.trains
                self._rehearses = part is not None
                self._headroom = {}
                if trial is not None:
                    self._state = State.SEARCHING
            case Progressed(step=step, peaks=peaks):
                self._headroom |= {
                    phase: 1.0 - peak.used_bytes / peak.capacity_bytes
                    for phase, peak in peaks.items()
                    if peak.capacity_bytes
                }
                if self._rehearses:
                    return
                self._step = step
                if self._state in (State.STARTING, State.RECOVERING):
                    self._state = State.RUNNING
            case GoalReached() if self._state is not State.SEARCHING:
                self._state = State.STABLE
            case Ended() | Decided() | Edited() if self._state is not State.SEARCHING:
                self._state = State.STARTING if self._rehearses else State.RECOVERING
            case Finished(verdict=verdict):
                self._state = State(shown(verdict).state)
            case _:
                pass

    def export(self) -> None:
        """Export every figure."""
        cluster, self._pending = self._cluster, False
        if cluster is None:
            return
        cluster.export(
            "autotune_attempts",
            self._attempts,
            description="Attempts begun, trials and rehearsals included.",
        )
        cluster.export(
            "autotune_relaunches",
            max(0, self._launches - 1),
            description="Attempts at the training after the first.",
        )
        if self._step is not None:
            cluster.export("autotune_step", self._step, description="Last completed training step.")
        for phase, share in self._headroom.items():
            cluster.export(
                "autotune_headroom_ratio",
                share,
                description="Share of a phase's memory that was free at its last peak.",
                phase=phase,
            )
        for state in State:
            cluster.export(
                "autotune_state",
                state is self._state,
                description="1 for the state that the run is in, 0 for the others.",
                state=state.value,
            )
