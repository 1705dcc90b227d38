"""Parameters and kept bytes of small models, counted by hand from their matrices."""

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.shapes import (
    active_parameters,
    gradient_set,
    kept_at_the_end,
    kept_by_layer,
    last_matrix,
    lora_parameters,
    parameters,
    working_set,
)

from .toy import LAYER, TOY, WHOLE

# Four experts with an inner size of 6, of which a token meets two.
MIXTURE = replace(TOY, intermediate=0, experts=4, experts_per_token=2, expert_intermediate=6)
GROUPED = replace(TOY, heads=4, kv_heads=2, head_dim=2)
# One layer of attention (1 head of 2) and one of linear attention: 2 x 3 keys and 2 x 5 values.
HYBRID = replace(
    TOY,
    heads=1,
    head_dim=2,
    intermediate=4,
    vocab=4,
    attention_layers=1,
    linear_layers=1,
    linear_keys=2,
    linear_key_dim=3,
    linear_values=2,
    linear_value_dim=5,
    linear_conv=4,
)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, 0),
        ({"tied": True}, -32 * 8),
        ({"layers": 3}, LAYER),
        ({"norm": "layer"}, 2 * 16 + 8),  # a bias beside every norm's weights
        ({"norms_per_layer": 4}, 2 * 16),
        ({"qkv_bias": True}, 2 * (8 + 2 * 4)),
        ({"output_bias": True}, 2 * 8),
        ({"mlp_bias": True}, 2 * (2 * 16 + 8)),
        ({"gated": False, "mlp_bias": True}, 2 * (16 + 8 - 8 * 16)),
        ({"gated": False}, -2 * 8 * 16),
        ({"attention_gate": True}, 2 * 8 * 8),
        ({"sinks": True}, 2 * 2),
        ({"qk_norm": "head"}, 2 * 2 * 4),
        ({"qk_norm": "all"}, 2 * (8 + 4)),
        ({"qk_norm": "l2"}, 0),
        ({"tower": 1000}, 1000),
    ],
)
def test_parameters_of_the_toy(changes, more):
    assert parameters(replace(TOY, **changes)).total == WHOLE + more


@pytest.mark.parametrize(
    ("changes", "mlp", "experts"),
    [
        ({}, 4 * 8, 4 * 3 * 8 * 6),  # a router and four times three matrices
        ({"expert_bias": True}, 4 * 8 + 4, 4 * (3 * 8 * 6 + 2 * 6 + 8)),
        ({"shared_gate": True}, 4 * 8 + 8, 4 * 3 * 8 * 6),
        ({"shared_intermediate": 5}, 4 * 8 + 3 * 8 * 5, 4 * 3 * 8 * 6),
        ({"expert_hidden": 4}, 4 * 8 + 2 * 8 * 4, 4 * 3 * 4 * 6),
        ({"gated": False}, 4 * 8, 4 * 2 * 8 * 6),
        # One layer of two without experts.
        ({"dense_layers": 1, "intermediate": 16}, (4 * 8 + 3 * 8 * 16) / 2, 4 * 3 * 8 * 6 / 2),
    ],
)
def test_parameters_of_experts(changes, mlp, experts):
    counts = parameters(replace(MIXTURE, **changes))
    assert (counts.mlp, counts.experts) == (mlp, experts)


