"""Propose the changes of a remedy: which knobs, how far, and why they free the memory that ran out.

Most remedies change each of their knobs to its next values, with the texts of `MOVES`. The others have a
function here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.legality import completed, highest
from autotune.policies.remedies.relevance import fills_host, runs_on_host
from autotune.policies.remedies.step_size import lower_fraction, next_values, shrink_share, smaller
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.knob_table import KNOB_TABLE, Memory, Unit
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.remedy import Remedy

_GIB = 1 << 30
_OF_ENGINE = (Cause.GPU_OOM, Cause.KV_POOL, Cause.POOL_TOO_SMALL)
_BUSY = 8  # requests below which an engine is bound by reading its weights
_RECOMPUTED = {
    "off": ("", ""),
    "selective": ("the activations of attention", "training by about 5 %"),
    "modules": ("what some modules of each layer keep", "training by 5 to 10 %"),
    "full": ("most activations of the layers", "training by 20 to 30 %"),
}
_FEWER_ENGINES = (
    "an engine that sleeps keeps its weights in host memory; fewer engines of more ranks keep less"
)
_CHUNK = 1024  # tokens per chunk of logits if nothing was chunked before


def propose(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Return the ways to apply a remedy, mildest first, by knobs that are supported and have an effect."""
    of_its_own = _PROPOSALS.get(name, _by_steps)
    return of_its_own(name, profile, knobs, diagnosis)


