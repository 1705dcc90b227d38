"""Prometheus metrics of a run: attempts, relaunches, steps, free memory per phase, state."""

from __future__ import annotations

from autotune.launchers.runners.cluster.metrics import ClusterMetrics
from autotune.orchestrator.run_states import DISPLAYS, METRIC_STATES
from autotune.policies.values.events import Accepted, Event, Progressed, Started
from autotune.policies.values.run.view import RunView


class Metrics:
    """The metrics of one run, exported while its driver is connected to an existing cluster."""

    def __init__(self) -> None:
        self._cluster: ClusterMetrics | None = None
        self._run = RunView()
        self._headroom: dict[str, float] = {}  # phase -> share of its memory that was free at its peak
        self._step: int | None = None  # the last step of the training or of a trial
        self._pending = False  # changes are not exported yet

    def take(self, event: Event) -> None:
        """Update metrics from a journal row; step metrics are exported by `settle`."""
        self.note(event)
        if not isinstance(event, Progressed):
            self.export()

    def settle(self) -> None:
        """Export the changes by steps since the last call."""
        if self._pending:
            self.export()

    def note(self, event: Event) -> None:
        """Update metrics from a journal row without exporting them."""
        self._pending = True
        self._run.take(event)
        match event:
            case Accepted(cluster=cluster, run=run, job=job):
                tags = {"run": run, "job": job.name, "framework": job.framework}
                self._cluster = None if cluster.address == "local" else ClusterMetrics(common=tags)
            case Started():
                self._headroom = {}
            case Progressed(step=step, peaks=peaks):
                self._headroom |= {
                    phase: 1.0 - peak.used_bytes / peak.capacity_bytes
                    for phase, peak in peaks.items()
                    if peak.capacity_bytes
                }
                latest = self._run.latest
                if latest is None or latest.started.rehearsal is None:
                    self._step = step
            case _:
                pass

    def export(self) -> None:
        """Export all metrics."""
        cluster, self._pending = self._cluster, False
        if cluster is None:
            return
        cluster.export(
            "autotune_attempts",
            len(self._run.attempts),
            description="Attempts begun, trials and rehearsals included.",
        )
        cluster.export(
            "autotune_relaunches",
            max(0, len(self._run.training) - 1),
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
        current = DISPLAYS[self._run.state].metric
        for state in METRIC_STATES:
            cluster.export(
                "autotune_state",
                state == current,
                description="1 for the state that the run is in, 0 for the others.",
                state=state,
            )
