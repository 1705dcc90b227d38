"""Logs of slime, Relax and miles, read as a run reads them: markers, evidence, diagnosis, first remedy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from autotune.launchers.base import Framework
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.diagnosis import Diagnosis, Evidence
from autotune.policies.values.events import Launch
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.observation import Crashed, Marker, Outcome, PhaseEnded, PhaseStarted, StepDone
from tests.policies.stories import Story, accepted, like

LOGS = Path(__file__).parent / "logs"
CLUSTER = Cluster(
    address="10.0.0.7:6379",
    nodes=1,
    gpus_per_node=8,
    gpu_memory_bytes=80 << 30,
    host_memory_bytes=1000 << 30,
)


class Read(NamedTuple):
    """What a log shows."""

    evidence: Evidence
    markers: tuple[Marker, ...]


def read(framework: Framework, name: str, *, outcome: Outcome | None = None) -> Read:
    """Return the markers of a log and the evidence left at its end."""
    scanner, markers, phase = Scanner(), [], Phase.NONE
    lines = (LOGS / framework.name / f"{name}.log").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        marker = framework.marker(line)
        if marker is not None:
            markers.append(marker)
        if isinstance(marker, StepDone):
            scanner.progress(marker.step)
        elif isinstance(marker, PhaseStarted):
            phase = marker.phase
        elif isinstance(marker, PhaseEnded) and marker.phase is phase:
            phase = Phase.NONE
        scanner.line(line, number=number)
    result = scanner.evidence(outcome=outcome or Crashed(exit_code=1))
    if result.last_phase is Phase.NONE:
        result = msgspec.structs.replace(result, last_phase=phase)
    return Read(evidence=result, markers=tuple(markers))


class Cure(NamedTuple):
    """What follows from a failure."""

    diagnosis: Diagnosis
    remedy: str
    words: tuple[str, ...]


def cure(framework: Framework, job: Job, name: str) -> Cure:
    """Return the diagnosis of a log and the first remedy, in the framework's own flags."""
    output = read(framework, name)
    diagnosis = diagnose(output.evidence)
    profile = framework.profile(job, CLUSTER)
    story = Story(accepted(profile))
    story.launch()
    done = [marker.step for marker in output.markers if isinstance(marker, StepDone)]
    action = story.steps(*done).fails(like(diagnosis)).action()
    assert isinstance(action, Launch), action
    assert action.remedy is not None
    settings = framework.settings(job, action.knobs)
    return Cure(diagnosis=diagnosis, remedy=action.remedy.name, words=framework.words(settings))
