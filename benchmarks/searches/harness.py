"""A search on a simulated job: every way to choose sees what the same probes show."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from random import Random

import msgspec
import numpy as np

from autotune.policies.search import trials
from autotune.policies.search.space import Dimension, space
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Diagnosed,
    Ended,
    Event,
    History,
    Progressed,
    Purpose,
    Result,
    Started,
    Tried,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Job
from autotune.policies.values.job import Search as Settings
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.observation import Completed, Crashed, Peak
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value
from benchmarks.simulation.baselines import autotune
from benchmarks.simulation.cluster import Failure, diagnosis, drawn_by, holds, reported, run
from benchmarks.simulation.columns import columns
from benchmarks.simulation.oracle import configurations
from benchmarks.simulation.speed import step_seconds
from benchmarks.simulation.truth import PHASES, device_peaks
from benchmarks.simulation.world import World

PROBE_STEPS = 5
BUDGET = 40  # runs
GOOD = 0.95  # of the oracle's throughput
_NOISE = 0.01  # relative standard deviation of a step's time
_RECOVERIES = 14


class Start(Value, frozen=True, kw_only=True):
    """A job that was made stable, as every search finds it."""

    kind: str  # launched | timid
    world: World
    knobs: Knobs
    events: tuple[Event, ...]
    dimensions: tuple[Dimension, ...]
    oracle_s: float  # seconds of a step of the best configuration of the oracle's grid

    @property
    def profile(self) -> Profile:
        """What the framework tells of the job."""
        return self.world.accepted.profile


class Night(Value, frozen=True, kw_only=True):
    """What a search made of its budget on one job."""

    world: str
    start: str
    method: str
    found_at: int | None  # the run after which the best so far reached 95 % of the oracle
    runs: int
    failures: int  # out of memory
    repeats: int  # of a configuration that had run
    best: float  # throughput of the best that holds, as a share of the oracle's
    refused: int  # runs that held and left too little headroom


class Book:
    """A journal in memory."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def history(self) -> History:
        """Return every event so far."""
        return self._events

    def add(self, events: Sequence[Event]) -> None:
        """Record what happened."""
        self._events += tuple(events)


Choose = Callable[[], Knobs | None]  # None: the search is over
Method = Callable[[Start, Book, int], Choose]


def started(world: World, *, timid: bool) -> Start | None:
    """Return a simulated job without late events and a start that holds; None where there is none.

    The start is what a launch made stable, or the job as somebody writes it who fears for its memory. What
    only shows after many steps is no matter of a probe of five.
    """
    values = {name: getattr(world, name) for name in World.__struct_fields__} | {"late": ()}
    calm = World(**values)
    accepted = calm.accepted
    job: Job = msgspec.structs.replace(accepted.job, search=Settings(trials=BUDGET, probe_steps=PROBE_STEPS))
    calm = msgspec.structs.replace(calm, accepted=msgspec.structs.replace(accepted, job=job, mode="search"))
    oracle_s = _oracle(calm)
    if timid:
        calm = _with_knobs(calm, _timid(calm))
        if not keeps(calm, [calm.accepted.profile.knobs])[0]:
            return None
    events: list[Event] = [calm.accepted]
    knobs: Knobs | None = calm.accepted.profile.knobs
    for number in range(1, _RECOVERIES):
        if knobs is None or oracle_s is None:
            return None
        events += attempt(calm, knobs, number, steps=job.goal.steps)
        if run(calm, knobs).failure is None:
            dimensions = space(job, calm.accepted.profile, knobs)
            return Start(
                kind="timid" if timid else "launched",
                world=calm,
                knobs=knobs,
                events=tuple(events),
                dimensions=dimensions,
                oracle_s=oracle_s,
            )
        launch = autotune(tuple(events))
        knobs = None if launch is None else launch.knobs
    return None


def play(start: Start, name: str, method: Method, *, seed: int, budget: int = BUDGET) -> Night:
    """Return the night of one way to choose."""
    world = start.world
    book = Book(start.events)
    choose = method(start, book, seed)
    number = max(e.attempt for e in start.events)
    before: list[Knobs] = []
    failures = repeats = refused = 0
    found_at: int | None = None
    best_s = np.inf
    while len(before) < budget:
        knobs = choose()
        if knobs is None:
            break
        number += 1
        repeats += knobs in before
        before.append(knobs)
        rows = attempt(world, knobs, number, steps=PROBE_STEPS, trial=len(before) - 1)
        result = tried(world, knobs, rows, trial=len(before) - 1)
        book.add([*rows, result])
        failures += result.result is Result.FAILS
        if keeps(world, [knobs])[0]:
            best_s = min(best_s, run(world, knobs).step_s)
        elif result.result is Result.FITS:
            refused += 1
        if found_at is None and best_s <= start.oracle_s / GOOD:
            found_at = len(before)
    return Night(
        world=world.name,
        start=start.kind,
        method=name,
        found_at=found_at,
        runs=len(before),
        failures=failures,
        repeats=repeats,
        best=float(start.oracle_s / best_s),
        refused=refused,
    )


