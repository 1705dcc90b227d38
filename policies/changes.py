"""The remedies, one function each: what to change, by how much, and why it frees the memory that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from policies.evidence import Diagnosis, Remedy
from policies.legal import completed, highest
from policies.sizing import higher_fraction, lower_fraction, shrink_share, smaller, stronger
from policies.types import Cause, Component, Effect, Knobs, Phase, Profile, Setting

Propose: TypeAlias = Callable[[Profile, Knobs, Diagnosis], Iterable[Remedy]]

_ROLLOUT_PHASES = (Phase.ROLLOUT, Phase.ROLLOUT_INIT)
_GIB = 1 << 30
_CHUNK = 1024  # tokens of logits at once when nothing was chunked before
_OUTSIDE_SHARE = 0.25  # of a card held by others before they are named as the reason


def reduce_concurrency(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Fewer requests at once: smaller batches in the engine and fewer live tokens in its pool."""
    share = shrink_share(diagnosis.facts) if diagnosis.cause is Cause.GPU_OOM else 0.5
    fewer = smaller(profile, knobs, "concurrency", share=share)
    yield from _remedy(
        "reduce_concurrency",
        profile,
        knobs,
        {"concurrency": fewer},
        reason=f"the engine works on {fewer} requests at once instead of {knobs.concurrency}; every sample is still made",
        frees="batch and pool memory in proportion to the requests",
        slows="rollout, where the engine was not saturated",
    )


