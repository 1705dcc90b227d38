"""`python -m benchmarks.nights`: nights of 2,000 steps in which memory grows, or only seems to.

Each seed is a table of its own: two that are fixed, and one drawn at the run. `oracle` knows how much grows
and restarts, or changes the settings, at the best steps. `--without` leaves out the answer to growth.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from autotune.orchestrator.driver.memory import Forecaster
from autotune.policies.recovery.checkpoint_interval import with_saves
from autotune.policies.recovery.decide import decide_on
from autotune.policies.values.diagnosis import Diagnosis, Facts, Line
from autotune.policies.values.events import (
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Launch,
    Progressed,
    Started,
    Stop,
)
from autotune.policies.values.failure import HOST_LIMIT, Cause, Component, Phase
from autotune.policies.values.history import Folding
from autotune.policies.values.job import Forecasting
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import (
    Cancelled,
    Completed,
    Crashed,
    Peak,
    ProcessMemory,
    Sample,
    StepDone,
)
from benchmarks.simulation.cluster import peaks, run
from benchmarks.simulation.columns import columns
from benchmarks.simulation.jobs import undecided
from benchmarks.simulation.oracle import configurations
from benchmarks.simulation.speed import step_seconds
from benchmarks.simulation.summary import share
from benchmarks.simulation.truth import device_peaks, host_bytes
from benchmarks.simulation.world import GIB, Stratum, World

STEPS = 2000
SEEDS = (20261127, 20270101)
_MOST = 400  # attempts of a night
_FULLEST = (Phase.ROLLOUT, Phase.BACKWARD, Phase.OPTIMIZER)
_TRAINER = (Phase.BACKWARD, Phase.OPTIMIZER)
_DETECTED_S = 60.0  # from a failure to its relaunch


class Kind(StrEnum):
    """What grows in a night."""

    DEVICE = "device"  # 2 to 400 MiB a step of the trainer
    TRAINER = "host: trainer"
    DRIVER = "host: driver"
    WORKERS = "host: data workers"
    LENGTHS = "healthy: longer responses"
    CACHE = "healthy: a cache that fills once"
    SAWTOOTH = "healthy: sawtooth"
    NOISE = "healthy: noise"


LEAKS, HEALTHY = tuple(Kind)[:4], tuple(Kind)[4:]
_PROCESS = {Kind.TRAINER: "ray::Trainer", Kind.DRIVER: "driver", Kind.WORKERS: "pt_data_worker"}


class Night(NamedTuple):
    """A job whose settings hold, but for what grows."""

    world: World
    kind: Kind
    grows: float  # bytes a step of a process
    act: bool  # recovery.forecast


class Outcome(NamedTuple):
    """What became of a night."""

    kind: Kind
    done: bool  # reached the last step
    restarts: int
    needed: int  # restarts of the oracle
    lost: float  # time beside the oracle's, as a share of that; only of nights that are done
    slower: float  # seconds of a step at the end, against the oracle's
    named: bool  # the verdict says what grows; of hosts: in which process


def main() -> int:
    """Play the nights and print a table for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=10, help="of each kind that leaks, and each seed")
    parser.add_argument("--healthy", type=int, default=0, help="nights of each healthy kind, and each seed")
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of the fixed ones and a drawn one")
    parser.add_argument("--without", action="store_true", help="leave out the answer to growth")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    for seed in options.seeds or (*SEEDS, secrets.randbelow(1 << 31)):
        tasks = [(kind, n, seed, options.without) for kind in LEAKS for n in range(options.nights)]
        tasks += [(kind, n, seed, options.without) for kind in HEALTHY for n in range(options.healthy)]
        with ProcessPoolExecutor(options.processes) as pool:
            outcomes = list(pool.map(_outcome, tasks))
        sys.stdout.write("\n".join(table(outcomes, seed=seed, without=options.without)) + "\n\n")
        sys.stdout.flush()
    return 0


