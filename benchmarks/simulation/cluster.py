"""One simulated attempt: what the job's log and exit would have told."""

from __future__ import annotations

import re
import zlib
from random import Random

import numpy as np

from autotune.policies.values.diagnosis import Diagnosis, Facts, Line
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Peak
from autotune.policies.values.profile import Placement
from autotune.policies.values.value import Value
from benchmarks.simulation.columns import Columns, columns
from benchmarks.simulation.speed import parts, step_seconds
from benchmarks.simulation.truth import (
    ENGINE_PHASES,
    PHASES,
    device_peaks,
    engine,
    host_bytes,
    late_bytes,
    trainer,
    wakes,
)
from benchmarks.simulation.world import DAY_S, GIB, Event, World

_HOST_LIMIT = 0.95  # share at which Ray's monitor kills
# Of a device. No real log of the tests shows a tensor of more than 0.78 of it, but for two impossible sizes.
_LARGEST_TENSOR = 0.9


class Failure(Value, frozen=True, kw_only=True):
    """Where an attempt ran out of memory."""

    phase: Phase
    cause: Cause
    step: int  # being worked on; 0: before the first
    peak_bytes: float
    injected: bool = False  # without the late events it would have held


class Ran(Value, frozen=True, kw_only=True):
    """What became of a configuration."""

    failure: Failure | None
    step_s: float
    steps: int  # in a day


def run(world: World, knobs: Knobs) -> Ran:
    """Return when and where a configuration fails within a day, if it does."""
    c = columns(world, (knobs,))
    seconds = float(step_seconds(world, c)[0])
    steps = max(2, int(DAY_S / seconds))
    failure = _first(world, c, steps=steps)
    if failure is not None and failure.step > 2:
        calm = _first(_without_events(world), c, steps=steps)
        failure = Failure(
            phase=failure.phase,
            cause=failure.cause,
            step=failure.step,
            peak_bytes=failure.peak_bytes,
            injected=calm is None,
        )
    return Ran(failure=failure, step_s=seconds, steps=steps)


def holds(world: World, c: Columns) -> np.ndarray:
    """Return which of the configurations hold for a whole day."""
    steps = np.maximum(2, DAY_S / step_seconds(world, c)).astype(int)
    last = int(steps.max())
    fits = ~pool_too_small(world, c)
    cap = world.accepted.cluster.gpu_memory_bytes
    for phase, (long, short) in device_peaks(world, c).items():
        late = late_bytes(world, c, phase, last, short=short)
        fits &= long + short + late <= cap
    return fits & (host_bytes(world, c) <= _HOST_LIMIT * world.accepted.cluster.host_memory_bytes)


def pool_too_small(world: World, c: Columns) -> np.ndarray:
    """Return for which configurations the engine refuses to start: its pool cannot hold one sequence."""
    pool = engine(world, c, trainer(world, c))["pool_tokens"]
    return pool < (world.accepted.profile.longest_sequence or 1) * 1.02


def peaks(world: World, knobs: Knobs, step: int) -> dict[Phase, float]:
    """Return the device peaks of each phase at one step of an attempt."""
    c = columns(world, (knobs,))
    result = {}
    for phase, (long, short) in device_peaks(world, c, started=step >= 2).items():
        late = late_bytes(world, c, phase, step, short=short)
        result[phase] = float((long + short + late)[0])
    return result


def overflowing(world: World, knobs: Knobs, *, steps: int) -> frozenset[Phase]:
    """Return the phases that do not fit their device in some of the first steps, met or not."""
    capacity = world.accepted.cluster.gpu_memory_bytes
    every = (peaks(world, knobs, step) for step in range(1, steps + 1))
    return frozenset(phase for by_phase in every for phase, peak in by_phase.items() if peak > capacity)


def reported(world: World, knobs: Knobs, step: int) -> dict[str, Peak]:
    """Return the peaks of a finished step as the framework or NVML reports them."""
    capacity = world.accepted.cluster.gpu_memory_bytes
    result: dict[str, Peak] = {}
    rng = _rng(world, knobs, step)
    for phase, peak in peaks(world, knobs, step).items():
        if phase is Phase.ROLLOUT_INIT:
            continue
        component = Component.ROLLOUT if phase in ENGINE_PHASES else Component.TRAINER
        if world.reports:
            used = min(capacity, peak * rng.uniform(0.995, 1.0))
        else:  # a caching allocator keeps what it has taken
            used = min(capacity, peak + rng.uniform(0.2, 0.9) * (capacity - peak))
        result[phase.value] = Peak(
            used_bytes=int(used), capacity_bytes=capacity, component=component, upper_bound=not world.reports
        )
    return result


