"""What a search takes from an earlier run of the same job."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors
from autotune.orchestrator.search.earlier_run import (
    EarlierRun,
    allowed,
    earlier_run,
    refuse_too_short,
    same_hardware,
)
from autotune.policies.search.schedule import Pace
from autotune.policies.values.events import Stable
from autotune.policies.values.job import Cluster
from tests.orchestrator.scripted import World, settings
from tests.orchestrator.search.test_scheduler import JOB, Night, formula

CLUSTER = Cluster(address="a:1", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=1 << 30)
EARLIER = EarlierRun(id="7c1e0000", age_s=60.0, pace=Pace(start_s=20.0, step_s=5.0), cluster=CLUSTER)


def test_a_proof_of_the_last_hour_is_not_repeated(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula), JOB)
    assert night.drive() == Stable()
    other_budget = JOB.replace("trials: 12", "trials: 3, duration: 2h")
    earlier = earlier_run(tmp_path / "runs", other_budget, now=night.clock.now())
    assert earlier is not None and earlier.id == night.run.id and earlier.is_recent
    assert not replace(earlier, age_s=3_700.0).is_recent

    again = Night(tmp_path, World(formula), other_budget, proven_by=earlier.id)
    assert again.drive() == Stable()
    assert settings(again.world.commands[0])["steps"] == 3  # of a trial, not of the goal
    assert f"run {earlier.id} proved this job: 3 steps measure its speed" in again.messages


@pytest.mark.parametrize(
    ("old", "new"), [("samples: 8", "samples: 4"), ("goal: {steps: 4}", "goal: {steps: 9}")]
)
def test_another_job_or_goal_is_proven_anew(tmp_path: Path, old: str, new: str) -> None:
    night = Night(tmp_path, World(formula), JOB)
    night.drive()
    assert earlier_run(tmp_path / "runs", JOB.replace(old, new), now=night.clock.now()) is None
    assert earlier_run(tmp_path / "none", JOB, now=night.clock.now()) is None


def test_a_proof_on_other_hardware_does_not_count(tmp_path: Path) -> None:
    assert same_hardware(CLUSTER, replace(CLUSTER, address="b:2"))
    assert not same_hardware(CLUSTER, replace(CLUSTER, nodes=2))
    night = Night(tmp_path, World(formula), JOB, proven_by="00000000")  # a run that is gone
    night.drive()
    assert settings(night.world.commands[0])["steps"] == 4


def test_a_duration_that_leaves_no_trial_is_refused_at_its_place() -> None:
    text = JOB.replace("trials: 12", "trials: 12, duration: 40s")
    with pytest.raises(JobErrors) as raised:  # the start 30 s, a trial at least 15 s
        refuse_too_short(parse(text), EARLIER, text=text, file="job.yaml", option=None)
    (complaint,) = raised.value.complaints
    assert complaint.line == text.splitlines().index(complaint.text) + 1 and "duration" in complaint.text
    assert complaint.message == (
        "`search.duration`: 40s leaves no time for a trial: by run 7c1e0000, the start takes about 30s"
        " and a trial 30s"
    )
    assert complaint.hint == "allow 1m 12s or more for one trial, 7m 48s for 12"
    with pytest.raises(Failure, match=r"^--duration: 40s leaves") as refused:
        refuse_too_short(parse(text), EARLIER, text=text, file="job.yaml", option="40s")
    assert refused.value.code is ExitCode.USAGE


def test_a_duration_says_how_many_trials_it_allows() -> None:
    job = parse(JOB.replace("trials: 12", "trials: 12, duration: 2m"))
    refuse_too_short(job, EARLIER, text=JOB, file="job.yaml", option=None)
    assert allowed(job, EARLIER) == (
        "by run 7c1e0000, the start takes about 30s, a trial 30s; 2m 00s are enough for about 3 trials"
    )
    old = replace(EARLIER, age_s=7_200.0)
    assert "the start takes about 35s" in allowed(job, old)  # the proof is made again: 4 steps
