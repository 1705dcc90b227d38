"""Which remedies can act on what failed, and which first, by the figures and frames of a failure."""

from __future__ import annotations

import re

from autotune.policies.diagnosis.memory_users import largest, without_loaders
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs

SMALLER_PASSES = ("reduce_tokens_per_mb", "reduce_micro_batch", "recompute")

# What makes the tensor itself smaller that was asked for; all others only give memory back.
_SHRINKING = frozenset((
    "reduce_tokens_per_mb", "reduce_micro_batch", "reduce_concurrency", "chunk_logits", "loss_recompute",
    "fused_kernels", "sequence_parallel", "tensor_parallel", "reduce_sync_buffer", "disk_weight_sync",
))  # fmt: skip
# What acts on an engine's pool, graphs and batches, which it has once its weights are loaded.
_AFTER_LOADING = frozenset((
    "reduce_mem_fraction", "disable_cuda_graph", "reduce_concurrency", "reduce_tokens_per_mb",
))  # fmt: skip
_AFTER_PROFILING = frozenset(("reduce_mem_fraction", "disable_cuda_graph"))  # which act on pool and graphs
_REFUSED = ("shm-refused", "shm-engine-refused")  # before any process of the job runs
_ASKED = ("sglang-host-memory", "vllm-swap-space")  # an engine, by settings of its own, as it started
# An engine takes back its own memory, before any weights are sent.
_WAKES = re.compile(r"cumem_allocator|wake_up method failed|\bfunc=resume\b")
_SENT = ("reduce_sync_buffer", "disk_weight_sync")
_OCCUPIED = "vllm-startup-memory"  # before the engine holds anything
_LEAST_FREE = 0.2  # of a card, with which an engine may still start
_GROWN = 3  # steps, which are all alike: what is fuller at the last than at the first has grown
_OF_GROWTH = ("host_allocator",)
_OF_STATE = ("drop_weights_backup", "reduce_host_offload")
_OF_DATA = ("reduce_workers", "reduce_multimodal_cache")
_OF_SAVE = ("save_synchronously",)


def wakes(diagnosis: Diagnosis) -> bool:
    """Return whether a sleeping engine did not get its own memory back."""
    return any(_WAKES.search(line.text) for line in diagnosis.evidence)


def runs_on_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a pass of the trainer ran out of host memory because it computes there.

    The allocator failed in the pass, and no state is offloaded, a copy of which would be what it requested.
    """
    return (
        diagnosis.cause is Cause.HOST_OOM
        and diagnosis.phase.is_pass
        and diagnosis.component in (Component.TRAINER, Component.REF, Component.CRITIC)
        and diagnosis.facts.requested_bytes is not None
        and not (knobs.param_offload or knobs.grad_offload or knobs.optimizer_offload)
    )


def fills_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a pass fills host memory: it computes there, or its activations wait there."""
    waiting = knobs.activation_offload is True and diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD)
    return diagnosis.cause is Cause.HOST_OOM and (waiting or runs_on_host(knobs, diagnosis))


def can_act(name: str, diagnosis: Diagnosis) -> bool:
    """Return whether a remedy can act on what failed, wherever the job's settings would allow it."""
    facts = diagnosis.facts
    if any(line.rule in _REFUSED for line in diagnosis.evidence):
        return False
    if diagnosis.cause is Cause.HOST_OOM:
        if any(line.rule in _ASKED for line in diagnosis.evidence):
            return name in _OF_STATE
        group = largest(facts)
        elsewhere = group is not None and group.component in (Component.DRIVER, Component.DATA)
        if name == "reduce_workers" and without_loaders(facts):
            return False
        if name in _OF_SAVE and (diagnosis.phase.is_start or elsewhere):
            return False  # nothing is saved yet, or by another process
        return not elsewhere or name in (*_OF_DATA, *_OF_GROWTH)
    if diagnosis.cause is not Cause.GPU_OOM:
        return True
    if name in _SENT and wakes(diagnosis):
        return False
    if facts.loading and name in _AFTER_LOADING:
        return False
    if facts.profiling and not facts.held_by_others_bytes and name in _AFTER_PROFILING:
        return False
    if any(line.rule == _OCCUPIED for line in diagnosis.evidence) and facts.capacity_bytes:
        enough = (facts.free_bytes or 0) >= _LEAST_FREE * facts.capacity_bytes
        return name == "free_before_relaunch" or (name == "reduce_mem_fraction" and enough)
    return not facts.impossible or name in _SHRINKING


def grew(diagnosis: Diagnosis) -> bool:
    """Return whether memory must have grown over steps, as leaks and an allocator's arenas do."""
    anew = diagnosis.phase.is_start or diagnosis.phase is Phase.CHECKPOINT  # it begins from nothing each time
    return diagnosis.step is not None and diagnosis.step >= _GROWN and not anew


def shows_holder(diagnosis: Diagnosis) -> bool:
    """Return whether a failure shows what filled a node's memory, or that it grew."""
    return diagnosis.cause is Cause.HOST_OOM and (largest(diagnosis.facts) is not None or grew(diagnosis))


def precedence(name: str, diagnosis: Diagnosis) -> int:
    """Return the place of a host memory remedy among the others: what acts on the memory's holder first."""
    if diagnosis.cause is not Cause.HOST_OOM:
        return 0
    group = largest(diagnosis.facts)
    component = Component.UNKNOWN if group is None else group.component
    order: tuple[tuple[str, ...], ...]
    if component is Component.DATA or (group is None and diagnosis.phase is Phase.DATA):
        order = (_OF_DATA, _OF_GROWTH, _OF_STATE)
    elif component is Component.DRIVER or (grew(diagnosis) and not (group is not None and group.foreign)):
        order = (_OF_GROWTH, _OF_DATA, _OF_STATE)
    elif group is not None and group.alike:
        order = (_OF_STATE, _OF_DATA, _OF_GROWTH)
    else:
        order = (_OF_STATE, _OF_GROWTH, _OF_DATA)
    if diagnosis.phase is Phase.CHECKPOINT:
        order = (_OF_SAVE, *order)
    places = [place for place, names in enumerate(order) if name in names]
    return places[0] if places else len(order)
