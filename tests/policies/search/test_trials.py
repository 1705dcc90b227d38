"""What the trials of a search say."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from autotune.policies.search import schedule, trials
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Diagnosed, Ended, Progressed, Purpose, Result, Started, Tried
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Search
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Peak, Speed, Unit
from autotune.policies.values.run.view import RunView
from tests.policies.jobs import accepted, profile


def result(tokens: int, rate: float | None, *, of: Result = Result.FITS, **more) -> Tried:
    values = {"trial": tokens, "purpose": Purpose.PROBE, "seconds": 60.0} | more
    return Tried(knobs=Knobs(tokens_per_microbatch=tokens), result=of, tokens_per_second=rate, **values)


START = Knobs(tokens_per_microbatch=1)
SEARCH = Search(trials=20, confirm=2, min_gain=0.01)
NO_PROOF = Search(trials=20, confirm=0)


def proven(tokens: int, rate: float | None, *, of: Result = Result.FITS) -> Tried:
    return result(tokens, rate, of=of, purpose=Purpose.CONFIRM)


def counted(number: int, rate: float) -> Tried:
    """A result whose log told no tokens."""
    return replace(result(number, None, headroom=1 / (number + 1)), steps_per_second=rate)


def steps(*rates: float) -> list[Progressed]:
    return [Progressed(step=n, tokens_per_second=rate) for n, rate in enumerate(rates, start=1)]


def test_speed_is_the_median_without_the_warm_up() -> None:
    actual = trials.speed(steps(10, 100, 102, 98, 100))
    assert actual is not None and (actual.per_second, actual.unit) == (100, Unit.TOKENS)
    assert 0 < actual.noise < 0.02
    assert trials.speed([Progressed(step=1)]) is None


def test_steps_are_counted_where_no_tokens_are_known() -> None:
    actual = trials.speed([Progressed(step=1, seconds=4.0), Progressed(step=2, seconds=80.0)])
    assert actual == Speed(per_second=0.0125, unit=Unit.STEPS)
    bare = result(1, None)
    timed = trials.timed(bare, actual)
    assert (timed.tokens_per_second, timed.steps_per_second, timed.unit) == (None, 0.0125, Unit.STEPS)
    assert trials.timed(timed, None) == bare
    assert not trials.keeps_limits(bare) and trials.keeps_limits(timed)


def test_what_was_measured_in_another_unit_is_not_compared() -> None:
    every = [counted(1, 0.05), counted(2, 0.06), result(3, 4000.0, headroom=0.9)]
    best = trials.fastest(every)
    assert best is not None and (best.trial, best.rate, best.tokens_per_second) == (2, 0.06, None)
    assert trials.gain(every, NO_PROOF, start=every[0].knobs) == trials.Gain(
        fast=0.06, slow=0.05, runs=1, apart=1.0
    )
    assert [r.trial for r in trials.front(every)] == [2, 1]
    assert not schedule.too_slow(steps(50, 50, 50, 50), best=best)
    assert (trials.fastest(every[::-1]) or best).trial == 3


def test_a_search_in_steps_ends_without_gain_like_one_in_tokens() -> None:
    search = Search(trials=40, duration_s=100.0)
    assert "no gain" in schedule.why_end(
        [counted(n, 0.05) for n in range(20)], search, goal_steps=4, elapsed_s=0
    )
    assert not schedule.why_end(
        [counted(n, 0.05 * n) for n in range(1, 21)], search, goal_steps=4, elapsed_s=0
    )


def test_rows_of_earlier_versions_are_read() -> None:
    row = (
        b'{"type": "tried", "trial": 3, "knobs": {}, "purpose": "probe", "result": "fits",'
        b' "tokens_per_second": 0.05, "noise": 0.01}'
    )
    read = msgspec.json.decode(row, type=Tried)
    assert (read.rate, read.unit, read.steps_per_second) == (0.05, Unit.TOKENS, None)


def test_only_exact_readings_say_that_headroom_is_missing() -> None:
    full = Peak(used_bytes=99, capacity_bytes=100)
    assert trials.excess({"backward": full}, headroom=0.05) == {"backward": pytest.approx(0.04)}
    filled = replace(full, upper_bound=True)
    assert trials.excess({"backward": filled}, headroom=0.05) == {}
    assert trials.free_share({"a": filled, "b": Peak(used_bytes=50, capacity_bytes=100)}) == 0.5


def test_a_failure_misses_by_what_its_message_says() -> None:
    facts = Facts(requested_bytes=30, free_bytes=10, capacity_bytes=100)
    failed = Diagnosed(cause=Cause.GPU_OOM, phase=Phase.BACKWARD, component=Component.TRAINER, facts=facts)
    assert trials.excess_of_failure(failed)["backward"] == pytest.approx(0.2)
    silent = replace(failed, facts=Facts())
    assert trials.excess_of_failure(silent)["backward"] > 0


def test_the_fastest_keeps_every_limit_and_never_failed() -> None:
    tight = result(4, 400.0, constraints={"forward": 0.01})
    every = [result(1, 100.0), result(2, 200.0), result(3, 300.0), tight]
    assert (trials.fastest(every) or every[0]).trial == 3
    every.append(proven(3, None, of=Result.FAILS))
    assert (trials.fastest(every) or every[0]).trial == 2
    assert trials.fastest(every, confirmed=True) is None


def test_several_measurements_count_with_their_median() -> None:
    every = [proven(1, 100.0), proven(2, 90.0), proven(1, 80.0), proven(1, 60.0)]
    best = trials.fastest(every, confirmed=True)
    assert best is not None and best.trial == 2


def test_the_winner_is_proven_or_the_start() -> None:
    tight = replace(proven(1, 100.0), constraints={"rollout": 0.01})
    probes = [result(2, 200.0), result(3, 300.0)]
    failed = proven(3, None, of=Result.FAILS)
    assert trials.winner([tight, *probes, failed], SEARCH, start=START) is None
    every = [proven(1, 100.0), *probes, failed]
    assert (trials.winner(every, SEARCH, start=START) or failed).trial == 1
    assert (trials.winner(every, NO_PROOF, start=START) or failed).trial == 2
    every.append(proven(2, 190.0))
    assert (trials.winner(every, SEARCH, start=START) or every[0]).trial == 2
    assert (trials.winner([tight, *probes, proven(2, 90.0)], SEARCH, start=START) or tight).trial == 2
    assert trials.gain(every, SEARCH, start=START) == trials.Gain(fast=190.0, slow=100.0, runs=1, apart=1.0)


@pytest.mark.parametrize(
    ("own", "other", "wins"),
    [
        ((1100.0, 900.0), (1101.0, 901.0), False),  # a tenth of a percent, and runs 20 % apart
        ((1000.0, 1001.0), (1008.0, 1009.0), False),  # less than min_gain
        ((1000.0, 1001.0), (1020.0, 1021.0), True),
        ((1000.0, 1100.0), (1090.0, 1300.0), False),  # one of its runs is slower
        ((1000.0,), (1020.0,), True),
    ],
)
def test_the_start_stays_unless_another_is_surely_faster(own, other, wins) -> None:
    every = [*(proven(1, rate) for rate in own), *(proven(2, rate) for rate in other)]
    best = trials.winner(every, SEARCH, start=START)
    assert best is not None and (best.trial == 2) is wins


def test_a_gain_says_how_far_runs_of_one_configuration_are_apart() -> None:
    every = [proven(1, 100.0), result(2, 200.0), proven(2, 190.0), proven(1, 50.0), proven(2, 200.0)]
    assert trials.gain(every, SEARCH, start=START) == trials.Gain(fast=195.0, slow=75.0, runs=2, apart=2.0)


def test_a_search_ends_with_its_budget_or_without_gain() -> None:
    search = Search(trials=20, duration_s=100.0)
    many = [result(n, 100.0) for n in range(1, 21)]
    assert "all 20 trials" in schedule.why_end(many, search, goal_steps=4, elapsed_s=0)
    assert "duration" in schedule.why_end(many[:2], search, goal_steps=4, elapsed_s=100)
    assert "no gain" in schedule.why_end(many[:12], search, goal_steps=4, elapsed_s=0)
    rising = [result(n, 100.0 * n) for n in range(1, 13)]
    assert schedule.why_end(rising, search, goal_steps=4, elapsed_s=0) == ""
    failed = [result(n, None, of=Result.FAILS) for n in range(1, 10)]
    assert schedule.why_end(failed[:8], search, goal_steps=4, elapsed_s=0) == ""
    assert "none of 9 trials" in schedule.why_end(failed, search, goal_steps=4, elapsed_s=0)
    gated = [result(n, None, of=Result.GATED) for n in range(30, 60)]
    assert schedule.why_end([*rising, *gated], search, goal_steps=4, elapsed_s=0) == ""


def test_what_asks_for_no_less_than_a_failure_is_known_to_fail() -> None:
    failed = Diagnosed(attempt=3, cause=Cause.GPU_OOM, phase=Phase.BACKWARD, component=Component.TRAINER)
    known = [(Knobs(tokens_per_microbatch=1000), failed)]
    assert "attempt #3" in trials.known_to_fail(profile(), known, Knobs(tokens_per_microbatch=2000))
    assert trials.known_to_fail(profile(), known, Knobs(tokens_per_microbatch=500)) == ""


def test_what_a_job_does_not_run_with_is_narrowed_by_what_ran() -> None:
    def of(kind: Result, reason: str = "", **knobs) -> Tried:
        return replace(result(len(knobs), None, of=kind, reason=reason), knobs=replace(START, **knobs))

    def against(*results: Tried, **knobs) -> str:
        actual = trials.suspects(results, start=START)
        return trials.suspected(actual, replace(START, **knobs))

    refused = of(Result.REFUSED, recompute="full", concurrency=8)
    assert "did not run with" in against(refused, recompute="full", concurrency=8, tensor_parallel=2)
    assert against(refused, recompute="full") == against(refused, concurrency=8) == ""
    ran = of(Result.FITS, concurrency=8)
    assert against(refused, ran, recompute="full").endswith("did not run with recompute = full")
    assert against(refused, ran, concurrency=8) == ""
    assert against(refused, ran, of(Result.SLOW, recompute="full"), recompute="full", concurrency=8) == ""
    failed = of(Result.FAILS, recompute="full")
    assert "did not run" in against(refused, failed, recompute="full", concurrency=8)
    again = of(Result.REFUSED, "pid 17: no", recompute="full", concurrency=4)
    same, other = replace(refused, reason="pid 12: no"), replace(refused, reason="an other one")
    assert against(again, same, recompute="full").endswith("did not run with recompute = full")
    assert against(again, other, recompute="full") == ""
    assert "did not run" in against(again, other, recompute="full", concurrency=8)


def test_clearly_slow_trials_are_told_from_noisy_ones() -> None:
    best = result(1, 100.0)
    assert schedule.too_slow(steps(50, 50, 50, 50), best=best)
    assert not schedule.too_slow(steps(50, 50), best=best)
    assert not schedule.too_slow(steps(50, 30, 110, 60), best=best)
    assert not schedule.too_slow(steps(50, 50, 50, 50), best=None)


def test_the_front_has_no_result_that_another_beats_in_both() -> None:
    every = [
        result(1, 100.0, headroom=0.4),
        result(2, 200.0, headroom=0.2),
        result(3, 150.0, headroom=0.1),
        result(4, 90.0, headroom=0.3),
        result(2, 199.0, headroom=0.25),
    ]
    assert [r.trial for r in trials.front(every)] == [2, 1]


def test_time_is_counted_by_what_it_was_spent_on() -> None:
    history = (
        accepted(),
        Started(attempt=1, knobs=Knobs()),
        Ended(attempt=1, outcome=Completed(), seconds=100.0),
        Started(attempt=2, knobs=Knobs(), trial=1),
        Ended(attempt=2, outcome=Completed(), seconds=60.0),
        result(1, 100.0),
        result(2, None, of=Result.FAILS),
    )
    assert trials.spent(RunView(history)) == {"becoming stable": 100.0, "probe": 60.0, "fails": 60.0}


def test_what_exceeded_a_limit_in_its_proof_does_not_count() -> None:
    every = [result(1, 100.0), result(2, 200.0), result(3, 300.0)]
    every.append(replace(proven(3, 290.0), constraints={"backward": 0.01}))
    assert (trials.fastest(every) or every[0]).trial == 2
    assert trials.winner(every, SEARCH, start=START) is None


def test_the_fastest_besides_some_is_compared_in_the_unit_of_all() -> None:
    every = [counted(1, 0.05), result(2, 4000.0), counted(3, 0.04)]
    best = trials.fastest(every, besides={every[0].knobs})
    assert best is not None and best.trial == 3


def test_runs_for_proof_and_losses_are_no_trials_of_the_budget() -> None:
    every = [result(1, 100.0), proven(1, 100.0), result(2, None, of=Result.FAILS)]
    every += [result(3, None, of=Result.LOST), result(4, None, of=Result.GATED)]
    assert schedule.count(every) == 2
    assert not schedule.why_end(every, Search(trials=4), goal_steps=4, elapsed_s=0, running=1)
    assert "all 4 trials" in schedule.why_end(every, Search(trials=4), goal_steps=4, elapsed_s=0, running=2)


def test_what_runs_is_no_trial_without_gain() -> None:
    every = [result(1, 100.0), result(2, 90.0)]
    assert schedule.why_end(every, Search(trials=40), goal_steps=4, elapsed_s=0, running=30) == ""


def test_time_of_trials_without_a_result_is_counted() -> None:
    history = (
        accepted(),
        Started(attempt=1, knobs=Knobs(), trial=1),
        Ended(attempt=1, outcome=Completed(), seconds=60.03),
        result(1, 100.0),
        Started(attempt=2, knobs=Knobs(), trial=2),
        Ended(attempt=2, outcome=Completed(), seconds=40.0),
    )
    assert trials.spent(RunView(history[:4])) == {"probe": 60.0}
    assert trials.spent(RunView(history)) == {"probe": 60.0, "stopped": pytest.approx(40.03)}
