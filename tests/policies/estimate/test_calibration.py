"""What runs teach the estimate of their own job and of the next."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import calibrated, learned, predicted
from autotune.policies.estimate.belief.gaussian import Belief, at_least, at_most, less_sure, measured
from autotune.policies.estimate.belief.growth import growth
from autotune.policies.estimate.belief.prior import INDEX, LENGTHS
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.estimate.shapes import parameters
from autotune.policies.values.events import Ended, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.observation import Cancelled, Crashed
from autotune.policies.values.priors import Factor, Kind, Learned, merged, widened
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LAYOUT, MODEL, accepted, fails, peaks

ROW = np.array([1.0])
ENGINE = (Phase.ROLLOUT_INIT, Phase.ROLLOUT)
PASSES = (Phase.FORWARD, Phase.BACKWARD)


def steps(count: int, **used: float) -> list[Progressed]:
    return [Progressed(step=n, of=100, seconds=100.0, peaks=peaks(**used)) for n in range(1, count + 1)]


def about(events, phase: Phase, knobs=KNOBS) -> tuple[float, float]:
    """Return what is expected of a phase after a history, and how surely."""
    run = fold(tuple(events))
    job = run.accepted
    result = estimates(job.profile, job.cluster, MODEL, (knobs,))
    prediction = predicted(calibrated(run, MODEL), result, late=False)
    place = PHASES.index(phase)
    return float(prediction.gpu[place, 0]), float(prediction.gpu_error[place, 0])


def test_a_measurement_moves_the_belief_to_it_and_narrows_it():
    before = Belief(mean=np.zeros(1), covariance=np.eye(1))
    after = measured(before, ROW, 0.5, error=0.01)
    assert after.about(ROW)[0] == pytest.approx(0.5, abs=0.01)
    assert after.about(ROW)[1] < 0.02


def test_a_bound_moves_only_what_contradicts_it():
    before = Belief(mean=np.zeros(1), covariance=np.eye(1) * 0.01)
    assert at_least(before, ROW, -1.0, error=0.01).about(ROW)[0] == pytest.approx(0.0, abs=1e-6)
    lifted = at_least(before, ROW, 0.3, error=0.01).about(ROW)
    assert lifted[0] >= 0.28
    assert at_most(before, ROW, -0.3, error=0.01).about(ROW)[0] <= -0.28
    # What was thought impossible was thought too surely.
    assert lifted[1] > 0.01


def test_a_finished_step_is_a_measurement_that_shrinks_the_error():
    first = about([accepted()], Phase.BACKWARD)
    output = first[0] * 1.1
    history = [accepted(), Started(knobs=KNOBS), *steps(3, backward=output)]
    after = about(history, Phase.BACKWARD)
    assert after[0] == pytest.approx(output, rel=0.01)
    assert after[1] < first[1] / 3


def test_what_backward_shows_moves_other_configurations_and_phases_too():
    smaller = replace(KNOBS, tokens_per_microbatch=KNOBS.tokens_per_microbatch // 2)
    first = about([accepted()], Phase.BACKWARD)[0]
    history = [accepted(), Started(knobs=KNOBS), *steps(3, backward=first * 1.15)]
    assert about(history, Phase.BACKWARD, smaller)[0] > about([accepted()], Phase.BACKWARD, smaller)[0] * 1.02
    assert about(history, Phase.FORWARD)[0] > about([accepted()], Phase.FORWARD)[0] * 1.01


@pytest.mark.parametrize("missing", [1, 10, 28])
def test_a_failure_is_a_lower_bound(missing: int):
    bound = accepted().cluster.gpu_memory_bytes + missing * GIB
    failed = fails(Phase.LOG_PROB, requested=(missing + 2) * GIB, free=2 * GIB)
    before = about([accepted()], Phase.LOG_PROB)[0]
    assert before < bound - 20 * GIB
    settled, error = about([accepted(), Started(knobs=KNOBS), *steps(2), *failed], Phase.LOG_PROB)
    assert bound - error < settled < bound + 0.2 * accepted().cluster.gpu_memory_bytes
    # Before the first step ended Adam's state did not exist: it comes on top of the bound.
    first, error = about([accepted(), Started(knobs=KNOBS), *failed], Phase.LOG_PROB)
    state = 8 * parameters(MODEL).total / LAYOUT.shards
    assert first > max(settled, bound + 0.9 * state - error)


def test_nvml_is_an_upper_bound_and_moves_nothing_that_lies_below():
    first = about([accepted()], Phase.OPTIMIZER)
    high = [Progressed(step=n, peaks=peaks(upper_bound=True, optimizer=first[0] * 1.5)) for n in range(1, 4)]
    after = about([accepted(), Started(knobs=KNOBS), *high], Phase.OPTIMIZER)
    assert after[0] == pytest.approx(first[0], rel=0.02)


def test_phases_before_a_failure_passed():
    first = about([accepted()], Phase.ROLLOUT)
    capacity = accepted().cluster.gpu_memory_bytes
    full = replace(KNOBS, memory_fraction=0.99)
    assert about([accepted()], Phase.ROLLOUT, full)[0] > capacity
    history = [accepted(), Started(knobs=full), *fails(Phase.BACKWARD, requested=GIB, free=0)]
    assert about(history, Phase.ROLLOUT, full)[0] < about([accepted()], Phase.ROLLOUT, full)[0]
    assert about(history, Phase.ROLLOUT)[0] < first[0]


def test_weights_that_do_not_fit_before_the_first_rollout_say_nothing_of_the_steps_phases():
    full = replace(KNOBS, tokens_per_microbatch=98_304)
    before = about([accepted()], Phase.BACKWARD, full)
    history = [accepted(), Started(knobs=full), *fails(Phase.WEIGHT_SYNC, requested=GIB, free=0)]
    assert before[0] > accepted().cluster.gpu_memory_bytes
    assert about(history, Phase.BACKWARD, full)[0] > 0.9 * before[0]


def test_a_step_that_fails_before_the_update_says_nothing_of_the_state_that_it_lacks():
    factor = INDEX["train.optimizer"]
    failed = fails(Phase.BACKWARD, requested=14 * GIB, free=10 * GIB)
    full = replace(KNOBS, tokens_per_microbatch=24_576)
    begun = calibrated(fold((accepted(), Started(knobs=full), *failed)), MODEL)
    assert begun.belief.mean[factor] == 0
    steps = [Progressed(step=n) for n in (1, 2, 3)]
    updated = calibrated(fold((accepted(), Started(knobs=full), *steps, *failed)), MODEL)
    assert updated.belief.mean[factor] != 0


def test_the_host_has_a_belief_of_its_own():
    job = accepted()
    moved = replace(KNOBS, optimizer_offload=True)

    def host(events) -> float:
        run = fold(tuple(events))
        result = estimates(job.profile, job.cluster, MODEL, (moved,))
        return float(predicted(calibrated(run, MODEL), result).host.max())

    history = [job, Started(knobs=moved), *fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM)]
    assert host(history) > host([job])
    assert host(history) >= 0.9 * job.cluster.host_memory_bytes


def test_a_pool_that_was_too_small_must_grow():
    job = accepted()
    tiny = replace(KNOBS, memory_fraction=0.2)
    result = estimates(job.profile, job.cluster, MODEL, (tiny, KNOBS))
    history = (job, Started(knobs=tiny), *fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL))
    known = calibrated(fold(history), MODEL)
    assert known.pool_tokens > result.pool_tokens[0]
    assert predicted(known, result).pool[0] < 0


def test_growth_is_a_term_of_its_own():
    early = about([accepted()], Phase.BACKWARD)[0]
    rising = [
        Progressed(step=n, of=400, peaks=peaks(backward=early + n * 200 * (1 << 20))) for n in range(1, 31)
    ]
    trend = growth(rising, "backward")
    assert trend is not None
    assert trend.expected_bytes > 60 * GIB
    run = fold((accepted(), Started(knobs=KNOBS), *rising))
    knobs = estimates(run.accepted.profile, run.accepted.cluster, MODEL, (KNOBS,))
    place, known = PHASES.index(Phase.BACKWARD), calibrated(run, MODEL)
    with_growth = float(predicted(known, knobs).gpu[place, 0])
    without = float(predicted(known, knobs, late=False).gpu[place, 0])
    assert with_growth - without > 12 * GIB


@pytest.mark.parametrize(("held", "grows"), [(0, False), (2, False), (3, True), (12, True)])
def test_a_failure_after_steps_that_held_may_be_growth(held: int, grows: bool):
    history = [accepted(), Started(knobs=KNOBS), *steps(held), *fails(Phase.BACKWARD, requested=GIB, free=0)]
    run = fold(tuple(history))
    result = estimates(run.accepted.profile, run.accepted.cluster, MODEL, (KNOBS,))
    place, known = PHASES.index(Phase.BACKWARD), calibrated(run, MODEL)
    late, settled = (float(predicted(known, result, late=late).gpu[place, 0]) for late in (True, False))
    assert (late - settled > 0.05 * run.accepted.cluster.gpu_memory_bytes) is grows


@pytest.mark.parametrize("shape", ["flat", "saturating", "linear"])
def test_growth_that_levels_off_is_not_a_leak(shape: str):
    of = {
        "flat": lambda n: 50.0,
        "saturating": lambda n: 50.0 + 4 * (1 - 0.75**n),
        "linear": lambda n: 50.0 + 0.1 * n,
    }
    series = [Progressed(step=n, of=200, peaks=peaks(backward=of[shape](n) * GIB)) for n in range(1, 25)]
    trend = growth(series, "backward")
    assert trend is not None
    if shape == "flat":
        assert trend.expected_bytes == 0
    if shape == "saturating":
        assert trend.expected_bytes < 6 * GIB
    if shape == "linear":
        assert trend.expected_bytes == pytest.approx(20 * GIB, rel=0.25)


def test_too_few_steps_and_upper_bounds_say_nothing_of_growth():
    assert growth(steps(4, backward=50 * GIB), "backward") is None
    bounds = [Progressed(step=n, peaks=peaks(upper_bound=True, backward=n * GIB)) for n in range(1, 30)]
    assert growth(bounds, "backward") is None


@pytest.mark.parametrize("spike", [2, 9, 20])
def test_the_largest_peak_is_a_floor_whenever_it_came(spike: int):
    usual = about([accepted()], Phase.BACKWARD)[0] * 0.6
    rows = [
        Progressed(step=n, of=40, peaks=peaks(backward=usual * (2.2 if n == spike else 1 + 0.01 * (n % 3))))
        for n in range(1, 22)
    ]
    mean, error = about([accepted(), Started(knobs=KNOBS), *rows], Phase.BACKWARD)
    assert mean == pytest.approx(usual * 2.2, rel=0.02)
    assert error < 0.05 * mean


def test_a_later_attempt_with_shorter_batches_does_not_lower_the_floor():
    usual = about([accepted()], Phase.BACKWARD)[0] * 0.6
    history = [accepted(), Started(knobs=KNOBS), *steps(4, backward=usual * 1.5)]
    history += [Ended(outcome=Cancelled(by="user")), Started(knobs=KNOBS), *steps(4, backward=usual)]
    assert about(history, Phase.BACKWARD)[0] == pytest.approx(usual * 1.5, rel=0.02)


def test_growth_that_was_seen_is_never_believed_away():
    usual = about([accepted()], Phase.BACKWARD)[0] * 0.4
    rows = [Progressed(step=n, of=22, peaks=peaks(backward=usual * (1 + 0.1 * n))) for n in range(1, 22)]
    job = accepted()
    run = fold((job, Started(knobs=KNOBS), *rows))
    after = predicted(calibrated(run, MODEL), estimates(job.profile, job.cluster, MODEL, (KNOBS,)))
    assert after.gpu[PHASES.index(Phase.BACKWARD), 0] >= 0.97 * usual * 3.1


def test_an_attempt_that_continues_a_checkpoint_had_the_optimizer_state_from_its_first_step():
    failed = fails(Phase.FORWARD, requested=4 * GIB, free=2 * GIB)
    saved = [accepted(), Started(knobs=KNOBS), Ended(outcome=Cancelled(by="user"), saved=3)]
    smaller = replace(KNOBS, tokens_per_microbatch=KNOBS.tokens_per_microbatch // 2)
    anew = about([*saved, Started(knobs=smaller), *failed], Phase.FORWARD, smaller)
    continued = about([*saved, Started(knobs=smaller, resume=True), *failed], Phase.FORWARD, smaller)
    # The same overflow with the state already there leaves less to the activations.
    assert continued[0] < anew[0] - GIB


def test_what_a_run_taught_serves_the_next_job():
    first = about([accepted()], Phase.BACKWARD)
    history = (accepted(), Started(knobs=KNOBS), *steps(3, backward=first[0] * 1.1), Ended(outcome=Crashed()))
    known = learned(fold(history))
    assert known is not None and known.runs == 1 and known.kind.gpu == "H100"
    assert any(name.startswith("train.") for name in known.factors)
    mean, error = about([replace(accepted(), learned=known)], Phase.BACKWARD)
    assert mean > first[0] * 1.02
    assert error < first[1]


KIND = Kind(model="m", gpu="H100", framework="verl", version="1", placement="colocated")


def taught(mean: float, error: float) -> Learned:
    return Learned(kind=KIND, factors={"train.activations": Factor(mean=mean, error=error)}, runs=1)


def test_what_runs_taught_is_weighed_by_how_sure_it_is():
    both = merged(taught(1.2, 0.02), taught(1.0, 0.06))
    assert both.runs == 2
    assert both.factors["train.activations"].mean == pytest.approx(1.18, abs=0.005)
    assert both.factors["train.activations"].error < 0.02
    other = Learned(kind=replace(KIND, gpu="A100"))
    with pytest.raises(ValueError, match="kinds"):
        merged(taught(1.0, 0.1), other)


def test_a_new_version_is_believed_half_and_less_surely():
    wide = widened(taught(1.2, 0.02), version="2")
    assert wide.kind.version == "2"
    assert wide.factors["train.activations"].mean == pytest.approx(1.1)
    assert wide.factors["train.activations"].error > 0.1
    assert widened(taught(1.2, 0.02), version="1") == taught(1.2, 0.02)


def test_without_a_model_nothing_is_learned():
    job = accepted()
    unknown = replace(job, job=replace(job.job, shape=None))
    assert learned(fold((unknown, Started(knobs=KNOBS)))) is None


def test_a_surprise_widens_what_shares_its_error_and_nothing_else():
    belief = Belief(
        mean=np.zeros(3), covariance=np.array([[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 4.0]])
    )
    result = less_sure(belief, np.array([3.0, 1.0, 1.0]))
    assert np.sqrt(np.diag(result.covariance)) == pytest.approx([3.0, (1 + 0.36 * 8) ** 0.5, 2.0])
    assert result.covariance[0, 1] / (3.0 * result.covariance[1, 1] ** 0.5) == pytest.approx(0.6)
    assert less_sure(belief, np.ones(3)).covariance == pytest.approx(belief.covariance)


def test_only_a_bound_far_above_what_was_thought_is_a_surprise():
    belief = Belief(mean=np.zeros(2), covariance=np.diag([1.0, 1.0]))
    row = np.array([1.0, 0.0])
    assert at_least(belief, row, 0.9, error=0.0).surprise is None
    assert at_least(belief, row, 3.0, error=0.0).surprise == pytest.approx([3.0, 1.0])
    again = at_least(at_least(belief, row, 3.0, error=0.0), np.array([0.0, 1.0]), 9.0, error=0.0)
    assert again.surprise == pytest.approx([3.0, 4.0])  # the later one is capped


def growing(mib: int) -> list:
    """Return 400 steps in which the trainer's phases grow by so many MiB each."""
    used = {phase: about([accepted()], phase)[0] for phase in PHASES}
    return [
        Progressed(
            step=n,
            peaks=peaks(**{p.value: size + (p not in ENGINE) * n * mib * 2**20 for p, size in used.items()}),
        )
        for n in range(1, 401)
    ]