def attempt(world: World, knobs: Knobs, number: int, *, steps: int, trial: int | None = None) -> list[Event]:
    """Return what the journal holds of an attempt of so many steps."""
    ran = run(world, knobs)
    lasted = steps if ran.failure is None or ran.failure.step > steps else max(0, ran.failure.step - 1)
    rows: list[Event] = [Started(attempt=number, knobs=knobs, trial=trial, longest=trial is not None)]
    rng = Random(zlib.crc32(f"{world.seed} {drawn_by(knobs)} {number}".encode()))
    for step in range(1, lasted + 1):
        took = ran.step_s * (1 + abs(rng.gauss(0.0, _NOISE)))
        rows.append(
            Progressed(
                attempt=number,
                step=step,
                of=steps,
                seconds=took,
                tokens_per_second=1e6 / took,
                peaks=reported(world, knobs, step),
            )
        )
    if lasted == steps:
        return [*rows, Ended(attempt=number, outcome=Completed(), step=lasted)]
    assert ran.failure is not None
    passed = _passed(world, knobs, ran.failure)
    rows.append(Ended(attempt=number, outcome=Crashed(exit_code=1), step=lasted or None, peaks=passed))
    diagnosed = diagnosis(world, knobs, ran.failure)
    values = {name: getattr(diagnosed, name) for name in Diagnosis.__struct_fields__}
    return [*rows, Diagnosed(attempt=number, **values)]


def tried(world: World, knobs: Knobs, rows: Sequence[Event], *, trial: int) -> Tried:
    """Return what a probe showed."""
    headroom = world.accepted.job.goal.headroom
    steps = [e for e in rows if isinstance(e, Progressed)]
    peaks: dict[str, Peak] = {}
    for step in steps:
        for phase, peak in step.peaks.items():
            if phase not in peaks or peaks[phase].used_bytes < peak.used_bytes:
                peaks[phase] = peak
    constraints = trials.excess(peaks, headroom=headroom)
    failure = next((e for e in rows if isinstance(e, Diagnosed)), None)
    if failure is not None:
        constraints |= trials.excess_of_failure(failure)
    result = Tried(
        attempt=rows[0].attempt,
        trial=trial,
        knobs=knobs,
        purpose=Purpose.PROBE,
        result=Result.FITS if failure is None else Result.FAILS,
        headroom=trials.free_share(peaks),
        constraints=constraints,
    )
    return trials.timed(result, trials.speed(steps) if failure is None else None)


def keeps(world: World, configurations: Sequence[Knobs]) -> np.ndarray:
    """Return which configurations hold for a day with the goal's headroom free on every device."""
    c = columns(world, configurations)
    limit = (1 - world.accepted.job.goal.headroom) * world.accepted.cluster.gpu_memory_bytes
    fits = holds(world, c)
    peaks = device_peaks(world, c)
    for phase in PHASES:
        if phase is not Phase.ROLLOUT_INIT:  # a start-up is not part of a step
            long, short = peaks[phase]
            fits = fits & (long + short <= limit)
    return fits


def _oracle(world: World) -> float | None:
    grid = configurations(world)
    best = np.inf
    for place in range(0, len(grid), 4096):
        part = grid[place : place + 4096]
        seconds = np.where(keeps(world, part), step_seconds(world, columns(world, part)), np.inf)
        best = min(best, float(seconds.min()))
    return best if np.isfinite(best) else None


def _passed(world: World, knobs: Knobs, failure: Failure) -> dict[str, Peak]:
    if failure.step == 0:
        return {}
    peaks = reported(world, knobs, failure.step)
    if failure.phase.value not in peaks:
        return {}
    return {name: peaks[name] for name in list(peaks)[: list(peaks).index(failure.phase.value)]}


def _timid(world: World) -> Knobs:
    """Return the job's configuration with everything that saves memory and a quarter of the requests."""
    profile, knobs = world.accepted.profile, world.accepted.profile.knobs
    least = -(-(profile.longest_sequence or 1) // 256) * 256
    wanted: dict[str, Setting] = {
        "concurrency": max(1, (knobs.concurrency or 64) // 4),
        "memory_fraction": 0.4,
        "tokens_per_microbatch": least,
        "logprob_tokens": least,
        "recompute": "full",
        "activation_offload": True,
        "optimizer_offload": True,
        "param_offload": True,
    }
    offered = {k: v for k, v in wanted.items() if k in profile.supported and getattr(knobs, k) is not None}
    return msgspec.structs.replace(knobs, **offered)


def _with_knobs(world: World, knobs: Knobs) -> World:
    profile = msgspec.structs.replace(world.accepted.profile, knobs=knobs)
    return msgspec.structs.replace(world, accepted=msgspec.structs.replace(world.accepted, profile=profile))
