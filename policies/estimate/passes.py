"""Device memory of a micro-batch: activations by layer, and the logits with their loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.experts import gathered_rows, leaving, moving, recomputed
from autotune.policies.estimate.lengths import UNBOUNDED
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import (
    FP32,
    Kept,
    gradient_set,
    kept_at_the_end,
    kept_by_layer,
    kept_by_operation,
    parameters,
    working_set,
)
from autotune.policies.estimate.stages import Stage, in_flight, stages_of
from autotune.policies.values.architecture.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Bytes of a micro-batch's activations and logits."""

    layer: Floats  # what one layer keeps without recomputation
    kept_layer: Floats  # the same with recomputation
    again: Floats  # what recomputing one layer adds to what it keeps
    kept: Floats  # what all layers keep, with recomputation and before offloading
    shared: Floats  # between all layers: an attention mask
    ends: Floats  # final norm and the head's input
    inputs: Floats  # of one layer
    working: Floats  # one layer's transient memory without gradients
    backward: Floats  # one layer's transient gradients
    moving: Floats  # rows sent to experts and back in forward, in addition to what a layer keeps
    offloaded: Floats  # of `kept`, in host memory
    casts: Floats  # layers' weights cast to the products' type, kept by autocast until the micro-batch ends
    head_cast: Floats  # the same of the head's; included in `ends`


# Rows that three norms and the projection of two concatenated rows keep in multi-token prediction.
_JOINED_ROWS = 5


