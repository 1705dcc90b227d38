"""Which remedies can help with a failure, and which first, by its figures and stack frames."""

from __future__ import annotations

import re

from autotune.policies.diagnosis.memory_users import Group, largest, without_loaders
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs

SMALLER_PASSES = ("reduce_tokens_per_mb", "reduce_micro_batch", "recompute")

# Remedies that shrink the requested tensor itself; all others only free other memory.
_SHRINKING = frozenset((
    "reduce_tokens_per_mb", "reduce_micro_batch", "reduce_concurrency", "chunk_logits", "loss_recompute",
    "fused_kernels", "sequence_parallel", "tensor_parallel", "reduce_sync_buffer", "disk_weight_sync",
))  # fmt: skip
# Remedies for an engine's pool, graphs and batches, which exist once its weights are loaded.
_AFTER_LOADING = frozenset((
    "reduce_mem_fraction", "disable_cuda_graph", "reduce_concurrency", "reduce_tokens_per_mb",
))  # fmt: skip
_AFTER_PROFILING = frozenset(("reduce_mem_fraction", "disable_cuda_graph"))  # for pool and graphs
_REFUSED = ("shm-refused", "shm-engine-refused")  # before any process of the job runs
_ASKED = ("sglang-host-memory", "vllm-swap-space")  # requested by an engine's own settings at its start
# An engine takes back its own memory, before weights are transferred.
_WAKES = re.compile(r"cumem_allocator|wake_up method failed|\bfunc=(?:resume|cu_mem_create|cuMemCreate)\b")
_SENT = ("reduce_sync_buffer", "disk_weight_sync")
_OCCUPIED = "vllm-startup-memory"  # before the engine holds anything
_LEAST_FREE = 0.2  # free share of a GPU with which an engine may still start
_GROWN = 3  # steps; all need the same, so memory that first runs out at such a step has grown
_WORKERS = (Component.TRAINER, Component.REF, Component.CRITIC, Component.ROLLOUT, Component.REWARD)
_OF_GROWTH = ("host_allocator",)
OF_STATE = ("drop_weights_backup", "reduce_host_offload")
_OF_DATA = ("reduce_workers", "reduce_multimodal_cache")
_OF_SAVE = ("save_synchronously",)


def wakes(diagnosis: Diagnosis) -> bool:
    """Return whether the failure is a sleeping engine's that could not take its own memory back."""
    return diagnosis.facts.waking or any(_WAKES.search(line.text) for line in diagnosis.evidence)


def runs_on_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a micro-batch of the trainer ran out of host memory because it is computed there.

    True if the allocator failed in it and no state is offloaded, of which the request could be a copy.
    """
    return (
        diagnosis.cause is Cause.HOST_OOM
        and diagnosis.phase.is_pass
        and diagnosis.component in (Component.TRAINER, Component.REF, Component.CRITIC)
        and diagnosis.facts.requested_bytes is not None
        and not (knobs.param_offload or knobs.grad_offload or knobs.optimizer_offload)
    )


def fills_host(knobs: Knobs, diagnosis: Diagnosis) -> bool:
    """Return whether a micro-batch fills host memory: computed there, or by offloaded activations."""
    waiting = knobs.activation_offload is True and diagnosis.phase in (Phase.FORWARD, Phase.BACKWARD)
    return diagnosis.cause is Cause.HOST_OOM and (waiting or runs_on_host(knobs, diagnosis))


def can_act(name: str, diagnosis: Diagnosis) -> bool:
    """Return whether a remedy can help with a failure at all, regardless of the job's settings."""
    facts = diagnosis.facts
    if any(line.rule in _REFUSED for line in diagnosis.evidence):
        return False
    if diagnosis.cause is Cause.HOST_OOM:
        if any(line.rule in _ASKED for line in diagnosis.evidence):
            return name in OF_STATE
        group = largest(facts)
        elsewhere = group is not None and group.component in (Component.DRIVER, Component.DATA)
        if name == "reduce_workers" and (without_loaders(facts) or is_worker(group)):
            return False
        if name in _OF_SAVE and (diagnosis.phase.is_start or elsewhere):
            return False  # nothing is saved yet, or another process saves
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


def is_worker(group: Group | None) -> bool:
    """Return whether the largest users are Ray's trainers or engines, of which none loads data."""
    return group is not None and group.command.startswith("ray::") and group.component in _WORKERS


def grew(diagnosis: Diagnosis) -> bool:
    """Return whether memory must have grown over steps, as with leaks and an allocator's arenas."""
    anew = diagnosis.phase.is_start or diagnosis.phase is Phase.CHECKPOINT  # starts from nothing each time
    return diagnosis.step is not None and diagnosis.step >= _GROWN and not anew


def precedence(name: str, diagnosis: Diagnosis) -> int:
    """Return the rank of a remedy: first what fills a full host, or the profile of an engine.

    An engine profiles the most tokens that one prefill may have; its sampler, a row for each request.
    """
    facts = diagnosis.facts
    if facts.profiling and not (facts.sampling or facts.held_by_others_bytes):
        return 0 if name == "reduce_tokens_per_mb" else 1
    if diagnosis.cause is not Cause.HOST_OOM:
        return 0
    group = largest(facts)
    component = Component.UNKNOWN if group is None else group.component
    order: tuple[tuple[str, ...], ...]
    if component is Component.DATA or (group is None and diagnosis.phase is Phase.DATA):
        order = (_OF_DATA, _OF_GROWTH, OF_STATE)
    elif component is Component.DRIVER or (grew(diagnosis) and not (group is not None and group.foreign)):
        order = (_OF_GROWTH, _OF_DATA, OF_STATE)
    elif group is not None and group.alike:
        order = (OF_STATE, _OF_DATA, _OF_GROWTH)
    else:
        order = (OF_STATE, _OF_GROWTH, _OF_DATA)
    if diagnosis.phase is Phase.CHECKPOINT:
        order = (_OF_SAVE, *order)
    places = [place for place, names in enumerate(order) if name in names]
    return places[0] if places else len(order)