def table(outcomes: Sequence[Outcome], *, seed: int, without: bool) -> Iterator[str]:
    """Yield the rows of a table of markdown, by kind and for all that leak."""
    yield f"seed {seed}{', without the answer to growth' if without else ''}\n"
    yield (
        "| what grows | nights | reached the last step | restarts, oracle | time lost median / p90 | "
        "more than 5 % slower settings | named |"
    )
    yield "|---" * 7 + "|"
    groups = [(kind.value, [o for o in outcomes if o.kind is kind]) for kind in Kind]
    for name, own in [*groups, ("all leaks", [o for o in outcomes if o.kind in LEAKS])]:
        if not own:
            continue
        lost = sorted(o.lost for o in own if o.done)
        figures = f"{share(lost, 0.5):.1%} / {share(lost, 0.9):.1%}" if lost else "–"
        yield (
            f"| {name} | {len(own)} | {statistics.mean(o.done for o in own):.1%} | "
            f"{sum(o.restarts for o in own)}, {sum(o.needed for o in own)} | {figures} | "
            f"{sum(o.slower > 1.05 for o in own)} | {sum(o.named for o in own)} |"
        )


def _outcome(task: tuple[Kind, int, int, bool]) -> Outcome:
    kind, number, seed, without = task
    night = drawn(kind, seed=seed * 1009 + number * len(Kind) + list(Kind).index(kind))
    with ExitStack() as stack:
        for name in ("growth", "restart_now") if without else ():
            stack.enter_context(patch(f"autotune.policies.recovery.decide.{name}", lambda *_, **__: None))
        return play(night)


def drawn(kind: Kind, *, seed: int) -> Night:
    """Return a night whose job holds as written for a day without what grows."""
    rng = Random(seed)
    while True:
        world = undecided(Stratum.NEAR, seed=rng.randrange(1 << 40))
        world = msgspec.structs.replace(world, reports=True)
        knobs = world.accepted.profile.knobs
        room = _room(world, knobs)
        if run(world, knobs).failure is not None or min(room) < 0.04 * GIB:
            continue
        step_s = run(world, knobs).step_s
        if not 10.0 <= step_s <= 1200.0:
            continue
        device = math.exp(rng.uniform(math.log(2), math.log(400))) * (1 << 20)
        grows = (
            device if kind is Kind.DEVICE else room[1] / math.exp(rng.uniform(math.log(60), math.log(1500)))
        )
        lasts = room[kind is not Kind.DEVICE] / grows
        if kind in LEAKS and not 25 <= lasts <= 0.9 * STEPS:
            continue  # too big from the start, or never out of memory
        act = rng.random() < 0.5
        recovery = msgspec.structs.replace(
            world.accepted.job.recovery, forecast=Forecasting.ACT if act else Forecasting.TELL
        )
        job = msgspec.structs.replace(world.accepted.job, recovery=recovery)
        accepted = msgspec.structs.replace(world.accepted, job=job)
        return Night(msgspec.structs.replace(world, accepted=accepted), kind, grows, act)


def _room(world: World, knobs: Knobs) -> tuple[float, float]:
    """Return the bytes that stay free on the fullest device in a pass of the trainer, and on a host."""
    cluster = world.accepted.cluster
    held = peaks(world, knobs, 3)
    host = float(host_bytes(world, columns(world, (knobs,)))[0])
    return (
        cluster.gpu_memory_bytes - max(held[phase] for phase in _TRAINER),
        HOST_LIMIT * (cluster.host_memory_bytes or 0) - host,
    )


