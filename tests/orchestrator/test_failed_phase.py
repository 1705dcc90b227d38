"""No knob is moved for a phase in whose memory, by its own job's estimate, it has no part."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.neighbours import choices
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.events import Accepted, Diagnosed, Ended, Launch, Started
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.knob_table import ENGINE_KNOBS
from autotune.policies.values.knobs import new_values
from autotune.policies.values.observation import Crashed

GIB = 1 << 30
JOBS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
# A message that says that 2 GiB are missing: more than an engine that sleeps keeps.
MISSING = Facts(requested_bytes=3 * GIB, free_bytes=GIB, capacity_bytes=80 * GIB, allocated_bytes=70 * GIB)


def accepted(path: Path) -> Accepted:
    job, _ = parse_elsewhere(path.read_text())
    cluster = replace(assumed(job), gpu_memory_bytes=80 * GIB, host_memory_bytes=1000 * GIB)
    return Accepted(
        run="7c1e", job=job, profile=FRAMEWORKS[job.framework].profile(job, cluster), cluster=cluster
    )


def idle_engine_knobs(start: Accepted, phase: Phase) -> set[str]:
    """Return the engine's knobs of which no legal value frees a percent of the device in a phase."""
    view, present = outlook(fold((start,))), start.profile.knobs
    if view is None:
        return set()
    offered = choices(start.profile, present, recovery=start.job.recovery, started=True)
    engine = {knob: values[1:] for knob, values in offered.items() if knob in ENGINE_KNOBS}
    changed = [replace(present, **{knob: value}) for knob, values in engine.items() for value in values]
    peaks = iter(view.estimates([present, *changed]).gpu[PHASES.index(phase)].tolist())
    own = next(peaks)
    return {
        knob for knob, values in engine.items() if max([own - next(peaks) for _ in values]) < 0.01 * 80 * GIB
    }


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_trainer_that_fails_is_not_helped_by_an_engine_that_sleeps_or_works_elsewhere(path: Path) -> None:
    start = accepted(path)
    present = start.profile.knobs
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
        idle = idle_engine_knobs(start, phase)
        failed = Diagnosis(cause=Cause.GPU_OOM, phase=phase, component=Component.TRAINER, facts=MISSING)
        without_model = [r.changes for r in candidates(start.profile, present, failed, started=True)]
        row = Diagnosed(
            cause=Cause.GPU_OOM, phase=phase, phase_shown=True, component=Component.TRAINER, facts=MISSING
        )
        action = decide((start, Started(knobs=present), Ended(outcome=Crashed(exit_code=1)), row))
        with_model = new_values(present, action.knobs) if isinstance(action, Launch) else {"none": None}
        useless = [changes for changes in (*without_model, with_model) if changes.keys() <= idle]
        assert not useless, phase
