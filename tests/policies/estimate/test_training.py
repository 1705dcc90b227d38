"""Device memory of a trainer rank of the toy, part by part: a quarter of 1,696 parameters on each of four."""

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.estimate.training import state_of
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement

from .toy import CPU, LAYER, LAYOUT, LOCAL, MEGATRON, NODE, TOY, WHOLE, by_phase, estimated, load

PASSES = {Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD}
TRAINING = {Phase.FORWARD, Phase.BACKWARD}
UPDATED = {*TRAINING, Phase.OPTIMIZER, Phase.CHECKPOINT}
STORED = {*PASSES, Phase.OPTIMIZER, Phase.WEIGHT_SYNC, Phase.CHECKPOINT, Phase.ROLLOUT_INIT, Phase.ROLLOUT}
EVERYWHERE = {*STORED, Phase.INIT}
ALONE = replace(LAYOUT, strategy="none", ranks=1, shards=1, engine_ranks=1)
DDP = replace(LAYOUT, strategy="ddp", shards=1)


@pytest.mark.parametrize(
    ("layout", "knobs", "weights", "gradients", "optimizer"),
    [
        (LAYOUT, {}, LOCAL, LOCAL, 2 * LOCAL),  # fp32, and two moments of it
        (DDP, {}, 4 * LOCAL, 4 * LOCAL, 8 * LOCAL),
        (replace(DDP, shards=4), {}, 4 * LOCAL, 4 * LOCAL, 2 * LOCAL),  # ZeRO-1
        (replace(DDP, shards=4, shards_gradients=True), {}, 4 * LOCAL, LOCAL, 2 * LOCAL),  # ZeRO-2
        (MEGATRON, {}, 2 * LOCAL, 4 * LOCAL, 3 * LOCAL),
        (MEGATRON, {"tensor_parallel": 2}, LOCAL, 2 * LOCAL, 12 * LOCAL / 2 / 2),
        (ALONE, {}, 4 * LOCAL, 4 * LOCAL, 8 * LOCAL),
        (replace(LAYOUT, gradient_bytes=2, optimizer_bytes=12), {}, LOCAL, LOCAL / 2, 3 * LOCAL),
    ],
)
def test_what_a_rank_holds_at_an_update(layout, knobs, weights, gradients, optimizer):
    estimate = estimated(layout, **knobs)
    for part, size in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        assert by_phase(estimate, part)[Phase.OPTIMIZER] == pytest.approx(size)


def differs(part, base, layout, knobs, **job):
    """Return what settings add to one part on the device, by phase, where it is anything."""
    after, before = (
        by_phase(estimated(replace(base, **layout), **job, **knobs), part),
        by_phase(estimated(base, **job), part),
    )
    return {phase: after[phase] - before[phase] for phase in PHASES if after[phase] != before[phase]}


COPY = {"reference": True}
CRITIC = {"critic": True}
FOLLOWING = CRITIC | {"critic_follows": True}
BOTH_AWAY = {"param_offload": True, "optimizer_offload": True}
BUFFERED = replace(DDP, gradients_stay=True)


