"""Host memory of a node, counted by hand for the toy: four ranks with a quarter of 1,696 parameters each."""

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.host import Node, node_of
from autotune.policies.estimate.parts import of_first
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.estimate.pinned import block, of_tensors, of_zero
from autotune.policies.estimate.training import fullest, states_of
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement

from .toy import CPU, GIB, LAYOUT, LOCAL, MEGATRON, NODE, TOY, WHOLE, by_phase, estimated, load

ALWAYS = frozenset(PHASES)
LOADING = {Phase.INIT}
BUILT = ALWAYS - LOADING  # what is made of a model that is loaded
ENGINE = {Phase.ROLLOUT_INIT, Phase.ROLLOUT}
PASSES = {Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
TRAINING = {Phase.FORWARD, Phase.BACKWARD}
SYNC, SAVE = {Phase.WEIGHT_SYNC}, {Phase.CHECKPOINT}
BESIDE_A_SAVE = {Phase.ROLLOUT, *PASSES, *SYNC}
DDP = replace(LAYOUT, strategy="ddp", shards=1)
ON_CPU = replace(MEGATRON, optimizer_stays_offloaded=True)


@pytest.mark.parametrize(
    ("layout", "placement", "gpus", "trainers", "engines"),
    [
        ({}, Placement.COLOCATED, 4, 4, 4),
        ({"engine_ranks": 0}, Placement.COLOCATED, 4, 4, 4),  # the trainer's own devices
        ({"engine_ranks": 2}, Placement.COLOCATED, 4, 4, 2),
        ({"ranks": 16, "engine_ranks": 16}, Placement.COLOCATED, 8, 8, 8),
        ({"ranks": 2, "engine_ranks": 2}, Placement.COLOCATED, 8, 2, 2),
        ({}, Placement.SEPARATE, 8, 4, 4),
        ({}, Placement.SEPARATE, 6, 4, 2),  # nodes are filled one after the other
        ({}, Placement.SEPARATE, 4, 4, 4),  # the trainer fills its node, engines have another
        ({"ranks": 8, "engine_ranks": 2}, Placement.ASYNCHRONOUS, 4, 4, 2),
        ({"ranks": 1, "engine_ranks": 1}, Placement.SEPARATE, 8, 1, 1),
        ({"engine_ranks": 0}, Placement.SEPARATE, 8, 4, 0),
        ({"ranks": 2, "engine_ranks": 1}, Placement.COLOCATED, 0, 2, 1),  # without devices: processes
    ],
)
def test_processes_on_one_node(layout, placement, gpus, trainers, engines):
    cluster = replace(NODE, gpus_per_node=gpus) if gpus else CPU
    job = load(replace(LAYOUT, **layout), placement=placement, cluster=cluster)
    assert node_of(job, cluster) == Node(trainers=trainers, engines=engines)


def differs(part, layout, knobs, base=LAYOUT, **job):
    """Return what settings add to one part on the host, by phase, where it is anything."""
    with_it, without = estimated(layout, **job, **knobs), estimated(base, **job)
    after, before = by_phase(with_it, part, host=True), by_phase(without, part, host=True)
    return {phase: after[phase] - before[phase] for phase in PHASES if after[phase] != before[phase]}


@pytest.mark.parametrize(
    ("part", "layout", "knobs", "size", "phases"),
    [
        # A critic as large as the policy: fp32 weights and two moments, of all four ranks.
        ("weights", {"critic": True, "critic_offload": True}, {}, 12 * LOCAL, BUILT),
        ("weights", {"critic": True}, {}, 0, ()),
        ("weights", {"critic_offload": True}, {}, 0, ()),
        ("weights", {"critic": True, "critic_follows": True}, {"optimizer_offload": True}, 8 * LOCAL, BUILT),
        ("weights", {"critic": True, "critic_follows": True}, {"param_offload": True}, 2 * 4 * LOCAL, BUILT),
        ("weights", {"critic_follows": True}, {"optimizer_offload": True}, 0, ()),
        # A frozen copy in bf16, spread over the ranks; adapters have the policy itself for one.
        ("weights", {"reference": True, "reference_offload": True}, {}, 2 * LOCAL, ALWAYS),
        (
            "weights",
            {"reference": True, "reference_offload": True, "reference_bytes": 4},
            {},
            4 * LOCAL,
            ALWAYS,
        ),
        ("weights", {"reference": True}, {}, 0, ()),
        ("weights", {"reference_offload": True}, {}, 0, ()),
        ("weights", {}, {"weights_backup": True}, 4 * 2 * LOCAL, BUILT),  # each rank has all of it
        ("weights", {}, {"param_offload": True}, 4 * LOCAL, BUILT),
        ("weights", {"weights_sleep": True}, {}, 4 * LOCAL, ENGINE),
        ("weights", {"weights_sleep": True}, {"param_offload": True}, 4 * LOCAL, BUILT),
        ("gradients", {}, {"grad_offload": True}, 4 * LOCAL, BUILT),
        ("gradients", {"trainer_sleeps": True}, {"param_offload": True}, 4 * LOCAL, BUILT),
        ("gradients", {}, {"param_offload": True}, 0, ()),
        ("optimizer", {}, {"optimizer_offload": True}, 8 * LOCAL, BUILT),
        (
            "optimizer",
            {},
            {"optimizer_offload": True, "optimizer_offload_fraction": 0.25},
            2 * LOCAL,
            BUILT,
        ),
        (
            "optimizer",
            {},
            {"optimizer_offload": True, "optimizer_offload_fraction": 0.0},
            8 * LOCAL,
            BUILT,
        ),
        ("optimizer", {}, {"optimizer_offload_fraction": 0.25}, 0, ()),
        ("optimizer", {"trainer_sleeps": True}, {"param_offload": True}, 8 * LOCAL, BUILT),
        ("optimizer", {"trainer_sleeps": True}, {}, 0, ()),
        ("optimizer", {"grad_offload_takes_optimizer": True}, {"grad_offload": True}, 8 * LOCAL, BUILT),
        ("buffers", {}, {"sync_mode": "disk"}, 2 * WHOLE, SYNC),  # one copy of the model on its way
        # Weights and moments of all ranks, written while the steps go on; no more at the save itself.
        ("buffers", {}, {"async_save": True}, 12 * LOCAL, BESIDE_A_SAVE),
        ("outside", {}, {"multimodal_cache": 4 << 30}, 0, ()),  # of a model of text
        ("outside", {}, {"dataloader_workers": 3}, 3 * 0.7 * GIB, ALWAYS),
        ("outside", {}, {"dataloader_workers": 500}, 64 * 0.7 * GIB, ALWAYS),
    ],
)
def test_what_is_moved_to_a_nodes_host(part, layout, knobs, size, phases):
    changed = differs(part, replace(LAYOUT, **layout), knobs)
    assert changed == pytest.approx(dict.fromkeys(phases, size))


@pytest.mark.parametrize(
    ("part", "base", "layout", "knobs", "size", "phases"),
    [
        # Without sharding each of four ranks has the whole reference; an adapter's policy is its own.
        ("weights", DDP, {"reference": True, "reference_offload": True}, {}, 4 * 2 * LOCAL, ALWAYS),
        (
            "weights",
            replace(LAYOUT, lora_rank=1),
            {"reference": True, "reference_offload": True},
            {},
            0,
            (),
        ),
        # Megatron's buffers keep their copy when they wake.
        ("weights", MEGATRON, {"weights_sleep": True}, {}, 4 * 2 * LOCAL, ALWAYS),
        # A CPU Adam has fp32 gradients of its own part.
        ("gradients", MEGATRON, {}, {"optimizer_offload": True}, 0, ()),
        ("gradients", ON_CPU, {}, {"optimizer_offload": True}, 4 * LOCAL, ALWAYS),
        (
            "gradients",
            ON_CPU,
            {},
            {"optimizer_offload": True, "optimizer_offload_fraction": 0.5},
            2 * LOCAL,
            ALWAYS,
        ),
        (
            "gradients",
            replace(LAYOUT, optimizer_stays_offloaded=True),
            {},
            {"optimizer_offload": True},
            0,
            (),
        ),
    ],
)
def test_what_a_strategy_moves_to_a_nodes_host(part, base, layout, knobs, size, phases):
    changed = differs(part, replace(base, **layout), knobs, base=base)
    assert changed == pytest.approx(dict.fromkeys(phases, size))


@pytest.mark.parametrize(
    ("layout", "placement", "tensor", "size"),
    [
        ({}, Placement.COLOCATED, 1, 4 * 2 * WHOLE),  # four engines, each with all of it in bf16
        ({}, Placement.COLOCATED, 2, 2 * 2 * WHOLE),  # two of two ranks each
        ({"engine_bytes": 1}, Placement.COLOCATED, 1, 4 * WHOLE),
        ({"engine_weights_on_host": False}, Placement.COLOCATED, 1, 0),
        ({}, Placement.SEPARATE, 1, 0),
    ],
)
def test_a_sleeping_engine_keeps_its_weights_on_the_host_while_the_trainer_works(
    layout, placement, tensor, size
):
    asleep = replace(LAYOUT, engine_sleeps=True, **layout)
    job = {"placement": placement, "engine": "sglang"}
    knobs = {"rollout_tensor_parallel": tensor}
    awake = replace(asleep, engine_sleeps=False)
    before = by_phase(estimated(awake, **job, **knobs), "weights", host=True)
    after = by_phase(estimated(asleep, **job, **knobs), "weights", host=True)
    added = {phase: after[phase] - before[phase] for phase in PHASES if after[phase] != before[phase]}
    assert added == pytest.approx(dict.fromkeys(PASSES, size) if size else {})


@pytest.mark.parametrize(
    ("layout", "knobs", "loaded"),
    [
        (LAYOUT, {}, 4 * WHOLE),  # FSDP reads the model once on a node, in fp32
        (replace(LAYOUT, parameter_bytes=2), {}, 2 * WHOLE),
        (replace(LAYOUT, parameter_bytes=1), {}, 2 * WHOLE),  # in the type of the passes at least
        (MEGATRON, {}, 4 * 2 * LOCAL),  # a rank of Megatron reads its own part
        (MEGATRON, {"tensor_parallel": 2}, 4 * 2 * LOCAL / 2),
        (replace(LAYOUT, loads_whole=True), {"memory_efficient_load": True}, 6 * WHOLE),
        (replace(LAYOUT, loads_whole=True), {}, 4 * WHOLE),
        (LAYOUT, {"memory_efficient_load": True}, 4 * WHOLE),
        (replace(LAYOUT, loads="ranks"), {}, 4 * 4 * WHOLE),
        (DDP, {}, 4 * 4 * WHOLE),  # so does every rank that is not sharded
    ],
)
def test_a_model_passes_through_the_host_when_it_is_loaded(layout, knobs, loaded):
    assert by_phase(estimated(layout, **knobs), "weights", host=True)[Phase.INIT] == pytest.approx(loaded)


@pytest.mark.parametrize(("tensor", "engines"), [(1, 4), (2, 2), (4, 1)])
def test_an_engine_that_starts_has_a_gib_of_its_own(tensor, engines):
    weights = by_phase(estimated(rollout_tensor_parallel=tensor), "weights", host=True)
    assert weights[Phase.ROLLOUT_INIT] - weights[Phase.ROLLOUT] == pytest.approx(engines * GIB)


def test_a_model_is_loaded_before_its_optimizer_is_made_except_by_megatron():
    for layout, there in ((LAYOUT, 0), (MEGATRON, 12 * LOCAL)):
        optimizer = by_phase(estimated(layout, optimizer_offload=True), "optimizer", host=True)
        assert optimizer[Phase.INIT] == pytest.approx(there)


def test_a_backup_of_vllms_weights_is_page_locked_and_stays_when_the_engine_wakes():
    asleep = replace(LAYOUT, engine_sleeps=True)
    odd = replace(TOY, hidden=9, intermediate=17, vocab=33)
    kept = {}
    for engine in ("sglang", "vllm"):
        with_it, without = (
            by_phase(estimated(layout, engine=engine, model=odd), "weights", host=True)
            for layout in (asleep, replace(asleep, engine_weights_on_host=False))
        )
        kept[engine] = {phase: with_it[phase] - without[phase] for phase in PHASES}
    assert kept["vllm"] == pytest.approx(dict.fromkeys(PHASES, kept["vllm"][Phase.ROLLOUT]), rel=1e-6)
    assert 1.2 < kept["vllm"][Phase.FORWARD] / kept["sglang"][Phase.FORWARD] < 2
    assert kept["sglang"][Phase.ROLLOUT] == 0


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [
        # Of a rank's 424 parameters: weights tensor by tensor, gradients in 16 bits and in fp32 as a block.
        ("fsdp2", 848 + 1024 - 848, 2048 - 4 * 424),
        ("ddp", 1024, 2 * (2048 - 4 * 424)),  # 16-bit weights of its part; fp32 weights and gradients
    ],
)
def test_deepspeed_page_locks_blocks(strategy, weights, gradients):
    zero = replace(
        LAYOUT,
        strategy=strategy,
        parameter_bytes=2,
        gradient_bytes=2,
        optimizer_bytes=12,
        optimizer_stays_offloaded=True,
        parameters_stay_offloaded=strategy == "fsdp2",
        reduce_bucket_bytes=1,
    )
    knobs = {"optimizer_offload": True, "param_offload": strategy == "fsdp2"}
    job = load(zero, **knobs)
    state = of_first(fullest(states_of(TOY, job)), 1)
    assert [float(each[0]) for each in of_zero(TOY, job, state)] == pytest.approx([weights, gradients])


