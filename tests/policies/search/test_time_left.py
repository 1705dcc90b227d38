"""How long a search still takes at most."""

from __future__ import annotations

from msgspec.structs import replace

from autotune.policies.forecast.time_left import Course, Leg, TimeLeft
from autotune.policies.search.schedule import time_left
from autotune.policies.values.events import Purpose, Result, Tried
from autotune.policies.values.job import Goal, Job, Search
from autotune.policies.values.knobs import Knobs

JOB = Job(
    name="story",
    framework="builtin",
    goal=Goal(steps=10),
    search=Search(trials=10, duration_s=10_000.0, probe_steps=5, confirm=2),
)
KNOBS = Knobs(tokens_per_microbatch=8)
LEG = Leg(attempt=9, knobs=KNOBS, trial=3, begun_at=950.0)


def course(*legs: Leg, driven_s: float = 1000.0, **search: object) -> Course:
    job = replace(JOB, search=replace(JOB.search, **search))
    return Course(job=job, search=True, at=1000.0, driven_s=driven_s, legs=legs, begun=True)


def tried(*trials: int, seconds: float = 100.0, **fields: object) -> tuple[Tried, ...]:
    usual = Tried(trial=0, knobs=KNOBS, purpose=Purpose.PROBE, result=Result.FITS, seconds=seconds)
    return tuple(replace(usual, trial=trial, **fields) for trial in trials)


def test_before_any_trial_nothing_is_known() -> None:
    assert time_left(course(replace(LEG, trial=None)), (), now=1000.0) is None


def test_the_first_trials_only_have_the_limit() -> None:
    assert time_left(course(LEG), (), now=1000.0) == TimeLeft(least_s=0.0, most_s=9000.0)
    assert time_left(course(LEG), tried(0, 1), now=1100.0) == TimeLeft(least_s=0.0, most_s=8900.0)
    gated = tried(0, 1, 2, 3, seconds=0.0, result=Result.GATED)
    assert time_left(course(LEG), gated, now=1000.0) == TimeLeft(least_s=0.0, most_s=9000.0)


def test_the_trials_that_are_left_and_the_proof() -> None:
    found = time_left(course(LEG), tried(0, 1, 2), now=1000.0)
    proof_s = (2 + 3) * 2 * 100.0  # runs, as long as so many steps take, seconds of a probe
    assert found is not None and found.least_s == 0.0
    assert 7 * 100.0 - 50 + proof_s <= found.most_s <= 1.1 * 7 * 100.0 - 50 + proof_s
    both = time_left(course(LEG, replace(LEG, trial=4), parallel=2), tried(0, 1, 2), now=1000.0)
    assert both is not None and 300.0 + proof_s - 50 <= both.most_s <= 400.0 + proof_s
    unproven = time_left(course(LEG, confirm=0), tried(0, 1, 2), now=1000.0)
    assert unproven is not None and unproven.most_s <= 800.0


def test_the_proof_counts_down() -> None:
    probed = tried(0, 1, 2, 3)
    proving = course(replace(LEG, trial=2))
    first, second = (
        time_left(proving, (*probed, *tried(*done, purpose=Purpose.CONFIRM)), now=1000.0)
        for done in ((), (1,))
    )
    assert first == TimeLeft(least_s=0.0, most_s=950.0) and second == TimeLeft(least_s=0.0, most_s=750.0)


def test_the_time_budget_is_the_limit() -> None:
    assert time_left(course(LEG, duration_s=1200.0), tried(0, 1, 2), now=1010.0) == TimeLeft(
        least_s=0.0, most_s=190.0
    )
    assert time_left(course(LEG, duration_s=900.0), tried(0, 1, 2), now=1010.0) is None