@pytest.mark.parametrize(
    ("part", "base", "layout", "knobs", "size", "phases"),
    [
        ("weights", LAYOUT, COPY, {}, 2 * LOCAL / 4, EVERYWHERE),
        ("weights", DDP, COPY, {}, 2 * LOCAL, EVERYWHERE),
        ("weights", LAYOUT, COPY | {"reference_bytes": 4}, {}, 4 * LOCAL / 4, EVERYWHERE),
        ("weights", LAYOUT, COPY | {"reference_offload": True}, {}, 0, ()),
        ("weights", replace(LAYOUT, lora_rank=1), COPY, {}, 0, ()),
        ("weights", LAYOUT, CRITIC, {}, (4 + 8) * LOCAL / 4, EVERYWHERE),
        ("weights", LAYOUT, CRITIC | {"critic_offload": True}, {}, 0, ()),
        # A critic that the trainer's settings offload too keeps only its optimizer, or only its weights.
        ("weights", LAYOUT, FOLLOWING, {"param_offload": True}, 8 * LOCAL / 4, EVERYWHERE),
        ("weights", LAYOUT, FOLLOWING, {"optimizer_offload": True}, 4 * LOCAL / 4, EVERYWHERE),
        ("weights", LAYOUT, FOLLOWING, BOTH_AWAY, 0, ()),
        # Buffers of gradients belong to a critic as to the policy.
        ("weights", BUFFERED, CRITIC, {}, (4 + 4 + 8) * LOCAL, EVERYWHERE),
        ("weights", BUFFERED, FOLLOWING, {"param_offload": True}, 8 * LOCAL, EVERYWHERE),
        ("weights", BUFFERED, CRITIC | {"critic_offload": True}, {}, 0, ()),
        ("optimizer", LAYOUT, {}, {"optimizer_offload": True}, -8 * LOCAL / 4, STORED - UPDATED),
        (
            "optimizer",
            replace(LAYOUT, optimizer_stays_offloaded=True),
            {},
            {"optimizer_offload": True},
            -8 * LOCAL / 4,
            STORED,
        ),
        (
            "optimizer",
            LAYOUT,
            {},
            {"optimizer_offload": True, "optimizer_offload_fraction": 0.5},
            -4 * LOCAL / 4,
            STORED - UPDATED,
        ),
    ],
)
def test_what_settings_add_to_a_device(part, base, layout, knobs, size, phases):
    # An engine's place is not the trainer's here.
    phases = set(phases) - ({Phase.ROLLOUT_INIT, Phase.ROLLOUT})
    changed = differs(part, base, layout, knobs, placement=Placement.SEPARATE)
    assert changed == pytest.approx(dict.fromkeys(phases, size))


@pytest.mark.parametrize(
    ("sequences", "forward", "complete"),
    [(4, 0, 4 * LOCAL / 4), (8, 4 * LOCAL, 4 * LOCAL / 4), (12, 4 * LOCAL, 4 * LOCAL / 4)],
)
def test_gradients_that_are_reduced_last_are_whole_from_the_second_micro_batch_on(
    sequences, forward, complete
):
    layout = replace(LAYOUT, reduces_last=True, sequences=sequences)  # one, two and three a rank
    gradients = by_phase(estimated(layout), "gradients")
    assert gradients[Phase.FORWARD] == pytest.approx(forward)
    assert gradients[Phase.OPTIMIZER] == pytest.approx(complete)


@pytest.mark.parametrize(
    ("layout", "sequences", "knobs", "forward"),
    [
        (LAYOUT, 4, {}, 0),  # the only micro-batch has none before it
        (LAYOUT, 8, {}, LOCAL),
        (replace(LAYOUT, reduce_bytes=2, reduces_last=True), 8, {}, 2 * LOCAL),
        (replace(LAYOUT, gradients_stay=True), 4, {}, LOCAL),
        (MEGATRON, 4, {}, 4 * LOCAL),  # buffers exist before the first
        (LAYOUT, 8, {"grad_offload": True}, LOCAL),  # moved between steps
        (replace(LAYOUT, optimizer_stays_offloaded=True), 8, {"grad_offload": True}, 0),
    ],
)
def test_gradients_of_earlier_micro_batches_wait_in_forward(layout, sequences, knobs, forward):
    gradients = by_phase(estimated(replace(layout, sequences=sequences), **knobs), "gradients")
    assert gradients[Phase.FORWARD] == pytest.approx(forward)


