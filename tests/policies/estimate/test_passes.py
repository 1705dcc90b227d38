"""Activations of one layer and the bytes of the logits, counted by hand for the toy."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.passes import logits_of, pass_of, with_predicting

from .toy import LAYOUT, MEGATRON, TOY, load

TOKENS = 100
# What one layer keeps of a token in bf16 (test_shapes.py): outside of tensor parallelism, and inside of it.
LAYER, FUSED = 136 + 184, 72 + 152
ROW = 2 * 8
CORE = 2 * 8  # the result of attention
# By operation: the layer's input and the MLP's result; attention's result and log-sums, q, v and the gate.
OPERATIONS = 2 * 8 * 2 + 2 * (8 + 8 + 4 + 16) + 4 * 2
NO_SPLIT = replace(LAYOUT, sequence_parallel=False)
MASKED = replace(LAYOUT, masked_attention=True)
FP32 = replace(LAYOUT, compute_bytes=4)
SCORES = 4 * 32 * 2  # of a token: two heads, 32 keys; fp32 has no fused kernel for grouped heads
LAYER_FP32 = 200 + 360 + SCORES


def counted(layout=LAYOUT, **knobs):
    of = load(layout, **knobs)
    result = pass_of(TOY, of, tokens=np.full(of.count, float(TOKENS)))
    return {field.name: float(getattr(result, field.name)[0]) / TOKENS for field in fields(result)}


@pytest.mark.parametrize(
    ("layout", "knobs", "layer"),
    [
        (LAYOUT, {}, LAYER),
        (LAYOUT, {"fused_kernels": True}, FUSED),
        (FP32, {}, LAYER_FP32),
        # With sequence parallelism both products keep their gathered input whole, all else is split.
        (LAYOUT, {"tensor_parallel": 2}, 2 * ROW + (136 - 2 * ROW + 184) / 2),
        (NO_SPLIT, {"tensor_parallel": 2}, 136 + 184 / 2),
        (NO_SPLIT, {}, LAYER),
        (MEGATRON, {}, FUSED),
        (MEGATRON, {"tensor_parallel": 2}, FUSED / 2),  # gathers a product's input again
        (MASKED, {}, LAYER + 2 * 32),  # a copy of the mask: 32 elements for every token
    ],
)
def test_what_one_layer_keeps_of_a_token(layout, knobs, layer):
    counts = counted(layout, **knobs)
    assert counts["layer"] == counts["kept_layer"] == pytest.approx(layer)
    assert counts["kept"] == pytest.approx(2 * layer)
    assert counts["again"] == counts["offloaded"] == 0


@pytest.mark.parametrize(
    ("layout", "knobs", "kept", "again"),
    [
        (LAYOUT, {"recompute": "full"}, ROW, LAYER),
        (LAYOUT, {"recompute": "selective"}, LAYER - CORE, 0),
        (replace(LAYOUT, selective_share=0.25), {"recompute": "selective"}, LAYER / 4, 0),
        (replace(LAYOUT, selective_share=0.25), {"recompute": "full"}, ROW, LAYER),
        (
            replace(LAYOUT, selective_operations=True),
            {"recompute": "selective"},
            OPERATIONS,
            LAYER - OPERATIONS,
        ),
        (replace(LAYOUT, selective_operations=True), {"recompute": "full"}, ROW, LAYER),
        # The input is itself what the first norm keeps.
        (FP32, {"recompute": "full"}, 4 * 8, LAYER_FP32 - 4 * 8),
        (LAYOUT, {"recompute": "full", "tensor_parallel": 2}, ROW / 2, 2 * ROW + (LAYER - 2 * ROW) / 2),
        (NO_SPLIT, {"recompute": "full", "tensor_parallel": 2}, ROW, 136 + 92),
        (MEGATRON, {"recompute": "full"}, ROW, FUSED),
        (MEGATRON, {"recompute": "selective", "tensor_parallel": 2}, (FUSED - CORE) / 2, 0),
    ],
)
def test_what_recomputation_keeps_and_brings_back(layout, knobs, kept, again):
    counts = counted(layout, **knobs)
    assert counts["kept_layer"] == pytest.approx(kept)
    assert counts["kept"] == pytest.approx(2 * kept)
    assert counts["again"] == pytest.approx(again)


def test_modules_that_megatron_computes_again():
    counts = counted(replace(MEGATRON, recompute_modules=("core_attn",)), recompute="selective")
    assert (counts["kept_layer"], counts["again"]) == pytest.approx((FUSED - CORE, CORE))
    elsewhere = counted(replace(LAYOUT, recompute_modules=("core_attn",)), recompute="selective")
    assert (elsewhere["kept_layer"], elsewhere["again"]) == pytest.approx((LAYER - CORE, 0))


def test_offloaded_activations_are_all_that_is_kept():
    counts = counted(activation_offload=True)
    assert counts["offloaded"] == counts["kept"] == pytest.approx(2 * LAYER)


@pytest.mark.parametrize(
    ("layout", "knobs", "inputs", "ends"),
    [
        # The final norm and the head's input: 68 bytes, of which sequence parallelism leaves the input whole.
        (LAYOUT, {}, ROW, 68),
        (LAYOUT, {"tensor_parallel": 2}, ROW / 2, ROW + (68 - ROW) / 2),
        (NO_SPLIT, {"tensor_parallel": 2}, ROW, 68),
        (MEGATRON, {}, ROW, 36),
        (MEGATRON, {"tensor_parallel": 2}, ROW / 2, 36 / 2),
        (MASKED, {}, ROW, 68),
    ],
)
def test_the_ends_of_a_pass(layout, knobs, inputs, ends):
    counts = counted(layout, **knobs)
    assert counts["inputs"] == pytest.approx(inputs)
    assert counts["ends"] == pytest.approx(ends)
    assert counts["shared"] == (32 if layout is MASKED else 0)


@pytest.mark.parametrize(
    ("layout", "knobs", "working", "backward"),
    [
        # At its widest a layer has four rows and three of its MLP; gradients of two rows and two of the MLP.
        (LAYOUT, {}, 4 * ROW + 3 * 32, 2 * ROW + 2 * 32),
        (NO_SPLIT, {"tensor_parallel": 2}, 4 * ROW + 3 * 16, 2 * ROW + 2 * 16),
        (MEGATRON, {"tensor_parallel": 2}, 2 * ROW + 3 * 16, ROW + 2 * 16),
        # While an MLP's result is scattered: three rows whole, and split two and a half and the MLP's.
        (LAYOUT, {"tensor_parallel": 2}, 3 * ROW + (2.5 * ROW + 32) / 2, ROW + 2 * 16),
    ],
)
def test_the_widest_instant_of_a_pass(layout, knobs, working, backward):
    counts = counted(layout, **knobs)
    assert counts["working"] == pytest.approx(working)
    assert counts["backward"] == pytest.approx(backward)


# --------------------------------------------------------------------- logits


SOFTMAX = replace(LAYOUT, logits_bytes=4, loss="softmax")
KERNEL = replace(LAYOUT, loss="kernel")
CAST_KERNEL = replace(LAYOUT, loss="cast_kernel")
STEPWISE = replace(KERNEL, compiled_loss=False)
PIECES = replace(LAYOUT, loss="pieces")
ROWS = replace(LAYOUT, loss="rows")
LOGPROB = replace(MEGATRON, loss="logprob")
IN_PLACE = {"logits_in_place": True}
ENTROPY, CHUNKED = {"entropy": True}, {"chunked_head": True}
AGAIN, HALF = {"loss_recompute": True}, {"logprob_chunk": 50}
NAMES = ("scoring", "forward", "kept", "backward", "head", "head_gradient")


def bytes_of_a_logit(layout, tokens=TOKENS, **knobs):
    of = load(layout, **knobs)
    rows = np.full(of.count, float(tokens))
    result = logits_of(TOY, of, tokens=rows, scored=rows)
    one = tokens * TOY.vocab / float(of.tensor[0])
    assert float(result.head_scored[0]) == pytest.approx(
        float(result.head[0]) if not layout.predicting_loss else 0.0
    )
    return [float(getattr(result, name)[0]) / one for name in NAMES]


@pytest.mark.parametrize(
    ("base", "layout", "knobs", "expected"),
    [
        # torch's log_softmax keeps its fp32 result beside the head's bf16 output and its upcast; backward
        # adds two gradients.
        (SOFTMAX, {}, {}, (10, 10, 4, 12, 2, 2)),
        (SOFTMAX, {"logits_bytes": 2}, {}, (4, 4, 2, 6, 2, 2)),
        (SOFTMAX, ENTROPY, {}, (14, 18, 8, 16, 2, 2)),
        (SOFTMAX, ENTROPY, {"entropy_recompute": True}, (14, 14, 4, 12, 2, 2)),
        (SOFTMAX, {}, {"entropy_recompute": True}, (10, 10, 4, 12, 2, 2)),
        (SOFTMAX, {}, AGAIN, (10, 10, 2, 14, 2, 2)),
        (SOFTMAX, {}, HALF, (6, 8, 4, 8, 2, 2)),
        (SOFTMAX, CHUNKED, HALF, (5, 7, 4, 8, 1, 1)),
        (SOFTMAX, CHUNKED, HALF | AGAIN, (5, 5, 0, 7, 1, 1)),
        (SOFTMAX, {"strategy": "megatron"}, {}, (10, 10, 6, 14, 2, 2)),
        (SOFTMAX, {"strategy": "megatron"}, AGAIN, (10, 10, 2, 14, 2, 2)),
        (SOFTMAX, IN_PLACE, {}, (10, 6, 4, 6, 2, 2)),
        (SOFTMAX, IN_PLACE | {"logits_bytes": 2}, {}, (4, 2, 2, 4, 2, 2)),
        (SOFTMAX, IN_PLACE, AGAIN, (10, 10, 2, 14, 2, 2)),
        # Pieces of the head and its loss, which keep nothing.
        (SOFTMAX, {}, {"fused_kernels": True}, (6, 6, 0, 10, 6, 10)),
        (CAST_KERNEL, {}, {}, (6, 6, 4, 10, 2, 2)),
        (CAST_KERNEL, ENTROPY, {}, (6, 6, 4, 14, 2, 2)),
        (SOFTMAX, {"logits_share": 0.5}, {}, (5, 5, 2, 6, 1, 1)),
        # A kernel keeps the logits and writes their gradient over them.
        (KERNEL, {}, {}, (2, 2, 2, 2, 2, 2)),
        (KERNEL, ENTROPY, {}, (2, 2, 2, 6, 2, 2)),
        (KERNEL, {"scaled_logits": True}, {}, (4, 4, 2, 4, 2, 2)),
        (KERNEL, {"scaled_logits": True} | ENTROPY, {}, (4, 4, 2, 6, 2, 2)),
        (KERNEL, {}, {"fused_kernels": True}, (2, 2, 0, 30 + 0.16, 12, 30 + 0.16)),
        (STEPWISE, {}, {}, (6, 2, 2, 2, 2, 2)),
        (STEPWISE, {}, {"entropy_chunking": True}, (14, 2, 2, 2, 2, 2)),
        (STEPWISE, ENTROPY, {}, (6, 6, 4, 14, 2, 2)),
        (STEPWISE, ENTROPY, {"entropy_recompute": True}, (6, 6, 2, 16, 2, 2)),
        (STEPWISE, ENTROPY, {"entropy_chunking": True}, (14, 14, 10, 18, 2, 2)),
        (STEPWISE, ENTROPY, {"entropy_chunking": True, "entropy_recompute": True}, (14, 14, 2, 20, 2, 2)),
        (STEPWISE, ENTROPY | {"scaled_logits": True}, {}, (8, 8, 4, 14, 2, 2)),
        # Padded passes without flash-attention: the head's output, a packed copy, log_softmax in fp32.
        (ROWS, {}, {}, (14, 8, 6, 6, 2, 2)),
        (ROWS, ENTROPY, {}, (14, 16, 16, 16, 2, 2)),
        (PIECES, {}, {}, (2, 6, 2, 8, 2, 4)),
        (PIECES, {}, HALF, (2, 4, 2, 7, 2, 4)),
        # Ranks that split the words keep an fp32 softmax beside the logits.
        (PIECES, {}, {"tensor_parallel": 2}, (14, 18, 6, 14, 2, 4)),
        (PIECES, {"compute_bytes": 4}, {"tensor_parallel": 2}, (12, 16, 8, 16, 4, 8)),
        # NeMo-RL's own function on fp32 logits, on bf16 ones, and on those in two chunks.
        (LOGPROB, {"logits_bytes": 4}, {}, (12, 12, 4, 8, 2, 2)),
        (LOGPROB, {"logits_bytes": 2}, {}, (14, 14, 4, 8, 2, 2)),
        (LOGPROB, {"logits_bytes": 2}, HALF, (8, 8, 2, 16, 2, 2)),
    ],
)
def test_bytes_of_a_logit(base, layout, knobs, expected):
    assert bytes_of_a_logit(replace(base, **layout), **knobs) == pytest.approx(list(expected))


def test_a_fused_head_takes_512_rows_at_a_time():
    assert bytes_of_a_logit(SOFTMAX, 1024, fused_kernels=True) == pytest.approx([3, 3, 0, 5, 3, 5])
    assert bytes_of_a_logit(SOFTMAX, 256, fused_kernels=True) == pytest.approx([6, 6, 0, 10, 6, 10])


def test_pieces_of_an_entropy_have_2048_rows():
    result = bytes_of_a_logit(replace(STEPWISE, entropy=True), 4096, entropy_chunking=True)
    assert result == pytest.approx([8, 12, 10, 16, 2, 2])
    softmax = bytes_of_a_logit(replace(SOFTMAX, entropy=True), 4096, entropy_chunking=True)
    assert softmax == pytest.approx([12, 16, 8, 16, 2, 2])


def test_a_layer_of_multi_token_prediction_keeps_an_fp32_softmax():
    layout = replace(MEGATRON, predicting_layers=2)
    of = load(layout)
    rows = np.full(of.count, float(TOKENS))
    plain = logits_of(TOY, of, tokens=rows, scored=rows)
    assert with_predicting(plain, TOY, of, tokens=rows) is plain
    of = load(replace(layout, predicting_loss=True), tensor_parallel=2)
    more = with_predicting(plain, TOY, of, tokens=rows)
    for name in (*NAMES, "head_scored"):
        added = float((getattr(more, name) - getattr(plain, name))[0])
        assert added == (0 if name in ("scoring", "head_scored") else 2 * 4 * 16 * TOKENS), name
