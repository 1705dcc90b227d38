"""A failure that is expected: said by default, avoided at the checkpoint before where the job wants it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.give_up import gave_up
from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.permissions import relapse_of
from autotune.policies.values.events import (
    Await,
    Ended,
    Event,
    Finish,
    Foreseen,
    Launch,
    Policy,
    Progressed,
    Started,
    Stop,
    StopRequested,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Run, fold
from autotune.policies.values.job import Forecasting, Goal, Preflight, Recovery, Then
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Crashed
from tests.policies.jobs import GIB, KNOBS, SUPPORTED, accepted, diagnosed, peaks, profile

LIMIT = int(78.4 * GIB)


def foreseen(**facts: object) -> Foreseen:
    values: dict[str, object] = {
        "cause": Cause.GPU_OOM, "phase": Phase.BACKWARD, "seen_at": 48, "step": 96, "earliest": 91,
        "latest": 103, "of": 180, "chance": 0.97, "since": 3, "used_bytes": 62 * GIB, "limit_bytes": LIMIT,
        "per_step_bytes": GIB // 3, "at_end_bytes": 86 * GIB,
    }  # fmt: skip
    return Foreseen(**(values | facts))  # type: ignore[arg-type]


def running(
    *rest: Event,
    to: int = 90,
    forecast: Forecasting = Forecasting.ACT,
    policy: Policy = Policy.ESTIMATE,
    goal: Goal | None = None,
    message: Foreseen | None = None,
    knobs: Knobs = KNOBS,
    **limits: Any,
) -> tuple[Event, ...]:
    """Return a run that grows, with a checkpoint every 10 steps, and a forecast after step 48."""
    recovery = Recovery(preflight=Preflight.OFF, forecast=forecast, **limits)
    begin = replace(accepted(profile(knobs), recovery=recovery, goal=goal), policy=policy)
    return (begin, *grown(1, 1, to, message=message, knobs=knobs), *rest)


def grown(
    number: int,
    begin: int,
    to: int,
    *,
    message: Foreseen | None = None,
    knobs: Knobs = KNOBS,
    of: int = 180,
) -> list[Event]:
    """Return an attempt that grows from one step to another, with what is said at its 48th."""
    rows: list[Event] = [Started(attempt=number, knobs=knobs, resume=number > 1)]
    for step in range(begin, to + 1):
        used = peaks(backward=int((46 + (step - begin + 1) / 3) * GIB), log_prob=30 * GIB)
        saved = step // 10 * 10 or None
        rows.append(Progressed(attempt=number, step=step, of=of, seconds=90.0, peaks=used, saved=saved))
        if step == begin + 47:
            rows.append(
                replace(message, attempt=number)
                if message is not None
                else foreseen(attempt=number, seen_at=step, step=begin + 95, earliest=begin + 90)
            )
    return rows


def stopped(number: int, **end: Any) -> tuple[Event, ...]:
    outcome = Cancelled(by="forecast")
    return (
        StopRequested(attempt=number, by="forecast"),
        Ended(attempt=number, outcome=outcome, **end),
    )


def failed(number: int) -> tuple[Event, ...]:
    return (
        Ended(attempt=number, outcome=Crashed(exit_code=1)),
        replace(diagnosed(Phase.BACKWARD), attempt=number),
    )


@pytest.mark.parametrize("policy", list(Policy))
def test_the_change_is_made_at_the_last_checkpoint_before(policy: Policy) -> None:
    assert [decide(running(to=step, policy=policy)) for step in (49, 50, 70, 79)] == [Await()] * 4
    for step in range(80, 90):
        assert decide(running(to=step, policy=policy)) == Await()  # the one of step 90 comes before 91
    stop = decide(running(to=90, policy=policy))
    assert isinstance(stop, Stop) and stop.by == "forecast" and "step 96" in stop.reason


@pytest.mark.parametrize("policy", list(Policy))
def test_what_follows_is_the_remedy_for_that_phase_and_no_repeat(policy: Policy) -> None:
    stopped = (StopRequested(attempt=1, by="forecast"), Ended(attempt=1, outcome=Cancelled(by="forecast")))
    history = running(*stopped, policy=policy)
    answer = decide(history)
    assert isinstance(answer, Launch) and answer.remedy is not None
    assert answer.knobs != KNOBS
    last = fold(history).attempts[-1]
    assert last.diagnosis is not None and last.diagnosis.phase is Phase.BACKWARD


def test_tell_and_off_never_stop() -> None:
    for mode in (Forecasting.TELL, Forecasting.OFF):
        assert decide(running(forecast=mode)) == Await()


def test_the_checkpoint_must_be_fresh() -> None:
    assert isinstance(decide(running(to=91)), Stop)
    for step in (92, 94):
        assert decide(running(to=step)) == Await()  # steps would be lost for nothing: the next is as near


def test_what_is_no_longer_expected_stops_nothing() -> None:
    assert decide(running(foreseen(attempt=1, seen_at=89, holds=False))) == Await()


def test_a_cache_stops_nothing() -> None:
    assert decide(running(foreseen(attempt=1, seen_at=60, upper_bound=True))) == Await()


def test_a_run_that_could_not_go_on_is_not_stopped() -> None:
    assert decide(running(relaunches=0)) == Await()


@pytest.mark.parametrize("policy", list(Policy))
def test_the_last_relaunch_may_be_for_what_is_foreseen(policy: Policy) -> None:
    assert isinstance(decide(running(relaunches=1, policy=policy)), Stop)


@pytest.mark.parametrize("limits", [{"relaunches": 0}, {"duration_s": -1.0}])
def test_no_remedy_is_looked_for_where_no_relaunch_is_left(
    limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Run] = []
    monkeypatch.setattr("autotune.policies.recovery.decide.next_remedy", looked.append)
    monkeypatch.setattr("autotune.policies.recovery.decide.gave_up", lambda run, _: looked.append(run))
    assert decide(running(**limits)) == Await() and not looked
    assert decide(running()) == Await() and looked


def test_the_host_is_one_memory_in_whichever_phase_it_is_fullest() -> None:
    host = foreseen(attempt=1, cause=Cause.HOST_OOM, seen_at=60, phase=Phase.ROLLOUT)
    device = foreseen(attempt=1, seen_at=60, holds=False)
    knobs = replace(KNOBS, optimizer_offload=True)  # something of the job moves the host's memory
    assert isinstance(decide(running(host, device, knobs=knobs)), Stop)
    back = foreseen(attempt=1, cause=Cause.HOST_OOM, seen_at=70, phase=Phase.OPTIMIZER, holds=False)
    history = running(host, device, back, knobs=knobs)
    assert decide(history) == Await()
    assert [each.holds for each in fold(history).attempts[-1].foreseen] == [False, False]


def test_what_is_less_sure_meanwhile_stops_nothing() -> None:
    assert decide(running(foreseen(attempt=1, seen_at=80, chance=0.89))) == Await()
    assert isinstance(decide(running(foreseen(attempt=1, seen_at=80, chance=0.9))), Stop)


@pytest.mark.parametrize(("steps", "stops"), [(90, False), (91, True)])
def test_a_job_that_ends_with_its_goal_before_is_left_alone(steps: int, stops: bool) -> None:
    assert isinstance(decide(running(goal=Goal(steps=steps, then=Then.STOP))), Stop) is stops
    assert isinstance(decide(running(goal=Goal(steps=steps))), Stop)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_job_stopped_in_good_health_never_ends_the_run(policy: Policy) -> None:
    late = running(*stopped(1, after_s=100.0), policy=policy, duration_s=50.0)
    gone = running(*stopped(1), policy=policy, deny=tuple(SUPPORTED))
    silent = running(foreseen(attempt=1, seen_at=89, holds=False), *stopped(1), policy=policy)
    for history in (late, gone, silent):
        answer = decide(history)
        assert isinstance(answer, Launch) and answer.knobs == KNOBS


def test_a_run_is_stopped_so_twice_at_most() -> None:
    at_end = foreseen(seen_at=138, step=180, earliest=180)
    once = (*running(*stopped(1)), *grown(2, 91, 180, message=at_end))
    assert isinstance(decide(once), Stop)
    later = foreseen(seen_at=138, step=181, earliest=181)
    twice = (*once, *stopped(2), *grown(3, 91, 181, message=later, of=181))
    assert decide(twice) == Await()


def test_a_stop_that_brought_nothing_on_is_not_made_again() -> None:
    same = foreseen(seen_at=48, step=96, earliest=91)
    history = (*running(*stopped(1)), *grown(2, 1, 90, message=same))
    assert decide(history) == Await()
    other = replace(same, phase=Phase.FORWARD)
    assert isinstance(decide((*running(*stopped(1)), *grown(2, 1, 90, message=other))), Stop)


@pytest.mark.parametrize("policy", list(Policy))
def test_what_never_happened_is_no_failure(policy: Policy) -> None:
    history = (*running(*stopped(1), relaunches=1, policy=policy), *grown(2, 91, 95))
    assert relapse_of(fold(history), KNOBS) is None
    answer = decide((*history, *failed(2)))
    assert isinstance(answer, Launch) and answer.remedy is not None


def test_nothing_but_its_peaks_is_learned_from_it() -> None:
    calm, after = outlook(fold(running())), outlook(fold(running(*stopped(1))))
    assert calm is not None and after is not None
    assert after.run.attempts[-1].diagnosis is not None
    assert (calm.calibration.belief.mean == after.calibration.belief.mean).all()
    assert (calm.calibration.belief.covariance == after.calibration.belief.covariance).all()


def test_verdicts_do_not_quote_it() -> None:
    verdict = gave_up(fold((*running(*stopped(1)), *grown(2, 91, 95), *failed(2))))
    assert "#1" not in verdict.nearest


def test_its_remedy_says_that_it_is_expected() -> None:
    answer = decide(running(*stopped(1)))
    assert isinstance(answer, Launch)
    assert "backward is expected to need" in answer.reason


def test_a_run_that_completes_is_complete() -> None:
    answer = decide(running(Ended(attempt=1, outcome=Completed())))
    assert isinstance(answer, Finish)