def pass_of(model: Model, load: Load, *, tokens: Floats, stage: Stage | None = None) -> Pass:
    """Return the memory of a micro-batch of `tokens` per rank (after Korthikanti et al., 2205.05198).

    `stage`: of the pipeline, by default the first, which has the most micro-batches in flight.
    """
    stage = stage or stages_of(model, load.layout)[0]
    size = load.layout.compute_bytes
    autocast = load.layout.autocast
    stream = FP32 if autocast else size  # bytes per element of the residual stream
    megatron = load.layout.strategy == "megatron"
    masked = load.layout.masked_attention
    # Without a mask PyTorch gets grouped heads, for which it has no fused kernel in fp32: it keeps the
    # attention scores, and holds them twice without gradients (measured: docs/measured/gpu.md).
    unfused = load.gpus and size == FP32 and model.kv_heads < model.heads and not (megatron or masked)
    repeated = masked or unfused
    scores = size * load.sequence * model.heads / load.tensor * unfused
    fp8 = load.layout.fp8
    kept = kept_by_layer(
        model, element_bytes=size, repeated_kv=repeated, fused=megatron, fp8=fp8, stream_bytes=stream
    )
    fused = kept_by_layer(
        model, element_bytes=size, repeated_kv=repeated, fused=True, fp8=fp8, stream_bytes=stream
    )
    mask = load.sequence * masked  # elements per token; each layer's copy has the compute type
    # Sequence parallelism splits what tensor parallelism does not. Megatron always uses both and gathers a
    # product's input again in backward; DTensor keeps the gathered one.
    whole_split = load.tensor if megatron or load.layout.sequence_parallel else np.ones(load.count)
    products = 0.0 if megatron else size * model.hidden * min(2, model.norms_per_layer)
    whole = products + (np.where(load.fused, fused.whole, kept.whole) - products) / whole_split
    split = np.where(load.fused, fused.split, kept.split) / load.tensor
    routed = np.where(load.fused, fused.experts, kept.experts) / load.tensor
    copies = gathered_rows(load.layout, load.tensor) if megatron else np.ones(load.count)
    routed = routed + np.where(load.fused, fused.rows, kept.rows) * (copies - 1.0) / load.tensor
    counts = parameters(model)
    cast = size * (counts.attention + counts.mlp + counts.experts) * autocast
    layer = (whole + split + routed + size * mask + scores) * tokens + cast
    attention = size * model.heads * model.head_dim / load.tensor * tokens
    inputs = stream * model.hidden / whole_split * tokens
    selective = layer * load.layout.selective_share if load.layout.selective_share else layer - attention
    if load.layout.selective_operations:
        stream_kept, split_kept = kept_by_operation(model, element_bytes=size)
        selective = np.minimum(layer, (stream_kept / whole_split + split_kept / load.tensor) * tokens)

    def held(part: Kept) -> Floats:
        """Return the bytes on this rank of tensors that a layer keeps."""
        spread = part.split + part.experts + part.rows * (copies - 1.0)
        result: Floats = (part.whole / whole_split + spread / load.tensor) * tokens
        return result

    def without(modules: tuple[str, ...]) -> Floats:
        """Return the bytes that a layer keeps if `modules` are recomputed."""
        gone = held(recomputed(model, load.layout, modules))
        return np.maximum(inputs, layer - gone - attention * ("core_attn" in modules))

    modules = load.layout.recompute_modules if megatron else ()
    selective = without(modules) if modules else selective
    most = without(load.layout.more_modules) if megatron and load.layout.more_modules else selective
    by_part = np.where(load.recompute_modules, most, np.where(load.recompute_selective, selective, layer))
    per_layer = np.where(load.recompute_full, inputs, by_part)
    layers = (stage.layers + stage.predicting) * in_flight(load, stage)
    all_layers = per_layer * layers
    movable = all_layers
    if megatron and load.layout.offload_modules:
        # A fully recomputed layer has nothing to offload.
        named = np.minimum(per_layer, held(leaving(model, load.layout)))
        movable = np.where(load.recompute_full, 0.0, named * layers)
    streamed = np.where(load.activation_offload, movable, 0.0)
    # In fp32 the kept input, from which recomputation starts, is also what the first norm keeps.
    again = np.where(load.recompute_full, layer - inputs * (stream == FP32), 0.0)
    if modules or load.layout.selective_operations:
        again = np.where(load.recompute_selective, layer - selective, again)
    again = np.where(load.recompute_modules, layer - most, again)
    gradients, rows = gradient_set(model, element_bytes=size), size * model.hidden
    # At the widest instants, four rows and two of their gradients belong to the residual stream.
    streaming = stream * model.hidden / whole_split
    working = (working_set(model, element_bytes=size) - 4.0 * rows) / load.tensor + 4.0 * streaming
    backward = (gradients - 2.0 * rows) / load.tensor + 2.0 * streaming
    if load.layout.sequence_parallel and not megatron:
        # While an MLP's result is scattered: its input, this rank's part and a copy in the scatter's order.
        scattering = 3.0 * rows + (2.5 * rows + size * model.intermediate) / load.tensor
        working = np.where(load.tensor > 1, np.maximum(working, scattering), working)
    working, backward = working + 2.0 * scores, backward + scores
    routing = moving(model, load)
    working = np.maximum(working, routing.scored + 4.0 * rows / whole_split)
    backward = np.maximum(backward, routing.backward + 2.0 * rows / whole_split)
    last = 0.0 if megatron else size * model.hidden  # the head's input
    ends = kept_at_the_end(model, element_bytes=size, fused=megatron, stream_bytes=stream)
    at_end = last + (ends - last) / whole_split
    head_cast = size * model.vocab * model.hidden * np.where(load.fused, 0.0, 1.0)
    head_cast = head_cast * (autocast and load.layout.autocast_head and stage.last)
    return Pass(
        layer=layer,
        kept_layer=per_layer,
        again=again,
        kept=all_layers,
        shared=mask * tokens,
        ends=at_end * tokens * stage.last + _JOINED_ROWS * stage.predicting * inputs + head_cast,
        inputs=inputs,
        working=working * tokens,
        backward=backward * tokens,
        moving=routing.forward * tokens,
        offloaded=streamed,
        casts=cast * stage.layers + np.zeros(load.count),
        head_cast=head_cast,
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


class _Loss(NamedTuple):
    """Bytes per word of the vocabulary on this rank, at the instants of `Logits`."""

    scoring: Floats
    forward: Floats
    kept: Floats
    backward: Floats
    head_gradient: Floats


def logits_of(model: Model, load: Load, *, tokens: Floats, scored: Floats) -> Logits:
    """Return the sizes of the loss: the head's output, what is computed from it, and their gradients."""
    layout = load.layout
    size, wide = layout.compute_bytes, layout.logits_bytes
    vocabulary = model.vocab / load.tensor
    rows, score_rows = tokens * layout.logits_share, scored * layout.logits_share
    loss = _LOSSES[layout.loss](load, rows, score_rows)
    fused_rows = np.minimum(rows, constant("fused_chunk"))
    fused_scored = np.minimum(score_rows, fused_rows)
    if layout.loss == "kernel":
        # Each chunk has a gradient of its own, as large as the head, which is added to the head's.
        fused = constant("fused_forward") * fused_rows
        fused_scoring = constant("fused_forward") * fused_scored
        fused_backward = constant("fused_backward") * fused_rows + size * model.hidden
    else:
        fused, fused_scoring = (size + wide) * fused_rows, (size + wide) * fused_scored
        fused_backward = fused + wide * fused_rows
    chunked = layout.chunked_head

    def chosen(without: Floats, with_kernel: Floats) -> Floats:
        result: Floats = vocabulary * np.where(load.fused, with_kernel, without)
        return result

    return Logits(
        scoring=chosen(loss.scoring, np.minimum(loss.scoring, fused_scoring)),
        forward=chosen(loss.forward, np.minimum(loss.forward, fused)),
        kept=chosen(loss.kept, 0.0 * rows),
        backward=chosen(loss.backward, fused_backward),
        head=chosen(size * (np.minimum(load.chunk, rows) if chunked else rows), fused),
        head_scored=chosen(
            size * (np.minimum(load.chunk, score_rows) if chunked else score_rows), fused_scoring
        ),
        head_gradient=chosen(loss.head_gradient, fused_backward),
    )


def with_predicting(logits: Logits, model: Model, load: Load, *, tokens: Floats) -> Logits:
    """Return the logits with the fp32 softmax that each layer of multi-token prediction keeps for its loss.

    It is computed before the model's own loss and freed after it (Megatron's multi_token_prediction.py,
    tensor_parallel/cross_entropy.py).
    """
    layout = load.layout
    if not layout.predicting_loss:
        return logits
    kept = layout.predicting_layers * FP32 * model.vocab / load.tensor * tokens
    training = ("forward", "kept", "backward", "head", "head_gradient")
    return replace(logits, **{name: getattr(logits, name) + kept for name in training})


def _softmax(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of torch's log_softmax: it keeps its result; backward adds two gradients."""
    layout = load.layout
    size, wide = layout.compute_bytes, layout.logits_bytes
    upcast = wide if wide != size else 0
    chunk, score_chunk = np.minimum(load.chunk, rows), np.minimum(load.chunk, score_rows)
    head = chunk if layout.chunked_head else rows
    score_head = score_chunk if layout.chunked_head else score_rows
    entropy_kept = np.where(load.entropy_recompute, 0.0, rows) * wide * layout.entropy
    pieces = constant("logits_chunk")
    entropy_rows = np.where(load.entropy_chunking, np.minimum(rows, pieces), rows)
    entropy_scored = np.where(load.entropy_chunking, np.minimum(score_rows, pieces), score_rows)
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
        # An upcast frees the head's output, and its gradient is cast back; otherwise scaling copies it.
        kept = np.where(again, kept, wide * rows)
        forward = np.where(again, forward, kept + size * head * (upcast > 0))
        backward = np.where(again, backward, kept + size * rows)
    return _Loss(scoring, forward, kept, backward, size * head)


def _kernel(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of a kernel that keeps only the logits and overwrites them with its gradient.

    It is flash-attention's Triton cross entropy, with verl 0.9.1's entropy_from_logits as measured by
    `python -m benchmarks.loss_code`: compiled, the entropy keeps nothing more and adds one gradient; in eager
    mode every operation has a result, and chunks are computed in fp32 and kept unless they are recomputed.
    """
    layout = load.layout
    size = layout.compute_bytes
    head = size * (2.0 if layout.scaled_logits else 1.0)  # scaling by a temperature copies the logits
    if layout.compiled_loss:
        forward, kept = head * rows, size * rows
        backward = (3.0 * size if layout.entropy else head) * rows
        return _Loss(head * score_rows, forward, kept, backward, size * rows)
    upcast = FP32 if size != FP32 else 0
    pieces, again = load.entropy_chunking, load.entropy_recompute

    def first(count: Floats) -> Floats:
        """Return the peak of an entropy that keeps nothing."""
        piece = np.minimum(count, constant("logits_chunk"))
        result: Floats = head * count + np.where(pieces, (2 * FP32 + upcast) * piece, 2.0 * size * count)
        return result

    if not layout.entropy:
        return _Loss(first(score_rows), head * rows, size * rows, head * rows, size * rows)
    piece = FP32 * np.minimum(rows, constant("logits_chunk"))
    kept_pieces = (FP32 + upcast) * rows
    kept = size * rows + np.where(again, 0.0, np.where(pieces, kept_pieces, size * rows))
    forward = np.where(again | ~pieces, first(rows), head * rows + kept_pieces + piece)
    in_pieces = 3.0 * size * rows + kept_pieces + piece
    backward = np.where(pieces, in_pieces, 7.0 * size * rows) + again * size * rows
    return _Loss(first(score_rows), forward, kept, backward, size * rows)


def _cast_kernel(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of that kernel over logits which OpenRLHF 0.11.2 casts to fp32 and keeps.

    openrlhf/models/actor.py, forward; models/utils.py, log_probs_from_logits. Its gradient is a tensor of its
    own, cast back beside it; a compiled entropy adds another.
    """
    size = load.layout.compute_bytes
    cast, kept = (size + FP32) * rows, FP32 * rows
    gradients = (FP32 * (1 + load.layout.entropy) + size) * rows
    return _Loss((size + FP32) * score_rows, cast, kept, kept + gradients, size * rows)


def _rows(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of verl 0.9.1's loss over padded micro-batches without flash-attention.

    `prepare_model_outputs` copies the head's output without its padding and applies log_softmax to each row;
    autocast computes and keeps the result in fp32. The entropy runs operation by operation on the padded
    output: a softmax, and for logsumexp an fp32 copy and its exponentials. Measured on an H200 (gpu.md),
    except for an entropy in the loss, which is counted from the tensors that autograd saves.
    """
    size = load.layout.compute_bytes
    kept, forward = (size + FP32) * rows, (2 * size + FP32) * rows
    if load.layout.entropy:
        kept, forward = kept + (size + 2 * FP32) * rows, forward + 2 * FP32 * rows
    return _Loss((size + 3 * FP32) * score_rows, forward, kept, kept, size * rows)


def _pieces(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of compiled chunks in fp32, or of an fp32 softmax if ranks split the vocabulary.

    areal 1.0.4's vocab_parallel.py, measured by `python -m benchmarks.loss_code`: chunks keep the logits,
    whose gradient is the sum of a full-size one per chunk; the softmax of a split vocabulary is kept in
    addition to the logits that the training loop holds.
    """
    size = load.layout.compute_bytes
    upcast = FP32 if size != FP32 else 0
    split, piece = load.tensor > 1, np.minimum(load.chunk, rows)
    return _Loss(
        scoring=np.where(split, size + upcast + 2.0 * FP32, size) * score_rows,
        forward=np.where(split, (size + upcast + 3.0 * FP32) * rows, size * rows + FP32 * piece),
        kept=np.where(split, size + FP32, size) * rows,
        backward=np.where(split, (size + 3.0 * FP32) * rows, 3.0 * size * rows + size * piece),
        head_gradient=2.0 * size * rows,
    )


def _logprob(load: Load, rows: Floats, score_rows: Floats) -> _Loss:
    """Return the sizes of NeMo-RL's log-probabilities under Megatron, whose ranks split the vocabulary.

    DistributedLogprob of nemo_rl/distributed/model_utils.py (0.7.0) holds the shifted logits and their
    exponentials in fp32, in addition to the head's output, and keeps the softmax. In chunks it keeps only
    the output; backward adds a gradient of its type and, per chunk, two one-hot tensors of 8 bytes and three
    of 4. On a CPU that code holds 12, 12, 4 and 8 bytes per logit, in chunks 2, 2, 2 and 4 plus a chunk's 12
    and, in backward, 24.
    """
    held = load.layout.logits_bytes  # of the head's output, as Megatron hands it to the loss
    upcast = FP32 if held != FP32 else 0
    chunk, score_chunk = np.minimum(load.chunk, rows), np.minimum(load.chunk, score_rows)
    in_chunks = load.chunk < UNBOUNDED
    one = upcast + 2.0 * FP32
    return _Loss(
        scoring=held * score_rows + one * score_chunk,
        forward=held * rows + one * chunk,
        kept=np.where(in_chunks, held, FP32) * rows,
        backward=np.where(in_chunks, 2.0 * held * rows + (upcast + 5.0 * FP32) * chunk, 2.0 * FP32 * rows),
        head_gradient=load.layout.compute_bytes * rows,
    )


_LOSSES = {
    "softmax": _softmax,
    "kernel": _kernel,
    "cast_kernel": _cast_kernel,
    "pieces": _pieces,
    "rows": _rows,
    "logprob": _logprob,
}