def oracle(night: Night) -> tuple[float, float, int]:
    """Return the least seconds of a night over the grid of settings, those of a step, and the restarts."""
    world = night.world
    grid = [world.accepted.profile.knobs, *configurations(world)]
    best = (math.inf, math.inf, 0)
    cluster = world.accepted.cluster
    for start in range(0, len(grid), 4096):
        c = columns(world, grid[start : start + 4096])
        held = device_peaks(world, c)
        used = {phase: long + short for phase, (long, short) in held.items()}
        fits = np.all([size <= cluster.gpu_memory_bytes for size in used.values()], axis=0)
        host_room = HOST_LIMIT * (cluster.host_memory_bytes or 0) - host_bytes(world, c)
        room = cluster.gpu_memory_bytes - np.maximum(*(used[phase] for phase in _TRAINER))
        lasts = (room if night.kind is Kind.DEVICE else host_room) / night.grows
        lasts = np.full_like(lasts, STEPS) if night.kind in HEALTHY else lasts
        fits &= (host_room >= 0) & (lasts >= 1)
        restarts = np.ceil(STEPS / np.maximum(1, np.floor(lasts))) - 1
        # A job that could be faster as written loses nothing by growth.
        seconds = np.maximum(step_seconds(world, c), run(world, world.accepted.profile.knobs).step_s)
        total = np.where(fits, STEPS * seconds + (restarts + 1) * world.startup_s, np.inf)
        place = int(total.argmin())
        best = min(best, (float(total[place]), float(seconds[place]), int(restarts[place])))
    return best


