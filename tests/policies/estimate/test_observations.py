"""What single attempts show: which phases they passed, what they held, and what they say nothing of."""

from statistics import NormalDist

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import calibrated, learned, predicted
from autotune.policies.estimate.belief.observations import likely_phase
from autotune.policies.estimate.belief.prior import INDEX, LENGTHS, prior
from autotune.policies.estimate.lengths import Assumption, deviation_of
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.values.events import Ended, Progressed, Started
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.observation import Cancelled
from autotune.policies.values.profile import Placement
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LONGEST, MODEL, accepted, fails, peaks, profile

from .test_calibration import about, steps

WIDE = replace(KNOBS, tokens_per_microbatch=24_576, logprob_tokens=LONGEST)
SAVED = (accepted(), Started(knobs=KNOBS), Ended(outcome=Cancelled(by="user"), saved=3))


@pytest.mark.parametrize(("longest", "least"), [(None, 1), (LONGEST, LONGEST)])
def test_a_pool_needs_room_for_the_longest_sequence(longest, least):
    job = accepted(replace(profile(), longest_sequence=longest))
    assert calibrated(fold((job,)), MODEL).pool_tokens == least


@pytest.mark.parametrize(("resume", "moved"), [(False, {}), (True, {2: Phase.FORWARD})])
def test_forward_is_suspected_where_a_resumed_optimizer_leaves_it_too_little(resume, moved):
    run = fold((*SAVED, Started(knobs=WIDE, resume=resume), *fails(Phase.CHECKPOINT)))
    assert calibrated(run, MODEL).moved == moved


def test_an_engine_whose_device_is_unknown_hides_no_other_phase():
    apart = replace(profile(), placement=Placement.SEPARATE, trainer_budget_bytes=CLUSTER.gpu_memory_bytes)
    unknown = replace(CLUSTER, gpu_memory_bytes=0)
    wider = replace(WIDE, tokens_per_microbatch=49_152)
    for cluster in (CLUSTER, unknown):
        job = accepted(apart, cluster=cluster)
        run = fold((job, Started(knobs=wider), *fails(Phase.CHECKPOINT)))
        assert calibrated(run, MODEL).moved == {1: Phase.FORWARD}