@pytest.mark.parametrize(
    ("layout", "knobs", "idle"),
    [
        (LAYOUT, {}, 0),
        (MEGATRON, {}, 4 * LOCAL),
        (MEGATRON, {"grad_offload": True}, 0),
        (MEGATRON, {"param_offload": True}, 0),
        (replace(LAYOUT, gradients_stay=True), {}, LOCAL),
        (replace(LAYOUT, gradients_stay=True), {"grad_offload": True}, 0),
    ],
)
def test_buffers_of_gradients_between_updates(layout, knobs, idle):
    gradients = by_phase(estimated(layout, **knobs), "gradients")
    resting = {phase: gradients[phase] for phase in (Phase.INIT, Phase.WEIGHT_SYNC, Phase.CHECKPOINT)}
    assert resting == pytest.approx(dict.fromkeys(resting, idle))


@pytest.mark.parametrize(
    ("layout", "knobs", "buffers"),
    [
        (LAYOUT, {}, 4 * LOCAL / 4),  # one fp32 temporary of everything
        (replace(LAYOUT, optimizer_temporary_bytes=8), {}, 8 * LOCAL / 4),
        (replace(LAYOUT, per_tensor_optimizer=True), {}, 4 * 256 / 4),  # of the embedding's part
        (replace(ALONE, per_tensor_optimizer=True), {}, 4 * 256),
        (replace(LAYOUT, update_parameters=100), {}, 4 * 100),
        (replace(LAYOUT, update_parameters=10**9), {}, 4 * LOCAL / 4),
        (LAYOUT, {"optimizer_offload": True}, 4 * LOCAL / 4),
        (replace(LAYOUT, optimizer_stays_offloaded=True), {"optimizer_offload": True}, 0),
        (
            replace(LAYOUT, optimizer_stays_offloaded=True),
            {"optimizer_offload": True, "optimizer_offload_fraction": 0.25},
            3 * LOCAL / 4,
        ),
    ],
)
def test_temporaries_of_an_update(layout, knobs, buffers):
    assert by_phase(estimated(layout, **knobs), "buffers")[Phase.OPTIMIZER] == pytest.approx(buffers)


@pytest.mark.parametrize(
    ("layout", "knobs", "weights", "buffers"),
    [
        # Two buckets of the whole model, which is less than one; the embedding is gathered from its shards.
        (LAYOUT, {}, LOCAL + 2 * 256, 2 * 2 * WHOLE),
        (LAYOUT, {"sync_buffer": 1000}, LOCAL + 2 * 256, 2 * 1000),
        (LAYOUT, {"sync_buffer": 100}, LOCAL + 2 * 256, 2 * 2 * 256),  # a bucket holds the largest tensor
        (replace(LAYOUT, sync_buckets=1), {"sync_buffer": 1000}, LOCAL + 2 * 256, 1000),
        (LAYOUT, {"sync_mode": "disk"}, LOCAL + 2 * 256, 0),
        (replace(LAYOUT, gathers_whole=True), {}, LOCAL + 4 * LOCAL, 2 * 2 * WHOLE),
        (replace(LAYOUT, shards=1), {}, 4 * LOCAL, 2 * 2 * WHOLE),
        (replace(DDP, shards=4), {}, 4 * LOCAL, 2 * 2 * WHOLE),
        (LAYOUT, {"tensor_parallel": 2}, 2 * LOCAL / 2 + 2 * 256 / 2, 2 * 2 * WHOLE),
    ],
)
def test_what_a_weight_sync_sends(layout, knobs, weights, buffers):
    estimate = estimated(layout, **knobs)
    assert by_phase(estimate, "weights")[Phase.WEIGHT_SYNC] == pytest.approx(weights)
    assert by_phase(estimate, "buffers")[Phase.WEIGHT_SYNC] == pytest.approx(buffers)


FSDP1 = replace(LAYOUT, strategy="fsdp", copies_shards=True, sync_buckets=0)
# While its state dict is made: embedding and head, a layer, and of that its last product once more, in fp32.
UNITS = 4 * (2 * 256 + LAYER + 8 * 16)


