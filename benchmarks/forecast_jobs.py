"""`python -m benchmarks.forecast_jobs`: forecasts of whole jobs, whose phases share their processes' memory.

A leak, fragmentation or a residue raises every phase of the process that holds it; longer responses raise the
phases that work on them. A job fails when its first phase runs out, and a forecast of any phase counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from autotune.policies.forecast.foresee import Measured, foresee
from autotune.policies.values.observation import Component, Peak
from benchmarks.forecast import (
    CAPACITY,
    DRIFTS,
    FIRST,
    WITH_LENGTHS,
    Base,
    lengthened,
)
from benchmarks.forecast_tables import Outcome, table

_LEVELS = 15  # of each recorded run
_ENGINE = ("rollout",)
_BY_LENGTH = ("rollout", "log_prob", "forward", "backward")


class Recorded(NamedTuple):
    """What the phases of a process of a recorded job took, as a share of its fullest phase."""

    peaks: Mapping[str, Sequence[float]]  # by phase and step
    lengths: Mapping[str, Sequence[float]]

    @property
    def fullest(self) -> str:
        """Return the phase that runs out first."""
        return max(self.peaks, key=lambda name: statistics.median(self.peaks[name]))


class Job(NamedTuple):
    """What the phases of a job take by step, as shares of the device."""

    kind: str
    peaks: Mapping[str, Sequence[float]]
    fails: int | None  # step at which a phase runs out; None: never
    of: int
    lengths: Mapping[str, Sequence[float]]


def recorded_runs(path: Path, *, seeds: Sequence[int]) -> Iterator[tuple[Recorded, Recorded]]:
    """Yield the trainer and the engine of each recorded run with one of these seeds."""
    for line in path.read_text().splitlines():
        row = msgspec.json.decode(line)
        if row["seed"] not in seeds:
            continue
        engine = {name: values for name, values in row["peaks"].items() if name in _ENGINE}
        trainer = {name: values for name, values in row["peaks"].items() if name not in _ENGINE}
        yield _process(trainer, row["lengths"]), _process(engine, row["lengths"])


def _process(peaks: Mapping[str, Sequence[int]], lengths: Mapping[str, Sequence[float]]) -> Recorded:
    usual = max(statistics.median(values[2:]) for values in peaks.values())
    return Recorded({name: [each / usual for each in values] for name, values in peaks.items()}, lengths)


def jobs(runs: Sequence[tuple[Recorded, Recorded]], each: int, seed: int) -> Iterator[Job]:
    """Yield so many jobs of each kind of drift, and each run at levels that hold."""
    for kind in DRIFTS:
        rng = Random(f"{seed} job {kind}")
        for number in range(each):
            yield _drifting(rng, kind, runs[number % len(runs)])
    for number, run in enumerate(runs):
        rng = Random(f"{seed} job {number}")
        for _ in range(_LEVELS):
            peaks: dict[str, list[float]] = {}
            for process in run:
                most = max(max(values) for values in process.peaks.values())
                level = rng.uniform(0.7, 0.97) / most
                peaks |= {name: [level * own for own in values] for name, values in process.peaks.items()}
            steps = len(peaks["rollout"])
            yield Job("as recorded", peaks, None, rng.choice((1, 2, 5)) * steps, run[0].lengths)


def _drifting(rng: Random, kind: str, run: tuple[Recorded, Recorded]) -> Job:
    """Return a job of which one process drifts until a phase of it runs out."""
    phases = [*run[0].peaks, *run[1].peaks]
    engine = rng.choice(phases) in _ENGINE
    drifts, other = (run[1], run[0]) if engine else run
    steps, longer = len(drifts.peaks[drifts.fullest]), kind.startswith("lengths")
    limit, fails = rng.uniform(0.985, 1.0), None
    peaks: dict[str, list[float]] = {}
    while fails is None or fails < FIRST:
        about, level = rng.randint(FIRST, steps - 8), rng.uniform(0.5, 0.9)
        grown, rise = DRIFTS[kind](rng, steps), (limit - level) * steps / about
        peaks = {
            name: [
                level * own + (rise * more if name in _BY_LENGTH or not longer else 0.0)
                for own, more in zip(values, grown, strict=True)
            ]
            for name, values in drifts.peaks.items()
        }
        over = [step for values in peaks.values() for step, share in enumerate(values, 1) if share > limit]
        fails = min(over, default=None)
    most = max(max(values) for values in other.peaks.values())
    held = rng.uniform(0.5, 0.9) / most
    peaks |= {name: [held * own for own in values] for name, values in other.peaks.items()}
    lengths = dict(drifts.lengths)
    if longer:
        base = Base(drifts.fullest, [*drifts.peaks[drifts.fullest]], drifts.lengths)
        lengths = lengthened(base, [rise * more / level for more in grown])
    until = {name: values[: fails - 1] for name, values in peaks.items()}
    return Job(kind, until, fails, 2 * steps, lengths)


def rows_of(job: Job) -> list[Measured]:
    """Return what each step of a job shows."""
    steps = len(next(iter(job.peaks.values())))
    return [
        Measured(
            step=number + 1,
            peaks={
                name: Peak(
                    used_bytes=int(values[number] * CAPACITY),
                    capacity_bytes=CAPACITY,
                    component=Component.ROLLOUT if name in _ENGINE else Component.TRAINER,
                )
                for name, values in job.peaks.items()
            },
            lengths={name: values[number] for name, values in job.lengths.items()},
        )
        for number in range(steps)
    ]


def watched(job: Job) -> Outcome:
    """Return after which step a failure of any phase was forecast first."""
    rows = rows_of(job)
    for count in range(1, len(rows) + 1):
        if foresee(rows[:count], last={}, of=job.of):
            return Outcome(job.kind, job.fails, count)
    return Outcome(job.kind, job.fails, None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20, help="of each kind of drift")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--path", type=Path, default=WITH_LENGTHS)
    parser.add_argument("--runs", type=int, nargs="+", default=[0], help="seeds of the recorded runs")
    options = parser.parse_args()
    runs = [*recorded_runs(options.path, seeds=options.runs)]
    outcomes = [watched(job) for job in jobs(runs, options.jobs, options.seed)]
    print("\n".join(table("recorded jobs", outcomes)), flush=True)


if __name__ == "__main__":
    main()
