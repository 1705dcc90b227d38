"""Changes of the rollout engine and of the weight sync."""

from __future__ import annotations

from collections.abc import Iterator

from policies.changes import change
from policies.evidence import Diagnosis, Remedy
from policies.sizing import higher_fraction, lower_fraction, shrink_share, size_text, smaller, stronger
from policies.types import Cause, Knobs, Profile


def reduce_concurrency(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer requests at once: smaller batches in the engine and fewer live tokens in its pool."""
    share = shrink_share(diagnosis) if diagnosis.cause is Cause.GPU_OOM else 0.5
    fewer = smaller(profile, knobs, "concurrency", share=share)
    yield from change(
        "reduce_concurrency",
        profile,
        knobs,
        {"concurrency": fewer},
        reason=f"the engine works on {fewer} requests at once instead of {knobs.concurrency}; "
        "every sample is still made",
        frees="batch and pool memory in proportion to the requests",
        slows="rollout, where the engine was not saturated",
    )


def reduce_mem_fraction(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose a smaller static share for the engine, which leaves more of the card to everything else."""
    lower = lower_fraction(profile, knobs, "memory_fraction", diagnosis)
    yield from change(
        "reduce_mem_fraction",
        profile,
        knobs,
        {"memory_fraction": lower},
        reason="the engine's static share is taken from the memory that ran out",
        frees=_of_capacity(knobs.memory_fraction, lower, diagnosis),
        slows="rollout, when the smaller pool holds fewer requests",
    )


def increase_mem_fraction(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose a larger static share for an engine whose pool is too small."""
    higher = higher_fraction(profile, knobs, "memory_fraction", diagnosis)
    yield from change(
        "increase_mem_fraction",
        profile,
        knobs,
        {"memory_fraction": higher},
        reason="what the weights leave of the engine's share is too small a pool, so the share must grow",
        frees="pool memory; takes it from everything else on the card",
        slows="nothing",
    )


def disable_cuda_graph(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer or no captured graphs in the engine."""
    for mode in stronger(profile, knobs, "cuda_graphs", ("full", "limited", "off")):
        yield from change(
            "disable_cuda_graph",
            profile,
            knobs,
            {"cuda_graphs": mode},
            reason="captured graphs keep private pools beside the token pool",
            frees="the graphs' private pools, often 1 to 3 GiB",
            slows="decoding of small batches, by 10 to 30 %",
        )


def disk_weight_sync(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose new weights reach the engine through files instead of device buffers."""
    if knobs.sync_mode != "disk":
        yield from change(
            "disk_weight_sync",
            profile,
            knobs,
            {"sync_mode": "disk"},
            reason="weights written to files need no gathered copies and buffers on the devices",
            frees="the gathered weights and the sync buffers",
            slows="weight sync, by writing and reading the model",
        )


def reduce_sync_buffer(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose smaller pieces in the weight sync."""
    if knobs.sync_mode != "disk":
        less = smaller(profile, knobs, "sync_buffer", share=shrink_share(diagnosis))
        yield from change(
            "reduce_sync_buffer",
            profile,
            knobs,
            {"sync_buffer": less},
            reason="weights travel in pieces of this size, held on both sides",
            frees="sync buffers in proportion",
            slows="weight sync, slightly",
        )


def _of_capacity(before: float | None, after: float | None, diagnosis: Diagnosis) -> str:
    capacity = diagnosis.facts.capacity_bytes
    if before is None or after is None:
        return ""
    if capacity:
        return size_text((before - after) * capacity)
    return f"{(before - after) * 100:.0f} % of the card"