@pytest.mark.parametrize(
    ("layout", "knobs", "size"),
    [
        (LAYOUT, {}, (4 + 8) * LOCAL),  # each rank its part
        (LAYOUT, {"optimizer_offload": True}, (4 + 8) * LOCAL),  # parked state passes through the device
        (replace(LAYOUT, staged="whole"), {}, 2 * WHOLE),  # rank 0 the model in 16 bits
        (replace(LAYOUT, staged="none"), {}, 0),
        (MEGATRON, {}, 4 * 2 * LOCAL + 12 * LOCAL),  # weights are whole in every rank
        (ON_CPU, {"optimizer_offload": True}, 4 * 2 * LOCAL),  # the rest is written from where it is
        (replace(MEGATRON, saves_optimizer=False), {}, 4 * 2 * LOCAL),
        # Every rank gathers what four share, and copies it.
        (replace(ON_CPU, staged="gathered"), {"optimizer_offload": True}, 4 * (2 + 2 * 12) * LOCAL),
    ],
)
def test_what_a_node_stages_of_a_checkpoint(layout, knobs, size):
    buffers = by_phase(estimated(layout, **knobs), "buffers", host=True)
    assert buffers[Phase.CHECKPOINT] - buffers[Phase.OPTIMIZER] == pytest.approx(size)


