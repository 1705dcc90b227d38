"""MOVES: the knobs that a remedy changes, the memory that it saves, and its description.

The knob table gives the direction in which a knob saves a memory, `proposals` how far it is changed and
`ladder` when. Reason, gain and cost are those written here, unless a failure's figures give better ones.
"""

from __future__ import annotations

from autotune.policies.values.failure import Phase
from autotune.policies.values.knob_table import KNOB_TABLE, Memory, Part
from autotune.policies.values.value import Value


class Turn(Value, frozen=True, kw_only=True):
    """The description of one knob that a remedy changes."""

    action: str = ""  # what to do without knowledge of the job; empty: the remedy needs the job's values
    reason: str = ""  # empty: made from the figures
    slows: str = ""  # empty: that of the remedy


class Move(Value, frozen=True, kw_only=True):
    """The description of a remedy."""

    frees: str
    slows: str
    memory: Memory = Memory.GPU  # that it saves
    turns: dict[str, Turn] = {}  # knob -> how it is applied; empty if the job does not change


def _move(
    knob: str,
    *,
    frees: str,
    slows: str,
    memory: Memory = Memory.GPU,
    action: str = "",
    reason: str = "",
) -> Move:
    """Return a remedy that changes one knob."""
    turn = Turn(action=action, reason=reason)
    return Move(frees=frees, slows=slows, memory=memory, turns={knob: turn})


_BY_TRANSFERS = "every step, by transfers to and from the host"
_COMMUNICATION = "every pass, by communication"
_PASS = "smaller micro-batches, same global batch"  # noqa: S105
_PIECES = "the logits of all tokens are often the largest tensor of the phase"
_SPLIT = "split each sequence across more ranks"
_PART = "each rank holds a part of each sequence"

