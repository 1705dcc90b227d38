"""Page-locked copies of weights on the host: PyTorch rounds each block up to a power of two."""

from __future__ import annotations

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import parameters
from autotune.policies.estimate.training import State
from autotune.policies.values.architecture.model import Model


def block(size: Floats | float) -> Floats:
    """Return what torch's host allocator takes for blocks of these bytes (CachingHostAllocator.h).

    Measured: `benchmarks/gpu/measurements/host/h100.jsonl`, case `pinned`.
    """
    result: Floats = np.where(size > 0, np.exp2(np.ceil(np.log2(np.maximum(1.0, size)))), 0.0)
    return result


def of_buffers(state: State, *, width: float) -> Floats:
    """Return by how much Megatron's flat buffers exceed their weights: one of the experts, one of the rest.

    `width`: bytes per weight (megatron/core/distributed/param_and_grad_buffer.py, offload_to_cpu; verl's and
    SkyRL's offload_megatron_model_to_cpu).
    """
    rest = block((state.local - state.routed) * width)
    result: Floats = (rest + block(state.routed * width)) / np.maximum(1.0, state.local * width)
    return result


def of_tensors(model: Model, load: Load, *, width: float) -> Floats:
    """Return by how much page-locked tensors exceed their bytes, over all weights of a rank.

    `width`: bytes per weight. A matrix is one block, which Megatron fuses: q, k and v, gate and up.
    """
    layout, megatron = load.layout, load.layout.strategy == "megatron"
    split = load.tensor if megatron else load.shards * load.tensor
    exact, taken = np.zeros(load.count), np.zeros(load.count)
    for number, elements, experts in _matrices(model, fused=megatron):
        # FSDP shards the experts of a layer as one tensor; Megatron has those of its rank one by one.
        ranks = layout.expert_tensor_parallel if experts and megatron else split
        size = elements * width / ranks
        exact, taken = exact + number * size, taken + number * block(size)
    result: Floats = taken / np.maximum(1.0, exact)
    return result


def _matrices(model: Model, *, fused: bool) -> list[tuple[float, float, bool]]:
    """Return how many matrices of which elements a model has, and whether they are experts'."""
    counts, hidden = parameters(model), model.hidden
    out = float(model.heads * model.head_dim * hidden)
    ordinary = not model.kv_lora_rank and not model.linear_layers
    # Of other attention, its weights in four equal parts.
    joined = [counts.attention - out] if fused else [out, *[(counts.attention - 2 * out) / 2] * 2]
    attention = [out, *joined] if ordinary else [counts.attention / 4] * 4
    result = [(float(model.layers), size, False) for size in attention]
    ups, down = (2 if model.gated else 1), counts.mlp / (3 if model.gated else 2)
    result += [
        (float(model.layers), size, False) for size in (down, *([ups * down] if fused else [down] * ups))
    ]
    if model.experts:
        each = float(hidden * model.expert_intermediate)
        number, times = (model.layers * model.experts, 1) if fused else (model.layers, model.experts)
        result += [(float(number), each * times, True), (float(number), ups * each * times, True)]
    return [*result, *((1.0, float(size), False) for size in (counts.embedding, counts.head))]
