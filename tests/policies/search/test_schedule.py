"""When a search proves, waits and ends."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from autotune.policies.search import schedule
from autotune.policies.values.events import GaveUp, Purpose, Result, Stable, Tried
from autotune.policies.values.job import Search
from autotune.policies.values.knobs import Knobs

START, FAST, FASTER = (Knobs(tokens_per_microbatch=n) for n in (1024, 2048, 4096))
SEARCH = Search(trials=20, confirm=2, probe_steps=5, duration_s=10_000.0)


def probe(knobs: Knobs, rate: float, **fields: object) -> Tried:
    actual = Tried(
        trial=0, knobs=knobs, purpose=Purpose.PROBE, result=Result.FITS, tokens_per_second=rate, seconds=100.0
    )
    return replace(actual, **fields)


def proof(knobs: Knobs, rate: float, **fields: object) -> Tried:
    return probe(knobs, rate, purpose=Purpose.CONFIRM, **fields)


def proofs(*results: Tried) -> list[Knobs]:
    """Return what is proven from here, where every proof shows the speed of its probe."""
    every, order = list(results), list[Knobs]()
    while (knobs := schedule.next_proof(every, SEARCH, start=START)) is not None:
        order.append(knobs)
        rate = next(r.rate for r in results if r.knobs == knobs)
        every.append(proof(knobs, rate))
    return order


def test_the_fastest_is_proven_first_then_in_turn_with_the_start() -> None:
    probes = (probe(START, 100.0), probe(FAST, 150.0), probe(FASTER, 200.0))
    assert proofs(*probes) == [FASTER, START, START, FASTER]


def test_a_proof_that_fails_leaves_its_place_to_the_next() -> None:
    probes = (probe(START, 100.0), probe(FAST, 150.0), probe(FASTER, 200.0))
    failed = proof(FASTER, 0.0, result=Result.FAILS, tokens_per_second=None)
    assert proofs(*probes, failed)[0] == FAST


def test_nothing_is_proven_where_the_start_is_fastest_or_none_is_wanted() -> None:
    assert proofs(probe(FAST, 50.0), proof(START, 100.0)) == []
    none = replace(SEARCH, confirm=0)
    assert schedule.next_proof([probe(FAST, 150.0)], none, start=START) is None


def test_the_time_of_the_proof_is_kept() -> None:
    every = [probe(START, 100.0), probe(FAST, 150.0)]

    def why(elapsed_s: float, *, goal_steps: int, search: Search = SEARCH) -> str:
        return schedule.why_end(every, search, goal_steps=goal_steps, elapsed_s=elapsed_s)

    assert why(8_700.0, goal_steps=20) == ""  # three runs of four times a probe
    assert why(8_900.0, goal_steps=20) == "the remaining time is reserved for the confirmation runs"
    assert why(8_900.0, goal_steps=20, search=replace(SEARCH, confirm=0)) == ""
    assert why(4_900.0, goal_steps=20_000) == ""  # never more than half of the night
    assert why(5_000.0, goal_steps=20_000)


def test_each_loss_of_a_configuration_waits_longer_until_there_were_too_many() -> None:
    def after(lost: int) -> schedule.Losses:
        every = [probe(FAST, 0.0, result=Result.LOST)] * lost + [probe(START, 0.0, result=Result.LOST)]
        return schedule.losses(every, FAST, retries=2)

    assert [after(n).wait_s for n in (1, 2, 3)] == [30.0, 60.0, 120.0]
    assert [after(n).too_many for n in (1, 2, 3)] == [False, False, True]


def test_a_tight_start_is_marginal_until_something_better_is_proven() -> None:
    tight = probe(START, 100.0, constraints={"backward": 0.01})
    verdict_of = partial(schedule.verdict_of, search=SEARCH, start=START, began_with=1)
    assert verdict_of([tight]) == Stable(marginal=True)
    assert verdict_of([tight, probe(FAST, 90.0)]) == Stable(marginal=True)
    assert verdict_of([tight, probe(FAST, 90.0), proof(FAST, 90.0)]) == Stable()
    assert verdict_of([probe(START, 100.0)]) == Stable()


def test_a_search_is_no_success_without_a_trial_that_was_measured() -> None:
    def reason_of(*results: Tried) -> str:
        verdict = schedule.verdict_of(results, SEARCH, start=START, began_with=1)
        assert isinstance(verdict, GaveUp)
        return verdict.reason

    start = replace(probe(START, 100.0), attempt=1)
    kept = "; `stable.yaml` is the configuration that it started from"
    assert reason_of(start) == (
        f"no trial of the search succeeded (none was started: raise search.duration or search.trials){kept}"
    )
    complete = partial(schedule.verdict_of, search=SEARCH, start=START, began_with=1, exhausted=True)
    assert complete([start]) == Stable()
    assert complete([start, probe(FAST, 0.0, result=Result.GATED)]) == Stable()
    assert isinstance(complete([start, probe(FAST, 0.0, result=Result.FAILS)]), GaveUp)
    others = [probe(FAST, 0.0, result=result) for result in (Result.FAILS, Result.LOST, Result.LOST)]
    assert reason_of(start, *others) == f"no trial of the search succeeded (1 out of memory, 2 lost){kept}"
    slow = probe(FAST, 0.0, result=Result.SLOW)
    assert schedule.verdict_of([start, slow], SEARCH, start=START, began_with=1) == Stable()


def test_no_trial_begins_that_would_have_to_be_twice_as_fast_as_the_start() -> None:
    every = [proof(START, 100.0, seconds=0.0)]

    def why(elapsed_s: float, *, trial_s: float) -> str:
        return schedule.why_end(every, SEARCH, goal_steps=20, elapsed_s=elapsed_s, trial_s=trial_s)

    assert why(9_000.0, trial_s=1_000.0) == "" and why(9_000.0, trial_s=0.0) == ""
    assert why(9_500.0, trial_s=1_000.0) == "the rest of `search.duration` is too short for a trial"


def test_the_stable_start_is_no_trial_of_the_budget() -> None:
    start = proof(START, 100.0, seconds=0.0)
    one = replace(SEARCH, trials=1)
    assert schedule.count([start]) == 0
    assert schedule.why_end([start], one, goal_steps=20, elapsed_s=0.0) == ""
    spent = [start, probe(FAST, 150.0, trial=1)]
    assert schedule.count(spent) == 1
    assert schedule.why_end(spent, one, goal_steps=20, elapsed_s=0.0) == "the only trial is used"


def test_a_trial_that_the_end_of_the_time_stopped_was_started() -> None:
    start = proof(START, 100.0, seconds=0.0, attempt=1)
    verdict = schedule.verdict_of([start], SEARCH, start=START, began_with=1, cut=1)
    assert isinstance(verdict, GaveUp) and "(1 stopped at the end of search.duration)" in verdict.reason
