"""A one-sentence description of each knob, as used by `--set`, `search.vary` and `recovery.deny`."""

from __future__ import annotations

import msgspec

from autotune.policies.values.formatting import BYTE_KNOBS
from autotune.policies.values.knobs import KNOBS, Knobs

KINDS: dict[object, str] = {
    int | None: "a whole number",
    float | None: "a number",
    bool | None: "true or false",
}

MEANINGS: dict[str, str] = {
    "concurrency": "Requests that a rollout engine works on at once.",
    "memory_fraction": "Share of the GPU memory that a rollout engine takes for its weights and KV cache.",
    "rollout_tensor_parallel": "Tensor-parallel size of a rollout engine.",
    "cuda_graphs": "CUDA graphs of the rollout engine: `full`, `limited` (fewer batch sizes) or `off`.",
    "max_batched_tokens": "Tokens that a rollout engine prefills in one pass.",
    "max_model_len": "Longest sequence that a rollout engine makes room for, in tokens.",
    "tokens_per_microbatch": "Token budget of a training micro-batch, with dynamic batching.",
    "microbatch_size": "Sequences of a training micro-batch, without dynamic batching.",
    "engine_sleep": "Whether the rollout engine gives its device memory back while the trainer works.",
    "dynamic_batching": "Whether micro-batches are filled up to a number of tokens, not of sequences.",
    "recompute": "Activation checkpointing in training: `off`, `selective`, `modules` or `full`.",
    "activation_offload": "Whether activations wait in host memory for the backward pass.",
    "param_offload": "Whether the trainer's weights are in host memory while they are not used.",
    "grad_offload": "Whether gradients are in host memory while they are not used; with verl's FSDP2 weights"
    " and optimizer too, with OpenRLHF the optimizer.",
    "optimizer_offload": "Whether the optimizer's state is in host memory.",
    "optimizer_offload_fraction": "Share of the optimizer's state that is in host memory.",
    "optimizer_offload_overlap": "Whether the copies of an offloaded optimizer overlap with computation.",
    "sequence_parallel": "Sequence-parallel (Ulysses) size of the trainer.",
    "context_parallel": "Context-parallel size of the trainer.",
    "tensor_parallel": "Tensor-parallel size of the trainer.",
    "expert_parallel": "Expert-parallel size of the trainer: the ranks over which its experts are spread.",
    "pipeline_parallel": "Pipeline-parallel size of the trainer: the stages into which its layers are split.",
    "sharding": "How the trainer shards weights, gradients and optimizer state, such as `fsdp` or `fsdp2`.",
    "shard_group": "Ranks over which FSDP spreads one copy of the trainer's state.",
    "reshard_after_forward": "Whether FSDP frees a layer's gathered weights until its backward.",
    "fused_kernels": "Whether a fused kernel computes the loss without whole logits in memory.",
    "loss_recompute": "Whether the logits are recomputed in the backward pass of the loss.",
    "memory_efficient_load": "Whether the model is loaded on the host and not whole on every device.",
    "logprob_tokens": "Token budget of a micro-batch of log-probability, value or reference scoring.",
    "logprob_chunk": "Tokens whose log-probabilities are computed at once.",
    "entropy_chunking": "Whether the entropy is computed in chunks.",
    "entropy_recompute": "Whether the entropy is recomputed in the backward pass.",
    "sync_mode": "How new weights reach the rollout engine: `memory` or `disk`.",
    "sync_buffer": "Buffer through which weights are sent to the rollout engine.",
    "layered_sync": "Whether a weight sync reads adapters layer by layer and never gathers the whole model.",
    "host_allocator": "Allocator of the job's host memory, such as `jemalloc`.",
    "weights_backup": "Whether a sleeping rollout engine keeps a copy of its weights in host memory.",
    "dataloader_workers": "Worker processes of the data loader.",
    "async_save": "Whether a checkpoint is written while training goes on, from a copy in host memory.",
    "multimodal_cache": "Processed images and videos that each process of an engine keeps in host memory.",
    "allocator": "CUDA caching allocator of PyTorch: `default` or `expandable` segments.",
    "memory_margin": "GPU memory that the trainer leaves free.",
    "restart_every": "Steps after which the job is stopped at a checkpoint and restarted, against leaks.",
    "memory_snapshot": "Whether PyTorch records a memory snapshot when it runs out of memory.",
    "nccl_memory_check": "Whether NCCL logs the memory that it allocates.",
    "memory_profile": "Whether the framework's own memory profile is written.",
}


def kind(name: str) -> str:
    """Return the kind of a knob's value in words, such as `a whole number`."""
    if name in BYTE_KNOBS:
        return "a size such as `64MiB`"
    return KINDS.get(value_type(name), "text")


def value_type(name: str) -> object:
    """Return the type of a knob's value."""
    return next(field.type for field in msgspec.structs.fields(Knobs) if field.name == name)


def table() -> list[tuple[str, str, str]]:
    """Return the name, kind and meaning of every knob."""
    return [(name, kind(name), MEANINGS[name]) for name in KNOBS]
