"""STEPS: which way each remedy turns which knob, for jobs of which nothing else is known."""

from __future__ import annotations

from policies.types import Value


class Step(Value, frozen=True, kw_only=True):
    """How a remedy turns a knob, without knowing its value."""

    knob: str
    direction: str
    action: str
    reason: str
    slows: str = ""


def step(knob: str, direction: str, action: str, reason: str, slows: str = "") -> Step:
    """Return a row of the table."""
    return Step(knob=knob, direction=direction, action=action, reason=reason, slows=slows)


_PASS = "the memory of a pass grows with its tokens; the batch is the same, in more passes"  # noqa: S105
_BUFFERS = "every step, by the transfers"
# The first step whose knob is offered is taken.
STEPS: dict[str, tuple[Step, ...]] = {
    "reduce_concurrency": (
        step(
            "concurrency",
            "lower",
            "lower `concurrency`, the requests the engine works on at once, for instance to half",
            "batch and pool memory shrink with the requests; every sample is still made",
            "rollout, where the engine was not saturated",
        ),
    ),
    "reduce_mem_fraction": (
        step(
            "memory_fraction",
            "lower",
            "lower `memory_fraction`, the engine's static share of the card, for instance by 0.1",
            "the engine's static share is taken from the memory that ran out",
            "rollout, when the smaller pool holds fewer requests",
        ),
    ),
    "increase_mem_fraction": (
        step(
            "memory_fraction",
            "raise",
            "raise `memory_fraction`, the engine's static share of the card, for instance by 0.05",
            "what the weights leave of the engine's share is too small a pool, so the share must grow",
        ),
    ),
    "disable_cuda_graph": (
        step(
            "cuda_graphs",
            "off",
            "capture fewer CUDA graphs, or none",
            "captured graphs keep private pools beside the token pool",
            "decoding of small batches, by 10 to 30 %",
        ),
    ),
    "reduce_tokens_per_mb": (
        step(
            "tokens_per_microbatch",
            "lower",
            "lower `tokens_per_microbatch`, for instance to half",
            _PASS,
            "this phase by a few per cent",
        ),
    ),
    "reduce_micro_batch": (
        step(
            "microbatch_size",
            "lower",
            "lower `microbatch_size`, for instance to half, and accumulate more gradients",
            "the memory of a pass grows with its sequences; the batch is the same, in more passes",
            "this phase by a few per cent",
        ),
    ),
    "chunk_logits": (
        step(
            "logprob_chunk",
            "lower",
            "compute logits and entropy in pieces",
            "the logits of all tokens at once are the largest tensor of the phase",
            "this phase by 1 to 3 %",
        ),
        step(
            "entropy_chunking",
            "on",
            "compute the entropy of the logits in pieces",
            "the logits of all tokens at once are the largest tensor of the phase",
            "this phase by 1 to 3 %",
        ),
    ),
    "fused_kernels": (
        step(
            "fused_kernels",
            "on",
            "use fused kernels for loss and gates",
            "they never write the full logits; results differ by rounding",
        ),
    ),
    "loss_recompute": (
        step(
            "loss_recompute",
            "on",
            "recompute the loss in backward",
            "the loss keeps logits for backward; computing it again keeps none",
            "backward by a few per cent",
        ),
    ),
    "recompute": (
        step(
            "recompute",
            "on",
            "recompute activations in backward (gradient checkpointing)",
            "backward computes the activations again, so that forward need not keep them",
            "training by 20 to 30 %",
        ),
    ),
    "offload_activations": (
        step(
            "activation_offload",
            "on",
            "offload activations to the host between forward and backward",
            "host memory keeps them while the devices do not need them",
            _BUFFERS,
        ),
    ),
    "offload_optimizer": (
        step(
            "optimizer_offload",
            "on",
            "offload the optimizer's state to the host",
            "host memory keeps it while the devices do not need it",
            _BUFFERS,
        ),
    ),
    "offload_params": (
        step(
            "param_offload",
            "on",
            "offload the trainer's weights to the host, or shard them over more cards",
            "host memory keeps them while the devices do not need them",
            _BUFFERS,
        ),
    ),
    "offload_grads": (
        step(
            "grad_offload",
            "on",
            "offload the gradients to the host",
            "host memory keeps them while the devices do not need them",
            _BUFFERS,
        ),
    ),
    "sequence_parallel": (
        step(
            "sequence_parallel",
            "more",
            "split every sequence over more ranks",
            "each rank holds a part of every sequence",
            "every pass, by communication",
        ),
        step(
            "context_parallel",
            "more",
            "split every sequence over more ranks",
            "each rank holds a part of every sequence",
            "every pass, by communication",
        ),
    ),
    "tensor_parallel": (
        step(
            "tensor_parallel",
            "more",
            "split every layer over more ranks",
            "each rank holds a part of every layer",
            "every pass, by communication",
        ),
    ),
    "disk_weight_sync": (
        step(
            "sync_mode",
            "disk",
            "hand new weights to the engine through files",
            "weights written to files need no gathered copies and buffers on the devices",
            "weight sync, by writing and reading the model",
        ),
    ),
    "reduce_sync_buffer": (
        step(
            "sync_buffer",
            "lower",
            "send new weights in smaller pieces",
            "weights travel in pieces of this size, held on both sides",
            "weight sync, slightly",
        ),
    ),
    "expandable_segments": (
        step(
            "allocator",
            "expandable",
            "let the allocator's segments grow",
            "memory that is reserved but in pieces too small for the request becomes usable",
        ),
    ),
    "host_allocator": (
        step(
            "host_allocator",
            "jemalloc",
            "use an allocator that gives host memory back",
            "glibc keeps freed host memory in its arenas; jemalloc and tcmalloc return it",
        ),
    ),
    "reduce_host_offload": (
        step(
            "optimizer_offload",
            "off",
            "offload less to the host: optimizer, weights, activations, caches",
            "what is offloaded fills the host memory that ran out",
        ),
    ),
    "reduce_workers": (
        step(
            "dataloader_workers",
            "lower",
            "lower `dataloader_workers`, for instance to half",
            "every data loader process holds its own copy of the data and its shared batches",
            "data loading, where it is the bottleneck",
        ),
    ),
}
IN_ENGINE = {
    "reduce_tokens_per_mb": step(
        "max_batched_tokens",
        "lower",
        "lower `max_batched_tokens`, what the engine prefills at once, for instance to half",
        "the memory of a prefill grows with its tokens",
        "rollout, slightly",
    ),
    "tensor_parallel": step(
        "rollout_tensor_parallel",
        "more",
        "split the engine's model over more cards",
        "each card holds a part of every layer, and more of its own pool",
        "decoding, by communication",
    ),
}
IN_SCORING = step(
    "logprob_tokens",
    "lower",
    "lower `logprob_tokens`, the tokens of a scoring pass, for instance to half",
    _PASS,
)
OFFLOADS = ("optimizer_offload", "param_offload", "activation_offload", "grad_offload")
