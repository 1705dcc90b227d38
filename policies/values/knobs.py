"""The closed vocabulary of what may change."""

from __future__ import annotations

import operator
from itertools import compress
from typing import Literal, TypeAlias, cast

import msgspec

from autotune.policies.values.value import Value


class Knobs(Value, frozen=True, kw_only=True):
    """The closed vocabulary of what may change; None means the framework's own default."""

    # rollout
    concurrency: int | None = None
    memory_fraction: float | None = None
    rollout_tensor_parallel: int | None = None
    cuda_graphs: str | None = None  # full | limited | off
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    engine_sleep: bool | None = None
    # training
    tokens_per_microbatch: int | None = None
    microbatch_size: int | None = None
    dynamic_batching: bool | None = None
    recompute: str | None = None  # off | selective | modules | full
    activation_offload: bool | None = None
    param_offload: bool | None = None
    grad_offload: bool | None = None
    optimizer_offload: bool | None = None
    optimizer_offload_fraction: float | None = None
    optimizer_offload_overlap: bool | None = None
    sequence_parallel: int | None = None
    context_parallel: int | None = None
    tensor_parallel: int | None = None
    expert_parallel: int | None = None
    pipeline_parallel: int | None = None
    sharding: str | None = None  # fsdp | fsdp2 | ...
    shard_group: int | None = None
    reshard_after_forward: bool | None = None
    fused_kernels: bool | None = None
    loss_recompute: bool | None = None
    memory_efficient_load: bool | None = None
    # log-probs
    logprob_tokens: int | None = None
    logprob_chunk: int | None = None
    entropy_chunking: bool | None = None
    entropy_recompute: bool | None = None
    # weight sync
    sync_mode: str | None = None  # memory | disk
    sync_buffer: int | None = None  # bytes
    layered_sync: bool | None = None
    # host
    host_allocator: str | None = None
    weights_backup: bool | None = None
    dataloader_workers: int | None = None
    async_save: bool | None = None
    multimodal_cache: int | None = None  # bytes
    # allocator
    allocator: str | None = None  # default | expandable
    memory_margin: int | None = None  # bytes
    # run
    restart_every: int | None = None  # steps
    # diagnostics
    memory_snapshot: bool | None = None
    nccl_memory_check: bool | None = None
    memory_profile: bool | None = None


Setting: TypeAlias = int | float | bool | str | None

# The name of a knob, for mypy; a test compares it with the fields of `Knobs`.
KnobName: TypeAlias = Literal[
    "concurrency",
    "memory_fraction",
    "rollout_tensor_parallel",
    "cuda_graphs",
    "max_batched_tokens",
    "max_model_len",
    "engine_sleep",
    "tokens_per_microbatch",
    "microbatch_size",
    "dynamic_batching",
    "recompute",
    "activation_offload",
    "param_offload",
    "grad_offload",
    "optimizer_offload",
    "optimizer_offload_fraction",
    "optimizer_offload_overlap",
    "sequence_parallel",
    "context_parallel",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "sharding",
    "shard_group",
    "reshard_after_forward",
    "fused_kernels",
    "loss_recompute",
    "memory_efficient_load",
    "logprob_tokens",
    "logprob_chunk",
    "entropy_chunking",
    "entropy_recompute",
    "sync_mode",
    "sync_buffer",
    "layered_sync",
    "host_allocator",
    "weights_backup",
    "dataloader_workers",
    "async_save",
    "multimodal_cache",
    "allocator",
    "memory_margin",
    "restart_every",
    "memory_snapshot",
    "nccl_memory_check",
    "memory_profile",
]
KNOBS: tuple[KnobName, ...] = cast("tuple[KnobName, ...]", Knobs.__struct_fields__)


def changed(before: Knobs, after: Knobs) -> dict[str, tuple[Setting, Setting]]:
    """Return the knobs in which `after` differs, as name -> (before, after)."""
    olds, news = msgspec.structs.astuple(before), msgspec.structs.astuple(after)
    differ = map(operator.ne, olds, news)
    return {name: (old, new) for name, old, new in compress(zip(KNOBS, olds, news, strict=True), differ)}


def new_values(before: Knobs, after: Knobs) -> dict[str, Setting]:
    """Return the values of `after` that differ from `before`, as name -> value."""
    return {name: new for name, (_, new) in changed(before, after).items()}
