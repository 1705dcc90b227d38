"""The closed vocabulary of what may change."""

from __future__ import annotations

import operator
from itertools import compress
from typing import Literal, TypeAlias, TypeGuard, cast

import msgspec

from autotune.policies.values.value import Value


class Knobs(Value, frozen=True, kw_only=True):
    """The closed vocabulary of what may change; None means the framework's own default."""

    # rollout
    concurrency: int | None = None  # requests that a rollout engine works on at once
    # share of the GPU memory that a rollout engine takes for its weights and KV cache, 0 to 1
    memory_fraction: float | None = None
    rollout_tensor_parallel: int | None = None  # tensor-parallel size of a rollout engine
    # CUDA graphs of the rollout engine: `full`, `limited` (fewer batch sizes) or `off`
    cuda_graphs: str | None = None
    max_batched_tokens: int | None = None  # tokens that a rollout engine prefills in one pass
    max_model_len: int | None = None  # longest sequence that a rollout engine makes room for, in tokens
    # whether the rollout engine gives its device memory back while the trainer works
    engine_sleep: bool | None = None
    # training
    tokens_per_microbatch: int | None = None  # token budget of a training micro-batch, with dynamic batching
    microbatch_size: int | None = None  # sequences of a training micro-batch, without dynamic batching
    # whether micro-batches are filled up to a number of tokens, not of sequences
    dynamic_batching: bool | None = None
    # activation checkpointing in training: `off`, `selective`, `modules` or `full`
    recompute: str | None = None
    activation_offload: bool | None = None  # whether activations wait in host memory for the backward pass
    # whether the trainer's weights are in host memory while they are not used
    param_offload: bool | None = None
    # whether gradients are in host memory while they are not used; with verl's FSDP2 weights and optimizer
    # too, with OpenRLHF the optimizer
    grad_offload: bool | None = None
    optimizer_offload: bool | None = None  # whether the optimizer's state is in host memory
    # share of the optimizer's state that is in host memory, 0 to 1
    optimizer_offload_fraction: float | None = None
    # whether the copies of an offloaded optimizer overlap with computation
    optimizer_offload_overlap: bool | None = None
    sequence_parallel: int | None = None  # sequence-parallel (Ulysses) size of the trainer
    context_parallel: int | None = None  # context-parallel size of the trainer
    tensor_parallel: int | None = None  # tensor-parallel size of the trainer
    # expert-parallel size of the trainer: the ranks over which its experts are spread
    expert_parallel: int | None = None
    # pipeline-parallel size of the trainer: the stages into which its layers are split
    pipeline_parallel: int | None = None
    # how the trainer shards weights, gradients and optimizer state, such as `fsdp` or `fsdp2`
    sharding: str | None = None
    shard_group: int | None = None  # ranks over which FSDP spreads one copy of the trainer's state
    # whether FSDP frees a layer's gathered weights until its backward
    reshard_after_forward: bool | None = None
    # whether a fused kernel computes the loss without whole logits in memory
    fused_kernels: bool | None = None
    loss_recompute: bool | None = None  # whether the logits are recomputed in the backward pass of the loss
    # whether the model is loaded on the host and not whole on every device
    memory_efficient_load: bool | None = None
    # log-probs
    logprob_tokens: int | None = None  # token budget of a micro-batch that scores log-probabilities or values
    logprob_chunk: int | None = None  # tokens whose log-probabilities are computed at once
    entropy_chunking: bool | None = None  # whether the entropy is computed in chunks
    entropy_recompute: bool | None = None  # whether the entropy is recomputed in the backward pass
    # weight sync
    sync_mode: str | None = None  # how new weights reach the rollout engine: `memory` or `disk`
    sync_buffer: int | None = None  # buffer through which weights are sent to the rollout engine, in bytes
    # whether a weight sync reads adapters layer by layer and never gathers the whole model
    layered_sync: bool | None = None
    # host
    host_allocator: str | None = None  # allocator of the job's host memory, such as `jemalloc`
    # whether a sleeping rollout engine keeps a copy of its weights in host memory
    weights_backup: bool | None = None
    dataloader_workers: int | None = None  # worker processes of the data loader
    # whether a checkpoint is written while training goes on, from a copy in host memory
    async_save: bool | None = None
    # processed images and videos that each process of an engine keeps in host memory, in bytes
    multimodal_cache: int | None = None
    # allocator
    allocator: str | None = None  # CUDA caching allocator of PyTorch: `default` or `expandable` segments
    memory_margin: int | None = None  # GPU memory that the trainer leaves free, in bytes
    # run
    restart_every: int | None = None  # steps between restarts of the job at a checkpoint, against leaks
    # diagnostics
    memory_snapshot: bool | None = None  # whether PyTorch records a snapshot when it runs out of memory
    nccl_memory_check: bool | None = None  # whether NCCL logs the memory that it allocates
    memory_profile: bool | None = None  # whether the framework's own memory profile is written


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


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
