"""The estimate: every phase's peak on the devices and on the host, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import card
from autotune.policies.estimate.engine import Engine, engine_of
from autotune.policies.estimate.host import host_phases, node_of
from autotune.policies.estimate.load import Load, load_of
from autotune.policies.estimate.parts import PARTS, Floats, heaviest, instant
from autotune.policies.estimate.passes import pass_of
from autotune.policies.estimate.roofline import seconds, step_seconds
from autotune.policies.estimate.training import resting, state_of, trainer_phases
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.model import Layout, Model
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.value import Value

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
_ENGINE_PHASES = frozenset({Phase.ROLLOUT_INIT, Phase.ROLLOUT})


class Parts(Value, frozen=True, kw_only=True):
    """Bytes of one memory at the largest instant of a phase."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0  # and entropy
    kv_pool: float = 0.0
    buffers: float = 0.0
    graphs: float = 0.0
    residue: float = 0.0  # of a sleeping engine
    outside: float = 0.0  # of PyTorch's tensors: contexts, NCCL, what the allocator strands; host: processes

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return float(sum(getattr(self, name) for name in PARTS))


class PhaseEstimate(Value, frozen=True, kw_only=True):
    """The peak of one phase on its device and on one node's host."""

    gpu: Parts
    host: Parts
    component: Component  # whose device it is
    error: float  # share of the device's total that one standard deviation is thought to be
    gpu_capacity_bytes: int  # 0: unknown or unlimited
    host_capacity_bytes: int
    seconds: float

    @property
    def gpu_missing_bytes(self) -> float:
        """By how much the device is too small; negative is free."""
        return self.gpu.total - self.gpu_capacity_bytes if self.gpu_capacity_bytes else 0.0


class Estimate(Value, frozen=True, kw_only=True):
    """What one configuration needs in every phase, and how long a step takes relative to others."""

    phases: dict[Phase, PhaseEstimate]
    step_s: float
    pool_tokens: float  # an engine's pool must hold at least one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The same for many configurations: phases by parts by configurations."""

    gpu_parts: Floats  # (phase, part, configuration), bytes
    host_parts: Floats
    on_engine: Floats  # (phase, configuration): 1 where the device is the engine's
    gpu_capacity: Floats  # (phase, configuration), bytes; infinite where unknown
    host_capacity: float
    error: Floats  # (phase,)
    seconds: Floats  # (phase, configuration)
    step_s: Floats
    pool_tokens: Floats

    @property
    def gpu(self) -> Floats:
        """Peaks of the devices in bytes, (phase, configuration)."""
        found: Floats = self.gpu_parts.sum(axis=1)
        return found

    @property
    def host(self) -> Floats:
        """Peaks of a node's host in bytes, (phase, configuration)."""
        found: Floats = self.host_parts.sum(axis=1)
        return found


def estimate(profile: Profile, cluster: Cluster, model: Model, knobs: Knobs) -> Estimate:
    """Return what one configuration needs."""
    return single(estimates(profile, cluster, model, (knobs,)), 0)


def estimates(profile: Profile, cluster: Cluster, model: Model, candidates: Sequence[Knobs]) -> Estimates:
    """Return what many configurations of one job need."""
    load = load_of(profile, cluster, candidates)
    n = load.count
    trainer_capacity = float(profile.trainer_budget_bytes or cluster.gpu_memory_bytes)
    engine_capacity = float(profile.engine_budget_bytes or cluster.gpu_memory_bytes)
    state = state_of(model, load)
    run = pass_of(model, load, tokens=load.tokens)
    shared = profile.placement is Placement.COLOCATED
    idle = resting(load, state)
    if Component.TRAINER not in profile.resident.get(Phase.ROLLOUT.value, (Component.TRAINER,)):
        idle = instant(n, outside=state.outside)  # the whole trainer leaves the device
    at_start = idle.copy()
    if profile.layout.strategy != "megatron":
        at_start[PARTS.index("optimizer")] = 0.0  # Adam's state appears with the first step
    engine = engine_of(
        model,
        load,
        engine=profile.engine,
        capacity=engine_capacity,
        beside=at_start if shared else instant(n),
    )
    devices = trainer_phases(model, load, state)
    on_engine = np.zeros((len(PHASES), n))
    if shared:
        devices = _colocated(devices, engine, idle)
    else:
        devices["rollout_init"], devices["rollout"] = engine.starting, engine.running
        on_engine[[PHASES.index(phase) for phase in _ENGINE_PHASES]] = 1.0
        row = PHASES.index(Phase.WEIGHT_SYNC)
        own = _share(devices["weight_sync"], trainer_capacity)
        theirs = _share(engine.receiving, engine_capacity)
        on_engine[row] = (theirs > own) if trainer_capacity and engine_capacity else 0.0
        devices["weight_sync"] = np.where(on_engine[row] > 0, engine.receiving, devices["weight_sync"])
    host = host_phases(model, load, node=node_of(load, cluster), state=state, run=run)
    timed = seconds(
        model,
        load,
        cluster=cluster,
        card=card(cluster.gpu_name, gpus=load.gpus),
        state=state,
        run=run,
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
        seconds=np.stack([timed.get(phase.value, nothing) for phase in PHASES]),
        step_s=step_seconds(load, timed),
        pool_tokens=engine.pool_tokens,
    )


