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
    concurrency: int | None = None  # requests that a rollout engine works on at once
    # share of a GPU, 0 to 1, that an engine takes for weights and KV cache
    memory_fraction: float | None = None
    rollout_tensor_parallel: int | None = None  # tensor-parallel size of a rollout engine, in ranks
    cuda_graphs: str | None = None  # full | limited | off
    max_batched_tokens: int | None = None  # tokens that a rollout engine prefills in one pass
    max_model_len: int | None = None  # longest sequence that a rollout engine makes room for, in tokens
    engine_sleep: bool | None = None  # whether the engine frees its device memory while the trainer works
    # training
    tokens_per_microbatch: int | None = None  # token budget of a training micro-batch, with dynamic batching
    microbatch_size: int | None = None  # sequences of a training micro-batch, without dynamic batching
    dynamic_batching: bool | None = None  # whether micro-batches are filled by tokens, not by sequences
    recompute: str | None = None  # off | selective | modules | full
    activation_offload: bool | None = None  # whether activations wait in host memory for the backward pass
    param_offload: bool | None = None  # whether unused weights of the trainer are in host memory
    grad_offload: bool | None = None  # whether unused gradients are in host memory
    optimizer_offload: bool | None = None  # whether the optimizer's state is in host memory
    optimizer_offload_fraction: float | None = None  # share of that state in host memory, 0 to 1
    optimizer_offload_overlap: bool | None = None  # whether its copies overlap with computation
    sequence_parallel: int | None = None  # sequence-parallel (Ulysses) size of the trainer, in ranks
    context_parallel: int | None = None  # context-parallel size of the trainer, in ranks
    tensor_parallel: int | None = None  # tensor-parallel size of the trainer, in ranks
    expert_parallel: int | None = None  # ranks over which the trainer's experts are spread
    pipeline_parallel: int | None = None  # stages into which the trainer's layers are split
    sharding: str | None = None  # fsdp | fsdp2 | ...
    shard_group: int | None = None  # ranks over which FSDP spreads one copy of the trainer's state
    reshard_after_forward: bool | None = None  # whether FSDP frees gathered weights until the backward
    fused_kernels: bool | None = None  # whether a fused kernel computes the loss without whole logits
    loss_recompute: bool | None = None  # whether the logits are recomputed in the backward pass of the loss
    memory_efficient_load: bool | None = None  # whether the model is loaded on the host, not on every device
    # log-probs
    logprob_tokens: int | None = None  # token budget of a micro-batch that scores log-probabilities or values
    logprob_chunk: int | None = None  # tokens whose log-probabilities are computed at once
    entropy_chunking: bool | None = None  # whether the entropy is computed in chunks
    entropy_recompute: bool | None = None  # whether the entropy is recomputed in the backward pass
    # weight sync
    sync_mode: str | None = None  # memory | disk
    sync_buffer: int | None = None  # bytes
    layered_sync: bool | None = None  # whether a weight sync reads adapters layer by layer
    # host
    host_allocator: str | None = None  # allocator of the job's host memory: default | jemalloc
    weights_backup: bool | None = None  # whether a sleeping engine keeps a copy of its weights in host memory
    dataloader_workers: int | None = None  # worker processes of the data loader
    async_save: bool | None = None  # whether a checkpoint is written during training, from a copy on the host
    multimodal_cache: int | None = None  # bytes
    # allocator
    allocator: str | None = None  # default | expandable
    memory_margin: int | None = None  # bytes
    # run
    restart_every: int | None = None  # steps
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
