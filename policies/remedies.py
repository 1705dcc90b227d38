"""LADDER: which remedies serve which failure, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from policies import changes as do
from policies.evidence import Diagnosis, Remedy
from policies.legal import objections
from policies.types import Cause, Component, Knobs, Phase, Placement, Profile, Value


class Rung(Value, frozen=True, kw_only=True):
    """One remedy at one place of the ladder; empty components or placements mean all."""

    name: str
    propose: Callable[[Profile, Knobs, Diagnosis], Iterable[Remedy]]
    causes: tuple[Cause, ...]
    phases: tuple[Phase, ...]
    components: tuple[Component, ...] = ()
    placements: tuple[Placement, ...] = ()

    def serves(self, profile: Profile, diagnosis: Diagnosis) -> bool:
        """Return whether this rung is for such a failure."""
        return (
            diagnosis.cause in self.causes
            and diagnosis.phase in self.phases
            and (not self.components or diagnosis.component in self.components)
            and (not self.placements or profile.placement in self.placements)
        )


_GPU = (Cause.GPU_OOM,)
_ANY_PHASE = tuple(Phase)
_SHARED = (Placement.COLOCATED,)
_APART = (Placement.SEPARATE, Placement.ASYNCHRONOUS)
_ENGINE = (Component.ROLLOUT, Component.REWARD)
_TRAINING = (
    Component.TRAINER,
    Component.REF,
    Component.CRITIC,
    Component.DRIVER,
    Component.DATA,
    Component.UNKNOWN,
)


def _rungs(
    causes: tuple[Cause, ...],
    phases: tuple[Phase, ...],
    *proposals: do.Propose,
    components: tuple[Component, ...] = (),
    placements: tuple[Placement, ...] = (),
) -> tuple[Rung, ...]:
    return tuple(
        Rung(
            name=getattr(proposal, "__name__", ""),
            propose=proposal,
            causes=causes,
            phases=phases,
            components=components,
            placements=placements,
        )
        for proposal in proposals
    )


# The order is the owner's: fewer rollouts at once, the engine's share, tokens per micro-batch, recomputation, offload,
# weight sync through files; within a phase what costs least time comes first. A rung that does not serve a component
# or a placement would leave the memory that failed as it was.
LADDER: tuple[Rung, ...] = (
    # Memory that others hold is not cured by changing the job.
    *_rungs(_GPU, _ANY_PHASE, do.free_before_relaunch),
    # Generation.
    *_rungs(
        _GPU,
        (Phase.ROLLOUT,),
        do.reduce_concurrency,
        do.reduce_mem_fraction,
        do.reduce_tokens_per_mb,
        do.disable_cuda_graph,
    ),
    *_rungs(
        _GPU,
        (Phase.ROLLOUT_INIT,),
        do.reduce_mem_fraction,
        do.disable_cuda_graph,
        do.reduce_concurrency,
        do.reduce_tokens_per_mb,
    ),
    *_rungs(
        _GPU,
        (Phase.ROLLOUT, Phase.ROLLOUT_INIT),
        do.offload_optimizer,
        do.offload_params,
        do.offload_grads,
        placements=_SHARED,
    ),
    *_rungs(_GPU, (Phase.ROLLOUT, Phase.ROLLOUT_INIT), do.tensor_parallel),
    # Scoring.
    *_rungs(
        _GPU,
        (Phase.LOG_PROB,),
        do.reduce_tokens_per_mb,
        do.reduce_micro_batch,
        do.chunk_logits,
        do.fused_kernels,
    ),
    *_rungs(_GPU, (Phase.LOG_PROB,), do.reduce_mem_fraction, placements=_SHARED),
    *_rungs(
        _GPU,
        (Phase.LOG_PROB,),
        do.expandable_segments,
        do.offload_optimizer,
        do.offload_grads,
        do.offload_params,
        do.sequence_parallel,
        do.tensor_parallel,
        do.adjust_memory_margin,
    ),
    # Training passes; a failure of unknown phase in the trainer is most often one.
    *_rungs(
        _GPU,
        (Phase.FORWARD, Phase.BACKWARD, Phase.NONE),
        do.reduce_tokens_per_mb,
        do.reduce_micro_batch,
        do.chunk_logits,
        do.loss_recompute,
        do.recompute,
        do.fused_kernels,
        do.expandable_segments,
        components=_TRAINING,
    ),
    *_rungs(
        _GPU,
        (Phase.FORWARD, Phase.BACKWARD, Phase.NONE),
        do.reduce_mem_fraction,
        components=_TRAINING,
        placements=_SHARED,
    ),
    *_rungs(
        _GPU,
        (Phase.FORWARD, Phase.BACKWARD, Phase.NONE),
        do.offload_activations,
        do.offload_optimizer,
        do.offload_grads,
        do.offload_params,
        do.sequence_parallel,
        do.tensor_parallel,
        do.adjust_memory_margin,
        components=_TRAINING,
    ),
    # An engine that fails beside training, or in a phase nobody named.
    *_rungs(
        _GPU,
        (Phase.FORWARD, Phase.BACKWARD, Phase.NONE),
        do.reduce_concurrency,
        do.reduce_mem_fraction,
        do.disable_cuda_graph,
        do.tensor_parallel,
        components=_ENGINE,
    ),
    # The optimizer's step.
    *_rungs(_GPU, (Phase.OPTIMIZER,), do.expandable_segments, do.reduce_mem_fraction, placements=_SHARED),
    *_rungs(
        _GPU,
        (Phase.OPTIMIZER,),
        do.offload_optimizer,
        do.expandable_segments,
        do.offload_grads,
        do.offload_params,
        do.fused_kernels,
        do.reduce_tokens_per_mb,
        do.reduce_micro_batch,
        do.tensor_parallel,
        do.adjust_memory_margin,
    ),
    # New weights on their way to the engine, and waking it.
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), do.reduce_mem_fraction, components=_ENGINE, placements=_SHARED),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), do.reduce_sync_buffer),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), do.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), do.reduce_mem_fraction, components=_ENGINE, placements=_APART),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), do.disk_weight_sync),
    *_rungs(
        _GPU,
        (Phase.WEIGHT_SYNC,),
        do.offload_optimizer,
        do.offload_params,
        do.offload_grads,
        do.expandable_segments,
        do.tensor_parallel,
    ),
    # Communication buffers outside PyTorch.
    *_rungs(_GPU, (Phase.COMM,), do.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.COMM,), do.reduce_mem_fraction, components=_ENGINE, placements=_APART),
    *_rungs(
        _GPU,
        (Phase.COMM,),
        do.expandable_segments,
        do.adjust_memory_margin,
        do.reduce_sync_buffer,
        do.reduce_tokens_per_mb,
        do.reduce_micro_batch,
        do.offload_optimizer,
        do.offload_params,
    ),
    # Start, checkpoints and data.
    *_rungs(_GPU, (Phase.INIT,), do.reduce_mem_fraction, placements=_SHARED),
    *_rungs(
        _GPU,
        (Phase.INIT, Phase.CHECKPOINT, Phase.DATA),
        do.expandable_segments,
        do.offload_params,
        do.offload_optimizer,
        do.offload_grads,
        do.tensor_parallel,
    ),
    *_rungs(_GPU, (Phase.CHECKPOINT, Phase.DATA), do.reduce_mem_fraction, placements=_SHARED),
    # The engine's pool.
    *_rungs(
        (Cause.KV_POOL,), _ANY_PHASE, do.reduce_concurrency, do.increase_mem_fraction, do.tensor_parallel
    ),
    *_rungs((Cause.POOL_TOO_SMALL,), _ANY_PHASE, do.increase_mem_fraction),
    *_rungs((Cause.POOL_TOO_SMALL,), _ANY_PHASE, do.offload_params, do.offload_optimizer, placements=_SHARED),
    *_rungs(
        (Cause.POOL_TOO_SMALL,),
        _ANY_PHASE,
        do.reduce_tokens_per_mb,
        do.reduce_concurrency,
        do.disable_cuda_graph,
        do.tensor_parallel,
    ),
    # Host memory: never more offload.
    *_rungs(
        (Cause.HOST_OOM,),
        _ANY_PHASE,
        do.reduce_workers,
        do.drop_weights_backup,
        do.host_allocator,
        do.reduce_host_offload,
    ),
    *_rungs((Cause.HOST_OOM,), (Phase.WEIGHT_SYNC,), do.reduce_sync_buffer, do.disk_weight_sync),
    *_rungs((Cause.HOST_OOM,), _ANY_PHASE, do.reduce_micro_batch, do.reduce_concurrency),
    *_rungs((Cause.SHM,), _ANY_PHASE, do.reduce_workers, do.drop_weights_backup, do.reduce_host_offload),
    *_rungs((Cause.OBJECT_STORE,), (Phase.WEIGHT_SYNC,), do.disk_weight_sync, do.reduce_sync_buffer),
    *_rungs((Cause.OBJECT_STORE,), _ANY_PHASE, do.reduce_concurrency, do.reduce_workers),
    # Last resorts.
    *_rungs((Cause.GPU_OOM, Cause.HOST_OOM, Cause.SHM, Cause.OBJECT_STORE), _ANY_PHASE, do.restart_every),
    *_rungs(_GPU, _ANY_PHASE, do.capture_snapshot),
)


def candidates(profile: Profile, knobs: Knobs, diagnosis: Diagnosis, *, started: bool) -> Iterator[Remedy]:
    """Yield the legal remedies for a failure, cheapest first.

    Where the message shows fragmentation, the allocator comes first: it costs nothing.
    """
    rungs = [
        rung for rung in LADDER if rung.serves(profile, diagnosis) and _reaches(rung, profile, diagnosis)
    ]
    if diagnosis.fragmentation:
        rungs.sort(key=lambda rung: rung.propose is not do.expandable_segments)
    seen: list[Remedy] = []
    for rung in rungs:
        for remedy in rung.propose(profile, knobs, diagnosis):
            known = any(other.changes == remedy.changes for other in seen)
            if not known and not objections(profile, knobs, remedy.apply(knobs), started=started):
                seen.append(remedy)
                yield remedy


def _reaches(rung: Rung, profile: Profile, diagnosis: Diagnosis) -> bool:
    """Return whether the component that a rung shrinks holds memory in the phase that failed."""
    held = profile.resident.get(diagnosis.phase.value)
    if diagnosis.cause is not Cause.GPU_OOM or held is None:
        return True
    if rung.propose is do.reduce_mem_fraction and diagnosis.component not in _ENGINE:
        return any(component in held for component in _ENGINE)
    if (
        rung.propose in (do.offload_optimizer, do.offload_params, do.offload_grads)
        and diagnosis.component in _ENGINE
    ):
        return any(component in held for component in (Component.TRAINER, Component.REF, Component.CRITIC))
    return True
