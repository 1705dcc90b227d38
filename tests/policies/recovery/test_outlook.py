"""What the calibrated estimate says of candidates against attempts that failed."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.outlook import less_than, outlook, trusted, with_host_and_pool
from autotune.policies.values.events import Decided, Progressed, Started
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.history import fold, rehearsal_of
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Remedy
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LAYOUT, accepted, diagnosed, fails, profile
from tests.policies.recovery.test_worst_case import ROWS, start

TOO_MUCH = replace(KNOBS, tokens_per_microbatch=49_152, logprob_tokens=49_152)
BACKWARD = PHASES.index(Phase.BACKWARD)
CLEARLY = 0.01


def failed(*failures, knobs=TOO_MUCH):
    """Return the outlook of a run whose attempts failed, one after the other."""
    events = [event for failure in failures for event in (Started(knobs=knobs), *failure)]
    view = outlook(fold((accepted(profile(knobs)), *events)))
    assert view is not None
    return view


def less(view, *candidates, clearly=0.0):
    estimate = view.estimates(candidates)
    return less_than(view, view.run.attempts, clearly=clearly)(estimate).tolist()


def tokens(count):
    return replace(TOO_MUCH, tokens_per_microbatch=count)


def in_backward(view, *candidates):
    """Return the calibrated bytes of candidates."""
    return predicted(view.calibration, view.estimates(candidates), late=False).gpu[BACKWARD]


def test_less_of_the_failed_phase_is_less():
    view = failed(fails(Phase.BACKWARD))
    assert less(view, TOO_MUCH, tokens(40_960), tokens(57_344)) == [False, True, False]
    # What does not act there is neither less nor more.
    assert less(view, replace(TOO_MUCH, memory_fraction=0.5)) == [False]


def test_clearly_less_is_a_share_of_the_memory():
    view = failed(fails(Phase.BACKWARD))
    before, slightly, enough = in_backward(view, TOO_MUCH, tokens(48_640), tokens(45_056))
    assert 0 < before - slightly < CLEARLY * view.calibration.unit < before - enough
    assert less(view, tokens(48_640), tokens(45_056)) == [True, True]
    assert less(view, tokens(48_640), tokens(45_056), clearly=CLEARLY) == [False, True]


def test_what_the_message_missed_is_to_be_free_as_well_where_it_counts():
    view = failed(fails(Phase.BACKWARD, requested=14 * GIB, free=8 * GIB))
    sizes = in_backward(view, TOO_MUCH, *map(tokens, range(20_480, 49_152, 1024)))
    for count, size in zip(range(20_480, 49_152, 1024), sizes[1:], strict=True):
        frees = sizes[0] - size >= 6 * GIB
        assert less(view, tokens(count), clearly=CLEARLY) == [frees], count
        assert less(view, tokens(count)) == [True]
    assert {bool(sizes[0] - size >= 6 * GIB) for size in sizes[1:]} == {True, False}


def test_every_failure_counts_in_its_own_memory():
    host = fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM)
    moved = replace(TOO_MUCH, optimizer_offload=True, param_offload=True)
    view = failed(fails(Phase.BACKWARD), host, knobs=moved)
    shorter, back = replace(moved, tokens_per_microbatch=32_768), replace(moved, optimizer_offload=False)
    both = replace(shorter, optimizer_offload=False)
    assert less(view, shorter, back, both) == [False, False, True]
    alone = failed(host, knobs=moved)
    assert less(alone, moved, shorter, back) == [False, False, True]


def test_a_host_is_clearly_less_by_a_share_of_what_it_needed():
    moved = replace(KNOBS, optimizer_offload=True)
    view = failed(fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM), knobs=moved)
    estimate = view.estimates((moved, replace(moved, optimizer_offload=False)))
    host = predicted(view.calibration, estimate, late=False).host[PHASES.index(Phase.OPTIMIZER)]
    share = float(1 - host[1] / host[0])
    kept = replace(moved, optimizer_offload=False)
    assert less(view, kept, clearly=share - 0.01) == [True]
    assert less(view, kept, clearly=share + 0.01) == [False]


def test_a_host_that_overflows_in_one_phase_anyway_is_asked_for_no_more_in_others():
    cluster = replace(CLUSTER, host_memory_bytes=int(110 * GIB / HOST_LIMIT))
    start = accepted(profile(layout=replace(LAYOUT, staged="shard")), cluster=cluster)
    view = outlook(fold((start,)))
    estimate = view.estimates((KNOBS, replace(KNOBS, activation_offload=True)))
    prediction = predicted(view.calibration, estimate)
    plain, moved = prediction.host.max(axis=0)
    assert plain == moved > 110 * GIB  # when a checkpoint is written
    over = with_host_and_pool(np.zeros(2), estimate, prediction, margin=0.0)
    assert 0 < over[0] < over[1]


def test_a_pool_that_was_too_small_must_grow():
    view = failed(fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL), knobs=KNOBS)
    larger, smaller = replace(KNOBS, memory_fraction=0.7), replace(KNOBS, memory_fraction=0.5)
    assert less(view, KNOBS, larger, smaller) == [False, True, False]
    assert less(view, KNOBS, larger, smaller, clearly=CLEARLY) == [False, True, False]


def test_what_no_estimate_knows_forbids_nothing():
    view = failed(fails(Phase.NONE), fails(Phase.BACKWARD, cause=Cause.SHM))
    assert less(view, TOO_MUCH, tokens(57_344)) == [True, True]


@pytest.mark.parametrize(
    ("cause", "phase", "believed"),
    [
        (Cause.GPU_OOM, Phase.BACKWARD, True),
        (Cause.GPU_OOM, Phase.NONE, False),
        (Cause.GPU_OOM, Phase.RESUME, False),
        (Cause.HOST_OOM, Phase.NONE, True),
        (Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, True),
        (Cause.POOL_TOO_SMALL, Phase.ROLLOUT, False),
        (Cause.SHM, Phase.BACKWARD, False),
    ],
)
def test_failures_that_the_estimate_may_rank(cause, phase, believed):
    view = outlook(fold((accepted(),)))
    assert view is not None
    need = float(view.estimates((KNOBS,)).host.max())  # a host that plausibly ran out
    start = accepted(cluster=replace(CLUSTER, host_memory_bytes=int(1.2 * need)))
    run = fold((start, Started(knobs=KNOBS), *fails(phase, cause=cause)))
    assert trusted(run, diagnosed(phase, cause=cause)) is believed


@pytest.mark.parametrize(("times", "believed"), [(1.55, True), (1.65, False)])
def test_a_failure_far_beyond_the_estimate_is_the_ladders(times, believed):
    view = outlook(fold((accepted(),)))
    assert view is not None
    need = int(times * view.estimates((KNOBS,)).gpu[BACKWARD, 0])
    free = CLUSTER.gpu_memory_bytes - need + 2 * GIB
    events = fails(Phase.BACKWARD, requested=2 * GIB, free=free)
    run = fold((accepted(), Started(knobs=KNOBS), *events))
    diagnosis = run.attempts[-1].diagnosis
    assert diagnosis is not None and trusted(run, diagnosis) is believed


@pytest.mark.parametrize("longest", [True, False])
def test_a_failure_is_far_beyond_the_estimate_of_its_own_lengths(longest):
    """Micro-batches of a fixed number of rows need far more if each response is as long as it can be."""
    short = start(prompt_mean=200.0, response_mean=1000.0)
    begun = Started(knobs=ROWS, rehearsal=Part.WORST, longest=longest)
    usual = outlook(fold((short,)))
    assert usual is not None
    need = int(1.65 * usual.estimates((ROWS,)).gpu[BACKWARD, 0])
    free = CLUSTER.gpu_memory_bytes - need + 2 * GIB
    run = rehearsal_of((short, begun, *fails(Phase.BACKWARD, requested=2 * GIB, free=free)))
    diagnosis = run.attempts[-1].diagnosis
    assert diagnosis is not None and trusted(run, diagnosis) is longest


@pytest.mark.parametrize(("steps", "believed"), [(3, False), (4, True)])
def test_what_held_for_four_steps_says_nothing_against_the_estimate(steps, believed):
    held = [Progressed(step=number, of=400, seconds=100.0) for number in range(1, steps + 1)]
    far = fails(Phase.BACKWARD, requested=200 * GIB, free=GIB)
    run = fold((accepted(), Started(knobs=KNOBS), *held, *far))
    assert trusted(run, diagnosed(Phase.BACKWARD, requested=200 * GIB, free=GIB)) is believed


@pytest.mark.parametrize(
    ("failures", "steps", "predicted_bytes", "phase", "believed"),
    [
        (2, 3, GIB, Phase.BACKWARD, False),
        (1, 3, GIB, Phase.BACKWARD, True),
        (2, 4, GIB, Phase.BACKWARD, True),
        (2, 3, None, Phase.BACKWARD, True),  # a remedy of the ladder predicts nothing
        (2, 3, GIB, Phase.LOG_PROB, True),
    ],
)
def test_two_predictions_that_failed_early_are_the_ladders(failures, steps, predicted_bytes, phase, believed):
    sizes = {} if predicted_bytes is None else {Phase.BACKWARD.value: predicted_bytes}
    cure = Remedy(name="recompute", changes={"recompute": "full"}, reason="a test", predicted=sizes)
    held = [Progressed(step=number, of=400, seconds=100.0) for number in range(1, steps + 1)]
    tries = [Decided(remedy=cure), Started(knobs=KNOBS), *held, *fails(Phase.BACKWARD)] * failures
    run = fold((accepted(), Started(knobs=KNOBS), *fails(Phase.BACKWARD), *tries))
    assert trusted(run, diagnosed(phase)) is believed


def test_a_pool_whose_phase_is_unknown_is_no_surprise():
    failure = {"cause": Cause.POOL_TOO_SMALL, "requested": 200 * GIB, "free": GIB}
    run = fold((accepted(), Started(knobs=KNOBS), *fails(Phase.NONE, **failure)))
    diagnosis = diagnosed(Phase.NONE, **failure)
    facts = replace(diagnosis.facts, capacity_bytes=CLUSTER.gpu_memory_bytes)
    assert trusted(run, replace(diagnosis, facts=facts))


@pytest.mark.parametrize(("times", "believed"), [(1.55, True), (1.65, False)])
def test_a_host_that_ran_out_far_below_its_limit_is_the_ladders(times, believed):
    view = outlook(fold((accepted(),)))
    assert view is not None
    need = float(view.estimates((KNOBS,)).host.max())
    cluster = replace(CLUSTER, host_memory_bytes=int(times * need / HOST_LIMIT))
    run = fold((accepted(cluster=cluster), Started(knobs=KNOBS), *fails(Phase.INIT, cause=Cause.HOST_OOM)))
    assert trusted(run, diagnosed(Phase.INIT, cause=Cause.HOST_OOM)) is believed


def test_a_run_without_a_card_or_sequences_has_no_outlook():
    assert outlook(fold((accepted(),))) is not None
    assert outlook(fold((accepted(cluster=replace(CLUSTER, gpu_memory_bytes=0)),))) is None
    of = profile()
    assert outlook(fold((accepted(replace(of, layout=replace(of.layout, sequences=0))),))) is None
    assert outlook(fold((accepted(model=None),))) is None
    budget = replace(of, trainer_budget_bytes=1 << 30)  # of an actor on a CPU
    assert outlook(fold((accepted(budget, cluster=replace(CLUSTER, gpu_memory_bytes=0)),))) is not None