def single(found: Estimates, column: int) -> Estimate:
    """Return one of many configurations' estimates by itself."""
    gpu, host = found.gpu_parts[:, :, column].tolist(), found.host_parts[:, :, column].tolist()
    host_capacity = 0 if found.host_capacity == np.inf else int(found.host_capacity)
    phases = {}
    for row, phase in enumerate(PHASES):
        capacity = found.gpu_capacity[row, column]
        phases[phase] = PhaseEstimate(
            gpu=Parts(**dict(zip(PARTS, gpu[row], strict=True))),
            host=Parts(**dict(zip(PARTS, host[row], strict=True))),
            component=Component.ROLLOUT if found.on_engine[row, column] else Component.TRAINER,
            error=float(found.error[row]),
            gpu_capacity_bytes=0 if capacity == np.inf else int(capacity),
            host_capacity_bytes=host_capacity,
            seconds=float(found.seconds[row, column]),
        )
    return Estimate(
        phases=phases,
        step_s=float(found.step_s[column]),
        pool_tokens=float(found.pool_tokens[column]),
    )


def _colocated(devices: dict[str, Floats], engine: Engine, idle: Floats) -> dict[str, Floats]:
    found = {phase: parts + engine.training for phase, parts in devices.items() if phase != "weight_sync"}
    found["init"] = devices["init"]
    found["rollout_init"] = idle + engine.starting
    found["rollout"] = idle + engine.running
    found["weight_sync"] = heaviest(devices["weight_sync"] + engine.receiving, idle + engine.starting)
    return found


def _share(parts: Floats, capacity: float) -> Floats:
    total: Floats = parts.sum(axis=0)
    return total / capacity if capacity else total


# Standard deviation of a phase's total as a share, before any run: dense models sharded by FSDP are checked
# against MemTracker and the built-in job (docs/estimate.md); the others are not measured and say so.
_BASE_ERROR = 0.06
_ENGINE_ERROR = 0.08
_UNMEASURED = {
    "megatron": 0.12,
    "pipeline": 0.12,
    "experts": 0.15,
    "context": 0.08,
    "lora": 0.12,
    "hybrid": 0.08,
}


def _errors(model: Model, layout: Layout, load: Load) -> Floats:
    present = {
        "megatron": layout.strategy == "megatron",
        "pipeline": layout.pipeline_parallel > 1,
        "experts": model.experts > 0,
        "context": bool((load.split > 1).any()),
        "lora": layout.lora_rank > 0,
        "hybrid": layout.strategy.startswith("fsdp") and 1 < layout.shards < layout.ranks,
    }
    extra = sum(_UNMEASURED[name] ** 2 for name, there in present.items() if there)
    base = np.array([_ENGINE_ERROR if phase in _ENGINE_PHASES else _BASE_ERROR for phase in PHASES])
    # An engine sizes its pool by what is free: what is not measured of training does not add to its phases.
    training = np.array([phase not in _ENGINE_PHASES for phase in PHASES])
    found: Floats = np.sqrt(base**2 + training * extra)
    return found
