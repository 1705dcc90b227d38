"""What goes wrong in a night, drawn from a seed."""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random
from typing import NamedTuple

import msgspec

from autotune.policies.values.failure import HOST_LIMIT, Phase
from autotune.policies.values.job import Forecasting
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Grid, Placement, Support
from benchmarks.simulation.cluster import peaks, run
from benchmarks.simulation.columns import columns
from benchmarks.simulation.jobs import drawn as failing
from benchmarks.simulation.jobs import undecided
from benchmarks.simulation.oracle import configurations
from benchmarks.simulation.truth import host_bytes
from benchmarks.simulation.world import DAY_S, GIB, Stratum, World

STEPS = 2000
HOUR_S = 3600.0
TRAINER = (Phase.BACKWARD, Phase.OPTIMIZER)
_WEEK_S = 7 * DAY_S
_BETWEEN_S = 1.5 * DAY_S  # preemptions, on average
_OFFLOADS = ("param_offload", "optimizer_offload")
_KEPT = 0.2  # share of stranded bytes that expandable segments leave


class Kind(StrEnum):
    """What goes wrong, or only seems to."""

    DEVICE = "device"  # 2 to 400 MiB a step of the trainer
    TRAINER = "host: trainer"
    DRIVER = "host: driver"
    WORKERS = "host: data workers"
    FRAGMENTATION = "fragmentation"
    INTRUDER = "intruder for an hour"
    PREEMPTIONS = "preemptions over weeks"
    SERVICE = "service fails after a change"
    CHECKPOINT = "checkpoint too big for the host"
    LENGTHS = "healthy: longer responses"
    CACHE = "healthy: a cache that fills once"
    SAWTOOTH = "healthy: sawtooth"
    NOISE = "healthy: noise"


LEAKS, OTHERS, HEALTHY = tuple(Kind)[:4], tuple(Kind)[4:9], tuple(Kind)[9:]
PROCESS = {Kind.TRAINER: "ray::Trainer", Kind.DRIVER: "driver", Kind.WORKERS: "pt_data_worker"}


class Night(NamedTuple):
    """A job and what goes wrong with it."""

    world: World
    kind: Kind
    act: bool  # recovery.forecast
    grows: float = 0.0  # bytes a step of a process
    more: float = 0.0  # bytes: stranded in the end, of the intruder, or that a host needs for a checkpoint
    at: int = 0  # step at which it happens, or after which most of it is there; period of a sawtooth
    gaps: tuple[int, ...] = ()  # steps after which each process is preempted


def drawn(kind: Kind, *, seed: int) -> Night:
    """Return a night whose job holds as written for a day, but for what goes wrong."""
    rng = Random(seed)
    while True:
        if kind is Kind.SERVICE:  # its change is the cure of a job that runs out of memory as written
            world = failing(Stratum.NEAR, seed=rng.randrange(1 << 40))[0]
        else:
            world = undecided(Stratum.NEAR, seed=rng.randrange(1 << 40))
        world = msgspec.structs.replace(world, reports=True)
        night = _with_fault(rng, world, kind)
        if night is not None:
            return night


