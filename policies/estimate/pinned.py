"""Page-locked copies of weights on the host: PyTorch rounds each block up to a power of two."""

from __future__ import annotations

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import FP32, parameters
from autotune.policies.estimate.training import State
from autotune.policies.values.architecture.model import Model

_HALF = 2
_SUB_GROUP = 1_000_000_000  # parameters, DeepSpeed's own sub_group_size (zero/config.py)


def block(size: Floats | float) -> Floats:
    """Return the bytes that torch's host allocator uses for blocks of `size` bytes (CachingHostAllocator.h).

    Measured: `benchmarks/gpu/measurements/host/h100.jsonl`, case `pinned`.
    """
    result: Floats = np.where(size > 0, np.exp2(np.ceil(np.log2(np.maximum(1.0, size)))), 0.0)
    return result


def of_buffers(state: State, *, width: float) -> Floats:
    """Return the factor by which Megatron's flat buffers, of experts and of the rest, exceed their weights.

    `width`: bytes per weight (megatron/core/distributed/param_and_grad_buffer.py, offload_to_cpu; verl's and
    SkyRL's offload_megatron_model_to_cpu).
    """
    rest = block((state.local - state.routed) * width)
    result: Floats = (rest + block(state.routed * width)) / np.maximum(1.0, state.local * width)
    return result


def of_tensors(model: Model, load: Load, *, width: float) -> Floats:
    """Return the factor by which page-locked tensors exceed their bytes, over all weights of a rank.

    `width`: bytes per weight. A matrix is one block; Megatron fuses q, k and v, and gate and up.
    """
    layout, megatron = load.layout, load.layout.strategy == "megatron"
    split = load.tensor if megatron else load.shards * load.tensor
    # FSDP shards the experts of a layer as one tensor; Megatron has one tensor per expert of its rank.
    experts = layout.expert_tensor_parallel if megatron else split
    return _rounded(_matrices(model, fused=megatron, apart=megatron), width, split, experts)


def of_engine(model: Model, load: Load) -> Floats:
    """Return the factor by which the backup of vLLM's weights exceeds them: one block per allocation.

    vllm/device_allocator/cumem.py, sleep; q, k and v, gate and up are one tensor each, a layer's experts two.
    """
    split = load.rollout_tensor
    return _rounded(_matrices(model, fused=True, apart=False), load.layout.engine_bytes, split, split)


def _rounded(
    matrices: list[tuple[float, float, bool]], width: float, split: Floats, experts: Floats | float
) -> Floats:
    exact, taken = np.zeros_like(split), np.zeros_like(split)
    for number, elements, routed in matrices:
        size = elements * width / (experts if routed else split)
        exact, taken = exact + number * size, taken + number * block(size)
    result: Floats = taken / np.maximum(1.0, exact)
    return result


def of_zero(model: Model, load: Load, state: State) -> tuple[Floats, Floats]:
    """Return the bytes of DeepSpeed's page-locked blocks in addition to 16-bit values, and to fp32 ones.

    `pin_memory` is assumed, as in the configurations that frameworks ship. ZeRO-3 locks a rank's weights
    tensor by tensor while it partitions them, blocks that PyTorch keeps after their copy to one buffer, and
    the summed gradients as one block (zero/partition_parameters.py, stage3.py); fp32 gradients are a block
    per sub-group. Stages 1 and 2 have one block of fp32 weights, one of fp32 gradients and one of 16-bit
    weights (stage_1_and_2.py).
    """
    own = state.optimizer / max(1, load.layout.optimizer_bytes) * load.host_update  # parameters of a rank
    gradients = own * FP32
    if load.layout.strategy == "ddp":
        return block(own * _HALF), 2 * (block(gradients) - gradients)
    groups = np.maximum(1.0, np.ceil(own / max(1, load.layout.update_parameters or _SUB_GROUP)))
    parted = state.weights * load.from_host * of_tensors(model, load, width=load.layout.parameter_bytes)
    summed = block(own * _HALF) - own * _HALF
    return parted + summed, groups * block(gradients / groups) - gradients


def _matrices(model: Model, *, fused: bool, apart: bool) -> list[tuple[float, float, bool]]:
    """Return a model's matrices as (count, elements, whether they are experts').

    `fused`: q, k and v are one matrix, gate and up are one; `apart`: each expert has its own.
    """
    counts, hidden = parameters(model), model.hidden
    out = float(model.heads * model.head_dim * hidden)
    ordinary = not model.kv_lora_rank and not model.linear_layers
    # Other kinds of attention count as four equal matrices.
    joined = [counts.attention - out] if fused else [out, *[(counts.attention - 2 * out) / 2] * 2]
    attention = [out, *joined] if ordinary else [counts.attention / 4] * 4
    result = [(float(model.layers), size, False) for size in attention]
    ups, down = (2 if model.gated else 1), counts.mlp / (3 if model.gated else 2)
    result += [
        (float(model.layers), size, False) for size in (down, *([ups * down] if fused else [down] * ups))
    ]
    if model.experts:
        each = float(hidden * model.expert_intermediate)
        number, times = (model.layers * model.experts, 1) if apart else (model.layers, model.experts)
        result += [(float(number), each * times, True), (float(number), ups * each * times, True)]
    return [*result, *((1.0, float(size), False) for size in (counts.embedding, counts.head))]
