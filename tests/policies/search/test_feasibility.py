"""What is foreseen of a search's candidates."""

from __future__ import annotations

from msgspec.structs import replace

from autotune.policies.search import feasibility
from autotune.policies.search.space import neighbours, space
from autotune.policies.values.events import Ended, Event, Policy, Progressed, Purpose, Result, Started, Tried
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Goal
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed
from tests.policies.jobs import GIB, KNOBS, accepted, fails, peaks

ACCEPTED = accepted()
JOB = ACCEPTED.job
DIMENSIONS = space(JOB, ACCEPTED.profile, KNOBS)
HELD = peaks(backward=50 * GIB, forward=48 * GIB, log_prob=40 * GIB, rollout=60 * GIB)
TOO_MUCH = replace(KNOBS, tokens_per_microbatch=131_072, logprob_tokens=131_072, recompute="off")


def ran(number: int, knobs: Knobs, *, longest: bool = True, used=HELD) -> list[Event]:
    steps = [Progressed(attempt=number, step=n, peaks=used, seconds=30.0) for n in (1, 2, 3, 4)]
    begun = Started(attempt=number, knobs=knobs, trial=number, longest=longest)
    return [begun, *steps, Ended(attempt=number, outcome=Completed(), step=4)]


def measured(number: int, knobs: Knobs, rate: float) -> Tried:
    return Tried(trial=number, knobs=knobs, purpose=Purpose.PROBE, result=Result.FITS, tokens_per_second=rate)


def moves(knobs: Knobs) -> tuple[Knobs, ...]:
    return neighbours(ACCEPTED.profile, KNOBS, knobs, DIMENSIONS)


def sight(*events: Event, results: tuple[Tried, ...] = (), first=ACCEPTED) -> feasibility.Foresight:
    actual = feasibility.foreseen(first, events, results, DIMENSIONS, neighbours=moves)
    assert actual is not None
    return actual


def test_what_is_predicted_to_overflow_may_not_run() -> None:
    actual = sight(*ran(1, KNOBS))
    assert actual.excess(KNOBS) == {}
    excess = actual.excess(TOO_MUCH)
    assert excess and max(excess.values()) > 0


def test_headroom_counts_as_well() -> None:
    generous = replace(ACCEPTED, job=replace(JOB, goal=Goal(headroom=0.4)))
    assert sight(*ran(1, KNOBS), first=generous).excess(KNOBS)


def test_trials_that_run_at_once_share_the_memory_of_a_node() -> None:
    halves = replace(
        ACCEPTED,
        cluster=replace(ACCEPTED.cluster, gpus_per_node=8, host_memory_bytes=260 * GIB),
        job=replace(JOB, search=replace(JOB.search, parallel=2)),
    )
    assert sight(*ran(1, KNOBS), first=halves).excess(KNOBS)["host"] > 0
    alone = replace(halves, job=JOB)
    assert sight(*ran(1, KNOBS), first=alone).excess(KNOBS) == {}


def test_without_a_model_or_by_the_ladder_nothing_is_foreseen() -> None:
    assert feasibility.foreseen(accepted(model=None), (), (), DIMENSIONS, neighbours=moves) is None
    by_ladder = replace(ACCEPTED, policy=Policy.LADDER)
    assert feasibility.foreseen(by_ladder, (), (), DIMENSIONS, neighbours=moves) is None


def test_what_needs_no_less_than_a_failed_attempt_may_not_run() -> None:
    failed = [
        replace(event, attempt=2)
        for event in (
            Started(knobs=replace(KNOBS, tokens_per_microbatch=24_576), trial=2, longest=True),
            *fails(Phase.BACKWARD, requested=1 * GIB, free=GIB // 2),
        )
    ]
    actual = sight(*ran(1, KNOBS), *failed)
    bigger = replace(KNOBS, tokens_per_microbatch=24_576, dataloader_workers=None, concurrency=64)
    assert actual.excess(bigger)
    assert not actual.excess(replace(KNOBS, tokens_per_microbatch=5120, logprob_tokens=5120))


def test_attempts_on_the_jobs_own_lengths_say_nothing_of_the_worst_case() -> None:
    little = peaks(backward=10 * GIB, forward=10 * GIB, log_prob=10 * GIB)
    forced = ran(1, KNOBS)
    own = ran(2, KNOBS, longest=False, used=little)
    with_both, alone = sight(*forced, *own), sight(*forced)
    assert with_both.expectations(TOO_MUCH) == alone.expectations(TOO_MUCH)


def test_proposals_may_run_and_promise_a_gain() -> None:
    timid = replace(KNOBS, concurrency=16, memory_fraction=0.3)
    actual = sight(*ran(1, timid), results=(measured(1, timid, 100.0),))
    proposed = actual.proposals((timid,), gain=0.01)
    assert proposed and timid not in proposed
    assert len(set(proposed)) == len(proposed)
    assert all(actual.excess(knobs) == {} for knobs in proposed[:20])


def test_nothing_is_proposed_where_nothing_is_hoped_to_be_faster() -> None:
    actual = sight(*ran(1, KNOBS), results=(measured(1, KNOBS, 100.0),))
    assert actual.proposals((KNOBS,), gain=50.0) == ()


def test_what_is_surely_slower_is_told() -> None:
    slow = replace(KNOBS, concurrency=1)
    actual = sight(*ran(1, KNOBS), results=(measured(1, KNOBS, 100.0), measured(2, slow, 5.0)))
    assert actual.much_slower(KNOBS, slow) > 1
    assert actual.much_slower(KNOBS, KNOBS) == 0
    assert actual.much_slower(slow, KNOBS) == 0


def test_measured_speeds_move_what_is_hoped_for() -> None:
    """Two configurations that only differ in a knob that turned out to be slow."""
    eager = replace(KNOBS, recompute="off", tokens_per_microbatch=8192)
    actual = sight(*ran(1, KNOBS), results=(measured(1, KNOBS, 100.0), measured(2, eager, 40.0)))
    assert actual.much_slower(KNOBS, eager) > 0.5


def test_speeds_in_another_unit_say_nothing_of_the_pace() -> None:
    in_steps = replace(measured(1, KNOBS, 0.0), tokens_per_second=None, steps_per_second=0.05)
    alone = sight(*ran(1, KNOBS), results=(in_steps,)).pace
    mixed = sight(*ran(1, KNOBS), results=(in_steps, measured(2, TOO_MUCH, 5000.0))).pace
    assert alone is not None and mixed is not None
    assert len(mixed.surprise) == len(alone.surprise) == 1
