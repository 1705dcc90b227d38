"""What the ranking believes of step times, and which changes it makes for speed alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.step_times import SURELY, StepTimes, step_times
from autotune.policies.values.events import Decided, Event, Launch, Progressed, Started
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement
from tests.policies.jobs import GIB, KNOBS, accepted, fails, profile

NO_PREFLIGHT = Recovery(preflight=Preflight.OFF)
OPTIONS = {"rollout_tensor_parallel": (1, 2, 4), "recompute": ("off", "full"), "concurrency": (256, 128)}
WIDE = replace(KNOBS, rollout_tensor_parallel=4)


def view_of(*events: Event) -> Outlook:
    view = outlook(fold((accepted(recovery=NO_PREFLIGHT), *events)))
    assert view is not None
    return view


def seconds(times: StepTimes, *knobs: Knobs) -> list[float]:
    return [float(s) for s in times.seconds(times.view.estimates(knobs), knobs)]


def ran(knobs: Knobs, taken: float) -> list[Event]:
    steps = [Progressed(step=n, of=400, seconds=taken) for n in (1, 2, 3, 4)]
    return [Started(knobs=knobs), *steps, *fails(Phase.BACKWARD, requested=2 * GIB, free=GIB)]


def test_measured_step_times_correct_the_roofline():
    plain = step_times(view_of(), KNOBS, OPTIONS)
    alone, wide = seconds(plain, KNOBS, WIDE)
    assert alone == pytest.approx(float(plain.view.estimates((KNOBS,)).step_s[0]))
    one = step_times(view_of(*ran(KNOBS, 2 * alone)), KNOBS, OPTIONS)
    assert seconds(one, KNOBS, WIDE) == pytest.approx([2 * alone, 2 * wide], rel=0.02)
    # The wider engine turns out to be slower than the narrow one, against the roofline.
    story = [*ran(KNOBS, 2 * alone), Decided(), *ran(WIDE, 3 * alone)]
    both = step_times(view_of(*story), KNOBS, OPTIONS)
    measured = seconds(both, KNOBS, WIDE)
    assert measured[1] > 1.2 * measured[0]


def test_a_difference_that_was_measured_is_surer_than_one_that_was_not():
    plain = step_times(view_of(), KNOBS, OPTIONS)
    _, unsure = plain.gain((WIDE,), (KNOBS,))
    alone = seconds(plain, KNOBS)[0]
    both = step_times(view_of(*ran(KNOBS, alone), Decided(), *ran(WIDE, alone / 2)), KNOBS, OPTIONS)
    gained, sure = both.gain((WIDE,), (KNOBS,))
    assert sure[0] < 0.5 * unsure[0]
    assert gained[0] > SURELY * sure[0]


def test_a_gain_within_the_error_of_a_knob_that_does_not_act_counts_nothing():
    times = step_times(view_of(), KNOBS, OPTIONS)
    gained, error = times.gain((WIDE,), (KNOBS,))
    assert 0 < gained[0] <= SURELY * error[0]
    estimate = times.view.estimates((WIDE,))
    assert times.sure(estimate, (WIDE,), {"recompute"})[0] == pytest.approx(seconds(times, KNOBS)[0])
    assert times.sure(estimate, (WIDE,), {"rollout_tensor_parallel"})[0] == seconds(times, WIDE)[0]


def test_a_gain_that_is_sure_only_beside_another_change_counts_nothing():
    """As more ranks of an engine do where its pool would hold nothing without them."""
    options = {**OPTIONS, "memory_fraction": (0.6, 0.1)}
    times = step_times(view_of(), KNOBS, options)
    starved = replace(KNOBS, memory_fraction=0.1)
    split = replace(starved, rollout_tensor_parallel=4)
    gained, error = times.gain((split,), (starved,))
    assert gained[0] > SURELY * error[0]
    sure = times.sure(times.view.estimates((split,)), (split,), {"memory_fraction"})
    assert sure[0] >= seconds(times, KNOBS)[0]


def test_fewer_requests_never_shorten_generation():
    present = replace(KNOBS, concurrency=40, cuda_graphs="limited")
    fewer = replace(present, concurrency=32)
    believed, cautious = step_times(view_of(), None), step_times(view_of(), present)
    assert seconds(believed, fewer)[0] < seconds(believed, present)[0]
    assert seconds(cautious, fewer)[0] >= seconds(cautious, present)[0]


def test_more_requests_shorten_generation():
    present = replace(KNOBS, concurrency=40)
    times = step_times(view_of(), present)
    assert seconds(times, replace(present, concurrency=64))[0] < seconds(times, present)[0]


@pytest.mark.parametrize("phase", [Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD])
def test_a_failed_pass_of_a_trainer_elsewhere_moves_no_engine(phase: Phase):
    apart = replace(profile(), placement=Placement.SEPARATE)
    failed = fails(phase, requested=3 * GIB, free=2 * GIB)
    decision = decide((accepted(apart, recovery=NO_PREFLIGHT), Started(knobs=KNOBS), *failed))
    assert isinstance(decision, Launch) and decision.remedy is not None and decision.remedy.predicted
    engine = {"memory_fraction", "rollout_tensor_parallel", "concurrency", "cuda_graphs"}
    assert not engine & decision.remedy.changes.keys()


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        # The first step also warms up: it counts only where it is the only one.
        ((90.0,), 90.0),
        ((90.0, 30.0), 30.0),
        ((90.0, 30.0, 32.0), 31.0),
        ((90.0, 30.0, 34.0, 100.0), 34.0),
        ((90.0, None, 34.0), 34.0),
    ],
)
def test_the_usual_step_of_a_configuration_is_its_time(taken, expected):
    steps = [Progressed(step=n, of=400, seconds=each) for n, each in enumerate(taken, 1)]
    times = step_times(view_of(Started(knobs=KNOBS), *steps), KNOBS, OPTIONS)
    assert seconds(times, KNOBS)[0] == pytest.approx(expected, rel=0.01)


def test_attempts_of_one_configuration_are_measured_together():
    def attempt(*taken):
        steps = [Progressed(step=n, of=400, seconds=each) for n, each in enumerate(taken, 1)]
        return [Started(knobs=KNOBS), *steps, *fails(Phase.BACKWARD, requested=2 * GIB, free=GIB)]

    times = step_times(view_of(*attempt(90.0, 30.0), Decided(), *attempt(90.0, 30.0, 36.0)), KNOBS, OPTIONS)
    assert seconds(times, KNOBS)[0] == pytest.approx(30.0, rel=0.01)


def test_a_step_that_was_measured_once_is_believed_less_than_one_measured_often():
    def error(*taken):
        steps = [Progressed(step=n, of=400, seconds=each) for n, each in enumerate(taken, 1)]
        story = [Started(knobs=KNOBS), *steps, *fails(Phase.BACKWARD, requested=2 * GIB, free=GIB), Decided()]
        times = step_times(view_of(*story, *ran(WIDE, 20.0)), KNOBS, OPTIONS)
        return float(times.gain((WIDE,), (KNOBS,))[1][0])

    steady, noisy = error(90.0, 30.0, 30.0, 30.0, 30.0), error(90.0, 24.0, 30.0, 36.0, 30.0)
    assert steady < noisy < error(30.0)


def test_only_what_acts_is_left_of_a_change():
    times = step_times(view_of(), KNOBS, OPTIONS)
    both = replace(WIDE, recompute="off")
    assert times.only(both, {"recompute"}) == replace(KNOBS, recompute="off")
    assert times.only(both, ()) == KNOBS
    assert times.only(both, {"recompute", "rollout_tensor_parallel"}) == both