def _with_fault(rng: Random, world: World, kind: Kind) -> Night | None:
    """Return the night of a job; None if what goes wrong would not be its only fault, or no fault."""
    if kind is Kind.FRAGMENTATION:
        world = _with_allocator(world)
    elif kind is Kind.CHECKPOINT:
        offloads: dict[str, Setting] = {
            name: True for name in _OFFLOADS if name in world.accepted.profile.supported
        }
        if not offloads:
            return None
        world = _with_knobs(world, offloads)
    knobs = world.accepted.profile.knobs
    night = Night(_forecasting(rng, world), kind, act=False)
    night = night._replace(act=night.world.accepted.job.recovery.forecast is Forecasting.ACT)
    if kind is Kind.SERVICE:
        return night._replace(at=rng.randint(1, 60))
    room, ran = _room(world, knobs), run(world, knobs)
    if ran.failure is not None or min(room) < 0.04 * GIB or not 10.0 <= ran.step_s <= 1200.0:
        return None
    match kind:
        case Kind.FRAGMENTATION:
            return night._replace(more=room[0] * rng.uniform(1.05, 2.5), at=rng.randint(30, 600))
        case Kind.INTRUDER:
            capacity = world.accepted.cluster.gpu_memory_bytes
            more = rng.uniform(0.4, 0.9) * capacity
            return night._replace(more=more, at=rng.randint(50, STEPS - 100)) if more > room[0] else None
        case Kind.PREEMPTIONS:
            if ran.step_s * STEPS < _WEEK_S:
                return None
            gaps = tuple(1 + int(rng.expovariate(ran.step_s / _BETWEEN_S)) for _ in range(STEPS))
            return night._replace(gaps=gaps)
        case Kind.CHECKPOINT:
            night = night._replace(more=room[1] * rng.uniform(1.05, 1.6))
            grid = configurations(world)
            hosts = host_bytes(world, columns(world, grid)) + night.more
            return night if min(hosts) <= host_limit(world) else None
        case _:
            device = math.exp(rng.uniform(math.log(2), math.log(400))) * (1 << 20)
            host = room[1] / math.exp(rng.uniform(math.log(60), math.log(1500)))
            grows = device if kind is Kind.DEVICE else host
            lasts = room[kind is not Kind.DEVICE] / grows
            if kind in LEAKS and not 25 <= lasts <= 0.9 * STEPS:
                return None  # too big from the start, or never out of memory
            return night._replace(grows=grows, at=round(math.exp(rng.uniform(math.log(5), math.log(200)))))


def stranded(night: Night, knobs: Knobs, age: int) -> float:
    """Return the bytes that the trainer's allocator cannot use after so many steps of a process."""
    if night.kind is not Kind.FRAGMENTATION:
        return 0.0
    kept = _KEPT if knobs.allocator == "expandable" else 1.0
    return night.more * kept * -math.expm1(-3.0 * age / night.at)


def excess(night: Night, age: int, step: int) -> float:
    """Return the share by which, or in leaks the bytes by which, memory is above its usual level."""
    match night.kind:
        case Kind.LENGTHS:
            return 0.15 * step / STEPS
        case Kind.CACHE:
            return 0.15 * -math.expm1(-age / night.at)
        case Kind.SAWTOOTH:
            return 0.15 * (age % night.at) / night.at
        case _:
            return age * night.grows if night.kind in LEAKS else 0.0


def host_limit(world: World) -> float:
    """Return the bytes of a host at which Ray's monitor kills."""
    return HOST_LIMIT * (world.accepted.cluster.host_memory_bytes or 0)


def _room(world: World, knobs: Knobs) -> tuple[float, float]:
    """Return the bytes that stay free on the fullest device in a pass of the trainer, and on a host."""
    held = peaks(world, knobs, 3)
    host = float(host_bytes(world, columns(world, (knobs,)))[0])
    fullest = max(held[phase] for phase in TRAINER)
    return world.accepted.cluster.gpu_memory_bytes - fullest, host_limit(world) - host


def _forecasting(rng: Random, world: World) -> World:
    forecast = Forecasting.ACT if rng.random() < 0.5 else Forecasting.TELL
    recovery = msgspec.structs.replace(world.accepted.job.recovery, forecast=forecast)
    job = msgspec.structs.replace(world.accepted.job, recovery=recovery)
    return msgspec.structs.replace(world, accepted=msgspec.structs.replace(world.accepted, job=job))


def _with_allocator(world: World) -> World:
    """Return the job of a framework that lets the allocator be chosen."""
    profile = world.accepted.profile
    support = Support(setting="PYTORCH_CUDA_ALLOC_CONF", grid=Grid(values=("default", "expandable")))
    profile = msgspec.structs.replace(profile, supported=profile.supported | {"allocator": support})
    accepted = msgspec.structs.replace(world.accepted, profile=profile)
    return _with_knobs(msgspec.structs.replace(world, accepted=accepted), {"allocator": "default"})


def _with_knobs(world: World, changes: dict[str, Setting]) -> World:
    """Return the job as if it was written with other settings."""
    profile = world.accepted.profile
    changed = msgspec.structs.replace(profile, knobs=msgspec.structs.replace(profile.knobs, **changes))
    return msgspec.structs.replace(world, accepted=msgspec.structs.replace(world.accepted, profile=changed))


def shares_cards(world: World) -> bool:
    """Return whether the engine is on the trainer's cards."""
    return world.accepted.profile.placement is Placement.COLOCATED
