"""Seconds of the toy's phases on a card of round figures, where one limit at a time decides."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.constants import Card
from autotune.policies.estimate.passes import pass_of
from autotune.policies.estimate.roofline import seconds, step_seconds
from autotune.policies.estimate.training import state_of
from autotune.policies.values.profile import Placement

from .toy import CPU, LAYOUT, LOCAL, MEGATRON, NODE, TOY, WHOLE, load

ENDLESS = 1e30
LINK = 0.25  # of a card's links: constant("link")
PCIE, DISK, FABRIC, CPU_ADAM = 22e9, 1.5e9, 25e9, 1.5e9
LAUNCH = 1.1e-5
LAUNCHES = 2 * 60 * LAUNCH  # of a pass: 60 kernels in each of two layers
HOOKS = 2 * 9e-4  # of FSDP in two layers
# Per token: two FLOPs for each weight but the embedding's, and attention over 32 tokens.
TOKEN_FLOPS = 2 * (2 * (192 + 384) + 32 * 8) + 2 * 2 * 2 * 4 * 32
ALONE = replace(LAYOUT, strategy="none", ranks=1, shards=1, engine_ranks=1)  # four sequences on one device


def timed(layout=LAYOUT, *, cluster=NODE, pool=ENDLESS, placement=Placement.COLOCATED, card=None, **knobs):
    """Return the seconds of each phase, on a card of which only the given limits count."""
    of = load(layout, cluster=cluster, placement=placement, **knobs)
    limits = {"flops": ENDLESS, "bandwidth": ENDLESS, "link": ENDLESS} | (card or {})
    result = seconds(
        TOY,
        of,
        cluster=cluster,
        card=Card(**limits),
        state=state_of(TOY, of),
        run=pass_of(TOY, of, tokens=of.usual_tokens),
        pool_tokens=np.array([pool]),
    )
    return {phase: float(value[0]) for phase, value in result.items()}


@pytest.mark.parametrize(
    ("layout", "knobs", "expected"),
    [
        # Fp32 weights and gradients and two moments are read and written: 2 x (4 + 4 + 8) bytes.
        ({}, {}, 32 * LOCAL / 4),
        ({"gradient_bytes": 2}, {}, 28 * LOCAL / 4),
        ({"optimizer_bytes": 12}, {}, 40 * LOCAL / 4),
        ({"parameter_bytes": 2}, {}, 28 * LOCAL / 4),
        ({"optimizer_bytes": 0}, {}, 16 * LOCAL / 4),
        ({"strategy": "none", "shards": 1}, {}, 32 * LOCAL),
    ],
)
def test_an_update_reads_and_writes_the_whole_state(layout, knobs, expected):
    result = timed(replace(LAYOUT, **layout), card={"bandwidth": 1e6}, **knobs)
    assert result["optimizer"] == pytest.approx(expected / 1e6)


HALF = {"optimizer_offload": True, "optimizer_offload_fraction": 0.5}


@pytest.mark.parametrize(
    ("layout", "knobs", "expected"),
    [
        ({}, {"optimizer_offload": True}, 2 * 8 / PCIE),  # moments come and go
        ({}, HALF, 8 / PCIE),
        ({}, {"grad_offload": True}, 2 * 4 / PCIE),
        ({}, {"optimizer_offload": True, "grad_offload": True}, (2 * 8 + 2 * 4) / PCIE),
        ({"optimizer_stays_offloaded": True}, {"optimizer_offload": True}, 1 / CPU_ADAM + 2 * 4 / PCIE),
        ({"optimizer_stays_offloaded": True}, HALF, (1 / CPU_ADAM + 2 * 4 / PCIE) / 2),
        (
            {"optimizer_stays_offloaded": True},
            {"optimizer_offload": True, "optimizer_offload_overlap": True},
            0.6 * (1 / CPU_ADAM + 2 * 4 / PCIE),
        ),
        ({}, {"optimizer_offload_overlap": True}, 0),
    ],
)
def test_an_optimizer_on_the_host_takes_its_links_or_its_processors(layout, knobs, expected):
    result = timed(replace(LAYOUT, **layout), **knobs)
    assert result["optimizer"] == pytest.approx(expected * LOCAL / 4)


def test_without_a_gpu_an_update_on_the_host_is_twice_as_much_again():
    stays = replace(LAYOUT, optimizer_stays_offloaded=True)
    result = timed(stays, cluster=CPU, card={"bandwidth": 1e6}, optimizer_offload=True)
    assert result["optimizer"] == pytest.approx(3 * 32 * LOCAL / 4 / 1e6)


@pytest.mark.parametrize(
    ("layout", "knobs", "cluster", "link", "expected"),
    [
        ({}, {}, NODE, 4e9, 2 * 2 * WHOLE / 1e9 + 5e-3),
        ({"engine_bytes": 1}, {}, NODE, 4e9, 2 * WHOLE / 1e9 + 5e-3),
        # 3,408 bytes in buckets of 1,000: four.
        ({}, {"sync_buffer": 1000}, NODE, 4e9, 4 * WHOLE / 1e9 + 4 * 5e-3),
        ({}, {"sync_mode": "disk"}, NODE, 4e9, 4 * WHOLE / DISK + 1),
        ({}, {"param_offload": True}, NODE, 4e9, 4 * LOCAL / 4 / PCIE + 4 * WHOLE / 1e9 + 5e-3),
        # Between nodes the slower of both counts.
        ({}, {}, replace(NODE, gpus_per_node=2), 4e12, 4 * WHOLE / FABRIC + 5e-3),
        ({}, {}, replace(NODE, gpus_per_node=2), 4e9, 4 * WHOLE / 1e9 + 5e-3),
        ({}, {}, NODE, 4e12, 4 * WHOLE / 1e12 + 5e-3),
    ],
)
def test_a_weight_sync(layout, knobs, cluster, link, expected):
    result = timed(replace(LAYOUT, **layout), cluster=cluster, card={"link": link}, **knobs)
    assert result["weight_sync"] == pytest.approx(expected)


def test_a_step_is_the_sum_of_its_phases_unless_training_and_generation_overlap():
    phases = ("rollout", "log_prob", "forward", "backward", "optimizer", "weight_sync")
    sizes = {phase: np.array([float(2**n)]) for n, phase in enumerate(phases)}  # 1, 2, 4, 8, 16, 32
    assert step_seconds(load(), sizes) == 63
    assert step_seconds(load(placement=Placement.SEPARATE), sizes) == 63
    assert step_seconds(load(placement=Placement.ASYNCHRONOUS), sizes) == 2 + 4 + 8 + 16 + 32
    sizes["rollout"] = np.array([100.0])
    assert step_seconds(load(placement=Placement.ASYNCHRONOUS), sizes) == 100 + 32


FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}


@pytest.mark.parametrize(
    ("layout", "knobs", "forward", "backward", "scoring"),
    [
        ({}, {}, 1, 2, 1),
        ({}, FULL, 1, 3, 1),
        ({}, SELECTIVE, 1, 2.05, 1),
        ({}, {"loss_recompute": True}, 1, 2.05, 1),
        ({}, {"entropy_recompute": True}, 1, 2.02, 1),
        ({}, {"entropy_chunking": True}, 1, 2.02, 1),
        ({}, {"fused_kernels": True}, 0.97, 2 * 0.97, 0.97),
        ({"critic": True}, {}, 2, 4, 2),
        ({"reference": True}, {}, 1, 2, 2),
        ({"critic": True, "reference": True}, {}, 2, 4, 4),
        ({"ranks": 2}, {"tensor_parallel": 2}, 0.5, 1, 0.5),
        # Two stages and four micro-batches: half of the layers, and one more of four while it fills.
        ({"strategy": "megatron", "ranks": 2, "pipeline_parallel": 2}, {}, 0.625, 1.25, 0.625),
    ],
)
def test_compute_of_a_pass(layout, knobs, forward, backward, scoring):
    result = timed(replace(ALONE, **layout), card={"flops": 1e6}, **knobs)
    one = 4 * 32 * TOKEN_FLOPS / 1e6
    assert result["forward"] == pytest.approx(forward * one / 0.40, rel=1e-3)
    assert result["backward"] == pytest.approx(backward * one / 0.40, rel=1e-3)
    assert result["log_prob"] == pytest.approx(scoring * one / 0.50, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "rows", "passes", "score_passes"),
    [({}, 1, 4, 4), ({}, 2, 2, 2), ({}, 4, 1, 1), ({"mini_batch": 2}, 4, 2, 1)],
)
def test_launches_decide_where_a_pass_has_little_to_compute(layout, rows, passes, score_passes):
    result = timed(replace(ALONE, **layout), microbatch_size=rows)
    assert result["forward"] == pytest.approx(passes * LAUNCHES)
    assert result["log_prob"] == pytest.approx(score_passes * LAUNCHES)


GATHER = 2 * LOCAL / 1e3  # seconds: all in bf16 over a link of which 1,000 bytes per second remain
SLOW = {"card": {"link": 4e3}}


@pytest.mark.parametrize(
    ("strategy", "shards", "gathered"), [("fsdp", 4, 1), ("fsdp2", 4, 1), ("fsdp2", 1, 0), ("ddp", 4, 0)]
)
def test_gathered_weights_hide_behind_compute_as_far_as_it_goes(strategy, shards, gathered):
    result = timed(replace(LAYOUT, strategy=strategy, shards=shards), **SLOW)
    launched = LAUNCHES + HOOKS * (strategy != "ddp")
    expected = GATHER + 0.1 * launched if gathered else launched
    assert result["forward"] == pytest.approx(expected)
    assert result["log_prob"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("knobs", "exchanges"),
    [({}, 0), ({"tensor_parallel": 2}, 4), ({"sequence_parallel": 2}, 2), ({"context_parallel": 2}, 2)],
)
def test_parallel_ranks_exchange_rows_in_every_layer(knobs, exchanges):
    layout = replace(LAYOUT, strategy="ddp", shards=1, ranks=2, sequences=2)
    result = timed(layout, **SLOW, **knobs)
    tokens = {"tensor_parallel": 64, "sequence_parallel": 32, "context_parallel": 32}.get(
        next(iter(knobs), ""), 0
    )
    rows = tokens * 8 * 2 / 1e3  # bf16 rows of the hidden size
    passes = 1 if not knobs else 2
    assert result["forward"] == pytest.approx(passes * LAUNCHES + 2 * exchanges * rows)
    assert result["log_prob"] == pytest.approx(passes * LAUNCHES + 2 * exchanges * rows)


def test_weights_on_the_host_come_and_go_once_a_phase_or_in_every_pass():
    move = 2 * 4 * LOCAL / PCIE  # all fp32 weights of one device, there and back
    plain, away = timed(ALONE), timed(ALONE, param_offload=True)
    assert away["forward"] - plain["forward"] == pytest.approx(move)
    assert away["log_prob"] - plain["log_prob"] == pytest.approx(move)
    assert away["backward"] == plain["backward"]
    layer_by_layer = timed(replace(ALONE, parameters_stay_offloaded=True), param_offload=True)
    assert layer_by_layer["forward"] - plain["forward"] == pytest.approx(4 * 2 * move)


def test_offloaded_activations_cross_the_link_in_backward():
    of = load(ALONE)
    kept = float(pass_of(TOY, of, tokens=of.usual_tokens).kept[0])
    more = timed(ALONE, activation_offload=True)["backward"] - timed(ALONE)["backward"]
    assert more == pytest.approx(4 * kept / PCIE)  # of four passes, half hidden of there and back


@pytest.mark.parametrize(("chunk", "pieces"), [(8, 4), (16, 2), (32, 0), (64, 0)])
def test_a_loss_in_pieces_launches_more_kernels(chunk, pieces):
    more = timed(ALONE, logprob_chunk=chunk)["forward"] - timed(ALONE)["forward"]
    expected = 4 * pieces * 4 * LAUNCH + 0.01 * 4 * LAUNCHES * (pieces > 0)
    assert more == pytest.approx(expected, abs=1e-12)


# A prompt and a response of 16 tokens each: two sequences a device.
ANSWERS = replace(
    LAYOUT,
    ranks=2,
    shards=2,
    engine_ranks=2,
    prompt_tokens=16,
    response_tokens=16,
    prompt_mean=16,
    response_mean=16,
)
TOKEN_BYTES = 2 * 2 * 4 * 2  # keys and values of one head of 4 in two layers, bf16
STEP = 1.5e-3  # scheduler and sampler
PREFILL = 2 * 16 / 8192 * STEP  # the prompts' share of a chunk of 8,192 tokens
ACTIVE = 2 * (192 + 384) + 32 * 8


@pytest.mark.parametrize(
    ("layout", "knobs", "pool", "card", "expected"),
    [
        ({}, {}, ENDLESS, {}, 16 * STEP + PREFILL),
        ({"response_mean": 8}, {}, ENDLESS, {}, 16 * STEP + PREFILL),  # until the longest has ended
        ({}, {"concurrency": 1}, ENDLESS, {}, 32 * STEP + PREFILL),  # one after the other
        ({}, {}, 24.0, {}, 32 * STEP + PREFILL),  # room for a prompt and half of its answer, once
        ({}, {}, 12.0, {}, 32 * STEP + PREFILL),  # one runs whatever the pool
        ({}, {"max_batched_tokens": 16}, ENDLESS, {}, 16 * STEP + 2 * STEP),
        ({}, {"cuda_graphs": "off"}, ENDLESS, {}, 16 * (STEP + 2 * 1.2e-4) + PREFILL),
        ({}, {"cuda_graphs": "limited"}, ENDLESS, {}, 16 * STEP + PREFILL),
        ({"engine_ranks": 0}, {}, ENDLESS, {}, 16 * STEP + PREFILL),
        # 64 sequences on each of two devices: more than limited graphs are captured for.
        (
            {"sequences": 128},
            {"cuda_graphs": "limited", "concurrency": 64},
            ENDLESS,
            {},
            16 * (STEP + 2 * 1.2e-4 / 2) + 32 * PREFILL,
        ),
        (
            {"sequences": 64},
            {"cuda_graphs": "limited", "concurrency": 64},
            ENDLESS,
            {},
            16 * STEP + 16 * PREFILL,
        ),
        # All weights in bf16 and two sequences of 24 tokens are read for each of 16 tokens.
        (
            {},
            {},
            ENDLESS,
            {"bandwidth": 1e6},
            16 * (STEP + (2 * WHOLE + 2 * 24 * TOKEN_BYTES) / 0.7e6) + PREFILL,
        ),
        ({}, {}, ENDLESS, {"flops": 1e6}, 16 * (STEP + 4 * ACTIVE / 1e6) + 32 * 2 * ACTIVE / 0.5e6 + PREFILL),
        # One engine of two ranks: four sequences, two all-reduces a layer of 8 us and 16 bytes a row.
        (
            {},
            {"rollout_tensor_parallel": 2},
            ENDLESS,
            {"link": 4e6},
            16 * (STEP + 4 * 8e-6 + 4 * 4 * 16 / 1e6) + 2 * PREFILL + 64 * 4 * 16 / 1e6,
        ),
        (
            {},
            {"rollout_tensor_parallel": 2},
            ENDLESS,
            {"bandwidth": 1e6},
            # The only head of keys is on both ranks.
            16 * (STEP + 4 * 8e-6 + (WHOLE + 4 * 24 * TOKEN_BYTES) / 0.7e6) + 2 * PREFILL,
        ),
    ],
)
def test_a_rollout(layout, knobs, pool, card, expected):
    result = timed(replace(ANSWERS, **layout), pool=pool, card=card, **knobs)
    assert result["rollout"] == pytest.approx(expected, rel=1e-3)


def test_megatron_gathers_nothing_for_a_pass():
    assert timed(MEGATRON, **SLOW)["forward"] == pytest.approx(LAUNCHES)