@pytest.mark.parametrize(
    ("tokens", "updates", "bounds"),
    [(70_000, 1, False), (250_000, 1, False), (270_000, 1, True), (270_000, 2, False), (None, 1, True)],
)
def test_a_step_that_fills_no_micro_batch_of_any_replica_does_not_show_what_one_takes(
    tokens, updates, bounds
):
    full = replace(KNOBS, tokens_per_microbatch=65_536)
    held = Progressed(step=1, seconds=10.0, tokens_per_second=tokens and tokens / 10.0)
    layout = profile().layout
    job = accepted(replace(profile(), layout=replace(layout, mini_batch=layout.sequences // updates)))
    history = (job, Started(knobs=full), held, *fails(Phase.OPTIMIZER, phase_shown=True))
    before, after = about([job], Phase.BACKWARD, full)[0], about(history, Phase.BACKWARD, full)[0]
    assert before > 1.2 * CLUSTER.gpu_memory_bytes
    assert (after < 1.02 * CLUSTER.gpu_memory_bytes) is bounds


@pytest.mark.parametrize(
    ("failed", "passed"), [(Phase.WEIGHT_SYNC, False), (Phase.CHECKPOINT, True), (Phase.OPTIMIZER, True)]
)
def test_weights_that_fail_to_be_sent_may_precede_the_step(failed, passed):
    full = replace(KNOBS, tokens_per_microbatch=65_536)
    history = (accepted(), Started(knobs=full), *fails(failed, phase_shown=True))
    before, after = about([accepted()], Phase.BACKWARD, full)[0], about(history, Phase.BACKWARD, full)[0]
    capacity = CLUSTER.gpu_memory_bytes
    assert before > 1.2 * capacity
    assert (after < 1.02 * capacity) is passed
    assert (after > 0.97 * before) is not passed


def test_a_checkpoint_that_fails_may_precede_the_weights():
    full = replace(KNOBS, memory_fraction=0.95)
    history = (accepted(), Started(knobs=full), *fails(Phase.CHECKPOINT, phase_shown=True))
    before, after = (
        about([accepted()], Phase.WEIGHT_SYNC, full)[0],
        about(history, Phase.WEIGHT_SYNC, full)[0],
    )
    assert before > 1.2 * CLUSTER.gpu_memory_bytes
    assert after > 0.95 * before


def test_steps_without_growth_leave_what_is_believed_of_growth():
    job = accepted()
    usual = about([job], Phase.BACKWARD)[0]
    run = fold((job, Started(knobs=KNOBS), *steps(4, backward=usual * 1.2)))
    late = INDEX["backward.late"]
    before = prior(estimates(job.profile, job.cluster, MODEL, (KNOBS,)), None)
    after = calibrated(run, MODEL).belief
    assert after.mean[late] == before.mean[late]
    assert after.covariance[late, late] == before.covariance[late, late]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT])
def test_a_step_after_the_first_holds_the_optimizer(phase):
    job = accepted()
    usual = about([job], phase)[0]
    run = fold((job, Started(knobs=KNOBS), *steps(3, **{phase.value: usual * 1.1})))
    group = {Phase.BACKWARD: "train", Phase.OPTIMIZER: "update", Phase.CHECKPOINT: "start"}[phase]
    assert calibrated(run, MODEL).belief.mean[INDEX[f"{group}.optimizer"]] > 0


def test_steps_that_held_without_a_figure_were_below_the_capacity():
    full = replace(KNOBS, tokens_per_microbatch=65_536)
    before = about([accepted()], Phase.BACKWARD, full)[0]
    after = about([accepted(), Started(knobs=full), *steps(3)], Phase.BACKWARD, full)[0]
    assert after < 1.02 * CLUSTER.gpu_memory_bytes < before


@pytest.mark.parametrize("longest", [False, True])
def test_the_largest_peak_is_a_floor_among_attempts_with_answers_of_one_length(longest):
    job = accepted()
    assumption = Assumption.LONGEST if longest else Assumption.EXPECTED
    result = estimates(job.profile, job.cluster, MODEL, (KNOBS,), assumption=assumption)
    place = PHASES.index(Phase.BACKWARD)
    usual = float(result.gpu[place, 0]) * 0.8
    first = (Started(knobs=KNOBS), *steps(4, backward=usual * 1.2), Ended(outcome=Cancelled(by="user")))
    run = fold((job, *first, Started(knobs=KNOBS), *steps(4, backward=usual)))
    run = replace(run, attempts=tuple(replace(each, longest=longest) for each in run.attempts))
    mean = predicted(calibrated(run, MODEL), result, late=False).gpu[place, 0]
    assert mean == pytest.approx(usual * 1.2, rel=0.02)


def test_a_peak_of_forced_long_answers_is_no_floor_of_usual_ones():
    job = accepted()
    usual = about([job], Phase.BACKWARD)[0] * 0.6
    history = (
        job,
        Started(knobs=KNOBS),
        *steps(4, backward=usual * 1.5),
        Ended(outcome=Cancelled(by="user")),
    )
    run = fold((*history, Started(knobs=KNOBS), *steps(4, backward=usual)))
    result = estimates(job.profile, job.cluster, MODEL, (KNOBS,))
    place = PHASES.index(Phase.BACKWARD)

    def believed(*longest):
        marked = tuple(replace(each, longest=on) for each, on in zip(run.attempts, longest, strict=True))
        known = calibrated(replace(run, attempts=marked), MODEL)
        return float(predicted(known, result, late=False).gpu[place, 0])

    assert believed(False, False) == pytest.approx(usual * 1.5, rel=0.02)
    assert believed(True, False) < usual * 1.25


def test_a_run_teaches_parts_alone_and_only_those_that_it_narrowed():
    job = accepted()
    nothing = learned(fold((job,)))
    assert nothing is not None and nothing.factors == {}
    output = about([job], Phase.BACKWARD)[0] * 1.1
    taught = learned(fold((job, Started(knobs=KNOBS), *steps(3, backward=output))))
    assert taught is not None and taught.factors
    assert {name.partition(".")[2] for name in taught.factors} <= set(PARTS)
    before = prior(estimates(job.profile, job.cluster, MODEL, (KNOBS,)), None).covariance
    for name, factor in taught.factors.items():
        assert factor.error < 0.9 * np.sqrt(before[INDEX[name], INDEX[name]]) + 1e-4


@pytest.mark.parametrize(
    ("refusals", "margin"),
    [(1, 0.1), (2, 0.2), (3, 0.4)],  # each refusal doubles what is added
)
def test_refused_pools_ask_for_more_and_more(refusals, margin):
    tiny = replace(KNOBS, memory_fraction=0.3)
    job = accepted()
    pool = float(estimates(job.profile, job.cluster, MODEL, (tiny,)).pool_tokens[0])
    once = (Started(knobs=tiny), *fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL))
    known = calibrated(fold((job, *once * refusals)), MODEL)
    assert pool > LONGEST
    assert known.pool_tokens == pytest.approx(pool * (1 + margin))


@pytest.mark.parametrize("missing", [GIB, 8 * GIB])
def test_an_overflow_is_bounded_by_what_was_asked_for_beyond_what_was_free(missing):
    history = [accepted(), Started(knobs=KNOBS), *steps(2)]
    failed = fails(Phase.LOG_PROB, requested=missing + GIB, free=GIB, phase_shown=True)
    bound = CLUSTER.gpu_memory_bytes + missing
    mean, error = about([*history, *failed], Phase.LOG_PROB)
    assert mean + error > bound