class _Player:
    """A night row by row, as the driver would write it."""

    def __init__(self, night: Night) -> None:
        self.night, self.world = night, night.world
        self.events: list[Event] = [night.world.accepted]
        self.folding = Folding(tuple(self.events))
        self.rng = Random(night.world.seed)
        self.number = self.restarts = 0
        self.saved = 0
        self.seconds = 0.0

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.folding.take(event)

    def grown(self, age: int, step: int) -> float:
        """Return the share by which, or in leaks the bytes by which, memory is above its usual level."""
        match self.night.kind:
            case Kind.LENGTHS:
                return 0.15 * step / STEPS
            case Kind.CACHE:
                return 0.15 * -math.expm1(-age / 60)
            case Kind.SAWTOOTH:
                return 0.15 * (age % 40) / 40
            case Kind.NOISE:
                return 0.0
            case _:
                return age * self.night.grows

    def attempt(self, launch: Launch) -> None:
        """Run an attempt until it ends by itself or is stopped."""
        world, kind, first = self.world, self.night.kind, self.saved + 1
        self.number += 1
        self.take(
            Decided(attempt=self.number - 1, remedy=launch.remedy, reason=launch.reason, growth=launch.growth)
        )
        self.take(Started(attempt=self.number, knobs=launch.knobs, resume=self.number > 1))
        self.seconds += world.startup_s
        ran = run(world, launch.knobs)
        held, cluster = peaks(world, launch.knobs, 3), world.accepted.cluster
        host = float(host_bytes(world, columns(world, (launch.knobs,)))[0])
        total = cluster.host_memory_bytes or 0
        every = with_saves(world.accepted.job, tuple(self.events), launch.knobs).recovery.save_every or 10
        forecaster, saved = Forecaster(known=None, longest_response=None), None
        if ran.failure is not None and ran.failure.step <= 3:
            self.fail(ran.failure.cause, ran.failure.phase, ran.failure.peak_bytes, step=None)
            return
        for step in range(first, STEPS + 1):
            age = step - first + 1
            more = self.grown(age, step)
            device = more if kind is Kind.DEVICE else 0.0
            wide = 1 + more if kind in HEALTHY else 1.0
            used = {
                phase: min(held[phase] * wide, 0.97 * cluster.gpu_memory_bytes)
                if kind in HEALTHY
                else held[phase] + (device if phase in _TRAINER else 0.0)
                for phase in _FULLEST
            }
            on_host = host + (more if kind in _PROCESS else 0.0)
            on_host = min(host * wide, 0.9 * total) if kind in HEALTHY else on_host
            over = next((p for p, size in used.items() if size > cluster.gpu_memory_bytes), None)
            if over is not None or on_host > HOST_LIMIT * total:
                self.seconds += 0.5 * ran.step_s + _DETECTED_S
                cause = Cause.HOST_OOM if over is None else Cause.GPU_OOM
                self.fail(cause, over or Phase.BACKWARD, used[over] if over else on_host, step=step)
                return
            self.seconds += ran.step_s
            saved = step if step % every == 0 else saved
            self.saved = saved or self.saved
            shown = {
                phase.value: Peak(
                    used_bytes=int(size * self.rng.uniform(0.996, 1.0)),
                    capacity_bytes=cluster.gpu_memory_bytes,
                )
                for phase, size in used.items()
            }
            self.take(
                Progressed(
                    attempt=self.number, step=step, of=STEPS, seconds=ran.step_s, peaks=shown, saved=saved,
                    after_s=ran.step_s + (world.startup_s if age == 1 else 0.0),
                )
            )  # fmt: skip
            by_process = more if kind in _PROCESS else 0.0
            names = {name: 4 * GIB + by_process * (name == _PROCESS.get(kind)) for name in _PROCESS.values()}
            forecaster.take(
                Sample(
                    at=self.seconds, node="n", host_used_bytes=int(on_host), host_total_bytes=total,
                    processes=tuple(
                        ProcessMemory(pid=n, name=name, rss_bytes=int(size))
                        for n, (name, size) in enumerate(names.items())
                    ),
                ),
                Phase.BACKWARD,
            )  # fmt: skip
            for row in forecaster.stepped(
                StepDone(step=step, of=STEPS), shown, attempt=self.number, of=STEPS, new=True
            ):
                self.take(row)
            action = decide_on(self.folding)
            if isinstance(action, Stop):
                self.restarts += 1
                self.take(Ended(attempt=self.number, outcome=Cancelled(by=action.by), step=step, saved=saved))
                return
        self.take(Ended(attempt=self.number, outcome=Completed(), step=STEPS, saved=saved))

    def fail(self, cause: Cause, phase: Phase, peak: float, *, step: int | None) -> None:
        """Write down a failure of memory."""
        self.restarts += 1
        capacity = self.world.accepted.cluster.gpu_memory_bytes
        asked = int(max(64 << 20, min(GIB, 0.05 * peak)))
        facts = Facts(
            requested_bytes=asked,
            free_bytes=int(max(0.0, min(asked - 1.0, capacity - peak + asked))),
            capacity_bytes=capacity,
        )
        found = Diagnosis(
            cause=cause, phase=phase, component=Component.TRAINER, step=step,
            evidence=(Line(line=1, text="out of memory", rule="torch-cuda-oom"),),
            facts=facts if cause is Cause.GPU_OOM else Facts(),
        )  # fmt: skip
        before = step - 1 if step else None
        self.take(Ended(attempt=self.number, outcome=Crashed(exit_code=1), step=before))
        self.take(
            Diagnosed(attempt=self.number, **{n: getattr(found, n) for n in Diagnosis.__struct_fields__})
        )


def play(night: Night) -> Outcome:
    """Return what the policy makes of a night."""
    player = _Player(night)
    action = decide_on(player.folding)
    launched = night.world.accepted.profile.knobs
    while isinstance(action, Launch) and player.number < _MOST:
        launched = action.knobs
        player.attempt(action)
        action = decide_on(player.folding)
    assert not isinstance(action, Await)
    done = player.saved >= STEPS or _completed(player.events)
    least_s, step_s, restarts = oracle(night)
    growth = getattr(action.verdict, "growth", None) if isinstance(action, Finish) else None
    named = growth is not None and growth.per_step_bytes > 0
    return Outcome(
        kind=night.kind,
        done=done,
        restarts=player.restarts,
        needed=restarts,
        lost=player.seconds / least_s - 1,
        slower=run(night.world, launched).step_s / step_s,
        named=named and (night.kind not in _PROCESS or growth.process == _PROCESS[night.kind]),
    )


def _completed(events: Sequence[Event]) -> bool:
    last = next((event for event in reversed(events) if isinstance(event, Ended)), None)
    return last is not None and isinstance(last.outcome, Completed)


if __name__ == "__main__":
    raise SystemExit(main())
