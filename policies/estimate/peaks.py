"""The estimate: every phase's peak on the devices and on the host, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from autotune.policies.estimate.constants import card, constant
from autotune.policies.estimate.engine import Engine, engine_of
from autotune.policies.estimate.host import host_phases, node_of
from autotune.policies.estimate.lengths import Assumption
from autotune.policies.estimate.load import Load, by_length, load_of
from autotune.policies.estimate.parts import PARTS, Floats, heaviest, instant, of_first
from autotune.policies.estimate.passes import pass_of
from autotune.policies.estimate.roofline import seconds, step_seconds
from autotune.policies.estimate.stages import with_stages
from autotune.policies.estimate.training import State, fullest, resting, states_of, trainer_phases
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.failure import ENGINE_PHASES, Component, Phase
from autotune.policies.values.job import Cluster, Goal
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile

PHASES: tuple[Phase, ...] = (
    Phase.INIT,
    Phase.ROLLOUT_INIT,
    Phase.ROLLOUT,
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.WEIGHT_SYNC,
    Phase.CHECKPOINT,
)
OF_PASSES = frozenset({Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The estimates of many configurations, as arrays of phases by parts by configurations."""

    gpu_parts: Floats  # (phase, part, configuration), bytes
    host_parts: Floats
    on_engine: Floats  # (phase, configuration): 1 if the device is the engine's
    gpu_capacity: Floats  # (phase, configuration), bytes; infinite if unknown
    host_capacity: float
    error: Floats  # (phase, configuration), standard deviation of the peak as a share, before any attempt
    lengths: Floats  # (phase, configuration), bytes that one standard deviation of the mean length adds
    seconds: Floats  # (phase, configuration)
    step_s: Floats
    pool_tokens: Floats
    left: Floats  # (configuration,), share of a micro-batch that stays reserved while the engine works
    asleep: Floats  # (part, configuration), beside a trainer that waits for its engine's start; 0: none

    @property
    def gpu(self) -> Floats:
        """Peaks of the devices in bytes, (phase, configuration)."""
        result: Floats = self.gpu_parts.sum(axis=1)
        return result

    @property
    def host(self) -> Floats:
        """Peaks of a node's host in bytes, (phase, configuration)."""
        result: Floats = self.host_parts.sum(axis=1)
        return result

    def at(self, places: NDArray[np.intp]) -> Estimates:
        """Return the estimates of the configurations at these places, in this order."""
        arrays = {name: getattr(self, name)[..., places] for name in _BY_CONFIGURATION}
        return Estimates(host_capacity=self.host_capacity, **arrays)


_BY_CONFIGURATION = tuple(field.name for field in fields(Estimates) if field.name != "host_capacity")


def joined(parts: Sequence[Estimates]) -> Estimates:
    """Return the estimates of all configurations of `parts`, which are of one job."""
    arrays = {
        name: np.concatenate([getattr(each, name) for each in parts], axis=-1) for name in _BY_CONFIGURATION
    }
    return Estimates(host_capacity=parts[0].host_capacity, **arrays)