def test_a_page_locked_buffer_is_rounded_as_a_whole_and_tensors_one_by_one():
    sleeping = {"weights_sleep": True}
    exact = differs("weights", replace(MEGATRON, **sleeping), {}, base=MEGATRON)
    assert exact == pytest.approx(dict.fromkeys(ALWAYS, 4 * 2 * LOCAL))  # 3,392 bytes a rank
    buffers = replace(MEGATRON, pinned="buffers", **sleeping)
    assert differs("weights", buffers, {}, base=MEGATRON) == pytest.approx(dict.fromkeys(ALWAYS, 4 * 4096))
    # Fused q, k and v of 128 elements, the output of 64, gate and up of 256, down of 128, embedding and head
    # of 256 are powers of two.
    tensors = replace(MEGATRON, pinned="tensors", **sleeping)
    assert differs("weights", tensors, {}, base=MEGATRON) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (33 << 20, 64 << 20), (129 << 20, 256 << 20), (2300 << 20, 4 << 30)]
)
def test_blocks_are_what_was_measured(size, taken):
    assert block(np.array([float(size)]))[0] == taken


def test_tensors_of_any_size_are_rounded_by_up_to_twice():
    odd = replace(TOY, hidden=9, intermediate=17, vocab=33)
    for layout in (replace(MEGATRON, pinned="tensors"), replace(LAYOUT, pinned="tensors")):
        assert 1.2 < of_tensors(odd, load(layout), width=2)[0] < 2