def diagnosis(world: World, knobs: Knobs, failure: Failure) -> Diagnosis:
    """Return what the failure's own message says."""
    rng = _rng(world, knobs, failure.step)
    phase = _named_phase(world, knobs, failure)
    c = columns(world, (knobs,))
    in_engine = phase in ENGINE_PHASES or (phase is Phase.WEIGHT_SYNC and wakes(world, c))
    component = Component.ROLLOUT if in_engine else Component.TRAINER
    line = (Line(line=1, text="torch.OutOfMemoryError: CUDA out of memory.", rule="torch-cuda-oom"),)
    if failure.cause is not Cause.GPU_OOM:
        return Diagnosis(
            cause=failure.cause,
            phase=phase,
            component=component,
            step=failure.step or None,
            evidence=line,
        )
    cap = world.accepted.cluster.gpu_memory_bytes
    _, short = device_peaks(world, c)[failure.phase]
    # One tensor, which no job asks of a device that could never hold it.
    largest = min(failure.peak_bytes * 0.5, cap * _LARGEST_TENSOR)
    piece = max(64 << 20, min(float(short[0]) * rng.choice((0.1, 0.2, 0.4)), largest))
    least = max(cap - piece + (1 << 20), 0.0)
    most = min(float(cap), max(least, failure.peak_bytes - piece))
    used = least + rng.random() * (most - least)
    reserved = world.coefficients.reserve * float(short[0]) * rng.uniform(0.3, 1.0)
    outside = outside_bytes(world, c, failure.phase)
    facts = Facts(
        requested_bytes=int(piece),
        free_bytes=int(cap - used),
        capacity_bytes=cap,
        allocated_bytes=int(max(0.0, used - reserved - outside)),
        reserved_unallocated_bytes=int(reserved),
        outside_bytes=int(outside),
        device="cuda",
    )
    return Diagnosis(
        cause=Cause.GPU_OOM,
        phase=phase,
        component=component,
        step=failure.step or None,
        evidence=line,
        facts=facts if world.figures else Facts(),
    )


def _named_phase(world: World, knobs: Knobs, failure: Failure) -> Phase:
    """Return the phase that the diagnosis names: in `misplaced` of the failures of devices another one."""
    if not world.misplaced or failure.cause is not Cause.GPU_OOM:
        return failure.phase
    rng = Random(zlib.crc32(f"phase {world.seed} {drawn_by(knobs)} {failure.step}".encode()))
    if rng.random() >= world.misplaced:
        return failure.phase
    return rng.choice([phase for phase in PHASES if phase is not failure.phase])


def slow_parts(world: World, knobs: Knobs) -> tuple[float, ...]:
    """Return the seconds of generation, scoring, training and weight sync."""
    return tuple(float(part[0]) for part in parts(world, columns(world, (knobs,))))


def _first(world: World, c: Columns, *, steps: int) -> Failure | None:
    """Return the first failure in the order in which the attempt would meet it."""
    cluster = world.accepted.cluster
    if bool(pool_too_small(world, c)[0]):
        return Failure(phase=Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL, step=0, peak_bytes=0.0)
    host = float(host_bytes(world, c)[0])
    if host > _HOST_LIMIT * cluster.host_memory_bytes:
        return Failure(phase=_filling(world, c), cause=Cause.HOST_OOM, step=0, peak_bytes=host)
    fresh, full = device_peaks(world, c, started=False), device_peaks(world, c)
    times = sorted({1, 2, 3, *(late.step for late in world.late), *_growing(world, steps)})
    for step in times:
        if step > steps:
            break
        for phase in PHASES:
            if phase is Phase.ROLLOUT_INIT and step > 1:
                continue
            long, short = (fresh if step == 1 else full)[phase]
            peak = float((long + short + late_bytes(world, c, phase, step, short=short))[0])
            if peak > cluster.gpu_memory_bytes:
                return Failure(phase=phase, cause=Cause.GPU_OOM, step=step, peak_bytes=peak)
    return None


def _filling(world: World, c: Columns) -> Phase:
    """Return the phase in which the host fills: with activations, with moved state, or at the start."""
    t = trainer(world, c)
    if float(t["moved"][0]) > float((t["state"] * c["optimizer_offload"])[0]):
        return Phase.FORWARD
    return Phase.OPTIMIZER if c["optimizer_offload"][0] else Phase.INIT


def _growing(world: World, steps: int) -> list[int]:
    grows = any(late.event is not Event.LONGEST for late in world.late)
    return [int(s) for s in np.unique(np.geomspace(4, max(5, steps), 60).astype(int))] if grows else []


def _without_events(world: World) -> World:
    values = {name: getattr(world, name) for name in World.__struct_fields__}
    return World(**values | {"late": ()})


def outside_bytes(world: World, c: Columns, phase: Phase) -> float:
    """Return what the failing process cannot see: contexts, and the other half of a shared card."""
    context = 1.2 * GIB * world.coefficients.context + world.coefficients.context_bytes
    if world.accepted.profile.placement is not Placement.COLOCATED:
        return context
    e = engine(world, c, trainer(world, c))
    if phase in ENGINE_PHASES:
        return context
    asleep = world.accepted.profile.layout.engine_sleeps
    return context + float((e["context"] + e["graphs"] + (0 if asleep else e["static"]))[0])


def _rng(world: World, knobs: Knobs, step: int) -> Random:
    return Random(zlib.crc32(f"{world.seed} {drawn_by(knobs)} {step}".encode()))


# Knobs that came after the recorded decisions: while they are unset or off, noise is drawn as it was then.
_LATER = (
    "layered_sync",
    "async_save",
    "multimodal_cache",
    "shard_group",
    "reshard_after_forward",
    "expert_parallel",
    "pipeline_parallel",
)


def drawn_by(knobs: Knobs) -> str:
    """Return the text of a configuration from which the noise of its runs is drawn."""
    return re.sub(rf", ({'|'.join(_LATER)})=(None|False)", "", repr(knobs))