def estimates(
    profile: Profile,
    cluster: Cluster,
    model: Model,
    candidates: Sequence[Knobs],
    *,
    assumption: Assumption = Assumption.EXPECTED,
    steps: int = Goal().steps,
) -> Estimates:
    """Return the estimates of many configurations of one job.

    `assumption`: which micro-batch they are for; `steps`: over which the largest one is expected.
    """
    stages = profile.layout.pipeline_parallel
    sizes = [each.pipeline_parallel or profile.knobs.pipeline_parallel or stages for each in candidates]
    if {*sizes} - {stages}:
        return _of_stages(profile, cluster, model, candidates, sizes, assumption=assumption, steps=steps)
    load = load_of(profile, cluster, candidates, assumption=assumption, steps=steps)
    n = load.count
    trainer_capacity = float(profile.trainer_budget_bytes or cluster.gpu_memory_bytes)
    engine_capacity = float(profile.engine_budget_bytes or cluster.gpu_memory_bytes)
    with_doubt = by_length(load)
    doubtful = states_of(model, with_doubt)
    state = of_first(fullest(doubtful), n)
    # If both have a budget, neither counts the other's memory, even if they take turns.
    shared = profile.placement is Placement.COLOCATED and not (load.trainer_budgeted and load.engine_budgeted)
    idle, away = resting(load, state), np.zeros(n, dtype=np.bool_)
    if Component.TRAINER not in profile.resident.get(Phase.ROLLOUT.value, (Component.TRAINER,)):
        # The whole trainer leaves the device; one that sleeps only in configurations that offload it.
        away = load.param_offload | (not profile.layout.trainer_sleeps)
        masters = state.optimizer * (profile.layout.masters * profile.layout.masters_stay)
        idle = np.where(away, instant(n, optimizer=masters, outside=state.outside), idle)
    at_start = idle.copy()
    at_start[PARTS.index("optimizer")] *= np.where(away, 1.0, _before_first_step(profile.layout))
    engine = engine_of(
        model,
        load,
        engine=profile.engine,
        capacity=engine_capacity,
        beside=at_start if shared else instant(n),
    )
    devices, lengths = _trainer_phases(model, with_doubt, doubtful, n)
    on_engine, asleep = np.zeros((len(PHASES), n)), instant(n)
    if shared:
        asleep = at_start + engine.training * load.engine_sleep
        devices = _colocated(devices, engine, idle, at_start)
    else:
        devices["rollout_init"], devices["rollout"] = engine.starting, engine.running
        on_engine[[PHASES.index(phase) for phase in ENGINE_PHASES]] = 1.0
        row = PHASES.index(Phase.WEIGHT_SYNC)
        own = _share(devices["weight_sync"], trainer_capacity)
        receiving = heaviest(engine.receiving, _waking(engine))
        theirs = _share(receiving, engine_capacity)
        on_engine[row] = (theirs > own) if trainer_capacity and engine_capacity else 0.0
        devices["weight_sync"] = np.where(on_engine[row] > 0, receiving, devices["weight_sync"])
    host = host_phases(
        model,
        load,
        node=node_of(load, cluster),
        state=state,
        run=pass_of(model, load, tokens=load.tokens),
        engine=profile.engine,
    )
    timed = seconds(
        model,
        load,
        cluster=cluster,
        card=card(cluster.gpu_name, gpus=load.gpus),
        state=state,
        run=pass_of(model, load, tokens=load.usual_tokens),
        pool_tokens=engine.pool_tokens,
    )
    nothing = np.zeros(n)
    capacity = np.where(on_engine > 0, engine_capacity or np.inf, trainer_capacity or np.inf)
    return Estimates(
        gpu_parts=np.stack([devices[phase.value] for phase in PHASES]),
        host_parts=np.stack([host[phase.value] for phase in PHASES]),
        on_engine=on_engine,
        gpu_capacity=capacity,
        host_capacity=float(cluster.host_memory_bytes) or np.inf,
        error=_errors(model, profile.layout, load),
        lengths=lengths,
        seconds=np.stack([timed.get(phase.value, nothing) for phase in PHASES]),
        step_s=step_seconds(load, timed),
        pool_tokens=engine.pool_tokens,
        left=_left(load),
        asleep=asleep,
    )


def _left(load: Load) -> Floats:
    """Return the share of a micro-batch that a trainer leaves reserved while the engine works.

    `torch.cuda.empty_cache` releases only segments in which no tensor is alive. torch_memory_saver, with
    which a trainer that sleeps is suspended, unmaps all of them.
    """
    if load.layout.trainer_sleeps:
        return np.zeros(load.count)
    result: Floats = np.where(load.expandable, constant("fragmentation_expandable"), constant("left_of_pass"))
    return result


def _of_stages(
    profile: Profile,
    cluster: Cluster,
    model: Model,
    candidates: Sequence[Knobs],
    sizes: Sequence[int],
    *,
    assumption: Assumption,
    steps: int,
) -> Estimates:
    """Return the estimates of configurations in `sizes` stages, each group by a layout of its own."""
    groups = [[place for place, each in enumerate(sizes) if each == size] for size in sorted({*sizes})]
    parts = []
    for group in groups:
        size = sizes[group[0]]
        staged = replace(
            profile,
            layout=with_stages(profile.layout, size),
            knobs=replace(profile.knobs, pipeline_parallel=size),
        )
        some = [replace(candidates[place], pipeline_parallel=size) for place in group]
        parts.append(estimates(staged, cluster, model, some, assumption=assumption, steps=steps))
    return joined(parts).at(np.argsort(np.concatenate(groups)))


