"""LADDER: the remedies for each failure, cheapest first."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.proposals import propose
from autotune.policies.remedies.relevance import (
    SMALLER_PASSES,
    can_act,
    fills_host,
    precedence,
)
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Component, Phase
from autotune.policies.values.knob_table import BESIDE_ENGINE, KNOB_TABLE, WITH_REQUESTS, Knob, Memory, Part
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.value import Value


class Rung(Value, frozen=True, kw_only=True):
    """A remedy at one place of the ladder; empty components or placements mean all."""

    name: str
    cause: Cause
    phases: tuple[Phase, ...]
    components: tuple[Component, ...] = ()
    placements: tuple[Placement, ...] = ()
    joins: int = 0  # failures in a row from which on a relaunch may combine it with others; 0: never

    def serves(self, diagnosis: Diagnosis, placement: Placement | None, *, any_phase: bool = False) -> bool:
        """Return whether this rung is for a failure; without a placement: for any placement."""
        return (
            diagnosis.cause is self.cause
            and (any_phase or diagnosis.phase in self.phases)
            and (not self.components or diagnosis.component in self.components)
            and (not self.placements or placement in (None, *self.placements))
        )


_ANY_PHASE = tuple(Phase)
_BUT_AT_START = tuple(phase for phase in Phase if phase is not Phase.ROLLOUT_INIT)
_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.NONE)  # a failure of unknown phase is most often one
_WITH_BATCHES = (*_PASSES, Phase.LOG_PROB)
_SHARED = (Placement.COLOCATED,)
_APART = (Placement.SEPARATE, Placement.ASYNCHRONOUS)
_ENGINE = (Component.ROLLOUT, Component.REWARD)
_TRAINER = (Component.TRAINER, Component.REF, Component.CRITIC)
_TRAINING = (*_TRAINER, Component.DRIVER, Component.DATA, Component.UNKNOWN)


# Remedies that move the trainer's state off the GPU or shard it further, after those of micro-batches.
_STATE_AND_SPLITS = (
    "shard_wider offload_optimizer:3 offload_grads:3 offload_params:3 sequence_parallel expert_parallel "
    "tensor_parallel pipeline_parallel adjust_memory_margin"
)


def _rungs(
    cause: Cause,
    phases: Phase | tuple[Phase, ...],
    names: str,
    *,
    components: tuple[Component, ...] = (),
    placements: tuple[Placement, ...] = (),
) -> tuple[Rung, ...]:
    """Return a rung for each remedy in `names`, written as `name` or `name:joins`."""
    return tuple(
        Rung(
            name=name.partition(":")[0],
            cause=cause,
            phases=phases if isinstance(phases, tuple) else (phases,),
            components=components,
            placements=placements,
            joins=int(name.partition(":")[2] or 0),
        )
        for name in names.split()
    )


# The general order: fewer concurrent requests, the engine's share, tokens per micro-batch, recomputation,
# offload, weight sync through files; within a phase, the remedy that costs least time comes first. A rung
# excludes components and placements for which it would not change the memory that ran out. After the first
# failure in a micro-batch, one relaunch combines all remedies that cost no more than some of its time, and
# after further failures costlier ones; for an engine, and during a resume, it starts with one remedy.
LADDER: tuple[Rung, ...] = (
    # Generation.
    *_rungs(
        Cause.GPU_OOM,
        Phase.ROLLOUT,
        "reduce_concurrency:4 reduce_mem_fraction:2 reduce_tokens_per_mb:3 disable_cuda_graph:3",
    ),
    *_rungs(
        Cause.GPU_OOM,
        Phase.ROLLOUT_INIT,
        "reduce_mem_fraction:2 disable_cuda_graph:3 reduce_concurrency:4 reduce_tokens_per_mb:3",
    ),
    *_rungs(
        Cause.GPU_OOM, ENGINE_PHASES, "offload_optimizer:3 offload_params:2 offload_grads", placements=_SHARED
    ),
    *_rungs(Cause.GPU_OOM, ENGINE_PHASES, "tensor_parallel:2"),
    # An engine that is awake beside the trainer: sleeping frees its whole share, for the time to wake it.
    *_rungs(
        Cause.GPU_OOM, (*BESIDE_ENGINE, Phase.NONE), "engine_sleep", components=_TRAINING, placements=_SHARED
    ),
    # Log-probs.
    *_rungs(
        Cause.GPU_OOM,
        Phase.LOG_PROB,
        "reduce_tokens_per_mb:1 reduce_micro_batch:1 reshard_after_forward:1 chunk_logits:1 fused_kernels",
    ),
    *_rungs(Cause.GPU_OOM, Phase.LOG_PROB, "reduce_mem_fraction:2", placements=_SHARED),
    *_rungs(Cause.GPU_OOM, Phase.LOG_PROB, f"expandable_segments {_STATE_AND_SPLITS}"),
    # Micro-batches of the training.
    *_rungs(
        Cause.GPU_OOM,
        _PASSES,
        "reduce_tokens_per_mb:1 reduce_micro_batch:1 reshard_after_forward:1 chunk_logits:1 loss_recompute:1 "
        "recompute:1 fused_kernels expandable_segments",
        components=_TRAINING,
    ),
    *_rungs(Cause.GPU_OOM, _PASSES, "reduce_mem_fraction:2", components=_TRAINING, placements=_SHARED),
    *_rungs(Cause.GPU_OOM, _PASSES, f"offload_activations:2 {_STATE_AND_SPLITS}", components=_TRAINING),
    # An engine that fails during training, or in an unknown phase, in which it may have no requests.
    *_rungs(Cause.GPU_OOM, Phase.NONE, "reduce_mem_fraction:2", components=_ENGINE),
    *_rungs(
        Cause.GPU_OOM,
        _PASSES,
        "reduce_concurrency reduce_mem_fraction:2 disable_cuda_graph:2 tensor_parallel",
        components=_ENGINE,
    ),
    # The optimizer's step.
    *_rungs(Cause.GPU_OOM, Phase.OPTIMIZER, "expandable_segments reduce_mem_fraction:2", placements=_SHARED),
    *_rungs(
        Cause.GPU_OOM,
        Phase.OPTIMIZER,
        "shard_wider offload_optimizer:2 expandable_segments offload_grads:2 offload_params:2 "
        "expert_parallel tensor_parallel pipeline_parallel adjust_memory_margin",
    ),
    # Weight sync, and waking the engine.
    *_rungs(
        Cause.GPU_OOM, Phase.WEIGHT_SYNC, "reduce_mem_fraction:1", components=_ENGINE, placements=_SHARED
    ),
    *_rungs(Cause.GPU_OOM, Phase.WEIGHT_SYNC, "layered_sync reduce_sync_buffer:1"),
    *_rungs(Cause.GPU_OOM, Phase.WEIGHT_SYNC, "reduce_mem_fraction:1", placements=_SHARED),
    *_rungs(Cause.GPU_OOM, Phase.WEIGHT_SYNC, "reduce_mem_fraction:1", components=_ENGINE, placements=_APART),
    *_rungs(Cause.GPU_OOM, Phase.WEIGHT_SYNC, "disk_weight_sync:2"),
    *_rungs(
        Cause.GPU_OOM,
        Phase.WEIGHT_SYNC,
        "offload_optimizer:3 offload_params:3 offload_grads:3 expandable_segments tensor_parallel:2",
    ),
    # Communication buffers outside PyTorch.
    *_rungs(Cause.GPU_OOM, Phase.COMM, "reduce_mem_fraction:1", placements=_SHARED),
    *_rungs(Cause.GPU_OOM, Phase.COMM, "reduce_mem_fraction:1", components=_ENGINE, placements=_APART),
    *_rungs(
        Cause.GPU_OOM,
        Phase.COMM,
        "expandable_segments adjust_memory_margin reduce_sync_buffer:1 reduce_tokens_per_mb "
        "reduce_micro_batch offload_optimizer:3 offload_params:3",
    ),
    # Start, checkpoints and data.
    *_rungs(Cause.GPU_OOM, Phase.INIT, "load_on_host", components=_TRAINING),
    *_rungs(Cause.GPU_OOM, Phase.INIT, "reduce_mem_fraction:2", placements=_SHARED),
    *_rungs(
        Cause.GPU_OOM,
        (Phase.INIT, Phase.CHECKPOINT, Phase.DATA),
        "expandable_segments shard_wider offload_params:2 offload_optimizer:2 offload_grads:2 "
        "expert_parallel tensor_parallel pipeline_parallel",
    ),
    *_rungs(Cause.GPU_OOM, (Phase.CHECKPOINT, Phase.DATA), "reduce_mem_fraction:2", placements=_SHARED),
    # Loading a checkpoint: where its tensors go, and the memory left for them, before anything else.
    *_rungs(Cause.GPU_OOM, Phase.RESUME, "expandable_segments"),
    *_rungs(Cause.GPU_OOM, Phase.RESUME, "load_on_host", components=_TRAINING),
    *_rungs(Cause.GPU_OOM, Phase.RESUME, "offload_optimizer offload_params"),
    *_rungs(Cause.GPU_OOM, Phase.RESUME, "reduce_mem_fraction", placements=_SHARED),
    *_rungs(Cause.GPU_OOM, Phase.RESUME, "tensor_parallel"),
    # Captured graphs beside training, some even while their engine sleeps.
    *_rungs(
        Cause.GPU_OOM,
        (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD),
        "disable_cuda_graph:2",
        components=_TRAINING,
        placements=_SHARED,
    ),
    *_rungs(
        Cause.GPU_OOM,
        (Phase.RESUME, Phase.OPTIMIZER, Phase.CHECKPOINT),
        "disable_cuda_graph",
        components=_TRAINING,
        placements=_SHARED,
    ),
    # The engine's pool.
    *_rungs(Cause.KV_POOL, _ANY_PHASE, "reduce_concurrency increase_mem_fraction tensor_parallel"),
    # An engine that had started lacks memory for its requests, not for itself.
    *_rungs(Cause.POOL_TOO_SMALL, Phase.ROLLOUT, "reduce_concurrency"),
    *_rungs(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, "increase_mem_fraction:1 tensor_parallel:1"),
    *_rungs(Cause.POOL_TOO_SMALL, _BUT_AT_START, "increase_mem_fraction:3 tensor_parallel:2"),
    *_rungs(Cause.POOL_TOO_SMALL, _ANY_PHASE, "offload_params:3 offload_optimizer:3", placements=_SHARED),
    *_rungs(
        Cause.POOL_TOO_SMALL, _ANY_PHASE, "disable_cuda_graph:4 reduce_tokens_per_mb:4 reduce_concurrency"
    ),
    # Host memory: never more offload.
    *_rungs(
        Cause.HOST_OOM,
        _ANY_PHASE,
        "save_synchronously reduce_multimodal_cache reduce_workers:1 drop_weights_backup:1 host_allocator:1",
    ),
    *_rungs(Cause.HOST_OOM, (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB), "reduce_tokens_per_mb:1"),
    *_rungs(Cause.HOST_OOM, _ANY_PHASE, "reduce_host_offload"),
    *_rungs(Cause.HOST_OOM, _ANY_PHASE, "tensor_parallel", placements=_SHARED),
    *_rungs(Cause.HOST_OOM, Phase.WEIGHT_SYNC, "reduce_sync_buffer disk_weight_sync"),
    *_rungs(Cause.HOST_OOM, _WITH_BATCHES, "reduce_micro_batch:1"),
    *_rungs(Cause.HOST_OOM, WITH_REQUESTS, "reduce_concurrency"),
    *_rungs(Cause.HOST_OOM, (Phase.FORWARD, Phase.BACKWARD), "recompute:1"),
    *_rungs(Cause.SHM, _ANY_PHASE, "reduce_workers"),  # offloaded state is pinned memory, not in /dev/shm
    *_rungs(Cause.OBJECT_STORE, Phase.WEIGHT_SYNC, "disk_weight_sync reduce_sync_buffer"),
    *_rungs(Cause.OBJECT_STORE, _ANY_PHASE, "reduce_concurrency reduce_workers"),
)


def candidates(profile: Profile, knobs: Knobs, diagnosis: Diagnosis, *, started: bool) -> Iterator[Remedy]:
    """Yield the legal remedies for a failure, cheapest first.

    If fragmentation prevails, the allocator comes first, because it costs nothing. If the message says how
    much an engine lacks, a smaller share comes first, because it frees just that. If optimizer state did not
    fit, its offload comes first. Against a full host, and in an engine's largest batch, remedies for what
    probably fills the memory come first. If a micro-batch fills the host, smaller ones come first. If program
    and phase are unknown, remedies for other phases come last.
    """
    every = _rungs_of(diagnosis.cause, diagnosis.phase)
    rungs = [rung for rung in every if rung.serves(diagnosis, profile.placement)]
    if profile.may_be_any(diagnosis.phase):
        others = (rung for rung in LADDER if rung not in rungs)
        rungs += [rung for rung in others if rung.serves(diagnosis, profile.placement, any_phase=True)]
    rungs = [rung for rung in rungs if can_act(rung.name, diagnosis)]
    if fragmentation_prevails(diagnosis):
        rungs.sort(key=lambda rung: rung.name != "expandable_segments")
    if diagnosis.facts.states:
        rungs.sort(key=lambda rung: rung.name != "offload_optimizer")
    if diagnosis.phase.is_engine and missing_bytes(diagnosis.facts) is not None:
        rungs.sort(key=lambda rung: rung.name != "reduce_mem_fraction")
    rungs.sort(key=lambda rung: precedence(rung.name, diagnosis))
    if fills_host(knobs, diagnosis):
        rungs.sort(key=lambda rung: rung.name not in SMALLER_PASSES)
    offered: list[Remedy] = []
    for rung in rungs:
        for remedy in propose(rung.name, profile, knobs, diagnosis):
            known = any(other.changes == remedy.changes for other in offered)
            if (
                known
                or not _reaches(profile, knobs, remedy, diagnosis)
                or _elsewhere(profile, remedy, diagnosis)
            ):
                continue
            if not any(
                KNOB_TABLE[knob].acts(diagnosis.cause, diagnosis.phase, profile.placement)
                for knob in remedy.changes
            ):
                continue
            if not objections(profile, knobs, remedy.apply(knobs), started=started):
                offered.append(remedy)
                yield remedy


@functools.cache  # called several times in every decision
def _rungs_of(cause: Cause, phase: Phase) -> tuple[Rung, ...]:
    return tuple(rung for rung in LADDER if rung.cause is cause and phase in rung.phases)


def joinable(diagnosis: Diagnosis, failures: int) -> frozenset[str]:
    """Return the remedies that one relaunch may combine after so many failures in a row."""
    rungs = _rungs_of(diagnosis.cause, diagnosis.phase)
    return frozenset(rung.name for rung in rungs if 0 < rung.joins <= failures)


def order_of_knobs(
    profile: Profile, knobs: Knobs, diagnosis: Diagnosis | None, *, started: bool
) -> dict[str, int]:
    """Return the knobs that help with a failure, each with its rank by the first remedy that changes it."""
    remedies = () if diagnosis is None else candidates(profile, knobs, diagnosis, started=started)
    return {knob: place for place, knob in enumerate(dict.fromkeys(k for r in remedies for k in r.changes))}


def _elsewhere(profile: Profile, remedy: Remedy, diagnosis: Diagnosis) -> bool:
    """Return whether a remedy frees device memory in other phases only, as for state that is loaded back."""
    phases = [profile.supported[knob].phases for knob in remedy.changes if knob in profile.supported]
    return (
        diagnosis.cause is Cause.GPU_OOM
        and bool(phases)
        and all(own and diagnosis.phase not in own for own in phases)
    )


def _reaches(profile: Profile, knobs: Knobs, remedy: Remedy, diagnosis: Diagnosis) -> bool:
    """Return whether a remedy shrinks something that holds memory in the failed phase."""
    held = profile.held(diagnosis.phase)
    if diagnosis.cause is not Cause.GPU_OOM or held is None or not remedy.changes:
        return True
    return any(_shrinks(KNOB_TABLE[knob], profile, knobs, held, diagnosis) for knob in remedy.changes)


def _shrinks(row: Knob, profile: Profile, knobs: Knobs, held: tuple[str, ...], diagnosis: Diagnosis) -> bool:
    if (diagnosis.component in _ENGINE) is (row.part is Part.ENGINE):
        return True
    owners = {Part.ENGINE: _ENGINE, Part.TRAINER: _TRAINER}.get(row.part)
    if owners is None or any(component in held for component in owners):
        return True
    # The first step frees nearly all of the memory that an engine keeps while it sleeps.
    kept, most = row.kept_asleep.get(profile.engine, 0), row.towards(Memory.GPU)[:1]
    untouched = getattr(knobs, row.name) in (None, *most)
    return untouched and (missing_bytes(diagnosis.facts) or 0) < kept