def test_the_experts_that_a_rollout_chose_are_kept_for_the_trainer():
    experts = replace(TOY, experts=4, experts_per_token=2, expert_intermediate=8, dense_layers=1)
    plain = by_phase(estimated(LAYOUT, model=experts), "buffers", host=True)[Phase.ROLLOUT]
    tokens = load(LAYOUT).lengths.mean * LAYOUT.sequences
    shared, ahead = Placement.COLOCATED, Placement.ASYNCHRONOUS
    for routing, placement, copies in (("parts", shared, 3), ("recorded", shared, 4), ("parts", ahead, 4)):
        layout = replace(LAYOUT, routing=routing)
        kept = by_phase(estimated(layout, model=experts, placement=placement), "buffers", host=True)
        # Of one layer with experts, two choices of four bytes: with the driver, in Ray's store, in the ranks.
        assert kept[Phase.ROLLOUT] - plain == pytest.approx(tokens * 2 * 4 * copies)
    dense = by_phase(estimated(replace(LAYOUT, routing="parts")), "buffers", host=True)
    assert dense[Phase.ROLLOUT] == by_phase(estimated(), "buffers", host=True)[Phase.ROLLOUT]


def test_processes_of_a_node_by_where_they_run():
    for cluster, size in ((NODE, 4 * 3.5 + 4 * 4.0 + 6.0), (CPU, 4 * 0.6 + 4 * 1.8 + 1.5)):
        outside = by_phase(estimated(cluster=cluster), "outside", host=True)
        assert outside == pytest.approx(dict.fromkeys(PHASES, size * GIB))