def reduce_mem_fraction(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """A smaller static share for the engine, which leaves more of the card to everything else."""
    lower = lower_fraction(profile, knobs, "memory_fraction", diagnosis)
    yield from _remedy(
        "reduce_mem_fraction",
        profile,
        knobs,
        {"memory_fraction": lower},
        reason="the engine's static share is taken from the memory that ran out",
        frees=_of_capacity(knobs.memory_fraction, lower, diagnosis),
        slows="rollout, when the smaller pool holds fewer requests",
    )


def increase_mem_fraction(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """A larger static share for an engine whose pool is too small."""
    higher = higher_fraction(profile, knobs, "memory_fraction", diagnosis)
    yield from _remedy(
        "increase_mem_fraction",
        profile,
        knobs,
        {"memory_fraction": higher},
        reason="what the weights leave of the engine's share is too small a pool, so the share must grow",
        frees="pool memory; takes it from everything else on the card",
        slows="nothing",
    )


def disable_cuda_graph(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Fewer or no captured graphs in the engine."""
    for mode in stronger(profile, knobs, "cuda_graphs", ("full", "limited", "off")):
        yield from _remedy(
            "disable_cuda_graph",
            profile,
            knobs,
            {"cuda_graphs": mode},
            reason="captured graphs keep private pools beside the token pool",
            frees="the graphs' private pools, often 1 to 3 GiB",
            slows="decoding of small batches, by 10 to 30 %",
        )


def reduce_tokens_per_mb(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Fewer tokens per pass in the phase that failed: same batch, more micro-batches."""
    share = shrink_share(diagnosis.facts)
    names: tuple[str, ...] = ("tokens_per_microbatch",)
    if diagnosis.phase in _ROLLOUT_PHASES:
        names = ("max_batched_tokens",)
    elif diagnosis.phase is Phase.LOG_PROB:
        names = ("logprob_tokens", "tokens_per_microbatch")
    for knob in names:
        base = knobs.tokens_per_microbatch if knob == "logprob_tokens" else None
        fewer = smaller(profile, knobs, knob, share=share, base=base)
        yield from _remedy(
            "reduce_tokens_per_mb",
            profile,
            knobs,
            {knob: fewer},
            reason="the memory of a pass grows with its tokens; the batch is the same, in more passes",
            frees="activations and logits in proportion to the tokens",
            slows="this phase by a few per cent",
        )


def reduce_micro_batch(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Fewer sequences per micro-batch, where they are counted in sequences; else batching by tokens."""
    if knobs.dynamic_batching is not True:
        fewer = smaller(profile, knobs, "microbatch_size", share=shrink_share(diagnosis.facts))
        yield from _remedy(
            "reduce_micro_batch",
            profile,
            knobs,
            {"microbatch_size": fewer},
            reason="the memory of a pass grows with its sequences; the batch is the same, in more passes",
            frees="activations and logits in proportion to the sequences",
            slows="this phase by a few per cent",
        )


def chunk_logits(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Logits and entropy in pieces instead of one tensor of tokens x vocabulary."""
    for knob in ("entropy_chunking",):
        if getattr(knobs, knob) is not True:
            yield from _switch("chunk_logits", profile, knobs, {knob: True}, **_CHUNK_WORDS)
    if knobs.logprob_chunk is None:
        chunk = smaller(profile, knobs, "logprob_chunk", share=1.0, base=_CHUNK + 1)
    else:
        chunk = smaller(profile, knobs, "logprob_chunk", share=0.5)
    yield from _remedy("chunk_logits", profile, knobs, {"logprob_chunk": chunk}, **_CHUNK_WORDS)


_CHUNK_WORDS = {
    "reason": "the logits of all tokens at once are the largest tensor of the phase",
    "frees": "all but one piece of the logits",
    "slows": "this phase by 1 to 3 %",
}


def loss_recompute(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """The loss computed again in backward instead of keeping its inputs."""
    yield from _switch(
        "loss_recompute",
        profile,
        knobs,
        {"loss_recompute": True},
        reason="the loss keeps logits for backward; computing it again keeps none",
        frees="the logits kept between forward and backward",
        slows="backward by a few per cent",
    )
    if diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB, Phase.NONE):
        yield from _switch(
            "loss_recompute",
            profile,
            knobs,
            {"entropy_recompute": True},
            reason="the entropy keeps a copy of the logits for backward; computing it again keeps none",
            frees="one copy of the logits",
            slows="backward by a few per cent",
        )


def recompute(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Activations computed again in backward instead of kept."""
    for mode in stronger(profile, knobs, "recompute", ("off", "selective", "full")):
        yield from _remedy(
            "recompute",
            profile,
            knobs,
            {"recompute": mode},
            reason="backward computes the activations again, so that forward need not keep them",
            frees="most activations of the layers" if mode == "full" else "the activations of attention",
            slows="training by 20 to 30 %" if mode == "full" else "training by about 5 %",
        )


def fused_kernels(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Kernels that never write the full logits or gate products."""
    yield from _switch(
        "fused_kernels",
        profile,
        knobs,
        {"fused_kernels": True},
        reason="fused kernels compute loss and gates without writing their full intermediate tensors",
        frees="logits and gate products",
        slows="nothing; results differ by rounding",
    )


def offload_activations(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Kept activations in host memory between forward and backward."""
    yield from _offload("offload_activations", profile, knobs, "activation_offload", "the kept activations")


def offload_optimizer(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """The optimizer's state in host memory."""
    yield from _offload("offload_optimizer", profile, knobs, "optimizer_offload", "the optimizer's state")
    share = knobs.optimizer_offload_fraction
    most = highest(profile, "optimizer_offload_fraction")
    if share is not None and knobs.optimizer_offload is not False and share < (most or 1.0):
        yield from _remedy(
            "offload_optimizer",
            profile,
            knobs,
            {"optimizer_offload_fraction": most or 1.0},
            reason="the rest of the optimizer's state moves to host memory",
            frees="the optimizer's state",
            slows="every step, by the transfers",
        )


def offload_params(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """The trainer's weights in host memory while they are not used."""
    yield from _offload("offload_params", profile, knobs, "param_offload", "the trainer's weights")


def offload_grads(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """The gradients in host memory while they are not used."""
    yield from _offload("offload_grads", profile, knobs, "grad_offload", "the gradients")


def sequence_parallel(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Every sequence split over more ranks."""
    for knob in ("sequence_parallel", "context_parallel"):
        yield from _doubled(
            "sequence_parallel", profile, knobs, knob, "each rank holds a part of every sequence"
        )


def tensor_parallel(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Every layer split over more ranks."""
    knob = "tensor_parallel"
    if diagnosis.component is Component.ROLLOUT or diagnosis.phase in _ROLLOUT_PHASES:
        knob = "rollout_tensor_parallel"
    yield from _doubled("tensor_parallel", profile, knobs, knob, "each rank holds a part of every layer")


def disk_weight_sync(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """New weights reach the engine through files instead of device buffers."""
    if knobs.sync_mode != "disk":
        yield from _remedy(
            "disk_weight_sync",
            profile,
            knobs,
            {"sync_mode": "disk"},
            reason="weights written to files need no gathered copies and buffers on the devices",
            frees="the gathered weights and the sync buffers",
            slows="weight sync, by writing and reading the model",
        )


def reduce_sync_buffer(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Smaller pieces in the weight sync."""
    if knobs.sync_mode != "disk":
        less = smaller(profile, knobs, "sync_buffer", share=shrink_share(diagnosis.facts))
        yield from _remedy(
            "reduce_sync_buffer",
            profile,
            knobs,
            {"sync_buffer": less},
            reason="weights travel in pieces of this size, held on both sides",
            frees="sync buffers in proportion",
            slows="weight sync, slightly",
        )


def expandable_segments(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """An allocator whose segments grow, so that free pieces are not stranded."""
    if knobs.allocator != "expandable":
        yield from _remedy(
            "expandable_segments",
            profile,
            knobs,
            {"allocator": "expandable"},
            reason="memory that is reserved but in pieces too small for the request becomes usable",
            frees="fragmented reserve",
            slows="nothing",
        )


def adjust_memory_margin(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """More memory kept out of the trainer's allocator for NCCL, or less where the allocator itself lacks it."""
    support = profile.supported.get("memory_margin")
    present = knobs.memory_margin
    if support is None or present is None:
        return
    if diagnosis.phase is Phase.COMM:
        margin = min(present + _GIB, int(highest(profile, "memory_margin") or present + _GIB))
        reason = "NCCL allocates outside PyTorch and finds only what this margin keeps free"
    else:
        less = smaller(profile, knobs, "memory_margin", share=0.5)
        margin = present if less is None else less
        reason = "the margin refuses allocations that would fit"
    yield from _remedy(
        "adjust_memory_margin",
        profile,
        knobs,
        {"memory_margin": margin},
        reason=reason,
        frees="the difference",
        slows="nothing",
    )


def host_allocator(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """An allocator that gives host memory back to the system."""
    support = profile.supported.get("host_allocator")
    if support is not None and knobs.host_allocator in (None, "default", "glibc"):
        offered = [v for v in support.grid.values if isinstance(v, str) and v not in ("default", "glibc")]
        yield from _remedy(
            "host_allocator",
            profile,
            knobs,
            {"host_allocator": offered[0] if offered else "jemalloc"},
            reason="glibc keeps freed host memory in its arenas; this allocator returns it",
            frees="host memory that is freed but not returned",
            slows="nothing",
        )


def reduce_host_offload(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """What was moved to host memory goes back to the devices, the phase's own first."""
    order = ["activation_offload", "grad_offload", "optimizer_offload", "param_offload"]
    first = {
        Phase.OPTIMIZER: "optimizer_offload",
        Phase.WEIGHT_SYNC: "param_offload",
        Phase.ROLLOUT: "param_offload",
    }.get(diagnosis.phase)
    for knob in sorted(order, key=lambda name: name != first):
        if getattr(knobs, knob) is True:
            yield from _remedy(
                "reduce_host_offload",
                profile,
                knobs,
                {knob: False},
                reason=f"{knob} fills the host memory that ran out",
                frees="host memory; takes device memory",
                slows="nothing",
            )


def drop_weights_backup(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """No second copy of the weights in host memory."""
    if knobs.weights_backup is not False:
        yield from _remedy(
            "drop_weights_backup",
            profile,
            knobs,
            {"weights_backup": False},
            reason="the backup is a full copy of the weights in host memory",
            frees="one copy of the weights in host memory",
            slows="waking the trainer, slightly",
        )


def reduce_workers(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Fewer data loader processes."""
    present = knobs.dataloader_workers
    if present is not None and present > 0:
        for fewer in dict.fromkeys((present // 2, 0)):
            yield from _remedy(
                "reduce_workers",
                profile,
                knobs,
                {"dataloader_workers": fewer},
                reason="every data loader process holds its own copy of the data and its shared batches",
                frees="host and shared memory in proportion",
                slows="data loading, where it is the bottleneck",
            )


def restart_every(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Planned restarts before memory that grows from step to step runs out."""
    if diagnosis.step is not None and diagnosis.step > 1:
        bound = diagnosis.step if knobs.restart_every is None else knobs.restart_every
        steps = max(1, bound * 3 // 4)
        yield from _remedy(
            "restart_every",
            profile,
            knobs,
            {"restart_every": steps},
            reason=f"the failure came after {diagnosis.step} steps; a restart gives back what grows from step to step",
            frees="what accumulates over steps",
            slows=f"one restart every {steps} steps",
        )


def free_before_relaunch(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Others hold the card: nothing of the job changes, their memory must go first."""
    outside, capacity = diagnosis.facts.outside_bytes, diagnosis.facts.capacity_bytes
    if outside and capacity and outside >= _OUTSIDE_SHARE * capacity:
        yield Remedy(
            name="free_before_relaunch",
            changes={},
            reason=f"{outside / _GIB:.1f} GiB of the card are held outside this process",
            frees=f"up to {outside / _GIB:.1f} GiB",
        )


def capture_snapshot(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """The next failure is recorded, where nothing explains this one; cures nothing by itself."""
    yield from _switch(
        "capture_snapshot",
        profile,
        knobs,
        {"memory_snapshot": True},
        reason="nothing explains this failure; the next one is recorded with its allocations",
        frees="nothing",
        slows="every allocation, slightly",
    )


def _offload(name: str, profile: Profile, knobs: Knobs, knob: str, what: str) -> Iterator[Remedy]:
    yield from _switch(
        name,
        profile,
        knobs,
        {knob: True},
        reason=f"{what} move to host memory while the devices do not need them",
        frees=what,
        slows="every step, by the transfers",
    )


def _doubled(name: str, profile: Profile, knobs: Knobs, knob: str, why: str) -> Iterator[Remedy]:
    present = getattr(knobs, knob)
    if knob in profile.supported and isinstance(present, int):
        yield from _remedy(
            name,
            profile,
            knobs,
            {knob: present * 2},
            reason=f"{why}: {present * 2} ranks instead of {present}",
            frees="about half of it",
            slows="every pass, by communication",
        )


def _switch(
    name: str,
    profile: Profile,
    knobs: Knobs,
    changes: dict[str, Setting],
    *,
    reason: str,
    frees: str,
    slows: str,
) -> Iterator[Remedy]:
    yield from _remedy(name, profile, knobs, changes, reason=reason, frees=frees, slows=slows)


def _remedy(
    name: str,
    profile: Profile,
    knobs: Knobs,
    changes: dict[str, Setting],
    *,
    reason: str,
    frees: str,
    slows: str,
) -> Iterator[Remedy]:
    """Yield the remedy where its knobs are offered, have a value and differ from the present ones."""
    if any(value is None or knob not in profile.supported for knob, value in changes.items()):
        return
    full = completed(profile, knobs, changes)
    full = {knob: value for knob, value in full.items() if getattr(knobs, knob) != value}
    if any(knob not in full for knob in changes):
        return
    numeric = any(profile.supported[k].effect is Effect.NUMERIC for k in full if k in profile.supported)
    yield Remedy(
        name=name,
        changes=full,
        reason=reason,
        frees=frees,
        slows=slows,
        effect=Effect.NUMERIC if numeric else Effect.EXACT,
    )


def _of_capacity(before: float | None, after: float | None, diagnosis: Diagnosis) -> str:
    capacity = diagnosis.facts.capacity_bytes
    if before is None or after is None:
        return ""
    if capacity:
        return f"{(before - after) * capacity / _GIB:.2f} GiB"
    return f"{(before - after) * 100:.0f} % of the card"
