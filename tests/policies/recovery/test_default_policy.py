"""What recovery does where the job's model is known: the calibrated estimate ranks every cure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.permissions import relapse_of
from autotune.policies.recovery.ranking import assess
from autotune.policies.recovery.upgrade import CLIMB
from autotune.policies.values.diagnosis import Line
from autotune.policies.values.events import (
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    GoalReached,
    Infrastructure,
    Launch,
    NeedsHuman,
    Progressed,
    Started,
    Stop,
    StopRequested,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import RESUMED, fold
from autotune.policies.values.job import Goal, Preflight, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost
from autotune.policies.values.profile import Grid, Support
from autotune.policies.values.remedy import Remedy
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LAYOUT, SUPPORTED, accepted, fails, peaks, profile

CAPACITY = CLUSTER.gpu_memory_bytes


def test_an_engine_awake_beside_the_trainer_is_put_to_sleep_before_its_cache_gets_smaller():
    knobs = replace(KNOBS, engine_sleep=False, concurrency=512)
    supported = SUPPORTED | {"engine_sleep": Support(setting="sleep", grid=Grid(values=(False, True)))}
    awake = profile(knobs, layout=replace(LAYOUT, engine_sleeps=False), supported=supported)
    steps = [Progressed(step=step, of=400, seconds=60.0) for step in (1, 2)]
    failed = fails(Phase.BACKWARD, requested=3 * GIB, free=GIB)
    start = accepted(awake, recovery=Recovery(preflight=Preflight.OFF))
    chosen = decide((start, Started(knobs=knobs), *steps, *failed))
    assert isinstance(chosen, Launch) and chosen.remedy is not None
    assert chosen.remedy.changes == {"engine_sleep": True}


NO_PREFLIGHT = Recovery(preflight=Preflight.OFF, relaunches=20)
HUNG = (Ended(outcome=Hung(silent_s=900)), Diagnosed(cause=Cause.HANG))


def launch(*events: Event) -> Launch:
    action = decide(events)
    assert isinstance(action, Launch), action
    return action


def steps(*numbers: int, seconds: float = 100.0, **used: float) -> list[Event]:
    return [Progressed(step=n, of=400, seconds=seconds, peaks=peaks(**used)) for n in numbers]


def needs(events: tuple[Event, ...], phase: Phase, *knobs: Knobs) -> list[float]:
    """Return what configurations are expected to need in a phase, without growth."""
    view = outlook(fold(events))
    assert view is not None
    prediction = predicted(view.calibration, view.estimates(knobs), late=False)
    return [float(size) for size in prediction.gpu[PHASES.index(phase)]]


# ----------------------------------------------------------------------------------- every cure

FAILING = (Phase.ROLLOUT, Phase.LOG_PROB, Phase.BACKWARD, Phase.WEIGHT_SYNC)


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.BACKWARD])
@pytest.mark.parametrize("missing", [0, 28])
def test_after_steps_that_held_a_cure_frees_what_was_missing(phase: Phase, missing: int):
    tokens, memory_gib = (16_384, 79) if missing else (49_152, 60)
    knobs = replace(KNOBS, tokens_per_microbatch=tokens, logprob_tokens=tokens)
    cluster = replace(CLUSTER, gpu_memory_bytes=memory_gib * GIB)
    figures = {"requested": (missing + 2) * GIB, "free": 2 * GIB} if missing else {}
    history: list[Event] = [accepted(profile(knobs), cluster=cluster, recovery=NO_PREFLIGHT)]
    failed = [knobs]
    for _ in range(3):
        history += [Started(knobs=failed[-1]), *steps(1, 2, 3, 4, 5), *fails(phase, **figures)]
        decision = decide(tuple(history))
        if not isinstance(decision, Launch) or not decision.remedy.predicted:
            break  # the ladder's
        *before, after = needs(tuple(history), phase, *failed, decision.knobs)
        assert after <= min(before) - max(0.01 * memory_gib, missing) * GIB + 1
        failed.append(decision.knobs)
        history.append(Decided(remedy=decision.remedy))


def test_the_estimate_answers_failures_after_steps_that_held():
    answered = 0
    for phase in FAILING:
        start = accepted(recovery=NO_PREFLIGHT)
        failed = fails(phase, requested=3 * GIB, free=2 * GIB)
        outcome = launch(start, Started(knobs=KNOBS), *steps(1, 2, 3, 4, 5), *failed)
        answered += bool(outcome.remedy is not None and outcome.remedy.predicted)
    assert answered == len(FAILING)


@pytest.mark.parametrize(("phase", "memory_gib"), tuple(zip(FAILING, (60, 79, 79, 60), strict=True)))
def test_no_launch_asks_for_as_much_as_one_that_failed(phase: Phase, memory_gib: int):
    knobs = replace(KNOBS, tokens_per_microbatch=49_152, logprob_tokens=49_152)
    cluster = replace(CLUSTER, gpu_memory_bytes=memory_gib * GIB)
    history: list[Event] = [accepted(profile(knobs), cluster=cluster, recovery=NO_PREFLIGHT)]
    for _ in range(6):
        action = decide(tuple(history))
        if isinstance(action, Finish):
            break
        assert isinstance(action, Launch)
        assert relapse_of(fold(tuple(history)), action.knobs) is None
        history += [Decided(remedy=action.remedy), Started(knobs=action.knobs)]
        history += [*steps(1, 2, 3, 4, 5), *fails(phase)]
    assert len(fold(tuple(history)).attempts) > 3


def test_what_needs_far_more_than_any_estimate_of_it_is_the_ladders():
    start = accepted(recovery=NO_PREFLIGHT)
    far = fails(Phase.LOG_PROB, requested=60 * GIB, free=2 * GIB)
    assert launch(start, Started(knobs=KNOBS), *far).remedy.predicted == {}
    near = fails(Phase.LOG_PROB, requested=4 * GIB, free=2 * GIB)
    assert launch(start, Started(knobs=KNOBS), *near).remedy.predicted


def test_a_cure_tells_the_seconds_of_a_step_as_this_cluster_shows_them():
    start = accepted(recovery=NO_PREFLIGHT)
    failed = fails(Phase.BACKWARD, requested=4 * GIB, free=2 * GIB)
    view = outlook(fold((start,)))
    assert view is not None
    predicted_s = float(view.estimates((KNOBS,)).step_s[0])
    held = steps(1, 2, 3, 4, 5, seconds=3 * predicted_s)
    outcome = launch(start, Started(knobs=KNOBS), *held, *failed)
    alone = float(view.estimates((outcome.knobs,)).step_s[0])
    assert outcome.remedy.step_s == pytest.approx(3 * alone, rel=0.01)


def test_a_change_that_the_job_refuses_is_undone_and_never_comes_back():
    error = Line(line=9, text="ValueError: size 12 must be divisible by 5", rule="python")
    refusal = (Ended(outcome=Crashed(exit_code=1)), Diagnosed(cause=Cause.CODE, evidence=(error,)))
    failed = fails(Phase.LOG_PROB, requested=4 * GIB, free=2 * GIB)
    history: list[Event] = [accepted(recovery=NO_PREFLIGHT), Started(knobs=KNOBS), *failed]
    first = launch(*history)
    history += [Decided(remedy=first.remedy), Started(knobs=first.knobs), *refusal]
    second = launch(*history)
    assert "the job refused" in second.reason and second.remedy.predicted
    assert not all(getattr(second.knobs, k) == v for k, v in first.remedy.changes.items())


# --------------------------------------------------------------------------- hangs, held memory


def test_a_second_hang_is_final_only_where_the_relaunch_came_no_further():
    story: list[Event] = [accepted(), Started(knobs=KNOBS), *steps(1, 2), *HUNG]
    assert launch(*story).knobs == KNOBS
    stuck = decide((*story, Started(knobs=KNOBS), *steps(2), *HUNG))
    assert isinstance(stuck, Finish) and isinstance(stuck.verdict, NeedsHuman)
    further = (*story, Started(knobs=KNOBS), *steps(2, 3), *HUNG)
    assert launch(*further).knobs == KNOBS


def test_memory_that_was_held_is_no_reason_to_stop_again_once_the_user_resumes():
    held = Ended(outcome=Crashed(exit_code=1), held="GPU 0: 12 GiB by pid 4711")
    failed = fails(Phase.BACKWARD, requested=4 * GIB, free=2 * GIB)[1]
    story = (accepted(), Started(knobs=KNOBS), held, failed)
    stopped = decide(story)
    assert isinstance(stopped, Finish) and isinstance(stopped.verdict, Infrastructure)
    assert launch(*story, Decided(reason=RESUMED)).knobs != KNOBS


# ----------------------------------------------------------------------------------- climbs

SLOW = replace(KNOBS, memory_fraction=0.4, tokens_per_microbatch=5120, concurrency=32)


def reaches(first: int, *, marginal: bool = False, used: float = 45.0) -> list[Event]:
    """Return twenty steps with room to spare, the goal and a checkpoint."""
    small = peaks(backward=(used - 5) * GIB, log_prob=(used - 7) * GIB, rollout=used * GIB)
    numbers = range(first, first + 20)
    rows = [Progressed(step=n, of=400, seconds=200.0, peaks=small, saved=n) for n in numbers]
    return [*rows[:-1], GoalReached(step=first + 18, marginal=marginal, headroom=0.4), rows[-1]]


def climbing(*, marginal: bool = False, used: float = 45.0) -> list[Event]:
    start = accepted(profile(KNOBS), recovery=Recovery(climb=True), goal=Goal(steps=20))
    return [start, Started(knobs=SLOW), *reaches(1, marginal=marginal, used=used)]


@pytest.mark.parametrize("climbs", [0, 1, 2])
def test_a_run_climbs_twice_and_no_more(climbs: int):
    history = climbing()
    for number in range(climbs):
        up = replace(SLOW, concurrency=33 + number)
        remedy = Remedy(name=CLIMB, changes={"concurrency": up.concurrency}, reason="room")
        history += [StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
        history += [Decided(remedy=remedy), Started(knobs=up), *reaches(21 + 20 * number)]
    assert isinstance(decide(tuple(history)), Stop if climbs < 2 else Await)


def test_what_ran_before_is_never_climbed_to():
    history = climbing()
    stopped = [StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
    up = launch(*history, *stopped)
    assert up.remedy is not None and up.remedy.name == CLIMB
    before = [history[0], Started(knobs=up.knobs), Ended(outcome=Lost(reason="node gone"))]
    again = launch(*before, *history[1:], *stopped)
    assert again.knobs != up.knobs


def test_a_climb_that_the_job_refuses_is_undone_with_its_reason():
    history = [*climbing(), StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
    up = launch(*history)
    error = Line(line=9, text="ValueError: size 12 must be divisible by 5", rule="python")
    refused = (Ended(outcome=Crashed(exit_code=1)), Diagnosed(cause=Cause.CODE, evidence=(error,)))
    after = launch(*history, Decided(remedy=up.remedy), Started(knobs=up.knobs), *refused)
    assert after.knobs != up.knobs and "the job refused" in after.reason


def test_a_marginal_goal_is_no_place_to_climb_from():
    assert decide(tuple(climbing(marginal=True))) == Await()
    done = decide((*climbing(marginal=True), Ended(outcome=Completed())))
    assert isinstance(done, Finish) and done.verdict.faster is None


@pytest.mark.parametrize("memory_gib", range(48, 80, 4))
def test_a_climb_surely_fits(memory_gib: int):
    first, *rows = climbing(used=40.0)
    history = (replace(first, cluster=replace(CLUSTER, gpu_memory_bytes=memory_gib * GIB)), *rows)
    if isinstance(decide(history), Stop):
        stopped = (*history, StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB)))
        up, view = launch(*stopped), outlook(fold(stopped))
        assert view is not None
        assert assess(view, up.knobs).risk <= 0.05


@pytest.mark.parametrize("headroom", [0.05, 0.25])
def test_a_cure_never_raises_the_load_of_what_failed(headroom: float):
    start = accepted(goal=Goal(headroom=headroom), recovery=NO_PREFLIGHT)
    up = launch(start, Started(knobs=KNOBS), *fails(Phase.BACKWARD, requested=3 * GIB, free=2 * GIB))
    assert up.knobs.recompute == KNOBS.recompute == "full"
    assert (up.knobs.tokens_per_microbatch or 0) <= (KNOBS.tokens_per_microbatch or 0)


def test_no_cure_is_expected_to_overflow_while_another_is_not():
    history, done = [accepted()], 0
    for attempt in range(1, 5):
        up = launch(*history)
        if up.remedy is not None and up.remedy.predicted:
            assert max(up.remedy.predicted.values()) <= CLUSTER.gpu_memory_bytes
        rows = [Progressed(attempt=attempt, step=done + n, saved=done + n) for n in range(1, 101)]
        history += [Decided(remedy=up.remedy), Started(attempt=attempt, knobs=up.knobs, resume=attempt > 1)]
        history += [*rows, *fails(Phase.BACKWARD, requested=GIB, free=GIB // 2)]
        done += 100