@pytest.mark.parametrize(
    ("model", "changes", "largest", "apart"),
    [
        (TOY, {}, 32 * 8, 32 * 8),
        (TOY, {"vocab": 4}, 8 * 16, 8 * 16),
        (TOY, {"vocab": 4, "fused_gate": True}, 2 * 8 * 16, 2 * 8 * 16),
        (TOY, {"vocab": 4, "intermediate": 4}, 8 * 8, 8 * 8),
        (TOY, {"vocab": 4, "intermediate": 4, "attention_gate": True}, 2 * 8 * 8, 2 * 8 * 8),
        (TOY, {"vocab": 4, "intermediate": 4, "fused_qkv": True}, 8 * 16, 8 * 16),
        # transformers holds gate and up of all experts in one tensor, Megatron those of each in its own.
        (MIXTURE, {"vocab": 4}, 4 * 2 * 8 * 6, 2 * 8 * 6),
        (MIXTURE, {"vocab": 4, "intermediate": 99}, 4 * 2 * 8 * 6, 2 * 8 * 6),
        (HYBRID, {"linear": "delta"}, 8 * (2 * 6 + 10), 8 * (2 * 6 + 10)),
        (HYBRID, {"linear": "mamba2"}, 8 * (2 * 10 + 2 * 6 + 2), 8 * (2 * 10 + 2 * 6 + 2)),
        (HYBRID, {"linear": "mamba"}, 2 * 8 * 10, 2 * 8 * 10),
        (HYBRID, {"linear": "conv"}, 3 * 8 * 8, 3 * 8 * 8),
    ],
)
def test_the_largest_tensor(model, changes, largest, apart):
    counts = parameters(replace(model, **changes))
    assert (counts.largest, counts.largest_apart) == (largest, apart)


@pytest.mark.parametrize(
    ("linear", "count"),
    [
        # Queries, keys, values, gate and output; two scales a head with their rows; a norm; taps.
        ("delta", 8 * (2 * 6 + 3 * 10) + 2 * 8 * 2 + 2 * 2 + 5 + 4 * (2 * 6 + 10)),
        ("mamba2", 8 * (10 + 22 + 2 + 10) + 3 * 2 + 10 + 22 * 5),
        # A time step has a rank of one for a hidden size of 8.
        ("mamba", 3 * 8 * 10 + 10 * (1 + 2 * 3) + 10 + 10 + 1 + 2 * 3 + 10 * 3 + 10 + 10 * 5),
        ("conv", 4 * 8 * 8 + 4 * 8),
    ],
)
def test_parameters_of_a_layer_without_attention(linear, count):
    attention = 2 * 8 * 2 + 2 * 8 * 2
    assert parameters(replace(HYBRID, linear=linear)).attention == (attention + count) / 2


@pytest.mark.parametrize(("hidden", "rank"), [(16, 1), (17, 2), (32, 2), (40, 3)])
def test_mambas_time_steps_have_a_sixteenth_of_the_hidden_size_rounded_up(hidden, rank):
    counts = parameters(replace(HYBRID, hidden=hidden, linear="mamba")).attention
    rest = 3 * hidden * 10 + 10 * 2 * 3 + 10 + 2 * 3 + 10 * 3 + 10 + 10 * 5
    assert 2 * counts - 8 * hidden == rest + rank * (10 + 10 + 1)


