"""A night as the policy plays it, row by row as the driver would write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from autotune.orchestrator.driver.memory import Forecaster
from autotune.policies.diagnosis.message_figures import fragmented
from autotune.policies.recovery.checkpoint_interval import with_saves
from autotune.policies.recovery.decide import decide_on
from autotune.policies.values.diagnosis import Facts, Line
from autotune.policies.values.events import (
    Action,
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Finished,
    Launch,
    NeedsHuman,
    Progressed,
    Started,
    Stop,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import RESUMED, Folding
from autotune.policies.values.observation import (
    Cancelled,
    Completed,
    Crashed,
    Lost,
    Peak,
    ProcessMemory,
    Sample,
    StepDone,
)
from benchmarks.nights.night import (
    HEALTHY,
    HOUR_S,
    PROCESS,
    STEPS,
    TRAINER,
    Kind,
    Night,
    excess,
    host_limit,
    shares_cards,
    stranded,
)
from benchmarks.nights.oracle import Least, oracle
from benchmarks.simulation.cluster import outside_bytes, peaks, run
from benchmarks.simulation.columns import columns
from benchmarks.simulation.truth import host_bytes
from benchmarks.simulation.world import GIB

_MOST = 400  # attempts of a night
_FULLEST = (Phase.ROLLOUT, Phase.BACKWARD, Phase.OPTIMIZER)
_DETECTED_S = 60.0  # from a failure to its relaunch
_SAVE_EVERY = 10  # of a job that says nothing
_SERVICE = "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: http://reward/score"


class Outcome(NamedTuple):
    """What became of a night."""

    kind: Kind
    possible: bool  # the oracle reaches the last step
    done: bool  # reached the last step
    restarts: int
    needed: int  # restarts of the oracle
    lost: float  # time beside the oracle's, as a share of that; only of nights that are done
    slower: float  # seconds of a step at the end, against the oracle's
    named: bool  # the verdict says what grows; of hosts: in which process
    grows: float  # bytes a step


def play(night: Night) -> Outcome:
    """Return what the policy makes of a night."""
    player = _Player(night)
    action = player.night_out()
    if night.kind is Kind.SERVICE:
        calm = _Player(night._replace(at=0))
        calm.night_out()
        least = Least(calm.seconds + HOUR_S + night.world.startup_s, calm.step_s, calm.restarts + 1)
    else:
        least = oracle(night)
    growth = getattr(action.verdict, "growth", None) if isinstance(action, Finish) else None
    named = growth is not None and growth.per_step_bytes > 0
    return Outcome(
        kind=night.kind,
        possible=math.isfinite(least.seconds),
        done=player.done,
        restarts=player.restarts,
        needed=least.restarts,
        lost=player.seconds / least.seconds - 1,
        slower=player.step_s / least.step_s,
        named=named and (night.kind not in PROCESS or growth.process == PROCESS[night.kind]),
        grows=night.grows,
    )


@dataclass
class _Process:
    """An attempt that makes steps."""

    launch: Launch
    first: int  # step
    held: dict[Phase, float]
    host: float
    every: int  # steps between checkpoints
    forecaster: Forecaster
    saved: int | None = None  # its latest checkpoint


class _Player:
    """The rows of a night, its clock, and where it is."""

    def __init__(self, night: Night) -> None:
        self.night, self.world = night, night.world
        self.events: list[Event] = [night.world.accepted]
        self.folding = Folding(tuple(self.events))
        self.number = self.restarts = 0
        self.saved = 0
        self.seconds = self.step_s = self.started_s = 0.0
        self.knobs = night.world.accepted.profile.knobs
        self.rng = Random(night.world.seed)
        self.done = False
        self.begins_s = self.ends_s = 0.0  # of what goes wrong for an hour
        if night.kind is Kind.INTRUDER:
            step_s = run(self.world, self.world.accepted.profile.knobs).step_s
            self.begins_s = self.world.startup_s + night.at * step_s
            self.ends_s = self.begins_s + HOUR_S

    def night_out(self) -> Action:
        """Launch what the policy decides until it ends; returns its last action.

        Where a service failed, a person goes on once it is there again.
        """
        action = decide_on(self.folding)
        while self.number < _MOST:
            if isinstance(action, Launch):
                self.seconds += action.not_before_s
                self.attempt(action)
            elif (
                isinstance(action, Finish)
                and isinstance(action.verdict, NeedsHuman)
                and self.seconds < self.ends_s
            ):
                self.seconds = self.ends_s
                self.take(Finished(verdict=action.verdict))
                self.take(Decided(attempt=self.number, reason=RESUMED))
            else:
                break
            action = decide_on(self.folding)
        assert not isinstance(action, Await)
        return action

    def take(self, event: Event) -> None:
        """Write down a row."""
        self.events.append(event)
        self.folding.take(event)

    def intrudes(self) -> float:
        """Return the bytes that others hold on a card now."""
        present = self.night.kind is Kind.INTRUDER and self.begins_s <= self.seconds < self.ends_s
        return self.night.more if present else 0.0

    def attempt(self, launch: Launch) -> None:
        """Run an attempt until it ends by itself or is stopped."""
        process = self.begin(launch)
        if process is None:
            return
        for step in range(process.first, STEPS + 1):
            if self.interrupted(process, step) or not self.step(process, step):
                return
            action = decide_on(self.folding)
            if isinstance(action, Stop):
                self.restarts += 1
                self.end(process, step, Cancelled(by=action.by))
                return
        self.done = True
        self.end(process, STEPS, Completed())

    def begin(self, launch: Launch) -> _Process | None:
        """Start an attempt; None if it fails before its first step, or always does in it."""
        world = self.world
        self.number += 1
        self.take(
            Decided(attempt=self.number - 1, remedy=launch.remedy, reason=launch.reason, growth=launch.growth)
        )
        self.started_s = self.seconds
        self.take(Started(attempt=self.number, knobs=launch.knobs, resume=self.number > 1))
        self.seconds += world.startup_s
        ran, held = run(world, launch.knobs), peaks(world, launch.knobs, 3)
        self.step_s, self.knobs = ran.step_s, launch.knobs
        if ran.failure is not None and ran.failure.step <= 3:
            phase = ran.failure.phase
            self.fail(ran.failure.cause, phase, facts=self.facts(phase, ran.failure.peak_bytes))
            return None
        starting = held[Phase.ROLLOUT_INIT] + self.intrudes()
        if shares_cards(world) and starting > world.accepted.cluster.gpu_memory_bytes:
            facts = self.facts(Phase.ROLLOUT_INIT, starting)
            self.fail(Cause.GPU_OOM, Phase.ROLLOUT_INIT, facts=facts)
            return None
        recovery = with_saves(world.accepted.job, tuple(self.events), launch.knobs).recovery
        return _Process(
            launch=launch,
            first=self.saved + 1,
            held={phase: held[phase] for phase in _FULLEST},
            host=float(host_bytes(world, columns(world, (launch.knobs,)))[0]),
            every=recovery.save_every or _SAVE_EVERY,
            forecaster=Forecaster(known=None, longest_response=None),
        )

    def interrupted(self, process: _Process, step: int) -> bool:
        """Return whether a service or the cluster ends a process before a step, and write it down."""
        night, age = self.night, step - process.first
        if night.kind is Kind.SERVICE and night.at:
            changed = process.launch.remedy is not None
            if not self.ends_s and changed and age >= night.at:
                self.ends_s = self.seconds + HOUR_S
            if self.seconds < self.ends_s:
                self.seconds += 0.2 * self.step_s + _DETECTED_S
                self.fail(Cause.UNKNOWN, Phase.ROLLOUT, step=step)
                return True
        if night.gaps and age >= night.gaps[self.number - 1]:
            self.restarts += 1
            self.seconds += 0.5 * self.step_s
            self.end(process, step - 1, Lost(reason="the node was preempted"))
            return True
        return False

    def step(self, process: _Process, step: int) -> bool:
        """Make a step and a checkpoint after it; returns whether memory sufficed."""
        night, world, age = self.night, self.world, step - process.first + 1
        capacity = world.accepted.cluster.gpu_memory_bytes
        total = world.accepted.cluster.host_memory_bytes or 0
        more, idle = excess(night, age, step), stranded(night, self.knobs, age)
        if night.kind in HEALTHY:
            used = {p: min(size * (1 + more), 0.97 * capacity) for p, size in process.held.items()}
            on_host, by_process = min(process.host * (1 + more), 0.9 * total), 0.0
        else:
            trainer = idle + more * (night.kind is Kind.DEVICE)
            used = {p: size + trainer * (p in TRAINER) for p, size in process.held.items()}
            by_process = more * (night.kind in PROCESS)
            on_host = process.host + by_process
        others = self.intrudes()
        shared = _FULLEST if shares_cards(world) else TRAINER
        over = next((p for p in shared if used[p] + others > capacity), None)
        if over is not None:
            self.seconds += 0.5 * self.step_s + _DETECTED_S
            self.fail(Cause.GPU_OOM, over, step=step, facts=self.facts(over, used[over] + others, idle=idle))
            return False
        if on_host > host_limit(world):
            self.seconds += 0.5 * self.step_s + _DETECTED_S
            self.fail(Cause.HOST_OOM, Phase.BACKWARD, step=step)
            return False
        self.seconds += self.step_s
        if step % process.every == 0:
            if night.kind is Kind.CHECKPOINT and on_host + night.more > host_limit(world):
                self.seconds += _DETECTED_S
                self.fail(Cause.HOST_OOM, Phase.CHECKPOINT, step=step + 1)
                return False
            process.saved = self.saved = step
        self.report(process, step, used, on_host, by_process)
        return True

    def report(
        self, process: _Process, step: int, used: Mapping[Phase, float], on_host: float, by_process: float
    ) -> None:
        """Write down a step and what is forecast after it."""
        capacity = self.world.accepted.cluster.gpu_memory_bytes
        columns = {
            phase.value: Peak(used_bytes=int(size * self.rng.uniform(0.996, 1.0)), capacity_bytes=capacity)
            for phase, size in used.items()
        }
        after_s = self.step_s + (self.world.startup_s if step == process.first else 0.0)
        self.take(
            Progressed(
                attempt=self.number, step=step, of=STEPS, seconds=self.step_s, peaks=columns,
                saved=process.saved, after_s=after_s,
            )
        )  # fmt: skip
        own = PROCESS.get(self.night.kind)
        processes = tuple(
            ProcessMemory(pid=n, name=name, rss_bytes=int(4 * GIB + by_process * (name == own)))
            for n, name in enumerate(PROCESS.values())
        )
        total = self.world.accepted.cluster.host_memory_bytes or 0
        sample = Sample(
            at=self.seconds, node="n", host_used_bytes=int(on_host), host_total_bytes=total,
            processes=processes,
        )  # fmt: skip
        process.forecaster.take(sample, Phase.BACKWARD)
        done = StepDone(step=step, of=STEPS)
        for row in process.forecaster.stepped(done, columns, attempt=self.number, of=STEPS, new=True):
            self.take(row)

    def end(self, process: _Process, step: int, outcome: Cancelled | Completed | Lost) -> None:
        """Write down the end of an attempt that did not fail."""
        self.take(Ended(attempt=self.number, outcome=outcome, step=step, saved=process.saved))

    def facts(self, phase: Phase, peak: float, *, idle: float = 0.0) -> Facts:
        """Return the figures of a device's message: what was asked for, free, idle and held by others."""
        capacity = self.world.accepted.cluster.gpu_memory_bytes
        asked = int(max(64 << 20, min(GIB, 0.05 * peak)))
        free = int(max(0.0, min(asked - 1.0, capacity - peak + asked)))
        outside = self.intrudes()
        if self.night.kind is Kind.INTRUDER:
            outside += outside_bytes(self.world, columns(self.world, (self.knobs,)), phase)
        return Facts(
            requested_bytes=asked,
            free_bytes=free,
            capacity_bytes=capacity,
            allocated_bytes=int(max(0.0, capacity - free - idle - outside)) if idle or outside else None,
            reserved_unallocated_bytes=int(idle) if idle or outside else None,
            outside_bytes=int(outside) if outside else None,
        )

    def fail(
        self, cause: Cause, phase: Phase, *, step: int | None = None, facts: Facts | None = None
    ) -> None:
        """Write down a failure while a step was worked on; None: before the first."""
        self.restarts += 1
        line = (
            Line(line=1, text=_SERVICE, rule="")
            if cause is Cause.UNKNOWN
            else Line(line=1, text="out of memory", rule="torch-cuda-oom")
        )
        engine = phase in (Phase.ROLLOUT, Phase.ROLLOUT_INIT) and cause is Cause.GPU_OOM
        stated = facts or Facts()
        before, held = step - 1 if step else None, ""
        if self.intrudes() and self.started_s < self.begins_s:
            held = (
                f"n: GPU 0 has {self.night.more / GIB:.1f} GiB more in use than before: pid 7 (python) of mia"
            )
        crashed = Crashed(exit_code=1)
        self.take(Ended(attempt=self.number, outcome=crashed, step=before, held=held, foreign=bool(held)))
        self.take(
            Diagnosed(
                attempt=self.number, cause=cause, phase=phase, step=step, evidence=(line,), facts=stated,
                component=Component.ROLLOUT if engine else Component.TRAINER,
                fragmentation=fragmented(stated),
            )
        )  # fmt: skip
