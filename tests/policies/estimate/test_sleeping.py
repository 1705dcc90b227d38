"""What a trainer that sleeps keeps on its device, and what it moves to the host."""

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.estimate.shapes import parameters
from autotune.policies.values.failure import Phase

from .test_peaks import CLUSTER, FSDP, KNOBS, MEGATRON, QWEN, profile

WHOLE = parameters(QWEN).total
ASLEEP = {"engine_ranks": 0, "reference": False, "weights_sleep": True}
RANKS = 8


def parts_of(layout, phase, part, *, host=False, stays=("trainer", "rollout"), **knobs):
    """Return the bytes of a part of a job without an engine; `stays` names who is on the card in rollout."""
    of = replace(profile(layout, engine="none"), resident={Phase.ROLLOUT.value: stays})
    predicted = estimates(of, CLUSTER, QWEN, [replace(KNOBS, **knobs)])
    sizes = predicted.host_parts if host else predicted.gpu_parts
    return float(sizes[PHASES.index(phase), PARTS.index(part), 0])


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.ROLLOUT_INIT])
def test_weights_that_sleep_are_on_the_host_while_the_engine_works(phase):
    layout = replace(FSDP, **ASLEEP)
    awake = replace(layout, weights_sleep=False)
    assert parts_of(awake, phase, "weights") == pytest.approx(4 * WHOLE / RANKS)
    assert parts_of(layout, phase, "weights") == 0
    moved = parts_of(layout, phase, "weights", host=True) - parts_of(awake, phase, "weights", host=True)
    assert moved == pytest.approx(4 * WHOLE)


def test_weights_that_sleep_are_back_in_a_pass():
    layout = replace(FSDP, **ASLEEP)
    awake = replace(layout, weights_sleep=False)
    for host in (False, True):
        for phase in (Phase.BACKWARD, Phase.CHECKPOINT):
            sizes = [parts_of(each, phase, "weights", host=host) for each in (layout, awake)]
            assert sizes[0] == sizes[1]


def test_an_optimizer_that_is_not_offloaded_stays_beside_weights_that_sleep():
    layout = replace(FSDP, trainer_sleeps=True, **ASLEEP)
    assert parts_of(layout, Phase.ROLLOUT, "optimizer") == pytest.approx(8 * WHOLE / RANKS)
    assert parts_of(layout, Phase.ROLLOUT, "optimizer", optimizer_offload=True) == 0


def test_megatrons_copy_of_its_weights_stays_on_the_host_when_they_wake():
    layout = replace(MEGATRON, **ASLEEP)
    awake = replace(layout, weights_sleep=False)
    moved = parts_of(layout, Phase.BACKWARD, "weights", host=True)
    assert moved - parts_of(awake, Phase.BACKWARD, "weights", host=True) == pytest.approx(2 * WHOLE * RANKS)


@pytest.mark.parametrize("phase", [Phase.LOG_PROB, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT])
def test_an_optimizer_in_host_memory_leaves_fp32_weights_on_the_device(phase):
    layout = replace(MEGATRON, optimizer_stays_offloaded=True, optimizer_bytes=12, **ASLEEP)
    for beside in (False, True):
        result = replace(layout, masters_beside=beside)
        on_device = parts_of(result, phase, "optimizer", optimizer_offload=True)
        assert on_device == pytest.approx(beside * 4 * WHOLE / RANKS)
        # The host's copies are whole whatever the device keeps; those of the weights are page-locked.
        on_host = parts_of(result, phase, "optimizer", host=True, optimizer_offload=True)
        assert 12 * WHOLE < on_host < 16 * WHOLE


@pytest.mark.parametrize("stays", [False, True])
def test_such_weights_leave_the_device_with_the_trainer_where_the_framework_moves_them(stays):
    layout = replace(MEGATRON, optimizer_bytes=12, masters_beside=True, masters_stay=stays, **ASLEEP)
    kept = parts_of(layout, Phase.ROLLOUT, "optimizer", stays=("rollout",), optimizer_offload=True)
    assert kept == pytest.approx(stays * 4 * WHOLE / RANKS)


@pytest.mark.parametrize("phase", [Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.LOG_PROB])
@pytest.mark.parametrize(("optimizer_bytes", "stays"), [(12, 4), (8, 0)])
def test_master_weights_that_are_not_moved_stay_on_the_device(phase, optimizer_bytes, stays):
    layout = replace(
        MEGATRON,
        optimizer_stays_offloaded=False,
        optimizer_bytes=optimizer_bytes,
        masters_stay=True,
        **ASLEEP,
    )
    kept = parts_of(layout, phase, "optimizer", stays=("rollout",), optimizer_offload=True)
    assert kept == pytest.approx(stays * WHOLE / RANKS)
    moved = parts_of(layout, phase, "optimizer", host=True, optimizer_offload=True)
    assert moved == pytest.approx((optimizer_bytes - stays) * WHOLE)