@pytest.mark.parametrize(
    ("model", "changes", "options", "whole", "split", "experts"),
    [
        # Inputs of attention and MLP in bf16; of each norm an fp32 copy, its rows in bf16 and four bytes.
        # Queries, keys, values, result, an fp32 sum a head; gate, its activation, up and their product.
        (TOY, {}, {}, 2 * 16 + 2 * (6 * 8 + 4), 2 * (16 + 8) + 8 + 4 * 2 * 16, 0),
        (TOY, {}, {"element_bytes": 4}, 4 * 16 + 2 * (8 * 8 + 4), 4 * (16 + 8) + 8 + 4 * 4 * 16, 0),
        (TOY, {}, {"fused": True}, 2 * 16 + 2 * (2 * 8 + 4), 56 + 3 * 2 * 16, 0),
        (TOY, {}, {"fp8": True}, 136 - 16, 184 + 8 - 16, 0),
        (TOY, {"gated": False}, {"fp8": True}, 136 - 16, 120 + 8, 0),
        # Under autocast norms keep fp32 rows, and each of five products a bf16 copy of its input.
        (TOY, {}, {"stream_bytes": 4}, 5 * 2 * 8 + 2 * (8 * 8 + 4), 184, 0),
        (TOY, {"fused_qkv": True, "fused_gate": True}, {"stream_bytes": 4}, 2 * 16 + 136, 184 + 24, 0),
        (TOY, {"gated": False}, {"stream_bytes": 4, "fused": True}, 4 * 16 + 2 * (4 * 8 + 4), 88, 0),
        (TOY, {"gated": False}, {}, 136, 56 + 2 * 2 * 16, 0),
        (TOY, {"norms_per_layer": 1}, {}, 2 * 8 + 52, 184, 0),
        (TOY, {"norm": "layer"}, {}, 32 + 2 * (2 * 8 + 4), 184, 0),
        (TOY, {"norm": "layer32"}, {}, 32 + 2 * (12 * 8 + 4), 184, 0),
        (TOY, {"norm": "rms32"}, {}, 32 + 2 * (8 * 8 + 4), 184, 0),
        (TOY, {"qk_norm": "head"}, {}, 136, 184 + 6 * 12 + 4 * 3, 0),
        (TOY, {"qk_norm": "l2"}, {}, 136, 184 + 4 * 12 + 4 * 3, 0),
        (TOY, {"qk_norm": "all"}, {}, 136 + 6 * 12 + 2 * 4, 184, 0),
        (TOY, {"fused_qkv": True}, {}, 136, 184 + 2 * (8 + 4), 0),
        (TOY, {"fused_qkv": True}, {"fused": True}, 72, 152, 0),
        (TOY, {"partial_rotary": True}, {}, 136, 184 + 2 * 8, 0),
        (TOY, {"partial_rotary": True}, {"fused": True}, 72, 152, 0),
        (TOY, {"attention_gate": True}, {}, 136, 184 + 2 * 2 * 8, 0),
        # Keys and values of two heads are repeated for four, a single head is seen by all.
        (GROUPED, {}, {}, 136, 184 + 8, 0),
        (GROUPED, {}, {"repeated_kv": True}, 136, 192 + 2 * 2 * (8 - 4), 0),
        (TOY, {}, {"repeated_kv": True}, 136, 184, 0),
        # Two of four experts: rows in and out, four tensors inside; fp32 logits and shares of the router.
        (MIXTURE, {}, {}, 136, 56, 2 * 2 * (2 * 8 + 4 * 6) + 2 * 4 * 4),
        (MIXTURE, {}, {"fused": True}, 72, 56, 2 * 2 * (8 + 3 * 6) + 32),
        (MIXTURE, {}, {"fp8": True}, 136 - 8, 56 + 8, 192 - 2 * (8 + 6)),
        (MIXTURE, {"router_fp32": True}, {}, 136 + 4 * 8, 56, 192),
        (MIXTURE, {"router_fp32": True}, {"fused": True}, 72, 56, 136),
        (MIXTURE, {"clamped_gate": True}, {}, 136, 56, 192 + 2 * 2 * 3 * 6),
        (MIXTURE, {"clamped_gate": True}, {"fused": True}, 72, 56, 136),
        (MIXTURE, {"all_experts": True}, {}, 136, 56, 4 * 2 * 40 + 32),
        (MIXTURE, {"all_experts": True}, {"fused": True}, 72, 56, 136),
        (MIXTURE, {"expert_hidden": 4}, {}, 136, 56, 2 * 2 * (2 * 4 + 4 * 6) + 32),
        (MIXTURE, {"shared_intermediate": 5}, {}, 136, 56 + 4 * 2 * 5, 192),
        (MIXTURE, {"shared_intermediate": 5}, {"fp8": True}, 128, 64 + 40 - 5, 164),
    ],
)
def test_what_a_layer_keeps(model, changes, options, whole, split, experts):
    result = kept_by_layer(replace(model, **changes), **({"element_bytes": 2} | options))
    assert result[:3] == (whole, split, experts)