def free_before_relaunch(diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the remedy for memory held by other processes: the job does not change, they must free it."""
    outside = diagnosis.facts.held_by_others_bytes
    if outside:
        size = f"{outside / _GIB:.1f} GiB"
        why = f"{size} of the card are held outside this process"
        yield Remedy(name="free_before_relaunch", changes={}, reason=why, frees=f"up to {size}")


def _by_steps(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the remedy with the next values of each of its knobs that has an effect with the others."""
    for knob in MOVES[name].turns:
        needs = KNOB_TABLE[knob].only_with
        if needs is None or getattr(knobs, needs.knob) in needs.values:
            yield from _stepped(name, profile, knobs, knob, diagnosis)


def _stepped(
    name: str, profile: Profile, knobs: Knobs, knob: str, diagnosis: Diagnosis, *, reason: str = ""
) -> Iterator[Remedy]:
    """Yield the remedy with a knob's next values in the direction that saves the remedy's memory."""
    move = MOVES[name]
    for value in next_values(profile, knobs, knob, diagnosis, move.memory):
        ranks = f": {value} ranks instead of {getattr(knobs, knob)}"
        why = (reason or move.turns[knob].reason) + (ranks if KNOB_TABLE[knob].unit is Unit.RANKS else "")
        yield from _change(name, profile, knobs, {knob: value}, reason=why)


def _change(
    name: str,
    profile: Profile,
    knobs: Knobs,
    changes: dict[str, Setting],
    *,
    reason: str = "",
    frees: str = "",
    slows: str = "",
) -> Iterator[Remedy]:
    """Yield the remedy if its knobs are supported, have a value and differ from the present ones."""
    if any(value is None or knob not in profile.supported for knob, value in changes.items()):
        return
    full = completed(profile, knobs, changes)
    full = {knob: value for knob, value in full.items() if getattr(knobs, knob) != value}
    if any(knob not in full for knob in changes):
        return
    move = MOVES[name]
    turn = move.turns[next(iter(changes))]
    yield Remedy(
        name=name,
        changes=full,
        reason=reason or turn.reason,
        frees=frees or move.frees,
        slows=slows or turn.slows or move.slows,
        effect=profile.effect_of(full),
    )


def _fewer_requests(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield fewer concurrent requests: smaller batches in the engine and fewer live tokens in its pool.

    Against memory outside the engine, at least _BUSY remain, because requests are a small part of it.
    """
    share = shrink_share(diagnosis) if diagnosis.cause is Cause.GPU_OOM else 0.5**diagnosis.streak
    least = 1 if diagnosis.cause in _OF_ENGINE else _BUSY
    fewer = smaller(profile, knobs, "concurrency", share=share, least=least)
    requests = f"{fewer} concurrent request{'' if fewer == 1 else 's'} instead of {knobs.concurrency}"
    reason = f"the engine runs at most {requests}; all samples are still generated"
    yield from _change(name, profile, knobs, {"concurrency": fewer}, reason=reason)


def _smaller_share(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    before, after = knobs.memory_fraction, lower_fraction(profile, knobs, "memory_fraction", diagnosis)
    frees, capacity = "", diagnosis.facts.capacity_bytes
    if before is not None and after is not None:
        share = before - after
        frees = show_gib(share * capacity) if capacity else f"{share * 100:.0f} % of the card"
    yield from _change(name, profile, knobs, {"memory_fraction": after}, frees=frees)


def _fewer_tokens(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield fewer tokens per micro-batch in the failed phase: same batch, more micro-batches."""
    filled = fills_host(knobs, diagnosis) or profile.may_be_any(diagnosis.phase)
    if diagnosis.cause is Cause.HOST_OOM and not filled:
        return
    names: tuple[str, ...] = ("tokens_per_microbatch",)
    if diagnosis.phase.is_engine:
        names = ("max_batched_tokens",)
    elif diagnosis.phase is Phase.LOG_PROB:
        names = ("logprob_tokens", "tokens_per_microbatch")
    for knob in names:
        yield from _stepped(name, profile, knobs, knob, diagnosis)


def _chunks(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield logits and entropy in chunks instead of one tensor of tokens x vocabulary."""
    if diagnosis.component is not Component.REF:  # a reference computes no entropy
        yield from _stepped(name, profile, knobs, "entropy_chunking", diagnosis)
    if knobs.logprob_chunk is None:
        chunk = smaller(profile, knobs, "logprob_chunk", share=1.0, base=_CHUNK + 1)
    else:
        chunk = smaller(profile, knobs, "logprob_chunk", share=0.5)
    yield from _change(name, profile, knobs, {"logprob_chunk": chunk})


def _recompute(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield activations recomputed in backward instead of kept in the memory that ran out."""
    computes = runs_on_host(knobs, diagnosis) or profile.may_be_any(diagnosis.phase)
    if diagnosis.cause is Cause.HOST_OOM and not computes:
        return
    for mode in next_values(profile, knobs, "recompute", diagnosis, Memory.GPU):
        frees, slows = _RECOMPUTED[str(mode)]
        yield from _change(name, profile, knobs, {"recompute": mode}, frees=frees, slows=slows)


def _offloaded_optimizer(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield optimizer state in host memory, by the switch or by a larger share."""
    yield from _stepped(name, profile, knobs, "optimizer_offload", diagnosis)
    share = knobs.optimizer_offload_fraction
    most = highest(profile, "optimizer_offload_fraction") or 1.0
    switch = profile.supported.get("optimizer_offload")
    # A switch that acts in some phases only parks the state; the fraction then offloads it independently.
    parks = switch is not None and bool(switch.phases)
    if share is not None and (parks or knobs.optimizer_offload is not False) and share < most:
        yield from _change(name, profile, knobs, {"optimizer_offload_fraction": most})


def _more_ranks(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield layers split over more ranks: of the engine if it failed or syncs weights, else of the trainer.

    With more ranks per engine there are fewer engines, and fewer copies of weights on the host while they
    sleep.
    """
    engine, trainer = "rollout_tensor_parallel", "tensor_parallel"
    if diagnosis.cause is Cause.HOST_OOM:
        asleep = profile.layout.engine_sleeps if knobs.engine_sleep is None else knobs.engine_sleep
        names: tuple[str, ...] = (engine,) if asleep and profile.layout.engine_weights_on_host else ()
    elif diagnosis.component is Component.ROLLOUT or diagnosis.phase.is_engine:
        names = (engine,)
    elif diagnosis.phase is Phase.WEIGHT_SYNC and profile.placement is Placement.COLOCATED:
        names = (engine, trainer)
    else:
        names = (trainer,)
    reason = _FEWER_ENGINES if diagnosis.cause is Cause.HOST_OOM else ""
    for knob in names:
        yield from _stepped(name, profile, knobs, knob, diagnosis, reason=reason)


def _less_offload(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield switches that move state from host memory back to the devices, the failed phase's first."""
    first = {
        Phase.INIT: "memory_efficient_load",
        Phase.RESUME: "memory_efficient_load",
        Phase.OPTIMIZER: "optimizer_offload",
        Phase.WEIGHT_SYNC: "param_offload",
        Phase.ROLLOUT: "param_offload",
    }.get(diagnosis.phase)
    for knob in sorted(MOVES[name].turns, key=lambda each: each != first):
        if getattr(knobs, knob) is True:
            reason = f"what {knob} moves off the GPUs stays in the host memory that ran out"
            yield from _change(name, profile, knobs, {knob: False}, reason=reason)


def _fewer_workers(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    present = knobs.dataloader_workers
    if present is not None and present > 0:
        least = min(1, present - 1)
        for fewer in dict.fromkeys((max(least, present // 2**diagnosis.streak), 0)):
            yield from _change(name, profile, knobs, {"dataloader_workers": fewer})


def _smaller_cache(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield a smaller cache of processed images in the engines, finally none."""
    yield from _stepped(name, profile, knobs, "multimodal_cache", diagnosis)
    yield from _change(name, profile, knobs, {"multimodal_cache": 0})


def _other_allocator(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the first supported allocator that returns host memory to the system."""
    keeping = (None, "default", "glibc")
    support = profile.supported.get("host_allocator")
    if support is not None and knobs.host_allocator in keeping:
        offered = [value for value in support.grid.values if value not in keeping]
        yield from _change(name, profile, knobs, {"host_allocator": offered[0] if offered else "jemalloc"})


def _other_margin(name: str, profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield more memory kept free for NCCL, or less if the trainer's allocator itself lacks it."""
    present = knobs.memory_margin
    if "memory_margin" not in profile.supported or present is None:
        return
    if diagnosis.phase is Phase.COMM:
        margin = min(present + _GIB, int(highest(profile, "memory_margin") or present + _GIB))
        reason = "NCCL allocates outside PyTorch and finds only what this margin keeps free"
    else:
        less = smaller(profile, knobs, "memory_margin", share=0.5)
        margin = present if less is None else less
        reason = "the margin refuses allocations that would fit"
    yield from _change(name, profile, knobs, {"memory_margin": margin}, reason=reason)


_Proposal: TypeAlias = Callable[[str, Profile, Knobs, Diagnosis], Iterator[Remedy]]
_PROPOSALS: dict[str, _Proposal] = {
    "reduce_concurrency": _fewer_requests,
    "reduce_mem_fraction": _smaller_share,
    "reduce_tokens_per_mb": _fewer_tokens,
    "chunk_logits": _chunks,
    "recompute": _recompute,
    "offload_optimizer": _offloaded_optimizer,
    "tensor_parallel": _more_ranks,
    "reduce_host_offload": _less_offload,
    "reduce_workers": _fewer_workers,
    "reduce_multimodal_cache": _smaller_cache,
    "host_allocator": _other_allocator,
    "adjust_memory_margin": _other_margin,
}
