"""The estimate: figures that others published, and what every change of a knob must do to it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.launchers.frameworks.core.optimizer_state import with_zero
from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.engine import kv_token_bytes
from autotune.policies.estimate.host import node_of
from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.passes import logits_of, pass_of
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.estimate.pinned import block
from autotune.policies.estimate.shapes import kept_by_layer, parameters
from autotune.policies.estimate.training import state_of
from autotune.policies.values.architecture.model import Layout, Model, model_from_config
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from benchmarks.architectures import ARCHITECTURES
from benchmarks.one_estimate import estimate

GIB = 1 << 30
CLUSTER = Cluster(
    address="local",
    nodes=1,
    gpus_per_node=8,
    gpu_memory_bytes=80 * GIB,
    host_memory_bytes=1024 * GIB,
    gpu_name="NVIDIA A100-SXM4-80GB",
)
MODELS = {name: model_from_config(config) for name, config in ARCHITECTURES.items()}
QWEN = MODELS["Qwen2.5-7B"]
FSDP = Layout(
    strategy="fsdp2",
    ranks=8,
    shards=8,
    engine_ranks=8,
    reference=True,
    engine_sleeps=True,
    sequences=512,
    prompt_tokens=1024,
    response_tokens=3072,
)
MEGATRON = replace(
    FSDP, strategy="megatron", parameter_bytes=2, optimizer_bytes=12, optimizer_stays_offloaded=True
)
KNOBS = Knobs(tokens_per_microbatch=8192, dynamic_batching=True, memory_fraction=0.5, concurrency=128)


def profile(layout=FSDP, knobs=KNOBS, *, placement=Placement.COLOCATED, engine="sglang"):
    return Profile(
        framework="any",
        knobs=knobs,
        supported={},
        placement=placement,
        engine=engine,
        longest_sequence=layout.prompt_tokens + layout.response_tokens,
        layout=layout,
    )


def totals(matched):
    return matched.gpu[:, 0], matched.host[:, 0]


# --------------------------------------------------------------------------- what others published


def test_zero_figure_1():
    """120, 31.4, 16.6 and 1.9 GB: 7.5 billion parameters on 64 devices (ZeRO, 1910.02054, figure 1)."""
    model = Model(
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        intermediate=16384,
        vocab=50000,
        gated=False,
    )
    scale = 7.5e9 / parameters(model).total
    layout = Layout(ranks=64, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12)
    for spread, published in (
        (replace(layout, strategy="ddp"), 120),
        (with_zero(layout, 0, optimizer="adamw"), 120),
        (replace(layout, strategy="megatron", shards=64), 31.4),
        (with_zero(layout, 1, optimizer="adamw"), 31.4),
        (with_zero(layout, 2, optimizer="adamw"), 16.6),
        (replace(layout, strategy="fsdp2", shards=64), 1.9),
        (with_zero(layout, 3, optimizer="adamw"), 1.9),
    ):
        load = load_of(profile(spread), CLUSTER, [Knobs()])
        state = state_of(model, load)
        held = float((state.weights + state.gradients + state.optimizer)[0])
        assert held * scale / 1e9 == pytest.approx(published, rel=0.02)


def test_zero_copies_gradients_into_a_bucket_in_backward_alone():
    layout = with_zero(replace(FSDP, engine_ranks=0), 2, optimizer="adamw")
    result, without = (
        estimates(profile(each, engine="none"), CLUSTER, QWEN, [KNOBS]).gpu[:, 0]
        for each in (layout, replace(layout, reduce_bucket_bytes=1))
    )
    more = np.zeros(len(PHASES))
    more[PHASES.index(Phase.BACKWARD)] = 1e9
    assert result - without == pytest.approx(more, abs=1.0)


def zero(stage, **settings):
    return with_zero(replace(FSDP, engine_ranks=0, reference=False), stage, optimizer="adamw", **settings)


def parts_of(layout, phase, part, *, host=False, **knobs):
    predicted = estimates(profile(layout, engine="none"), CLUSTER, QWEN, [replace(KNOBS, **knobs)])
    sizes = predicted.host_parts if host else predicted.gpu_parts
    return float(sizes[PHASES.index(phase), PARTS.index(part), 0])


WHOLE = parameters(QWEN).total


@pytest.mark.parametrize("on_host", [False, True])
def test_zero_plus_plus_shares_a_second_copy_of_the_weights_from_a_pass_to_the_update(on_host):
    twice = {Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    for stage, secondary, each in ((3, 1, 0.0), (3, 4, 2 * WHOLE / 4), (2, 4, 0.0)):
        for phase in PHASES:
            second, without = (
                parts_of(layout, phase, "weights", host=on_host, param_offload=on_host)
                for layout in (zero(stage, secondary=secondary), zero(stage))
            )
            copies = (8 if on_host else 1) * each * (phase in twice)
            assert second - without == pytest.approx(copies, rel=1e-5, abs=1.0)


@pytest.mark.parametrize(
    ("layout", "resident", "updated"),
    [
        (zero(0), 0, 2 * WHOLE),
        (zero(1), 0, 2 * WHOLE / 8),  # the others' parts have gone once they are reduced
        (zero(1, accumulated=4), 4 * WHOLE, 4 * WHOLE),
        (zero(2), 0, 2 * WHOLE / 8),
        (zero(2, accumulated=4), 0, 4 * WHOLE / 8),
        (zero(3), 2 * WHOLE / 8 + 1e9, 2 * WHOLE / 8 + 1e9),
        (zero(3, accumulated=4), 4 * WHOLE / 8 + 1e9, 4 * WHOLE / 8 + 1e9),
    ],
)
def test_gradients_of_each_stage_of_zero(layout, resident, updated):
    assert parts_of(layout, Phase.LOG_PROB, "gradients") == pytest.approx(resident)
    assert parts_of(layout, Phase.OPTIMIZER, "gradients") == pytest.approx(updated)


@pytest.mark.parametrize(("stage", "left"), [(1, 2 * WHOLE), (2, 0), (3, 0)])
def test_an_optimizer_on_the_host_takes_the_gradients_that_are_spread(stage, left):
    """Stage 1 keeps them whole until the last micro-batch, stages 2 and 3 send what they reduced."""
    embedding = QWEN.vocab * QWEN.hidden * 2  # the buffer of the largest weight, below stage 3
    bucket = 1e9
    backward = parts_of(zero(stage), Phase.BACKWARD, "gradients", optimizer_offload=True)
    assert backward - bucket == pytest.approx(left, abs=embedding)
    on_host = parts_of(zero(stage), Phase.OPTIMIZER, "optimizer", host=True, optimizer_offload=True)
    assert on_host == pytest.approx(12 * WHOLE)
    sums = parts_of(zero(stage), Phase.OPTIMIZER, "gradients", host=True, optimizer_offload=True)
    # Page-locked blocks of fp32: of stage 3 gradients alone, else as much again for the weights.
    blocks = 8 * float(block(4 * WHOLE / 8)) - 4 * WHOLE
    assert sums == pytest.approx(
        (4 if stage == 1 else 6) * WHOLE + blocks * (1 if stage == 3 else 2), rel=1e-5
    )
    assert parts_of(zero(stage), Phase.OPTIMIZER, "optimizer", optimizer_offload=True) == 0


def test_zero_3_updates_a_billion_parameters_at_once():
    few = replace(zero(3), ranks=2, shards=2)
    assert parts_of(few, Phase.OPTIMIZER, "buffers") == 4e9
    assert parts_of(zero(3), Phase.OPTIMIZER, "buffers") == pytest.approx(4 * WHOLE / 8)


def test_weights_used_from_host_memory_have_gradients_and_optimizer_beside_them():
    layout = replace(FSDP, engine_ranks=0, reference=False, parameters_stay_offloaded=True)
    for part in ("gradients", "optimizer"):
        assert parts_of(layout, Phase.OPTIMIZER, part) > 0
        assert parts_of(layout, Phase.OPTIMIZER, part, param_offload=True) == 0
        assert parts_of(layout, Phase.OPTIMIZER, part, host=True, param_offload=True) > 0
    assert parts_of(layout, Phase.OPTIMIZER, "buffers", param_offload=True) == 0


@pytest.mark.parametrize(
    ("layout", "knobs", "more"),
    [
        (FSDP, {}, 0),
        (replace(FSDP, shards=4), {}, 1),
        (replace(FSDP, shards=4), {"tensor_parallel": 2}, 1),
        (FSDP, {"sequence_parallel": 4}, 1),
        (zero(2), {}, 0),
        (replace(FSDP, strategy="none", ranks=1, shards=1), {}, 0),
        (replace(MEGATRON, shards=2, pipeline_parallel=2), {"tensor_parallel": 2}, 3),
        (replace(MEGATRON, shards=1), {"tensor_parallel": 8}, 1),
        (replace(MEGATRON, shards=8, expert_parallel=8), {}, 2),
    ],
)
def test_every_kind_of_parallelism_has_a_communicator(layout, knobs, more):
    own = replace(KNOBS, **knobs)
    load = load_of(profile(layout, own), CLUSTER, [own])
    first = sum(constant(name) for name in ("context", "modules", "workspaces", "collectives"))
    outside = float(state_of(QWEN, load).outside[0])
    assert outside == pytest.approx(first + more * constant("communicator"))


def test_state_that_sleeps_is_on_the_device_for_an_update_alone():
    layout = replace(zero(2), grad_offload_takes_optimizer=True, critic=True, critic_follows=True)
    awake, asleep = (
        [parts_of(layout, phase, "optimizer", grad_offload=on) for phase in (Phase.LOG_PROB, Phase.OPTIMIZER)]
        for on in (False, True)
    )
    assert awake == pytest.approx([12 * WHOLE / 8] * 2) and asleep == pytest.approx([0, 12 * WHOLE / 8])
    weights = [parts_of(layout, Phase.CHECKPOINT, "weights", grad_offload=on) for on in (False, True)]
    assert weights == pytest.approx([4 * WHOLE + 12 * WHOLE / 8, 4 * WHOLE])  # the critic's state is moved


def test_a_trainer_that_sends_from_host_memory_holds_nothing_but_what_it_sends():
    def held(phase, *, from_host):
        layout = replace(FSDP, trainer_sleeps=True, sends_from_host=from_host)
        away = {Phase.ROLLOUT.value: (Component.ROLLOUT.value,)}
        of = replace(profile(layout, engine="none"), resident=away)
        knobs = [replace(KNOBS, param_offload=True)]
        sizes = estimates(of, CLUSTER, QWEN, knobs).gpu_parts[PHASES.index(phase), :, 0]
        return sizes[PARTS.index("optimizer")], sizes.sum()

    assert held(Phase.CHECKPOINT, from_host=True) == held(Phase.CHECKPOINT, from_host=False)
    (state, whole), (left, sent) = (held(Phase.WEIGHT_SYNC, from_host=each) for each in (False, True))
    assert state > left == 0 and sent < whole - state


def test_activations_of_a_gpt_layer():
    """34 bytes per token and hidden unit, 2 of them masks of dropouts (Korthikanti et al., 2205.05198)."""
    hidden = 12288
    model = Model(
        layers=96,
        hidden=hidden,
        heads=96,
        kv_heads=96,
        head_dim=128,
        intermediate=4 * hidden,
        vocab=51200,
        gated=False,
        norm="layer",
    )
    assert sum(kept_by_layer(model, element_bytes=2)) / hidden == pytest.approx(32, rel=0.005)


def test_a_token_of_opt_13b_in_the_pool():
    """800 KB (Kwon et al., 2309.06180, section 3)."""
    model = Model(
        layers=40, hidden=5120, heads=40, kv_heads=40, head_dim=128, intermediate=20480, vocab=50272
    )
    load = load_of(profile(), CLUSTER, [Knobs()])
    assert kv_token_bytes(model, load)[0] == 800 * 1024


def test_the_loss_of_gemma_2():
    """24 GB for 8,192 tokens of 256,000 words, in fp32 (Wijmans et al., 2411.09009, abstract)."""
    gemma = replace(MODELS["Gemma-7B (8.5B)"], hidden=2304)
    layout = replace(FSDP, sequences=1, prompt_tokens=8192, response_tokens=0)
    load = load_of(profile(layout), CLUSTER, [Knobs(tokens_per_microbatch=8192)])
    loss = logits_of(gemma, load, tokens=load.tokens, scored=load.scored).backward[0]
    assert loss / 2**20 == pytest.approx(24_000, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "vocab", "width", "tensor", "published", "source"),
    [
        (205_280, 152_064, 4, 2, 58.15, "THUDM/slime#1951: the failed request, [205280, 76032] in fp32"),
        (103_756, 152_064, 4, 2, 29.39, "THUDM/slime#1951: that of another step"),
        (11_600, 248_320, 4, 1, 10.8, "THUDM/slime#2253: fp32 logits of a micro-batch of 11.6k tokens"),
        (32_768, 151_936, 4, 1, 18.5, "modelscope/ms-swift#6966: logits.float() of 32k tokens"),
        (4_096, 131_072, 2, 1, 1.0, "foundation-model-stack/fms-fsdp#152: 4k tokens, 128k words, bf16"),
        (8_192, 248_320, 4, 1, 8.0, "NVIDIA-NeMo/labs-molt#121: fp32 kept for 8k tokens of 248k words"),
        (1_024, 32_000, 4, 1, 0.12, "meta-pytorch/torchtune#1046: (2, 512, 32000) in fp32, 120 MB"),
    ],
)
def test_one_copy_of_the_logits(tokens, vocab, width, tensor, published, source):
    load = load_of(profile(replace(FSDP, logits_bytes=width)), CLUSTER, [Knobs(tensor_parallel=tensor)])
    count = np.array([float(tokens)])
    result = logits_of(replace(QWEN, vocab=vocab), load, tokens=count, scored=count).kept[0] / GIB
    assert result == pytest.approx(published, rel=0.06), source


# --------------------------------------------------------------------------- one and many


def test_one_is_a_column_of_many():
    others = [replace(KNOBS, tokens_per_microbatch=tokens) for tokens in (4096, 8192, 16384)]
    predicted = estimates(profile(), CLUSTER, QWEN, others)
    for column, knobs in enumerate(others):
        one = estimate(profile(), CLUSTER, QWEN, knobs)
        for row, phase in enumerate(PHASES):
            assert one.phases[phase].gpu.total == pytest.approx(predicted.gpu[row, column])
            assert one.phases[phase].host.total == pytest.approx(predicted.host[row, column])
        assert one.step_s == pytest.approx(predicted.step_s[column])


def test_a_knob_left_out_is_the_jobs_own():
    assert estimate(profile(), CLUSTER, QWEN, Knobs()) == estimate(profile(), CLUSTER, QWEN, KNOBS)


def test_what_is_missing_and_what_is_free():
    small = replace(CLUSTER, gpu_memory_bytes=8 * GIB)
    backward = estimate(profile(), small, QWEN, KNOBS).phases[Phase.BACKWARD]
    assert backward.gpu_missing_bytes == pytest.approx(backward.gpu.total - 8 * GIB)
    unknown = replace(CLUSTER, gpu_memory_bytes=0)
    assert estimate(profile(), unknown, QWEN, KNOBS).phases[Phase.BACKWARD].gpu_missing_bytes == 0


def test_separate_devices_have_their_own_budgets():
    budgets = replace(
        profile(placement=Placement.SEPARATE), trainer_budget_bytes=70 * GIB, engine_budget_bytes=30 * GIB
    )
    phases = estimate(budgets, CLUSTER, QWEN, KNOBS).phases
    assert phases[Phase.ROLLOUT].gpu_capacity_bytes == 30 * GIB
    assert phases[Phase.BACKWARD].gpu_capacity_bytes == 70 * GIB
    assert phases[Phase.ROLLOUT].gpu.optimizer == 0
    assert phases[Phase.BACKWARD].gpu.kv_pool == 0


@pytest.mark.parametrize(("budget", "on_engine"), [(80 * GIB, True), (30 * GIB, False)])
def test_weights_are_sent_as_far_as_the_fuller_of_two_devices_allows(budget, on_engine):
    """The engine fills half of its 80 GiB, and the trainer needs 19."""
    awake = replace(FSDP, engine_sleeps=False)
    apart = replace(profile(awake, placement=Placement.SEPARATE), trainer_budget_bytes=budget)
    predicted = estimates(apart, CLUSTER, QWEN, [KNOBS])
    row = PHASES.index(Phase.WEIGHT_SYNC)
    parts = {part: float(predicted.gpu_parts[row, PARTS.index(part), 0]) for part in ("kv_pool", "optimizer")}
    assert (parts["kv_pool"] > 0, parts["optimizer"] > 0) == (on_engine, not on_engine)
    assert predicted.on_engine[row, 0] == on_engine
    assert predicted.gpu_capacity[row, 0] == (CLUSTER.gpu_memory_bytes if on_engine else budget)
    for phase in (Phase.ROLLOUT_INIT, Phase.ROLLOUT):
        assert predicted.on_engine[PHASES.index(phase), 0] == 1


def test_the_fraction_means_what_the_engine_means():
    layout = replace(FSDP, engine_sleeps=False)
    separate = {"placement": Placement.SEPARATE}
    vllm = (
        estimate(profile(layout, engine="vllm", **separate), CLUSTER, QWEN, KNOBS).phases[Phase.ROLLOUT].gpu
    )
    sglang = estimate(profile(layout, **separate), CLUSTER, QWEN, KNOBS).phases[Phase.ROLLOUT].gpu
    # vLLM: half the device for all but context and graphs; SGLang: half of what was free.
    covered = vllm.weights + vllm.kv_pool + vllm.activations + vllm.outside - constant("context")
    assert covered == pytest.approx(0.5 * 80 * GIB)
    assert sglang.weights + sglang.kv_pool == pytest.approx(0.5 * (80 * GIB - sglang.outside))


def test_a_sleeping_engine_leaves_its_residue():
    awake = (
        estimate(profile(replace(FSDP, engine_sleeps=False)), CLUSTER, QWEN, KNOBS).phases[Phase.BACKWARD].gpu
    )
    asleep = estimate(profile(), CLUSTER, QWEN, KNOBS).phases[Phase.BACKWARD].gpu
    assert awake.kv_pool > 0 == asleep.kv_pool
    assert asleep.residue > 0 == awake.residue


def test_a_model_that_is_loaded_whole_fills_every_device():
    layout = replace(FSDP, loads_whole=True)
    predicted = estimates(profile(layout), CLUSTER, QWEN, [Knobs(), Knobs(memory_efficient_load=True)])
    sharded = estimates(profile(), CLUSTER, QWEN, [Knobs()])
    start, whole = PHASES.index(Phase.INIT), parameters(QWEN).total * layout.parameter_bytes
    assert predicted.gpu[start, 0] >= whole
    assert predicted.gpu[start, 1] == sharded.gpu[start, 0] < whole / 2
    assert predicted.host[start, 1] - predicted.host[start, 0] == pytest.approx(parameters(QWEN).total * 2)
    later = [place for place in range(len(PHASES)) if place != start]
    assert (predicted.gpu[later, 0] == predicted.gpu[later, 1]).all()


def test_vllm_stays_within_its_share_beside_its_context_and_captures_graphs_on_top():
    apart = Layout(ranks=8, engine_ranks=8, sequences=512, prompt_tokens=1024, response_tokens=3072)
    job = profile(apart, placement=Placement.SEPARATE, engine="vllm")
    graphs = Knobs(memory_fraction=0.5, concurrency=1024, max_batched_tokens=512)
    few_rows = replace(graphs, concurrency=16, max_batched_tokens=65536)
    predicted = estimates(job, CLUSTER, QWEN, [replace(graphs, cuda_graphs="off"), graphs, few_rows])
    peak = predicted.gpu[PHASES.index(Phase.ROLLOUT)]
    assert peak[0] == pytest.approx(0.5 * CLUSTER.gpu_memory_bytes + constant("context"))
    assert peak[1] == peak[2] > peak[0]
    assert (predicted.pool_tokens > 0).all()
    start = predicted.gpu[PHASES.index(Phase.ROLLOUT_INIT)]
    assert start[1] == pytest.approx(peak[1])  # the sampler is warmed up after the graphs
    assert start[2] < peak[2]


def test_a_job_without_an_engine_has_no_pool():
    predicted = estimates(profile(engine="none"), CLUSTER, QWEN, [KNOBS])
    alone = estimates(profile(replace(FSDP, engine_sleeps=False), engine="none"), CLUSTER, QWEN, [KNOBS])
    assert np.isinf(predicted.pool_tokens).all()
    assert not predicted.gpu_parts[:, PARTS.index("kv_pool")].any()
    assert not predicted.gpu_parts[:, PARTS.index("residue")].any()
    assert (predicted.gpu == alone.gpu).all()
    assert np.isfinite(predicted.seconds).all()


def kept_by_stages(knobs=KNOBS, **sizes):
    """Return the parts of backward's largest instant on a pipeline's fullest stage, in bytes."""
    job = profile(replace(MEGATRON, mini_batch=512, **sizes), engine="none")
    predicted = estimates(job, CLUSTER, QWEN, [knobs]).gpu_parts[PHASES.index(Phase.BACKWARD), :, 0]
    return dict(zip(PARTS, predicted.tolist(), strict=True))


def test_a_pipelines_first_stage_holds_a_micro_batch_for_every_stage_and_no_logits():
    one = Knobs(microbatch_size=1, recompute="full")
    few = replace(one, fused_kernels=False)
    last_is_largest = kept_by_stages(few, pipeline_parallel=2, ranks=2, shards=1)
    assert last_is_largest["logits"] > 0
    full = replace(one, recompute="off")
    first_is_largest = kept_by_stages(full, pipeline_parallel=4, ranks=4, shards=1)
    assert first_is_largest["logits"] == 0
    # Four micro-batches of a quarter of the layers, as without stages.
    whole = kept_by_stages(full, ranks=1, shards=1)
    assert first_is_largest["activations"] == pytest.approx(whole["activations"], rel=0.1)


def test_interleaved_stages_keep_more_in_flight():
    full = Knobs(microbatch_size=1, recompute="off", fused_kernels=True)
    four = {"pipeline_parallel": 4, "ranks": 4, "shards": 1}
    plain, interleaved = (kept_by_stages(full, pipeline_chunks=chunks, **four) for chunks in (1, 7))
    # 1 + 2 x 3 + 6 x 4 of 7 chunks a stage, where the plain schedule keeps four stages.
    assert interleaved["activations"] / plain["activations"] == pytest.approx(31 / 28, rel=0.02)


def test_fewer_micro_batches_than_stages_are_all_in_flight():
    full = Knobs(microbatch_size=1, recompute="off")
    many = kept_by_stages(full, pipeline_parallel=4, ranks=4, shards=1)["activations"]
    job = replace(MEGATRON, pipeline_parallel=4, ranks=4, shards=1, sequences=2, mini_batch=2)
    predicted = estimates(profile(job, engine="none"), CLUSTER, QWEN, [full])
    two = predicted.gpu_parts[PHASES.index(Phase.BACKWARD), PARTS.index("activations"), 0]
    assert two < 0.7 * many


def test_a_sync_that_gathers_the_whole_model_needs_room_for_it():
    adapters = replace(FSDP, lora_rank=32, parameter_bytes=4)
    items = [
        estimates(profile(layout), CLUSTER, QWEN, [KNOBS]).gpu_parts[PHASES.index(Phase.WEIGHT_SYNC)]
        for layout in (adapters, replace(adapters, gathers_whole=True))
    ]
    weights = [parts[PARTS.index("weights"), 0] for parts in items]
    assert weights[1] - weights[0] > 3.5 * parameters(QWEN).total


def test_what_is_not_measured_is_less_certain():
    def error(layout, model=QWEN):
        return estimate(profile(layout), CLUSTER, model, KNOBS).phases[Phase.BACKWARD].error

    dense = error(FSDP)
    assert dense < error(MEGATRON) < error(replace(MEGATRON, pipeline_parallel=2))
    assert dense < error(FSDP, MODELS["Qwen3-30B-A3B"])
    assert dense < error(replace(FSDP, lora_rank=32))
    assert dense < error(replace(FSDP, shards=4))
    assert dense < error(with_zero(FSDP, 2, optimizer="adamw"))


@pytest.mark.parametrize("away", [False, True])
def test_a_reference_of_wider_type_takes_more(away: bool):
    narrow = replace(FSDP, reference_offload=away)
    items = [
        estimates(profile(layout), CLUSTER, QWEN, [Knobs()])
        for layout in (narrow, replace(narrow, reference_bytes=4))
    ]
    place, more = PHASES.index(Phase.LOG_PROB), parameters(QWEN).total * 2
    assert items[1].gpu[place, 0] - items[0].gpu[place, 0] == pytest.approx(0 if away else more / 8)
    assert items[1].host[place, 0] - items[0].host[place, 0] == pytest.approx(more if away else 0)


def test_adapters_train_little():
    full = estimate(profile(), CLUSTER, QWEN, KNOBS).phases[Phase.OPTIMIZER].gpu
    adapted = estimate(profile(replace(FSDP, lora_rank=32)), CLUSTER, QWEN, KNOBS).phases[Phase.OPTIMIZER].gpu
    assert adapted.optimizer < 0.03 * full.optimizer
    assert adapted.weights <= full.weights


# --------------------------------------------------------------------------- what knobs must do

models = st.sampled_from([MODELS["Qwen2.5-0.5B"], QWEN, MODELS["Llama-3.1-70B"], MODELS["Qwen3-30B-A3B"]])
layouts = st.builds(
    lambda base, **changes: replace(base, **changes),
    st.sampled_from(
        [
            FSDP,
            MEGATRON,
            replace(FSDP, strategy="fsdp"),
            replace(FSDP, critic=True, entropy=True),
            with_zero(FSDP, 2, optimizer="adamw"),
        ]
    ),
    engine_sleeps=st.booleans(),
    tokens_before_split=st.booleans(),
    padded=st.booleans(),
    logits_bytes=st.sampled_from([2, 4]),
    optimizer_stays_offloaded=st.booleans(),
    parameters_stay_offloaded=st.booleans(),
)
placements = st.sampled_from(list(Placement))
engines = st.sampled_from(["sglang", "vllm"])
knob_values = {
    "concurrency": st.integers(1, 1024),
    "memory_fraction": st.floats(0.1, 0.95),
    "rollout_tensor_parallel": st.sampled_from([1, 2, 4, 8]),
    "cuda_graphs": st.sampled_from(["off", "limited", "full"]),
    "max_batched_tokens": st.integers(256, 65536),
    "tokens_per_microbatch": st.integers(4096, 131072),
    "recompute": st.sampled_from(["off", "selective", "modules", "full"]),
    "activation_offload": st.booleans(),
    "param_offload": st.booleans(),
    "grad_offload": st.booleans(),
    "optimizer_offload": st.booleans(),
    "optimizer_offload_fraction": st.floats(0, 1),
    "sequence_parallel": st.sampled_from([1, 2, 4]),
    "tensor_parallel": st.sampled_from([1, 2, 4]),
    "expert_parallel": st.sampled_from([1, 2, 4]),
    "pipeline_parallel": st.sampled_from([1, 2, 4]),
    "shard_group": st.sampled_from([1, 2, 4, 8]),
    "reshard_after_forward": st.booleans(),
    "fused_kernels": st.booleans(),
    "loss_recompute": st.booleans(),
    "memory_efficient_load": st.booleans(),
    "logprob_tokens": st.integers(4096, 131072),
    "logprob_chunk": st.none() | st.integers(16, 65536),
    "entropy_chunking": st.booleans(),
    "entropy_recompute": st.booleans(),
    "sync_mode": st.sampled_from(["memory", "disk"]),
    "sync_buffer": st.integers(1 << 20, 8 << 30),
    "layered_sync": st.booleans(),
    "weights_backup": st.booleans(),
    "dataloader_workers": st.integers(0, 64),
    "async_save": st.booleans(),
    "multimodal_cache": st.integers(0, 8 << 30),
    "allocator": st.sampled_from(["default", "expandable"]),
    "memory_margin": st.integers(0, 4 << 30),
}
knobs = st.builds(lambda **values: Knobs(dynamic_batching=True, **values), **knob_values)
jobs = st.builds(
    lambda layout, placement, engine: profile(layout, placement=placement, engine=engine),
    layouts,
    placements,
    engines,
)
MEMORY = settings(max_examples=60, deadline=None)


@MEMORY
@given(job=jobs, model=models, chosen=knobs)
def test_every_figure_is_finite_and_positive(job, model, chosen):
    predicted = estimates(job, CLUSTER, model, [chosen])
    for parts in (predicted.gpu_parts, predicted.host_parts, predicted.seconds):
        assert np.isfinite(parts).all()
        assert (parts >= 0).all()
    assert 0 < predicted.step_s[0] < math.inf


# A cure and the memory that it may never raise.
GPU_CURES = {
    "memory_fraction": lambda value: value * 0.8,
    "concurrency": lambda value: max(1, value // 2),
    "cuda_graphs": lambda value: "off",
    "max_batched_tokens": lambda value: value // 2,
    "recompute": lambda value: "full",
    "param_offload": lambda value: True,
    "grad_offload": lambda value: True,
    "optimizer_offload": lambda value: True,
    "shard_group": lambda value: 2 * value,
    "reshard_after_forward": lambda value: True,
    "fused_kernels": lambda value: True,
    "memory_efficient_load": lambda value: True,
    "entropy_chunking": lambda value: True,
    "entropy_recompute": lambda value: True,
    "logprob_tokens": lambda value: max(4096, value // 2),
    "sync_mode": lambda value: "disk",
    "sync_buffer": lambda value: value // 2,
    "layered_sync": lambda value: True,
    "allocator": lambda value: "expandable",
    "memory_margin": lambda value: 0,
}
HOST_CURES = {
    "param_offload": lambda value: False,
    "grad_offload": lambda value: False,
    "optimizer_offload": lambda value: False,
    "activation_offload": lambda value: False,
    "memory_efficient_load": lambda value: False,
    "weights_backup": lambda value: False,
    "dataloader_workers": lambda value: 0,
    "async_save": lambda value: False,
    "multimodal_cache": lambda value: 0,
    "sync_mode": lambda value: "memory",
}


def compared(job, model, before, after):
    predicted = estimates(job, CLUSTER, model, [before, after])
    # Two instants of a phase that nearly tie are told apart by less than a thousandth.
    return predicted, predicted.gpu[:, 0] * (1 + 1e-3) + 1, predicted.host[:, 0] * (1 + 1e-3) + 1


@MEMORY
@given(job=jobs, model=models, chosen=knobs, name=st.sampled_from(sorted(GPU_CURES)))
def test_a_cure_never_needs_more_device_memory(job, model, chosen, name):
    if name == "recompute":
        # Of activations in host memory there is nothing to free.
        chosen = replace(chosen, activation_offload=False)
    cured = replace(chosen, **{name: GPU_CURES[name](getattr(chosen, name))})
    if job.placement is Placement.COLOCATED and name.endswith("_offload"):
        # What the trainer leaves free at the start is what SGLang's fraction is taken of.
        job = replace(job, engine="vllm")
    if name in ("max_batched_tokens", "concurrency"):
        # vLLM gives its pool what smaller passes and samplers leave of the fraction.
        job = replace(job, engine="sglang")
    result, limit, _ = compared(job, model, chosen, cured)
    lower = result.gpu[:, 1] <= limit
    if name == "recompute":
        # Layers that are computed again split freed blocks, also for a pass without gradients.
        lower[PHASES.index(Phase.LOG_PROB)] = True
    assert lower.all()


@MEMORY
@given(job=jobs, model=models, chosen=knobs, name=st.sampled_from(sorted(HOST_CURES)))
def test_a_cure_never_needs_more_host_memory(job, model, chosen, name):
    cured = replace(chosen, **{name: HOST_CURES[name](getattr(chosen, name))})
    result, _, limit = compared(job, model, chosen, cured)
    assert (result.host[:, 1] <= limit).all()


@MEMORY
@given(job=jobs, model=models, chosen=knobs, share=st.floats(0.1, 1))
def test_fewer_tokens_never_need_more(job, model, chosen, share):
    fewer = replace(chosen, tokens_per_microbatch=max(4096, int(chosen.tokens_per_microbatch * share)))
    # One micro-batch has no gradients to add to; from two on they wait in every forward.
    load = load_of(job, CLUSTER, [chosen, fewer])
    if (load.passes > 1).all():
        result, gpu, host = compared(job, model, chosen, fewer)
        assert (result.gpu[:, 1] <= gpu).all()
        assert (result.host[:, 1] <= host).all()


@MEMORY
@given(job=jobs, model=models, chosen=knobs)
def test_offloaded_activations_move_from_device_to_host(job, model, chosen):
    kept, moved = (replace(chosen, activation_offload=value) for value in (False, True))
    result, gpu, _ = compared(job, model, kept, moved)
    assert (result.gpu[:, 1] <= gpu).all()
    place = PHASES.index(Phase.BACKWARD)
    load = load_of(job, CLUSTER, [kept])
    trainers = node_of(load, CLUSTER).trainers
    freed = trainers * float(pass_of(model, load, tokens=load.tokens).kept[0])
    assert result.host[place, 1] == pytest.approx(result.host[place, 0] + freed, rel=1e-6)


# What saves memory, and the phase that it makes longer.
COSTS = {
    "recompute": ("full", Phase.BACKWARD),
    "activation_offload": (True, Phase.BACKWARD),
    "param_offload": (True, Phase.FORWARD),
    "grad_offload": (True, Phase.OPTIMIZER),
    "optimizer_offload": (True, Phase.OPTIMIZER),
}


@MEMORY
@given(job=jobs, model=models, chosen=knobs, name=st.sampled_from(sorted(COSTS)))
def test_what_saves_memory_takes_time(job, model, chosen, name):
    off = {knob: False for knob in COSTS if knob != "recompute"}
    plain = replace(chosen, recompute="off", optimizer_offload_fraction=None, **off)
    value, phase = COSTS[name]
    predicted = estimates(job, CLUSTER, model, [plain, replace(plain, **{name: value})])
    before, after = predicted.seconds[PHASES.index(phase)]
    assert after > before
    assert predicted.step_s[1] >= predicted.step_s[0]


def test_full_recomputation_is_one_more_forward():
    chosen = [replace(KNOBS, recompute=mode) for mode in ("off", "selective", "full")]
    predicted = estimates(profile(), CLUSTER, QWEN, chosen)
    forward, backward = (predicted.seconds[PHASES.index(p)] for p in (Phase.FORWARD, Phase.BACKWARD))
    assert backward[2] - backward[0] == pytest.approx(forward[0], rel=0.05)
    assert 0 < backward[1] - backward[0] < 0.1 * forward[0]


def test_ranks_beyond_the_heads_hold_no_less_of_a_token():
    model = replace(QWEN, kv_heads=2)
    chosen = [replace(KNOBS, rollout_tensor_parallel=ranks) for ranks in (1, 2, 4, 8)]
    one, *others = kv_token_bytes(model, load_of(profile(), CLUSTER, chosen))
    assert others == [one / 2] * 3


def test_graphs_memory_sync_and_a_larger_pool_are_faster():
    slow = replace(KNOBS, cuda_graphs="off", sync_mode="disk", memory_fraction=0.3, concurrency=1024)
    job = profile(replace(FSDP, sequences=4096))
    for name, value in (("cuda_graphs", "full"), ("sync_mode", "memory"), ("memory_fraction", 0.8)):
        predicted = estimates(job, CLUSTER, QWEN, [slow, replace(slow, **{name: value})])
        assert predicted.step_s[1] < predicted.step_s[0]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.one_of(st.none(), st.integers(1, 10**9)),
    rows=st.one_of(st.none(), st.integers(1, 10**6)),
    ranks=st.integers(1, 512),
    sequences=st.integers(0, 10**6),
)
def test_odd_jobs_are_estimated_too(tokens, rows, ranks, sequences):
    layout = replace(FSDP, ranks=ranks, shards=ranks, sequences=sequences)
    chosen = Knobs(tokens_per_microbatch=tokens, microbatch_size=rows)
    predicted = estimates(profile(layout, chosen), CLUSTER, QWEN, [chosen])
    assert np.isfinite(predicted.gpu).all()
    assert (predicted.gpu > 0).all()