def _trainer_phases(
    model: Model, with_doubt: Load, states: Sequence[State], n: int
) -> tuple[dict[str, Floats], Floats]:
    """Return the trainer's phases, and what one standard deviation of the mean length adds to each peak."""
    result = trainer_phases(model, with_doubt, states)
    lengths = np.zeros((len(PHASES), n))
    for place, phase in enumerate(PHASES):
        if phase in OF_PASSES:
            peaks = result[phase.value].sum(axis=0)
            lengths[place] = (peaks[n : 2 * n] - peaks[2 * n :]) / 2
    return {phase: parts[:, :n] for phase, parts in result.items()}, lengths


def _before_first_step(layout: Layout) -> float:
    """Return the share of the optimizer's state that exists before its first step.

    Adam creates its averages in that step; Megatron's optimizer has its fp32 copy of the weights from the
    start (megatron/core/optimizer/distrib_optimizer.py, _build_model_and_main_param_groups), DeepSpeed's has
    all of it (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, initialize_optimizer_states).
    """
    return 1.0 if layout.reduce_bucket_bytes else layout.masters


def _colocated(
    devices: dict[str, Floats], engine: Engine, idle: Floats, at_start: Floats
) -> dict[str, Floats]:
    result = {phase: parts + engine.training for phase, parts in devices.items() if phase != "weight_sync"}
    result["init"] = devices["init"]
    result["rollout_init"] = at_start + engine.starting
    result["rollout"] = idle + engine.running
    result["weight_sync"] = heaviest(devices["weight_sync"] + engine.receiving, idle + _waking(engine))
    return result


def _waking(engine: Engine) -> Floats:
    """Return the parts of a woken engine: its sampler warms up when it starts, not when it wakes."""
    waking = engine.starting.copy()
    waking[PARTS.index("logits")] = 0.0
    return waking


def _share(parts: Floats, capacity: float) -> Floats:
    total: Floats = parts.sum(axis=0)
    return total / capacity if capacity else total


# Standard deviation of a phase's total as a share, before any run: dense models sharded by FSDP are checked
# against MemTracker and the built-in job (docs/measured/estimate.md); others are unmeasured and add to it.
_BASE_ERROR = 0.06
_ENGINE_ERROR = 0.08
_UNMEASURED = {
    "megatron": 0.12,
    "zero": 0.12,  # ZeRO-1 and ZeRO-2
    "pipeline": 0.12,
    "experts": 0.15,
    "context": 0.08,
    "lora": 0.12,
    "hybrid": 0.08,
    "linear": 0.10,  # what its kernels keep is read from their code
    "unknown": 0.20,  # a family or a kind of layer that the estimate does not count
}


def _errors(model: Model, layout: Layout, load: Load) -> Floats:
    present = {
        "megatron": layout.strategy == "megatron",
        "zero": layout.strategy == "ddp" and layout.shards > 1,
        "pipeline": layout.pipeline_parallel > 1,
        "experts": model.experts > 0,
        "lora": layout.lora_rank > 0,
        "hybrid": layout.strategy.startswith("fsdp") and 1 < layout.shards < layout.ranks,
        "linear": model.linear_layers > 0,
        "unknown": bool(model.unknown),
    }
    extra = np.full(load.count, sum(_UNMEASURED[name] ** 2 for name, there in present.items() if there))
    extra = extra + _UNMEASURED["context"] ** 2 * (load.split > 1)
    base = np.array([_ENGINE_ERROR if phase in ENGINE_PHASES else _BASE_ERROR for phase in PHASES])
    # An engine sizes its pool by the free memory, so unmeasured training does not add to its phases.
    training = np.array([phase not in ENGINE_PHASES for phase in PHASES])
    result: Floats = np.sqrt(base[:, None] ** 2 + training[:, None] * extra)
    return result