@pytest.mark.parametrize("mib", [2, 40, 400])
def test_parts_of_memory_stay_positive_and_a_pass_monotone_in_its_knobs(mib: int):
    history = [accepted(), Started(knobs=KNOBS), *growing(mib), *fails(Phase.BACKWARD, requested=GIB, free=0)]
    mean = calibrated(fold(tuple(history)), MODEL).belief.mean
    parts = [column for name, column in INDEX.items() if not name.endswith((".scale", ".late", LENGTHS))]
    assert (1 + mean[parts] >= 0.1 - 1e-9).all()
    assert (1 + mean[parts] <= 20).all()
    for phase in PASSES:
        need = [
            about(history, phase, replace(KNOBS, **changes))[0]
            for changes in ({"recompute": "off"}, {"recompute": "full"}, {"tokens_per_microbatch": 8192})
        ]
        assert need[0] >= need[1] >= need[2] > 0


@pytest.mark.parametrize("mib", [2, 10, 40])
def test_what_grew_is_no_part_of_what_a_configuration_needs(mib: int):
    mean = calibrated(fold((accepted(), Started(knobs=KNOBS), *growing(mib))), MODEL).belief.mean
    parts = [column for name, column in INDEX.items() if not name.endswith((".scale", ".late", LENGTHS))]
    assert 1 + mean[parts] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("disturbed", ["growth", "fragmentation", "others"])
