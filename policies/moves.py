"""Which knobs each remedy moves, what that frees and what it costs: the ladder as it can be read."""

from __future__ import annotations

from policies.types import Value


class Move(Value, frozen=True, kw_only=True):
    """A remedy in words."""

    knobs: tuple[str, ...]  # the ways to apply it, each one knob; none where nothing of the job changes
    frees: str
    slows: str


_TRAINING_TRANSFERS = "every step, by transfers to and from the host"

MOVES: dict[str, Move] = {
    "reduce_concurrency": Move(
        knobs=("concurrency",),
        frees="the engine's batches and live tokens",
        slows="rollout, where the engine was not saturated",
    ),
    "reduce_mem_fraction": Move(
        knobs=("memory_fraction",),
        frees="the engine's static share",
        slows="rollout, when the pool holds fewer requests",
    ),
    "increase_mem_fraction": Move(
        knobs=("memory_fraction",), frees="pool memory, taken from the rest of the card", slows="nothing"
    ),
    "disable_cuda_graph": Move(
        knobs=("cuda_graphs",), frees="the graphs' private pools", slows="decoding of small batches"
    ),
    "reduce_tokens_per_mb": Move(
        knobs=("tokens_per_microbatch", "logprob_tokens", "max_batched_tokens"),
        frees="activations and logits in proportion",
        slows="the phase by a few per cent",
    ),
    "reduce_micro_batch": Move(
        knobs=("microbatch_size",),
        frees="activations and logits in proportion",
        slows="the phase by a few per cent",
    ),
    "recompute": Move(
        knobs=("recompute",), frees="the layers' kept activations", slows="training by 5 to 30 %"
    ),
    "loss_recompute": Move(
        knobs=("loss_recompute", "entropy_recompute"),
        frees="logits kept for backward",
        slows="backward by a few per cent",
    ),
    "chunk_logits": Move(
        knobs=("logprob_chunk", "entropy_chunking"),
        frees="all but one piece of the logits",
        slows="the phase by 1 to 3 %",
    ),
    "fused_kernels": Move(
        knobs=("fused_kernels",),
        frees="logits and gate products",
        slows="nothing; results differ by rounding",
    ),
    "offload_activations": Move(
        knobs=("activation_offload",), frees="kept activations, onto the host", slows=_TRAINING_TRANSFERS
    ),
    "offload_optimizer": Move(
        knobs=("optimizer_offload", "optimizer_offload_fraction"),
        frees="the optimizer's state, onto the host",
        slows=_TRAINING_TRANSFERS,
    ),
    "offload_params": Move(
        knobs=("param_offload",), frees="the trainer's weights, onto the host", slows=_TRAINING_TRANSFERS
    ),
    "offload_grads": Move(
        knobs=("grad_offload",), frees="gradients, onto the host", slows=_TRAINING_TRANSFERS
    ),
    "sequence_parallel": Move(
        knobs=("sequence_parallel", "context_parallel"),
        frees="about half of each sequence's activations",
        slows="every pass, by communication",
    ),
    "tensor_parallel": Move(
        knobs=("tensor_parallel", "rollout_tensor_parallel"),
        frees="about half of each layer",
        slows="every pass, by communication",
    ),
    "disk_weight_sync": Move(
        knobs=("sync_mode",),
        frees="gathered weights and sync buffers",
        slows="weight sync, by a write and a read",
    ),
    "reduce_sync_buffer": Move(
        knobs=("sync_buffer",), frees="sync buffers in proportion", slows="weight sync, slightly"
    ),
    "expandable_segments": Move(knobs=("allocator",), frees="fragmented reserve", slows="nothing"),
    "adjust_memory_margin": Move(knobs=("memory_margin",), frees="the difference", slows="nothing"),
    "host_allocator": Move(
        knobs=("host_allocator",), frees="host memory that is freed but not returned", slows="nothing"
    ),
    "reduce_host_offload": Move(
        knobs=("activation_offload", "grad_offload", "optimizer_offload", "param_offload"),
        frees="host memory, at the cost of the card's",
        slows="nothing",
    ),
    "drop_weights_backup": Move(
        knobs=("weights_backup",), frees="one host copy of the weights", slows="waking the trainer, slightly"
    ),
    "reduce_workers": Move(
        knobs=("dataloader_workers",),
        frees="host and shared memory in proportion",
        slows="data loading, where it is the bottleneck",
    ),
    "restart_every": Move(
        knobs=("restart_every",), frees="what accumulates over steps", slows="one restart every so many steps"
    ),
    "free_before_relaunch": Move(knobs=(), frees="what others hold of the card", slows="nothing"),
    "capture_snapshot": Move(
        knobs=("memory_snapshot",),
        frees="nothing; records the next failure",
        slows="every allocation, slightly",
    ),
}
