"""Changes of host memory, allocators and of the run itself."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.legality import highest
from autotune.policies.remedies.proposals import GIB, change, stepped, stepping
from autotune.policies.remedies.step_size import smaller
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Remedy


def reduce_host_offload(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose to move state from host memory back to the devices, that of the failed phase first."""
    first = {
        Phase.INIT: "memory_efficient_load",
        Phase.RESUME: "memory_efficient_load",
        Phase.OPTIMIZER: "optimizer_offload",
        Phase.WEIGHT_SYNC: "param_offload",
        Phase.ROLLOUT: "param_offload",
    }.get(diagnosis.phase)
    for knob in sorted(MOVES["reduce_host_offload"].turns, key=lambda name: name != first):
        if getattr(knobs, knob) is True:
            yield from change(
                "reduce_host_offload",
                profile,
                knobs,
                {knob: False},
                reason=f"{knob} fills the host memory that ran out",
                frees="host memory; takes device memory",
            )


# No second copy of the weights in host memory.
drop_weights_backup = stepping(
    "drop_weights_backup", "weights_backup", frees="one copy of the weights in host memory"
)


def reduce_workers(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose fewer data loader processes."""
    present = knobs.dataloader_workers
    if present is not None and present > 0:
        least = min(1, present - 1)
        for fewer in dict.fromkeys((max(least, present // 2**diagnosis.streak), 0)):
            yield from change("reduce_workers", profile, knobs, {"dataloader_workers": fewer})


# No copy of a checkpoint beside the steps that follow it.
save_synchronously = stepping("save_synchronously", "async_save")


def reduce_multimodal_cache(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose a smaller cache of processed images in the engines, at last none."""
    yield from stepped("reduce_multimodal_cache", profile, knobs, "multimodal_cache", diagnosis)
    yield from change("reduce_multimodal_cache", profile, knobs, {"multimodal_cache": 0})


def host_allocator(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose an allocator that gives host memory back to the system."""
    support = profile.supported.get("host_allocator")
    if support is not None and knobs.host_allocator in (None, "default", "glibc"):
        offered = [v for v in support.grid.values if isinstance(v, str) and v not in ("default", "glibc")]
        yield from change(
            "host_allocator",
            profile,
            knobs,
            {"host_allocator": offered[0] if offered else "jemalloc"},
            reason="glibc keeps freed host memory in its arenas; this allocator returns it",
        )


# An allocator whose segments grow, so that free pieces are not stranded.
expandable_segments = stepping("expandable_segments", "allocator")


def adjust_memory_margin(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose more memory kept free for NCCL, or less where the trainer's allocator itself lacks it."""
    support = profile.supported.get("memory_margin")
    present = knobs.memory_margin
    if support is None or present is None:
        return
    if diagnosis.phase is Phase.COMM:
        margin = min(present + GIB, int(highest(profile, "memory_margin") or present + GIB))
        reason = "NCCL allocates outside PyTorch and finds only what this margin keeps free"
    else:
        less = smaller(profile, knobs, "memory_margin", share=0.5)
        margin = present if less is None else less
        reason = "the margin refuses allocations that would fit"
    yield from change("adjust_memory_margin", profile, knobs, {"memory_margin": margin}, reason=reason)


def free_before_relaunch(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Propose others hold the card: nothing of the job changes, their memory must go first."""
    outside = diagnosis.facts.held_by_others_bytes
    if outside:
        yield Remedy(
            name="free_before_relaunch",
            changes={},
            reason=f"{outside / GIB:.1f} GiB of the card are held outside this process",
            frees=f"up to {outside / GIB:.1f} GiB",
        )