def test_only_an_undisturbed_run_teaches_others(disturbed: str):
    start = (accepted(), Started(knobs=KNOBS))
    failed = fails(Phase.BACKWARD, requested=2 * GIB, free=GIB)
    calm = (*start, *steps(8, backward=about([accepted()], Phase.BACKWARD)[0]))
    assert learned(fold((*calm, *failed))) is not None
    row = failed[-1]
    others = replace(row, facts=replace(row.facts, outside_bytes=60 * GIB))
    history = {
        "growth": (*start, *growing(40)),
        "fragmentation": (*calm, failed[0], replace(row, fragmentation=True)),
        "others": (*calm, failed[0], others),
    }[disturbed]
    assert learned(fold(history)) is None


def test_a_run_that_its_own_belief_does_not_explain_teaches_nothing():
    usual = about([accepted()], Phase.BACKWARD)[0]
    output = (accepted(), Started(knobs=KNOBS), *steps(4, backward=usual))
    other = replace(KNOBS, param_offload=True)
    assert learned(fold(output)) is not None
    assert learned(fold((*output, Started(knobs=other), *steps(4, backward=3.0 * usual)))) is None


def test_after_a_surprise_other_phases_are_less_sure_but_what_passed_still_fits():
    start = (accepted(), Started(knobs=KNOBS))
    surprised = (*start, *fails(Phase.OPTIMIZER, requested=3 * GIB, free=2 * GIB, phase_shown=True))
    before, after = about(start[:1], Phase.WEIGHT_SYNC), about(surprised, Phase.WEIGHT_SYNC)
    assert after[1] > 1.5 * before[1]
    assert about(surprised, Phase.OPTIMIZER)[0] > 0.98 * CLUSTER.gpu_memory_bytes
    for passed in (Phase.ROLLOUT, Phase.LOG_PROB, Phase.BACKWARD):
        assert about(surprised, passed)[0] < 1.02 * CLUSTER.gpu_memory_bytes
