"""`explain` and `launch` answer a failure alike: the first exact cure is what `decide` takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.planner import first_attempt, plan
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.explain.advice import Cure, Known, prescribe
from autotune.policies.recovery.decide import decide
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.events import (
    Accepted,
    Diagnosed,
    Ended,
    Event,
    Finish,
    GaveUp,
    Launch,
    Policy,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Recovery
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Crashed
from autotune.policies.values.remedy import Remedy
from benchmarks.explain_accuracy import kinds
from tests.policies.jobs import accepted as known_model

GIB = 1 << 30
REPOSITORY = Path(__file__).parents[3]
JOBS = {path.stem: path for path in sorted((REPOSITORY / "configs").glob("*.yaml"))}
LOGS = sorted((REPOSITORY / "tests" / "policies" / "logs").glob("*/*.log"))
CORPUS = REPOSITORY / "benchmarks" / "logs"

sizes = st.integers(0, 80 * GIB)
diagnoses = st.builds(
    Diagnosis,
    cause=st.sampled_from([cause for cause in Cause if cause.is_memory]),
    phase=st.sampled_from(Phase),
    component=st.sampled_from(Component),
    step=st.none() | st.integers(1, 50),
    fragmentation=st.booleans(),
    facts=st.builds(
        Facts,
        requested_bytes=st.none() | sizes,
        free_bytes=st.none() | sizes,
        capacity_bytes=st.none() | st.just(80 * GIB),
        allocated_bytes=st.none() | sizes,
        reserved_unallocated_bytes=st.none() | sizes,
        outside_bytes=st.none() | sizes,
    ),
)


@cache
def job(name: str) -> Accepted:
    """Return a job of `configs/` as a launch by the ladder accepts it."""
    written = parse(JOBS[name].read_text())
    cluster = assumed(written)
    profile = FRAMEWORKS[written.framework].profile(written, cluster)
    plain = replace(written, recovery=Recovery())
    return Accepted(run="7c1e", job=plain, profile=profile, cluster=cluster, policy=Policy.LADDER)


@cache
def logged() -> tuple[Diagnosis, ...]:
    """Return the diagnoses of the labelled logs that are failures of memory."""
    return memory_failures(log.read_bytes() for log in LOGS)


@cache
def collected() -> tuple[Diagnosis, ...]:
    """Return those of every log of the benchmark of advice."""
    labelled = (case for result in kinds(CORPUS).values() for case in result)
    return memory_failures(case.text.encode() for case in labelled)


def memory_failures(logs: Iterable[bytes]) -> tuple[Diagnosis, ...]:
    result = (diagnose(scan([log])) for log in logs)
    return tuple(diagnosis for diagnosis in result if diagnosis.cause.is_memory)


def history(accepted: Accepted, diagnosis: Diagnosis, *, knobs: Knobs) -> tuple[Event, ...]:
    fields = {name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__}
    steps = () if diagnosis.step is None else (Progressed(attempt=1, step=diagnosis.step),)
    return (
        accepted,
        Started(attempt=1, knobs=knobs),
        *steps,
        Ended(attempt=1, outcome=Crashed(exit_code=1), step=diagnosis.step),
        Diagnosed(attempt=1, **fields),
    )


def taken(accepted: Accepted, diagnosis: Diagnosis, *, knobs: Knobs | None = None) -> Remedy | None:
    """Return the remedy that a launch takes after its first attempt, with `knobs`; None where it gives up."""
    action = decide(history(accepted, diagnosis, knobs=knobs or accepted.profile.knobs))
    if isinstance(action, Launch):
        return action.remedy
    assert isinstance(action, Finish) and isinstance(action.verdict, GaveUp)
    return None


def exact(result: tuple[Cure, ...]) -> Iterator[Cure]:
    return (cure for cure in result if cure.exact and cure.changes)


def alike(name: str, diagnosis: Diagnosis) -> None:
    accepted = job(name)
    remedy = taken(accepted, diagnosis)
    first = next(exact(prescribe(diagnosis, Known(profile=accepted.profile, complete=True))), None)
    if remedy is None or first is None:
        assert remedy is None and first is None
        return
    assert (first.name, first.changes, first.reason) == (remedy.name, remedy.changes, remedy.reason)


@given(st.sampled_from(sorted(JOBS)), diagnoses)
@settings(deadline=None)
def test_the_first_exact_cure_is_the_remedy_that_the_ladder_takes(name: str, diagnosis: Diagnosis) -> None:
    alike(name, diagnosis)


@pytest.mark.parametrize("name", JOBS)
def test_the_labelled_logs_are_answered_alike(name: str) -> None:
    assert len(logged()) > 20
    for diagnosis in logged():
        alike(name, diagnosis)


def test_every_collected_log_is_answered_alike() -> None:
    assert len(collected()) > 400
    for diagnosis, name in zip(collected(), cycle(JOBS), strict=False):
        alike(name, diagnosis)


@given(diagnoses)
@settings(max_examples=10, deadline=None)
def test_where_the_estimate_ranks_it_ranks_both(diagnosis: Diagnosis) -> None:
    accepted = known_model()
    remedy = taken(accepted, diagnosis)
    known = Known(profile=accepted.profile, complete=True, job=accepted.job, cluster=accepted.cluster)
    first = next(exact(prescribe(diagnosis, known)), None)
    if remedy is None or first is None:
        assert remedy is None and first is None
        return
    assert (first.name, first.changes, first.reason) == (remedy.name, remedy.changes, remedy.reason)


def test_the_estimate_speaks_for_a_job_whose_model_is_known() -> None:
    facts = Facts(requested_bytes=2 * GIB, free_bytes=GIB, capacity_bytes=80 * GIB)
    diagnosis = Diagnosis(
        cause=Cause.GPU_OOM, phase=Phase.BACKWARD, component=Component.TRAINER, step=1, facts=facts
    )
    remedy = taken(known_model(), diagnosis)
    assert remedy is not None and remedy.predicted


@pytest.mark.parametrize(
    "name",
    [
        "verl-grpo-qwen2.5-7b",
        "slime-colocated",
        "builtin-cpu",
        pytest.param("skyrl-gsm8k", marks=pytest.mark.e2e_long),
    ],
)
def test_plan_explain_and_launch_answer_a_failure_of_the_first_attempt_alike(name: str) -> None:
    written = parse(JOBS[name].read_text())
    framework, cluster = FRAMEWORKS[written.framework], assumed(written)
    rungs = plan(written, framework, cluster, render=lambda *_: ("train",)).ladder
    accepted, first = first_attempt(written, framework, cluster)
    known = Known(profile=accepted.profile, complete=True, job=written, cluster=cluster)
    for phase in dict.fromkeys(rung.phase for rung in rungs):
        engine = phase in ("rollout_init", "rollout", "weight_sync")
        part = Component.ROLLOUT if engine else Component.TRAINER
        diagnosis = Diagnosis(cause=Cause.GPU_OOM, phase=Phase(phase), component=part)
        planned = [
            (each.remedy, {k: after for k, (_, after) in each.changes.items()}, each.reason, each.effect)
            for each in rungs
            if each.phase == phase
        ]
        remedy = taken(accepted, diagnosis, knobs=first.knobs)
        assert remedy is not None
        changes = {k: v for k, (_, v) in changed(first.knobs, remedy.apply(first.knobs)).items()}
        assert planned[0] == (remedy.name, changes, remedy.reason, remedy.effect)
        if first.knobs == accepted.profile.knobs:  # else the log would be of another job
            cures = list(exact(prescribe(diagnosis, known)))[: len(planned)]
            assert planned == [(c.name, c.changes, c.reason, c.effect) for c in cures]


@given(st.sampled_from(sorted(JOBS)), diagnoses)
@settings(deadline=None)
def test_what_is_exact_is_never_what_recovery_may_not_take(name: str, diagnosis: Diagnosis) -> None:
    """Every exact cure is taken once those before it are denied, unless it contains one of them."""
    accepted = job(name)
    cures = list(exact(prescribe(diagnosis, Known(profile=accepted.profile, complete=True))))
    for place, cure in enumerate(cures[1:], 1):
        if any(before.changes.items() <= cure.changes.items() for before in cures[:place]):
            continue
        denied = tuple(before.name for before in cures[:place])
        strict = replace(accepted, job=replace(accepted.job, recovery=Recovery(deny=denied)))
        remedy = taken(strict, diagnosis)
        assert remedy is not None and (remedy.name, remedy.changes) == (cure.name, cure.changes)
