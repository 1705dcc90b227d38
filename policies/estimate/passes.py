"""What a pass holds on a device: activations by layer, and the logits with their loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import FP32, gradient_set, kept_at_the_end, kept_by_layer, working_set
from autotune.policies.values.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Bytes of a micro-batch's activations and logits."""

    layer: Floats  # what one layer keeps without recomputation
    kept_layer: Floats  # the same with recomputation
    again: Floats  # what recomputing one layer adds to its input
    kept: Floats  # what all layers keep, with recomputation and before offloading
    shared: Floats  # between all layers: an attention mask
    ends: Floats  # final norm and the head's input
    inputs: Floats  # of one layer
    working: Floats  # one layer's transient without gradients
    backward: Floats  # one layer's transient gradients
    offloaded: Floats  # of `kept`, in host memory


def pass_of(model: Model, load: Load, *, tokens: Floats) -> Pass:
    """Return what a pass of `tokens` per rank holds (after Korthikanti et al., 2205.05198)."""
    size = load.layout.compute_bytes
    megatron = load.layout.strategy == "megatron"
    masked = load.layout.masked_attention
    kept = kept_by_layer(model, element_bytes=size, repeated_kv=masked, fused=megatron)
    fused = kept_by_layer(model, element_bytes=size, repeated_kv=masked, fused=True)
    mask = load.sequence * masked  # elements per token; each layer's copy has the type of the pass
    # Sequence parallelism splits what is outside of tensor parallelism. Megatron's always comes with it and
    # gathers a product's input again in backward; DTensor's keeps the gathered one.
    whole_split = load.tensor if megatron or load.layout.sequence_parallel else np.ones(load.count)
    products = 0.0 if megatron else size * model.hidden * min(2, model.norms_per_layer)
    whole = products + (np.where(load.fused, fused.whole, kept.whole) - products) / whole_split
    split = np.where(load.fused, fused.split, kept.split) / load.tensor
    routed = np.where(load.fused, fused.experts, kept.experts) / load.tensor
    layer = (whole + split + routed + size * mask) * tokens
    attention = size * model.heads * model.head_dim / load.tensor * tokens
    inputs = size * model.hidden / whole_split * tokens
    stage_layers = -(-model.layers // load.layout.pipeline_parallel)
    in_flight = load.layout.pipeline_parallel  # 1F1B: the first stage holds one micro-batch per stage
    selective = layer * load.layout.selective_share if load.layout.selective_share else layer - attention
    per_layer = np.where(load.recompute_full, inputs, np.where(load.recompute_selective, selective, layer))
    all_layers = per_layer * stage_layers * in_flight
    streamed = np.where(load.activation_offload, all_layers, 0.0)
    # In fp32 the input that recomputation starts from is itself what the first norm keeps.
    again = layer - inputs * (size == FP32)
    widest = working_set(model, element_bytes=size)
    last = 0.0 if megatron else size * model.hidden  # the head's input
    at_end = last + (kept_at_the_end(model, element_bytes=size, fused=megatron) - last) / whole_split
    return Pass(
        layer=layer,
        kept_layer=per_layer,
        again=again,
        kept=all_layers,
        shared=mask * tokens,
        ends=at_end * tokens,
        inputs=inputs,
        working=widest / load.tensor * tokens,
        backward=gradient_set(model, element_bytes=size) / load.tensor * tokens,
        offloaded=streamed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Bytes of logits and what is computed from them."""

    scoring: Floats  # peak without gradients
    forward: Floats  # peak in forward
    kept: Floats  # between forward and backward
    backward: Floats  # peak at the start of backward
    head: Floats  # while the head's product runs in forward
    head_scored: Floats  # ... without gradients
    head_gradient: Floats  # ... in backward


def logits_of(model: Model, load: Load, *, tokens: Floats, scored: Floats) -> Logits:
    """Return the sizes of the loss: the head's output, its softmax, and their gradients.

    torch's log_softmax keeps its result; backward holds that, the incoming gradient and the outgoing one.
    """
    layout = load.layout
    size, wide = layout.compute_bytes, layout.logits_bytes
    upcast = wide if wide != size else 0
    vocabulary = model.vocab / load.tensor
    rows, score_rows = tokens * layout.logits_share, scored * layout.logits_share
    chunk = np.minimum(load.chunk, rows)
    score_chunk = np.minimum(load.chunk, score_rows)
    fused_rows = np.minimum(rows, constant("fused_chunk"))
    head = chunk if layout.chunked_head else rows
    score_head = score_chunk if layout.chunked_head else score_rows
    entropy_kept = np.where(load.entropy_recompute, 0.0, rows) * wide * layout.entropy
    entropy_rows = np.where(load.entropy_chunking, np.minimum(rows, constant("logits_chunk")), rows)
    entropy_scored = np.where(
        load.entropy_chunking, np.minimum(score_rows, constant("logits_chunk")), score_rows
    )
    scoring = size * score_head + (upcast + wide) * score_chunk + wide * entropy_scored * layout.entropy
    # Megatron's pipeline holds a stage's output, which here is the logits, until its backward is over.
    retained = size * rows if layout.strategy == "megatron" else 0.0 * rows
    again = load.loss_recompute
    kept = np.where(again, 0.0 if layout.chunked_head else size * rows, wide * rows + retained) + entropy_kept
    new_head = np.where(again & (not layout.chunked_head), 0.0, np.maximum(0.0, size * head - retained))
    forward = kept + new_head + upcast * chunk + wide * entropy_rows * layout.entropy
    forward = forward + np.where(again, wide * chunk, 0.0)
    backward = kept + 2.0 * wide * chunk
    backward = backward + np.where(again, (wide + size * layout.chunked_head) * chunk, 0.0)
    if layout.logits_in_place:
        # An upcast lets go of the head's output, and its gradient is cast back; else scaling copies it.
        kept = np.where(again, kept, wide * rows)
        forward = np.where(again, forward, kept + size * head * (upcast > 0))
        backward = np.where(again, backward, kept + size * rows)
    fused = (size + wide) * fused_rows
    fused_scoring = (size + wide) * np.minimum(score_rows, fused_rows)
    fused_backward = fused + wide * fused_rows
    return Logits(
        scoring=vocabulary * np.where(load.fused, np.minimum(scoring, fused_scoring), scoring),
        forward=vocabulary * np.where(load.fused, np.minimum(forward, fused), forward),
        kept=vocabulary * np.where(load.fused, 0.0, kept),
        backward=vocabulary * np.where(load.fused, np.minimum(backward, fused_backward), backward),
        head=vocabulary * np.where(load.fused, 0.0, size * head),
        head_scored=vocabulary * np.where(load.fused, 0.0, size * score_head),
        head_gradient=vocabulary * np.where(load.fused, 0.0, size * head),
    )
