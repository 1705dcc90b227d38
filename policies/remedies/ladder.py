"""LADDER: which remedies serve which failure, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.proposals import Propose, engine, host, training
from autotune.policies.remedies.relevance import can_act, precedence, shows_holder
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Component, Phase
from autotune.policies.values.knob_table import BESIDE_ENGINE, KNOB_TABLE, WITH_REQUESTS, Knob, Memory, Part
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.value import Value


class Rung(Value, frozen=True, kw_only=True):
    """One remedy at one place of the ladder; empty components or placements mean all."""

    name: str
    propose: Callable[[Profile, Knobs, Diagnosis], Iterable[Remedy]]
    causes: tuple[Cause, ...]
    phases: tuple[Phase, ...]
    components: tuple[Component, ...] = ()
    placements: tuple[Placement, ...] = ()

    def serves(self, profile: Profile, diagnosis: Diagnosis, *, anywhere: bool = False) -> bool:
        """Return whether this rung is for such a failure; `anywhere`: in whatever phase."""
        return (
            diagnosis.cause in self.causes
            and (anywhere or diagnosis.phase in self.phases)
            and (not self.components or diagnosis.component in self.components)
            and (not self.placements or profile.placement in self.placements)
        )


_GPU = (Cause.GPU_OOM,)
_ANY_PHASE = tuple(Phase)
_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.NONE)  # a failure of unknown phase is most often one
_WITH_BATCHES = (*_PASSES, Phase.LOG_PROB)
_SHARED = (Placement.COLOCATED,)
_APART = (Placement.SEPARATE, Placement.ASYNCHRONOUS)
_ENGINE = (Component.ROLLOUT, Component.REWARD)
_TRAINER = (Component.TRAINER, Component.REF, Component.CRITIC)
_TRAINING = (*_TRAINER, Component.DRIVER, Component.DATA, Component.UNKNOWN)


# What takes the trainer's state off the card, and, once the passes failed, spreads the job further.
_OFFLOADS = (training.offload_optimizer, training.offload_params, training.offload_grads)
_STATE_AND_SPLITS = (
    training.offload_optimizer,
    training.offload_grads,
    training.offload_params,
    training.sequence_parallel,
    training.tensor_parallel,
    host.adjust_memory_margin,
)


def _rungs(
    causes: tuple[Cause, ...],
    phases: tuple[Phase, ...],
    *proposals: Propose,
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


# The order is the owner's: fewer rollouts at once, the engine's share, tokens per micro-batch,
# recomputation, offload, weight sync through files; within a phase what costs least time comes first.
# A rung that does not serve a component or a placement would leave the memory that failed as it was.
LADDER: tuple[Rung, ...] = (
    # Generation.
    *_rungs(
        _GPU,
        (Phase.ROLLOUT,),
        engine.reduce_concurrency,
        engine.reduce_mem_fraction,
        training.reduce_tokens_per_mb,
        engine.disable_cuda_graph,
    ),
    *_rungs(
        _GPU,
        (Phase.ROLLOUT_INIT,),
        engine.reduce_mem_fraction,
        engine.disable_cuda_graph,
        engine.reduce_concurrency,
        training.reduce_tokens_per_mb,
    ),
    *_rungs(_GPU, ENGINE_PHASES, *_OFFLOADS, placements=_SHARED),
    *_rungs(_GPU, ENGINE_PHASES, training.tensor_parallel),
    # An engine that is awake beside the trainer: its whole share, for the time to wake it.
    *_rungs(
        _GPU, (*BESIDE_ENGINE, Phase.NONE), engine.engine_sleep, components=_TRAINING, placements=_SHARED
    ),
    # Scoring.
    *_rungs(
        _GPU,
        (Phase.LOG_PROB,),
        training.reduce_tokens_per_mb,
        training.reduce_micro_batch,
        training.chunk_logits,
        training.fused_kernels,
    ),
    *_rungs(_GPU, (Phase.LOG_PROB,), engine.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.LOG_PROB,), host.expandable_segments, *_STATE_AND_SPLITS),
    # Training passes.
    *_rungs(
        _GPU,
        _PASSES,
        training.reduce_tokens_per_mb,
        training.reduce_micro_batch,
        training.chunk_logits,
        training.loss_recompute,
        training.recompute,
        training.fused_kernels,
        host.expandable_segments,
        components=_TRAINING,
    ),
    *_rungs(_GPU, _PASSES, engine.reduce_mem_fraction, components=_TRAINING, placements=_SHARED),
    *_rungs(_GPU, _PASSES, training.offload_activations, *_STATE_AND_SPLITS, components=_TRAINING),
    # An engine that fails beside training, or in a phase nobody named, where it may have no requests.
    *_rungs(_GPU, (Phase.NONE,), engine.reduce_mem_fraction, components=_ENGINE),
    *_rungs(
        _GPU,
        _PASSES,
        engine.reduce_concurrency,
        engine.reduce_mem_fraction,
        engine.disable_cuda_graph,
        training.tensor_parallel,
        components=_ENGINE,
    ),
    # The optimizer's step.
    *_rungs(
        _GPU, (Phase.OPTIMIZER,), host.expandable_segments, engine.reduce_mem_fraction, placements=_SHARED
    ),
    *_rungs(
        _GPU,
        (Phase.OPTIMIZER,),
        training.offload_optimizer,
        host.expandable_segments,
        training.offload_grads,
        training.offload_params,
        training.tensor_parallel,
        host.adjust_memory_margin,
    ),
    # New weights on their way to the engine, and waking it.
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), engine.reduce_mem_fraction, components=_ENGINE, placements=_SHARED),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), engine.layered_sync, engine.reduce_sync_buffer),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), engine.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), engine.reduce_mem_fraction, components=_ENGINE, placements=_APART),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), engine.disk_weight_sync),
    *_rungs(_GPU, (Phase.WEIGHT_SYNC,), *_OFFLOADS, host.expandable_segments, training.tensor_parallel),
    # Communication buffers outside PyTorch.
    *_rungs(_GPU, (Phase.COMM,), engine.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.COMM,), engine.reduce_mem_fraction, components=_ENGINE, placements=_APART),
    *_rungs(
        _GPU,
        (Phase.COMM,),
        host.expandable_segments,
        host.adjust_memory_margin,
        engine.reduce_sync_buffer,
        training.reduce_tokens_per_mb,
        training.reduce_micro_batch,
        training.offload_optimizer,
        training.offload_params,
    ),
    # Start, checkpoints and data.
    *_rungs(_GPU, (Phase.INIT,), training.load_on_host, components=_TRAINING),
    *_rungs(_GPU, (Phase.INIT,), engine.reduce_mem_fraction, placements=_SHARED),
    *_rungs(
        _GPU,
        (Phase.INIT, Phase.CHECKPOINT, Phase.DATA),
        host.expandable_segments,
        training.offload_params,
        training.offload_optimizer,
        training.offload_grads,
        training.tensor_parallel,
    ),
    *_rungs(_GPU, (Phase.CHECKPOINT, Phase.DATA), engine.reduce_mem_fraction, placements=_SHARED),
    # A checkpoint that is loaded: where its tensors go, and what room is left for them, before anything else.
    *_rungs(_GPU, (Phase.RESUME,), host.expandable_segments),
    *_rungs(_GPU, (Phase.RESUME,), training.load_on_host, components=_TRAINING),
    *_rungs(_GPU, (Phase.RESUME,), training.offload_optimizer, training.offload_params),
    *_rungs(_GPU, (Phase.RESUME,), engine.reduce_mem_fraction, placements=_SHARED),
    *_rungs(_GPU, (Phase.RESUME,), training.tensor_parallel),
    # Captured graphs beside training, some even while their engine sleeps.
    *_rungs(
        _GPU,
        (Phase.RESUME, Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT),
        engine.disable_cuda_graph,
        components=_TRAINING,
        placements=_SHARED,
    ),
    # The engine's pool.
    *_rungs(
        (Cause.KV_POOL,),
        _ANY_PHASE,
        engine.reduce_concurrency,
        engine.increase_mem_fraction,
        training.tensor_parallel,
    ),
    # An engine that had started lacks room for its requests, not for itself.
    *_rungs((Cause.POOL_TOO_SMALL,), (Phase.ROLLOUT,), engine.reduce_concurrency),
    *_rungs((Cause.POOL_TOO_SMALL,), _ANY_PHASE, engine.increase_mem_fraction, training.tensor_parallel),
    *_rungs(
        (Cause.POOL_TOO_SMALL,),
        _ANY_PHASE,
        training.offload_params,
        training.offload_optimizer,
        placements=_SHARED,
    ),
    *_rungs(
        (Cause.POOL_TOO_SMALL,),
        _ANY_PHASE,
        engine.disable_cuda_graph,
        training.reduce_tokens_per_mb,
        engine.reduce_concurrency,
    ),
    # Host memory: never more offload.
    *_rungs(
        (Cause.HOST_OOM,),
        _ANY_PHASE,
        host.save_synchronously,
        host.reduce_multimodal_cache,
        host.reduce_workers,
        host.drop_weights_backup,
        host.host_allocator,
    ),
    *_rungs(
        (Cause.HOST_OOM,), (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB), training.reduce_tokens_per_mb
    ),
    *_rungs((Cause.HOST_OOM,), _ANY_PHASE, host.reduce_host_offload),
    *_rungs((Cause.HOST_OOM,), (Phase.WEIGHT_SYNC,), engine.reduce_sync_buffer, engine.disk_weight_sync),
    *_rungs((Cause.HOST_OOM,), _WITH_BATCHES, training.reduce_micro_batch),
    *_rungs((Cause.HOST_OOM,), WITH_REQUESTS, engine.reduce_concurrency),
    *_rungs((Cause.HOST_OOM,), (Phase.FORWARD, Phase.BACKWARD), training.recompute),
    *_rungs((Cause.SHM,), _ANY_PHASE, host.reduce_workers),  # what is offloaded is pinned, not in /dev/shm
    *_rungs((Cause.OBJECT_STORE,), (Phase.WEIGHT_SYNC,), engine.disk_weight_sync, engine.reduce_sync_buffer),
    *_rungs((Cause.OBJECT_STORE,), _ANY_PHASE, engine.reduce_concurrency, host.reduce_workers),
)


def candidates(profile: Profile, knobs: Knobs, diagnosis: Diagnosis, *, started: bool) -> Iterator[Remedy]:
    """Yield the legal remedies for a failure, cheapest first.

    Where fragmentation prevails, the allocator comes first: it costs nothing. Where it shows what an
    engine misses, a smaller share comes first, because it frees just that. Where a pass fills the host,
    what makes passes smaller comes first. Where nothing is known of the program and its log names no phase,
    what serves other phases comes last.
    """
    rungs = [rung for rung in LADDER if rung.serves(profile, diagnosis)]
    if profile.may_be_any(diagnosis.phase):
        rungs += [
            rung for rung in LADDER if rung not in rungs and rung.serves(profile, diagnosis, anywhere=True)
        ]
    rungs = [rung for rung in rungs if can_act(rung.name, diagnosis)]
    if fragmentation_prevails(diagnosis):
        rungs.sort(key=lambda rung: rung.propose is not host.expandable_segments)
    if diagnosis.phase in ENGINE_PHASES and missing_bytes(diagnosis.facts) is not None:
        rungs.sort(key=lambda rung: rung.propose is not engine.reduce_mem_fraction)
    if shows_holder(diagnosis):
        rungs.sort(key=lambda rung: precedence(rung.name, diagnosis))
    if training.fills_host(knobs, diagnosis):
        rungs.sort(key=lambda rung: rung.name not in training.SMALLER_PASSES)
    seen: list[Remedy] = []
    for rung in rungs:
        for remedy in rung.propose(profile, knobs, diagnosis):
            known = any(other.changes == remedy.changes for other in seen)
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
                seen.append(remedy)
                yield remedy


def _elsewhere(profile: Profile, remedy: Remedy, diagnosis: Diagnosis) -> bool:
    """Return whether a remedy frees device memory in other phases only, as state that comes back does."""
    phases = [profile.supported[knob].phases for knob in remedy.changes if knob in profile.supported]
    return (
        diagnosis.cause is Cause.GPU_OOM
        and bool(phases)
        and all(own and diagnosis.phase not in own for own in phases)
    )


def _reaches(profile: Profile, knobs: Knobs, remedy: Remedy, diagnosis: Diagnosis) -> bool:
    """Return whether what a remedy shrinks holds memory in the phase that failed."""
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
    # Of what an engine keeps while it sleeps, the first step frees nearly all.
    kept, most = row.kept_asleep.get(profile.engine, 0), row.towards(Memory.GPU)[:1]
    untouched = getattr(knobs, row.name) in (None, *most)
    return untouched and (missing_bytes(diagnosis.facts) or 0) < kept
