"""Changes of the rollout engine and of the weight sync."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.policies.remedies.proposals import change, stepped, stepping
from autotune.policies.remedies.step_size import lower_fraction, shrink_share, smaller
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Remedy

_OF_ENGINE = (Cause.GPU_OOM, Cause.KV_POOL, Cause.POOL_TOO_SMALL)
_BUSY = 8  # requests below which an engine reads its weights for next to nothing


def reduce_concurrency(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer requests at once: smaller batches in the engine and fewer live tokens in its pool.

    Against memory outside the engine not so few that it idles: requests are not most of what fills that.
    """
    share = shrink_share(diagnosis) if diagnosis.cause is Cause.GPU_OOM else 0.5**diagnosis.streak
    least = 1 if diagnosis.cause in _OF_ENGINE else _BUSY
    fewer = smaller(profile, knobs, "concurrency", share=share, least=least)
    yield from change(
        "reduce_concurrency",
        profile,
        knobs,
        {"concurrency": fewer},
        reason=f"the engine runs at most {fewer} concurrent request{'' if fewer == 1 else 's'} "
        f"instead of {knobs.concurrency}; "
        "all samples are still generated",
        frees="batch and KV-cache memory",
    )


def reduce_mem_fraction(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose a smaller static share for the engine, which leaves more of the card to everything else."""
    lower = lower_fraction(profile, knobs, "memory_fraction", diagnosis)
    yield from change(
        "reduce_mem_fraction",
        profile,
        knobs,
        {"memory_fraction": lower},
        frees=_of_capacity(knobs.memory_fraction, lower, diagnosis),
    )


# A larger static share for an engine whose pool is too small.
increase_mem_fraction = stepping(
    "increase_mem_fraction",
    "memory_fraction",
    frees="pool memory; takes it from everything else on the card",
)
# Fewer or no captured graphs in the engine.
disable_cuda_graph = stepping(
    "disable_cuda_graph", "cuda_graphs", frees="the graphs' private pools, often 1 to 3 GiB"
)
# An engine that gives its memory back while the trainer works on the same card.
engine_sleep = stepping("engine_sleep", "engine_sleep")
# New weights reach the engine through files instead of device buffers.
disk_weight_sync = stepping(
    "disk_weight_sync", "sync_mode", frees="the gathered weights and the sync buffers"
)


# Adapters are read layer by layer, without the whole model on every device.
layered_sync = stepping("layered_sync", "layered_sync")


def reduce_sync_buffer(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose smaller pieces in the weight sync."""
    if knobs.sync_mode != "disk":
        yield from stepped("reduce_sync_buffer", profile, knobs, "sync_buffer", diagnosis)


def _of_capacity(before: float | None, after: float | None, diagnosis: Diagnosis) -> str:
    capacity = diagnosis.facts.capacity_bytes
    if before is None or after is None:
        return ""
    if capacity:
        return show_gib((before - after) * capacity)
    return f"{(before - after) * 100:.0f} % of the card"