@pytest.mark.parametrize(
    ("linear", "kept"),
    [
        # The convolution's input, two repeated keys, 64 rows of a chunk a head, four values; six fp32 scales.
        ("delta", 2 * (22 + 2 * 6 + 64 * 2 + 4 * 10) + 6 * 4 * 2),
        ("mamba2", 2 * (3 * 10 + 2 * 6 + 2) + 4),
        ("mamba", 2 * (6 * 10 + 2 * 3)),
        ("conv", 2 * 6 * 8),
    ],
)
def test_what_a_layer_without_attention_keeps(linear, kept):
    result = kept_by_layer(replace(HYBRID, linear=linear), element_bytes=2).split
    assert result - kept_by_layer(HYBRID, element_bytes=2).split == kept / 2


@pytest.mark.parametrize(("qk_norm", "measured"), [("", 16360), ("head", 18320)])
def test_a_layer_under_autocast_keeps_what_torch_saves(qk_norm, measured):
    # Saved tensors of one layer of Qwen2 and Qwen3 in fp32 under bf16 autocast, 512 tokens, in bytes a token
    # (transformers 5.19, torch 2.13, torch.autograd.graph.saved_tensors_hooks), with the weights' casts.
    sizes = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "intermediate": 704}
    model = replace(TOY, layers=1, qkv_bias=not qk_norm, qk_norm=qk_norm, **sizes)
    kept, count = kept_by_layer(model, element_bytes=2, stream_bytes=4), parameters(model)
    casts = 2 * (count.attention + count.mlp) / 512
    assert kept.whole + kept.split + casts == pytest.approx(measured, abs=2)


def test_the_ends_of_a_model():
    assert kept_at_the_end(TOY, element_bytes=2) == (6 + 2) * 8 + 4
    assert kept_at_the_end(TOY, element_bytes=2, fused=True) == (2 + 2) * 8 + 4
    bounded = replace(TOY, softcap=True)  # by a tanh, which keeps its result
    assert kept_at_the_end(bounded, element_bytes=2) == 68 + 2 * 32
    assert kept_at_the_end(bounded, element_bytes=2, fused=True) == 36


@pytest.mark.parametrize(
    ("model", "changes", "working", "gradients"),
    [
        (TOY, {}, 4 * 8 + 3 * 16, 2 * 8 + 2 * 16),
        (TOY, {"gated": False}, 4 * 8 + 2 * 16, 2 * 8 + 2 * 16),
        (TOY, {"intermediate": 4}, 4 * 8 + 3 * 8 + 2 * 4, 2 * 8 + 2 * 8),  # attention is the widest
        (MIXTURE, {}, 4 * 8 + 2 * (2 * 8 + 3 * 6), 2 * 8 + 2 * (2 * 8 + 2 * 6)),
        (MIXTURE, {"shared_intermediate": 5}, 32 + 68 + 3 * 5, 16 + 56 + 2 * 5),
        (HYBRID, {"linear": "delta"}, 4 * 8 + 2 * 6 + 4 * 10, 2 * 8 + (2 * 6 + 4 * 10) / 2),
    ],
)
def test_the_widest_instant_of_a_layer(model, changes, working, gradients):
    model = replace(model, **changes)
    assert working_set(model, element_bytes=2) == 2 * working
    assert gradient_set(model, element_bytes=2) == 2 * gradients


def test_counts_of_parts():
    assert last_matrix(TOY) == 8 * 16
    assert last_matrix(MIXTURE) == 8 * 4 * 6
    # Both sides of queries and output, keys and values, and three matrices of the MLP, in two layers.
    assert lora_parameters(TOY, 4) == 4 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))
    assert lora_parameters(MIXTURE, 4) == 4 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 6))
    assert active_parameters(TOY) == 2 * (192 + 384) + 32 * 8
    assert active_parameters(MIXTURE) == 2 * (192 + 32 + 2 * 3 * 8 * 6) + 32 * 8
