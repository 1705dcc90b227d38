"""How long a search still takes at most."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from autotune.policies.forecast.time_left import TimeLeft
from autotune.policies.search.schedule import time_left
from autotune.policies.values.events import Decided, Purpose, Result, Started, Tried
from autotune.policies.values.job import Goal, Job, Search
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.view import RunView
from tests.policies.stories import accepted

JOB = Job(
    name="story",
    framework="builtin",
    goal=Goal(steps=10),
    search=Search(trials=10, duration_s=10_000.0, probe_steps=5, confirm=2),
)
KNOBS = Knobs(tokens_per_microbatch=8)
EPOCH = 1_800_000_000.0


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(EPOCH + seconds, UTC).isoformat()


def left(
    results: Sequence[Tried] = (),
    *,
    now: float = 1000.0,
    running: Sequence[int | None] = (3,),
    **search: object,
) -> TimeLeft | None:
    """Return the time left of a search 1000 s after its start, whose running trials began at 950 s."""
    job = replace(JOB, search=replace(JOB.search, **search))
    view = RunView([replace(accepted(), job=job, mode="search", at=stamp(0.0))])
    for attempt, trial in enumerate(running, 9):
        view.take(Started(attempt=attempt, knobs=KNOBS, trial=trial, at=stamp(950.0)))
    for result in results:
        view.take(replace(result, at=stamp(1000.0)))
    view.take(Decided(at=stamp(1000.0)))
    return time_left(view, now=EPOCH + now)


def tried(*trials: int, seconds: float = 100.0, **fields: object) -> tuple[Tried, ...]:
    usual = Tried(trial=0, knobs=KNOBS, purpose=Purpose.PROBE, result=Result.FITS, seconds=seconds)
    return tuple(replace(usual, trial=trial, **fields) for trial in trials)


def test_before_any_trial_nothing_is_known() -> None:
    assert left(running=(None,)) is None


def test_the_first_trials_only_have_the_limit() -> None:
    assert left() == TimeLeft(least_s=0.0, most_s=9000.0)
    assert left(tried(0, 1), now=1100.0) == TimeLeft(least_s=0.0, most_s=8900.0)
    gated = tried(0, 1, 2, 3, seconds=0.0, result=Result.GATED)
    assert left(gated) == TimeLeft(least_s=0.0, most_s=9000.0)


def test_the_trials_that_are_left_and_the_proof() -> None:
    actual = left(tried(0, 1, 2))
    proof_s = (2 + 3) * 2 * 100.0  # runs, as long as so many steps take, seconds of a probe
    assert actual is not None and actual.least_s == 0.0
    assert 7 * 100.0 - 50 + proof_s <= actual.most_s <= 1.1 * 7 * 100.0 - 50 + proof_s
    both = left(tried(0, 1, 2), running=(3, 4), parallel=2)
    assert both is not None and 300.0 + proof_s - 50 <= both.most_s <= 400.0 + proof_s
    unproven = left(tried(0, 1, 2), confirm=0)
    assert unproven is not None and unproven.most_s <= 800.0


def test_the_proof_counts_down() -> None:
    probed = tried(0, 1, 2, 3)
    first, second = (
        left((*probed, *tried(*done, purpose=Purpose.CONFIRM)), running=(2,)) for done in ((), (1,))
    )
    assert first == TimeLeft(least_s=0.0, most_s=950.0) and second == TimeLeft(least_s=0.0, most_s=750.0)


def test_the_time_budget_is_the_limit() -> None:
    assert left(tried(0, 1, 2), now=1010.0, duration_s=1200.0) == TimeLeft(least_s=0.0, most_s=190.0)
    assert left(tried(0, 1, 2), now=1010.0, duration_s=900.0) is None