def test_what_was_free_is_part_of_what_was_asked_for():
    def after(free):
        failed = fails(Phase.LOG_PROB, requested=2 * GIB + free, free=free, phase_shown=True)
        return about([accepted(), Started(knobs=KNOBS), *steps(2), *failed], Phase.LOG_PROB)

    assert after(0) == pytest.approx(after(20 * GIB))


@pytest.mark.parametrize("capacity", [None, CLUSTER.gpu_memory_bytes // 2])
def test_the_card_that_overflowed_has_the_size_that_its_message_prints(capacity):
    ended, failed = fails(Phase.LOG_PROB, phase_shown=True)
    facts = replace(failed.facts, capacity_bytes=capacity)
    result = about([accepted(), Started(knobs=KNOBS), ended, replace(failed, facts=facts)], Phase.LOG_PROB)
    usual = about([accepted(), Started(knobs=KNOBS), ended], Phase.LOG_PROB)[0]
    if capacity is None:
        assert result[0] + result[1] > CLUSTER.gpu_memory_bytes
    else:
        assert usual > capacity and result[0] < 1.1 * usual


def test_what_grows_late_is_part_of_a_prediction_unless_it_is_left_out():
    job = accepted()
    grown = [replace(each, peaks=peaks(backward=(40 + each.step) * GIB)) for each in steps(12)]
    known = calibrated(fold((job, Started(knobs=KNOBS), *grown)), MODEL)
    result, place = estimates(job.profile, job.cluster, MODEL, (KNOBS,)), PHASES.index(Phase.BACKWARD)
    late, settled = predicted(known, result).gpu[place, 0], predicted(known, result, late=False).gpu[place, 0]
    assert late > settled + 5 * GIB


@pytest.mark.parametrize("mean", [1500.0, 2500.0])
def test_tokens_of_steps_tell_the_mean_length(mean):
    job = accepted()
    layout = job.profile.layout
    items = [replace(each, tokens_per_second=mean * layout.sequences / 100.0) for each in steps(3)]
    run = fold((job, Started(knobs=KNOBS), *items))
    deviation = deviation_of(layout, longest=LONGEST, mean=mean)
    assert deviation is not None and abs(deviation) > 0.2
    belief = calibrated(run, MODEL).belief
    assert belief.mean[INDEX[LENGTHS]] == pytest.approx(deviation, rel=0.1)
    # The usual step's: one that is much longer says little.
    run = fold((job, Started(knobs=KNOBS), replace(items[0], tokens_per_second=1e9), *items[1:]))
    assert calibrated(run, MODEL).belief.mean[INDEX[LENGTHS]] == pytest.approx(deviation, rel=0.1)


def test_a_peak_before_the_failure_of_a_first_step_is_a_measurement():
    job = accepted()
    usual = about([job], Phase.LOG_PROB)[0]

    def after(**passed):
        failed = fails(Phase.BACKWARD, passed=peaks(**passed), phase_shown=True)
        return about([job, Started(knobs=KNOBS), *failed], Phase.LOG_PROB)

    # The optimizer's state comes after it.
    result = estimates(job.profile, job.cluster, MODEL, (KNOBS,))
    state = float(result.gpu_parts[PHASES.index(Phase.LOG_PROB), PARTS.index("optimizer"), 0])
    assert after(log_prob=usual * 1.2)[0] == pytest.approx(usual * 1.2 + state, rel=0.02)
    bounded = fails(Phase.BACKWARD, passed=peaks(log_prob=usual * 1.2, upper_bound=True), phase_shown=True)
    assert about([job, Started(knobs=KNOBS), *bounded], Phase.LOG_PROB)[0] < usual * 1.15


def test_what_a_step_showed_comes_before_what_the_end_showed():
    job = accepted()
    usual = about([job], Phase.LOG_PROB)[0]
    failed = fails(Phase.BACKWARD, passed=peaks(log_prob=usual * 1.3), phase_shown=True)
    history = [job, Started(knobs=KNOBS), *steps(3, log_prob=usual * 1.1), *failed]
    assert about(history, Phase.LOG_PROB)[0] == pytest.approx(usual * 1.1, rel=0.02)


@pytest.mark.parametrize(("first", "steady"), [(1, False), (2, True)])
def test_only_the_first_step_of_a_training_lacks_the_optimizers_state(first, steady):
    job = accepted()
    usual = about([job], Phase.FORWARD)[0]
    (step,) = steps(1, forward=usual * 1.1)
    mean = about([job, Started(knobs=KNOBS), replace(step, step=first)], Phase.FORWARD)[0]
    assert (mean == pytest.approx(usual * 1.1, rel=0.03)) is steady


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.WEIGHT_SYNC, Phase.INIT])
def test_a_host_ran_out_in_the_phase_that_is_named_unless_it_still_loaded(phase):
    moved = replace(KNOBS, optimizer_offload=True, param_offload=True)
    result = estimates(profile(moved), CLUSTER, MODEL, (moved,))
    needs = result.host[:, 0]
    place = int(needs.argmax()) if phase is Phase.INIT else PHASES.index(phase)
    limit = needs[place] * 1.3
    small = accepted(profile(moved), cluster=replace(CLUSTER, host_memory_bytes=int(limit / HOST_LIMIT)))
    failed = fails(phase, cause=Cause.HOST_OOM)
    run = fold((small, Started(knobs=moved), *failed))
    result = estimates(small.profile, small.cluster, MODEL, (moved,))
    after = predicted(calibrated(run, MODEL), result, late=False).host[:, 0]
    assert after[place] == pytest.approx(limit, rel=0.1)