@pytest.mark.parametrize(
    ("layout", "knobs", "weights", "buffers"),
    [
        (FSDP1, {}, 2 * LOCAL + UNITS, 0),
        (FSDP1, {"param_offload": True}, 2 * LOCAL + UNITS, 0),  # they come back for it
        (replace(FSDP1, parameter_bytes=2), {}, LOCAL + UNITS / 2, 0),
        # The buckets are the larger part: shards, their copies, and the embedding in the type of the shards.
        (replace(FSDP1, sync_buckets=4), {}, 2 * LOCAL + 4 * 256, 4 * 2 * WHOLE),
        (replace(FSDP1, sync_buckets=4), {"param_offload": True}, LOCAL + 4 * 256, 4 * 2 * WHOLE),
        (replace(FSDP1, shards=1, ranks=1), {}, 4 * LOCAL, 0),
    ],
)
def test_the_sharded_state_dict_of_fsdp1_copies_the_shards(layout, knobs, weights, buffers):
    estimate = estimated(layout, **knobs)
    assert by_phase(estimate, "weights")[Phase.WEIGHT_SYNC] == pytest.approx(weights)
    assert by_phase(estimate, "buffers")[Phase.WEIGHT_SYNC] == pytest.approx(buffers)


@pytest.mark.parametrize(
    ("layout", "kept", "copies"),
    [
        (ALONE, 4 * 256, 3 * 4 * 256),  # both and their sum, in the gradients' own type
        (LAYOUT, 4 * 256 / 4, 3 * 2 * 256),  # whole in the type of the pass before they are spread
        (replace(LAYOUT, lora_rank=1), 0, 0),  # it is not trained
    ],
)
def test_a_tied_embedding_has_two_gradients_for_a_moment(layout, kept, copies):
    state = state_of(replace(TOY, tied=True), load(layout))
    assert (float(state.tied_gradient[0]), float(state.tied_copies[0])) == (kept, copies)
    apart = state_of(TOY, load(layout))
    assert (float(apart.tied_gradient[0]), float(apart.tied_copies[0])) == (0, 0)


def test_without_a_gpu_a_process_has_no_context():
    outside = by_phase(estimated(ALONE, cluster=CPU), "outside")
    assert outside[Phase.OPTIMIZER] == 7 * (1 << 20)


def test_half_of_a_gathered_layer_is_on_the_device_while_a_model_is_built():
    weights = by_phase(estimated(), "weights")
    # In bf16: the head, a layer, and the output of the gather that the layer is copied from.
    assert weights[Phase.INIT] - LOCAL == pytest.approx(2 * (256 + LAYER + LAYER) / 2)
    assert weights[Phase.CHECKPOINT] == pytest.approx(LOCAL)


@pytest.mark.parametrize(
    ("cluster", "knobs", "prefill"),
    [(NODE, {}, 8192), (CPU, {}, 2048), (CPU, {"max_batched_tokens": 512}, 512)],
)
def test_a_prefill_chunk_by_default(cluster, knobs, prefill):
    assert load(cluster=cluster, **knobs).prefill == prefill


@pytest.mark.parametrize("host", [False, True])
def test_gradients_that_take_everything_along_are_as_weights_that_stay_in_host_memory(host):
    everything = estimated(replace(LAYOUT, grad_offload_takes_all=True), grad_offload=True)
    weights = estimated(replace(LAYOUT, parameters_stay_offloaded=True), param_offload=True)
    for part in PARTS:
        assert by_phase(everything, part, host=host) == by_phase(weights, part, host=host)
    usual = estimated(replace(LAYOUT, grad_offload_takes_all=True))
    for part, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        moved = [by_phase(each, part, host=host)[Phase.OPTIMIZER] for each in (usual, everything)]
        # Four ranks share this host; each gives up its quarter.
        assert moved[1] - moved[0] == pytest.approx(size * LOCAL if host else -size * LOCAL / 4)