MOVES: dict[str, Move] = {
    "reduce_concurrency": _move(
        "concurrency",
        frees="batch and KV-cache memory of running requests",
        slows="rollout, if the engine was not saturated",
        action="lower `concurrency`, the number of requests the engine runs at once, for instance to half",
        reason="fewer concurrent requests need less batch and KV memory; all samples are still generated",
    ),
    "reduce_mem_fraction": _move(
        "memory_fraction",
        frees="the engine's static share",
        slows="rollout, if fewer requests fit in the KV cache",
        action="lower `memory_fraction`, the engine's share of the GPU memory, for instance by 0.1",
        reason="the engine's share is taken from the memory that ran out",
    ),
    "increase_mem_fraction": _move(
        "memory_fraction",
        frees="KV-cache memory, taken from the rest of the GPU",
        slows="nothing",
        memory=Memory.POOL,
        action="raise `memory_fraction`, the engine's share of the GPU memory, for instance by 0.05",
        reason="the KV cache gets what the weights leave of the engine's share; a larger share adds to it",
    ),
    "disable_cuda_graph": _move(
        "cuda_graphs",
        frees="the graphs' private pools, often 1 to 3 GiB",
        slows="decoding of small batches, by 10 to 30 %",
        action="capture fewer CUDA graphs, or none",
        reason="captured graphs keep private memory pools beside the KV cache",
    ),
    "engine_sleep": _move(
        "engine_sleep",
        frees="the engine's weights and KV cache while the trainer works",
        slows="every step, by waking the engine",
        reason="the engine holds its whole share of the GPU while the trainer works; asleep it gives it back",
    ),
    "reduce_tokens_per_mb": Move(
        frees="activation and logit memory",
        slows="the phase by a few percent",
        turns={
            "tokens_per_microbatch": Turn(
                action="lower `tokens_per_microbatch`, for instance to half, but not below the longest "
                "sequence",
                reason=_PASS,
            ),
            "logprob_tokens": Turn(
                action="lower `logprob_tokens`, the tokens of a scoring pass, for instance to half, but not "
                "below the longest sequence",
                reason=_PASS,
                slows="nothing",
            ),
            "max_batched_tokens": Turn(
                action="lower `max_batched_tokens`, the tokens of one prefill, for instance to half",
                reason="smaller prefill batches need less memory",
                slows="rollout, slightly",
            ),
        },
    ),
    "reduce_micro_batch": _move(
        "microbatch_size",
        frees="activation and logit memory",
        slows="the phase by a few percent",
        action="lower `microbatch_size`, for instance to half, and accumulate more gradients",
        reason=_PASS,
    ),
    "recompute": _move(
        "recompute",
        frees="the layers' kept activations",
        slows="training by 5 to 30 %",
        action="recompute activations in backward (gradient checkpointing)",
        reason="backward recomputes activations instead of keeping them",
    ),
    "loss_recompute": Move(
        frees="logits kept for backward",
        slows="backward by a few percent",
        turns={
            "loss_recompute": Turn(
                action="recompute the loss in backward",
                reason="backward recomputes the loss instead of keeping its logits",
            ),
            "entropy_recompute": Turn(
                reason="backward recomputes the entropy instead of keeping a copy of the logits",
            ),
        },
    ),
    "chunk_logits": Move(
        frees="all but one piece of the logits",
        slows="the phase by 1 to 3 %",
        turns={
            "logprob_chunk": Turn(
                action="compute logits and entropy in chunks",
                reason=_PIECES,
            ),
            "entropy_chunking": Turn(
                action="compute the entropy in chunks",
                reason=_PIECES,
            ),
        },
    ),
    "fused_kernels": _move(
        "fused_kernels",
        frees="logits and gate products",
        slows="nothing",
        action="use fused kernels for loss and gates",
        reason="fused kernels never write the full logits and gate products; results differ by rounding",
    ),
    "offload_activations": _move(
        "activation_offload",
        frees="kept activations, onto the host",
        slows=_BY_TRANSFERS,
        action="offload activations to the host between forward and backward",
        reason="activations wait in host memory between forward and backward",
    ),
    "offload_optimizer": Move(
        frees="the optimizer's state, onto the host",
        slows=_BY_TRANSFERS,
        turns={
            "optimizer_offload": Turn(
                action="offload the optimizer's state to the host",
                reason="the optimizer's state stays in host memory while the GPUs do not need it",
            ),
            "optimizer_offload_fraction": Turn(
                reason="the rest of the optimizer's state moves to host memory",
            ),
        },
    ),
    "offload_params": _move(
        "param_offload",
        frees="the trainer's weights, onto the host",
        slows=_BY_TRANSFERS,
        action="offload the trainer's weights to the host, or shard them across more GPUs",
        reason="the trainer's weights stay in host memory while the GPUs do not need them",
    ),
    "offload_grads": _move(
        "grad_offload",
        frees="gradients, onto the host",
        slows=_BY_TRANSFERS,
        action="offload the gradients to the host",
        reason="gradients stay in host memory while the GPUs do not need them",
    ),
    "load_on_host": _move(
        "memory_efficient_load",
        frees="the full copy of the model on every GPU while it loads",
        slows="start-up, by sending each GPU its shard",
        action="load the model on the host of one rank and send each GPU only its shard",
        reason="every GPU holds the whole model before it is sharded",
    ),
    "sequence_parallel": Move(
        frees="about half of each sequence's activations",
        slows=_COMMUNICATION,
        turns={
            "sequence_parallel": Turn(action=_SPLIT, reason=_PART),
            "context_parallel": Turn(action=_SPLIT, reason=_PART),
        },
    ),
    "tensor_parallel": Move(
        frees="about half of each layer",
        slows=_COMMUNICATION,
        turns={
            "tensor_parallel": Turn(
                action="split each layer across more ranks",
                reason="each rank holds a part of every layer",
            ),
            "rollout_tensor_parallel": Turn(
                action="split the engine's model across more GPUs",
                reason="each GPU holds a part of every layer, which leaves more for the KV cache",
                slows="decoding, by communication",
            ),
        },
    ),
    "reshard_after_forward": _move(
        "reshard_after_forward",
        frees="the weights of all layers, gathered from forward to backward",
        slows="backward, by gathering each layer again",
        action="free each layer's gathered weights after its forward (reshard)",
        reason="every layer's gathered weights stay on the GPU until its backward",
    ),
    "shard_wider": _move(
        "shard_group",
        frees="half of the trainer's state on every GPU",
        slows="every pass, by gathers over more ranks",
        action="spread the trainer's state over more GPUs",
        reason="each group of ranks holds a copy of the trainer's state",
    ),
    "expert_parallel": _move(
        "expert_parallel",
        frees="about half of the experts on every GPU",
        slows="every pass, by sending tokens to experts and back",
        action="spread the experts over more GPUs (expert parallelism)",
        reason="each rank holds a part of the experts",
    ),
    "pipeline_parallel": _move(
        "pipeline_parallel",
        frees="about half of the layers on every GPU",
        slows="every update, by GPUs that wait for its first and last micro-batches",
        action="split the layers into more stages (pipeline parallelism)",
        reason="each rank holds the layers of one stage",
    ),
    "disk_weight_sync": _move(
        "sync_mode",
        frees="gathered weights and sync buffers",
        slows="weight sync, by writing and reading the model",
        action="send new weights to the engine through files",
        reason="weights in files need no gathered copies or buffers on the GPUs",
    ),
    "reduce_sync_buffer": _move(
        "sync_buffer",
        frees="sync buffers in proportion",
        slows="weight sync, slightly",
        action="use a smaller weight-sync buffer",
        reason="weights are sent in buffers of this size, held by sender and receiver",
    ),
    "layered_sync": _move(
        "layered_sync",
        frees="the gathered model on every GPU",
        slows="weight sync, by one gather a layer",
        action="read the adapters layer by layer for the weight sync",
        reason="a sync gathers the whole model on every GPU to read its adapters",
    ),
    "expandable_segments": _move(
        "allocator",
        frees="reserved but fragmented memory",
        slows="nothing",
        action="use expandable segments in PyTorch's allocator",
        reason="reserved memory in blocks too small for the request becomes usable",
    ),
    "adjust_memory_margin": Move(frees="the difference", slows="nothing", turns={"memory_margin": Turn()}),
    "host_allocator": _move(
        "host_allocator",
        frees="host memory that is freed but not returned",
        slows="nothing",
        memory=Memory.HOST,
        action="use an allocator that returns freed host memory (jemalloc or tcmalloc)",
        reason="glibc keeps freed host memory in its arenas; jemalloc and tcmalloc return it",
    ),
    "reduce_host_offload": Move(
        frees="host memory, at the cost of GPU memory",
        slows="nothing",
        memory=Memory.HOST,
        turns={
            "activation_offload": Turn(),
            "grad_offload": Turn(),
            "optimizer_offload": Turn(
                action="offload less to the host, if anything is: optimizer, weights, activations, caches",
                reason="what is offloaded stays in host memory",
            ),
            "param_offload": Turn(),
            "memory_efficient_load": Turn(),
        },
    ),
    "drop_weights_backup": _move(
        "weights_backup",
        frees="one host copy of the weights",
        slows="waking up, slightly",
        memory=Memory.HOST,
        action="keep no copy of the sleeping engine's weights in host memory",
        reason="the backup is a full copy of the weights in host memory",
    ),
    "reduce_workers": _move(
        "dataloader_workers",
        frees="host and shared memory in proportion",
        slows="data loading, where it is the bottleneck",
        memory=Memory.HOST,
        action="lower `dataloader_workers`, for instance to half",
        reason="every data loader process holds its own copy of the data and its shared batches",
    ),
    "save_synchronously": _move(
        "async_save",
        frees="the copy of a checkpoint that stays in host memory while it is written",
        slows="every checkpoint, by its write",
        memory=Memory.HOST,
        action="save checkpoints synchronously, if they are saved while the job goes on",
        reason="an asynchronous save keeps a copy of the whole state in host memory while the job goes on",
    ),
    "reduce_multimodal_cache": _move(
        "multimodal_cache",
        frees="processed images and videos in every process of the engines",
        slows="rollout, where a prompt with images is sampled again",
        memory=Memory.HOST,
        action="lower `multimodal_cache`, the processed images that each process of an engine keeps",
        reason="every process of an engine keeps processed images and videos for prompts that come again",
    ),
    "restart_every": Move(
        frees="what accumulates over steps",
        slows="one restart every N steps",
        memory=Memory.GROWTH,
        turns={"restart_every": Turn()},
    ),
    "free_before_relaunch": Move(frees="GPU memory held by other processes", slows="nothing"),
    "capture_snapshot": _move(
        "memory_snapshot",
        frees="nothing; records the next failure",
        slows="every allocation, slightly",
        reason="the cause of this failure is not known; the next one is recorded with its allocations",
    ),
}
# The remedy that changes each knob; of two in opposite directions, the one that saves device memory.
SAVING: dict[str, str] = {
    knob: name
    for name, move in sorted(MOVES.items(), key=lambda item: item[1].memory is Memory.GPU)
    for knob in move.turns
}


def turn_of(name: str, knob: str) -> str:
    """Return how a remedy changes a knob: lower, raise, more, on, off, the mode to use, or either."""
    return KNOB_TABLE[knob].turn(MOVES[name].memory)


def spoken(name: str) -> dict[str, Turn]:
    """Return the ways to apply a remedy that can be described without the job's values."""
    return {knob: turn for knob, turn in MOVES[name].turns.items() if turn.action} if name in MOVES else {}


def spoken_for(name: str, phase: Phase, *, engine: bool) -> dict[str, Turn]:
    """Return those that help with the failed phase, most specific first; `engine`: the engine failed."""
    every = spoken(name)
    own = {k: turn for k, turn in every.items() if (KNOB_TABLE[k].part is Part.ENGINE) is engine} or every
    near = {knob: turn for knob, turn in own.items() if phase in KNOB_TABLE[knob].phases}
    general = {knob: turn for knob, turn in own.items() if not KNOB_TABLE[knob].phases}
    return near | general or own