def test_a_failure_on_the_device_shows_no_room_on_the_host_for_later_phases():
    moved = replace(KNOBS, optimizer_offload=True, param_offload=True)
    needs = dict(zip(PHASES, estimates(profile(moved), CLUSTER, MODEL, (moved,)).host[:, 0], strict=True))
    between = (needs[Phase.INIT] + needs[Phase.LOG_PROB]) / 2
    assert needs[Phase.INIT] < 0.95 * between < between < 0.95 * needs[Phase.LOG_PROB]
    small = accepted(profile(moved), cluster=replace(CLUSTER, host_memory_bytes=int(between / HOST_LIMIT)))
    result = estimates(small.profile, small.cluster, MODEL, (moved,))

    def believed(phase):
        run = fold((small, Started(knobs=moved), *fails(phase, phase_shown=True)))
        return predicted(calibrated(run, MODEL), result, late=False).host[PHASES.index(Phase.LOG_PROB), 0]

    assert believed(Phase.LOG_PROB) < 0.95 * between < 1.01 * between < believed(Phase.INIT)


def test_without_a_diagnosis_no_phase_is_suspected():
    job = accepted()
    run = fold((job, Started(knobs=WIDE), Ended(outcome=Cancelled(by="user"))))
    result = estimates(job.profile, job.cluster, MODEL, (WIDE,))
    assert likely_phase(prior(result, None), result, 0, run.attempts[0]) is None


@pytest.mark.parametrize(
    ("change", "reported", "failed", "limited"),
    [
        ({}, {}, Phase.BACKWARD, True),
        ({"tokens_per_microbatch": 65_536}, {}, Phase.BACKWARD, True),  # the engine's share is as it was
        ({"memory_fraction": 0.5}, {}, Phase.BACKWARD, True),
        ({"memory_fraction": 0.7}, {}, Phase.BACKWARD, False),
        ({}, {"rollout": 60.0}, Phase.BACKWARD, False),  # a measured peak says more
        ({}, {}, Phase.ROLLOUT, False),
    ],
)
def test_completed_steps_limit_the_chance_of_what_needs_no_more(change, reported, failed, limited):
    history = (accepted(), Started(knobs=KNOBS), *steps(9, **reported), *fails(failed, phase_shown=True))
    run = fold(history)
    estimate = estimates(run.accepted.profile, CLUSTER, MODEL, (replace(KNOBS, **change),))
    certainty = predicted(calibrated(run, MODEL), estimate).certainty[PHASES.index(Phase.ROLLOUT), 0]
    chance = NormalDist().cdf(-certainty)
    later = 8  # steps with the optimizer's state
    assert chance == pytest.approx(1 / (len(PHASES) * (later + 2)) if limited else 1.0)


@pytest.mark.parametrize(
    ("in_use", "away", "kept"),
    [
        (0.6, True, 0.15),  # a context and graphs are all of it
        (0.6, False, 0.15),
        (7.0, True, 7.0 - 0.45 - 2.17),  # ... and the trainer's context beside them
        (7.0, False, 1.5),  # or its weights
        (60.0, False, 15.0),  # at most ten times the estimate
    ],
)
def test_what_an_engine_is_printed_to_keep_while_it_sleeps_replaces_the_estimate_of_it(in_use, away, kept):
    job = accepted(replace(profile(), resident={"rollout": ("rollout",)} if away else {}))
    *ended, failed = fails(Phase.ROLLOUT, phase_shown=True)
    slept = replace(failed, facts=replace(failed.facts, asleep_bytes=round(in_use * GIB)))
    for phase in (Phase.LOG_PROB, Phase.BACKWARD, Phase.OPTIMIZER):
        before, after = (about([job, Started(knobs=KNOBS), *ended, end], phase)[0] for end in (failed, slept))
        assert after - before == pytest.approx((kept - 1.5) * GIB, abs=0.01 * GIB)
