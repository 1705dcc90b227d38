"""Bytes of optimizer state per parameter, derived from dtype settings, and how ZeRO shards it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from autotune.policies.values.architecture.model import Layout

_WIDTHS = {"fp32": 4, "float32": 4, "float": 4, "32": 4, "fp8": 1, "uint8": 1}
_HALF, _FP32 = 2, 4
# DeepSpeed's own reduce_bucket_size, in gradients, and sub_group_size, in parameters (zero/config.py).
_ZERO_BUCKET, _ZERO_SUB_GROUP = 500_000_000, 1_000_000_000
_ZERO_3 = 3
_MASTER_REMAINDER = 2  # of an fp32 master weight, beside the 16 bits that the bf16 weight holds
_MOMENTS = {"sgd": 1, "lion": 1, "muon": 1, "adafactor": 0, "ademamix": 3}
_ADAM = 2
# Blocks of 256 values share one scale, which adds less than 2 % (torchao.optim, bitsandbytes.optim).
_PACKED = {"8bit": 1.0, "fp8": 1.0, "4bit": 0.5}


def width(dtype: str) -> int:
    """Return the bytes of a dtype, named as in torch or Megatron; 2 for half precision."""
    return _WIDTHS.get(dtype.removeprefix("torch."), 2)


def megatron_state_bytes(
    optimizer: str,
    *,
    parameter_bytes: int,
    precise: bool = False,
    on_host: bool = False,
    master: str = "fp32",
    moments: tuple[str, str] = ("fp32", "fp32"),
) -> int:
    """Return the bytes of master weights and moments per parameter (megatron/core/optimizer).

    All are fp32 unless the precision-aware optimizer (`precise`) sets other dtypes; of an fp32 master,
    Transformer Engine then stores only the 16 bits that the bf16 weight lacks. The CPU optimizer (`on_host`)
    always has full fp32 copies. Without half-precision weights there are no master weights.
    """
    typed = precise and not on_host
    masters = 0
    if parameter_bytes < _FP32:
        masters = width(master) if typed else _FP32
        masters = _MASTER_REMAINDER if typed and masters == _FP32 else masters
    widths = tuple(map(width, moments)) if typed else (_FP32, _FP32)
    return masters + sum(widths[: _MOMENTS.get(optimizer.lower(), _ADAM)])


def megatron_bytes(
    optimizer: str,
    *,
    parameter_bytes: int = _HALF,
    gradient_bytes: int = _FP32,
    precise: bool = False,
    on_host: bool = False,
    **state: Any,
) -> dict[str, Any]:
    """Return the fields of Layout that are bytes of Megatron's weights, gradients and optimizer.

    `state`: further arguments of `megatron_state_bytes`. Megatron's Adam is fused and works in place.
    Gradients in another dtype than fp32 are first copied to fp32, unless the precision-aware optimizer reads
    them directly (distrib_optimizer.py, _copy_model_grads_to_main_grads). An optimizer `on_host` without it
    also keeps fp32 weights on the device. Megatron's command line refuses that combination, but a framework
    that builds OptimizerConfig itself can use it (distrib_optimizer.py, _build_model_and_main_param_groups).
    """
    return {
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": megatron_state_bytes(
            optimizer, parameter_bytes=parameter_bytes, precise=precise, on_host=on_host, **state
        ),
        "masters_beside": on_host and not precise and parameter_bytes < _FP32,
        "optimizer_temporary_bytes": 0 if precise or gradient_bytes == _FP32 else _FP32,
    }


def torch_state_bytes(
    optimizer: str, *, parameter_bytes: int, arguments: Mapping[str, Any] | None = None
) -> int:
    """Return the bytes of a torch optimizer's moments per parameter, derived from its class name.

    Moments have their parameter's dtype, unless the class name says that they are packed (`8bit`) or the
    arguments set their dtypes. SGD keeps a moment only with momentum.
    """
    given, name = arguments or {}, optimizer.lower()
    if "momentum_dtype" in given or "variance_dtype" in given:
        types = [str(given.get(key, "bfloat16")) for key in ("momentum_dtype", "variance_dtype")]
        if given.get("use_kahan_summation", False):
            types.append(str(given.get("compensation_buffer_dtype", "bfloat16")))
        return sum(map(width, types))
    if name == "sgd" and not given.get("momentum"):
        return 0
    each = next((size for word, size in _PACKED.items() if word in name), float(parameter_bytes))
    count = next((moments for word, moments in _MOMENTS.items() if word in name), _ADAM)
    return math.ceil(count * each)


def with_zero(
    layout: Layout,
    stage: int | None,
    *,
    optimizer: str,
    ranks: int = 0,
    bucket: int = _ZERO_BUCKET,
    buckets: int = 1,
    accumulated: int = _HALF,
    secondary: int = 1,
) -> Layout:
    """Return a layout sharded by a stage of DeepSpeed's ZeRO over `ranks` (0: all); None leaves it unchanged.

    Below stage 3 every rank holds all weights in 16 bits. The optimizer holds an fp32 copy of the weights
    that it updates: all of them at stage 0, the rank's shard from stage 1 on. Its step converts gradients to
    fp32, at stage 3 sub_group_size of them at a time. The backward pass copies gradients into a buffer of
    `bucket` elements; `buckets` is 2 where communication overlaps. Gradients accumulate in `accumulated`
    bytes each. If these are wider than the weights, stage 1 has a buffer for all gradients; stage 3 always
    has one for the rank's shard. Stage 3 keeps a second copy of the weights, sharded over groups of
    `secondary` ranks (zero_hpz_partition_size; 1: none). Source: deepspeed/runtime/engine.py,
    bf16_optimizer.py, zero/stage_1_and_2.py, zero/stage3.py, zero/partition_parameters.py.
    """
    if stage is None:
        return layout
    parted, wide = stage == _ZERO_3, stage in (1, 2, _ZERO_3) and accumulated > _HALF
    return replace(
        layout,
        strategy="fsdp2" if parted else "ddp",
        shards=(ranks or layout.ranks) if stage else 1,
        shards_gradients=stage == 2,
        gradients_stay=parted or (wide and stage == 1),
        reduce_bucket_bytes=bucket * _HALF * buckets,
        parameter_bytes=_HALF,
        compute_bytes=_HALF,
        gradient_bytes=accumulated if wide else _HALF,
        reduce_bytes=_HALF,
        reference_bytes=_HALF,
        optimizer_bytes=_FP32 + torch_state_bytes(optimizer, parameter_bytes=_FP32),
        optimizer_stays_offloaded=True,  # DeepSpeed's Adam works in host memory
        parameters_stay_offloaded=parted,
        per_tensor_optimizer=False,
        optimizer_temporary_bytes=_FP32,
        secondary_shards=secondary if parted and secondary > 1 else 0,
        update_parameters=_ZERO_SUB_GROUP if parted else 0,
    )