def test_weights_gathered_from_the_host_are_copied_there_by_zero_plus_plus_alone():
    layout = replace(LAYOUT, parameters_stay_offloaded=True)
    second = replace(layout, secondary_shards=2)
    before, after = (
        by_phase(estimated(each, param_offload=True), "weights", host=True) for each in (layout, second)
    )
    added = {phase: after[phase] - before[phase] for phase in PHASES if after[phase] != before[phase]}
    assert added == pytest.approx(dict.fromkeys(PASSES, 4 * 4 * LOCAL / 2))


def test_offloaded_activations_of_all_ranks_are_on_the_host_in_a_training_pass():
    one = differs("activations", LAYOUT, {"activation_offload": True})
    assert set(one) == TRAINING
    both = differs(
        "activations", replace(LAYOUT, sequences=8), {"activation_offload": True, "microbatch_size": 2}
    )
    assert both == pytest.approx({phase: 2 * size for phase, size in one.items()})


def test_an_engine_keeps_processed_images_of_a_model_that_takes_them():
    """One cache of an engine, which the two ranks of its tensor parallelism share."""
    knobs = {"multimodal_cache": 4 << 30, "rollout_tensor_parallel": 2}
    result, blind = (estimated(LAYOUT, model=replace(TOY, tower=n), **knobs) for n in (1, 0))
    more = {
        p: by_phase(result, "outside", host=True)[p] - by_phase(blind, "outside", host=True)[p]
        for p in PHASES
    }
    assert more == pytest.approx(dict.fromkeys(PHASES, 2 * (4 << 30)))
