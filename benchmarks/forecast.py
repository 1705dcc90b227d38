"""`python -m benchmarks.forecast`: failures that are forewarned and false alarms, drawn and recorded.

Series `seen` were looked at while the forecast was written; those `held out` had no part in it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from autotune.policies.forecast.foresee import WARM_UP, Measured, foresee
from autotune.policies.forecast.trend import FEWEST
from autotune.policies.values.events import Accepted
from autotune.policies.values.observation import Peak
from benchmarks.forecast_tables import Outcome, compared, resampled, table
from benchmarks.simulation.cluster import reported
from benchmarks.simulation.jobs import undecided
from benchmarks.simulation.world import Stratum

_MEASUREMENTS = Path(__file__).parent / "measurements"
RECORDED = _MEASUREMENTS / "builtin-steps.jsonl"
WITH_LENGTHS = _MEASUREMENTS / "builtin-lengths.jsonl"  # by benchmarks.record_steps
SEEN, HELD_OUT = (0,), (1,)  # seeds of the recorded runs
RECORDED_LATER, LATER = _MEASUREMENTS / "builtin-lengths-2.jsonl", (2, 3, 4, 5, 6)
_LEAST_SLOPE = 0.1  # relative growth of memory for one of lengths, below which it does not follow them
CAPACITY = 1 << 36
FIRST, _LAST = 18, 400  # steps between which a drift makes a job fail
_BASE_STEPS = 40
_CALM, _FEWEST_LEVELS = 240, 5  # recorded series without a drift, and of each phase of a run
_CALM_STEPS = (60, 120, 240, 400)  # of a healthy job


class Series(NamedTuple):
    """What a job's fullest phase needs from step to step."""

    kind: str
    phase: str
    used: list[float]  # share of the device, by step from the first
    fails: int | None  # step at which it runs out; None: never
    of: int
    lengths: Mapping[str, Sequence[float]] = {}  # of the responses, by step
    run: int = 0  # of those recorded


Shape = Callable[[Random, int], list[float]]  # growth from 0 to 1 over so many steps


Method = Callable[[Sequence[Measured], str, int], bool]  # rows so far, phase, last step


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=40, help="of each kind")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument(
        "--jobs", type=int, default=24, help="simulated jobs whose peaks the series start from"
    )
    parser.add_argument("--only", choices=SETS, nargs="+", default=list(SETS))
    options = parser.parse_args()
    for name in options.only:
        every = [*SETS[name](options.jobs, options.series, options.seed)]
        methods = METHODS | (WITHOUT_LENGTHS if any(series.lengths for series in every) else {})
        outcomes = {title: [watched(series, method) for series in every] for title, method in methods.items()}
        print("\n".join(table(name, outcomes["forecast"])))
        print("\n".join(compared(name, outcomes)))
        print("\n".join(resampled(outcomes)), flush=True)


# --------------------------------------------------------------------- series


class Base(NamedTuple):
    """A job's fullest phase without drift: by step, as a share of its largest."""

    phase: str
    noise: list[float]  # around 1
    lengths: Mapping[str, Sequence[float]] = {}
    run: int = 0


def simulated_bases(jobs: int, seed: int) -> Iterator[Base]:
    """Yield the fullest phase of simulated jobs on cards that hold them, as it is reported."""
    for number in range(jobs):
        world = msgspec.structs.replace(undecided(Stratum.NEAR, seed=seed * 1009 + number), reports=True)
        knobs = world.accepted.profile.knobs
        world = msgspec.structs.replace(world, accepted=_on_larger_cards(world.accepted))
        peaks = [reported(world, knobs, step) for step in range(1, _BASE_STEPS + 1)]
        phase = max(peaks[2], key=lambda name: peaks[2][name].used_bytes)
        used = [float(row[phase].used_bytes) for row in peaks]
        usual = statistics.median(used[2:])
        yield Base(phase=phase, noise=[each / usual for each in used])


def _on_larger_cards(accepted: Accepted) -> Accepted:
    cluster = msgspec.structs.replace(accepted.cluster, gpu_memory_bytes=1 << 50)
    return msgspec.structs.replace(accepted, cluster=cluster)


def recorded_bases(path: Path = RECORDED, *, seeds: Sequence[int | None] = (None,)) -> Iterator[Base]:
    """Yield the phases of runs of the built-in job on a CPU, those with one of these seeds."""
    for run, line in enumerate(path.read_text().splitlines()):
        row = msgspec.json.decode(line)
        if row.get("seed") not in seeds:
            continue
        for phase, used in row["peaks"].items():
            usual = statistics.median(used[2:])
            noise = [each / usual for each in used]
            yield Base(phase=phase, noise=noise, lengths=row.get("lengths", {}), run=run)


def _noisy(rng: Random, base: Base, steps: int) -> list[float]:
    """Return a phase's steps around 1: those of the base, with batches that differ and resemble the last."""
    spread = 10 ** rng.uniform(-3.0, -1.8)
    follows = rng.choice((0.0, 0.0, 0.3, 0.6))
    state, result = 0.0, []
    for step in range(steps):
        state = follows * state + math.sqrt(1 - follows**2) * rng.gauss(0, spread)
        own = base.noise[step] if step < len(base.noise) else base.noise[2 + step % (len(base.noise) - 2)]
        result.append(own * (1 + state))
    return result


def _line(rng: Random, steps: int) -> list[float]:
    begin = rng.choice((0, 0, int(rng.uniform(0, 0.5) * steps)))
    return [max(0.0, (step - begin) / (steps - begin)) for step in range(steps)]


def _slowing(rng: Random, steps: int) -> list[float]:
    slow = rng.uniform(0.3, 1.5)
    return [-math.expm1(-slow * step / steps) / -math.expm1(-slow) for step in range(steps)]


def _sawtooth(rng: Random, steps: int) -> list[float]:
    period, tooth = rng.randint(3, max(4, steps // 6)), rng.uniform(0.1, 0.4)
    return [(1 - tooth) * step / steps + tooth * (step % period) / period for step in range(steps)]


def _residue(rng: Random, steps: int) -> list[float]:
    kept = [rng.expovariate(1.0) if rng.random() < 0.4 else 0.0 for _ in range(steps)]
    whole = sum(kept) or 1.0
    return [sum(kept[:step]) / whole for step in range(steps)]


DRIFTS: dict[str, Shape] = {
    "leak": _line,
    "lengths that level off above the limit": _slowing,
    "sawtooth fragmentation": _sawtooth,
    "sleep residue": _residue,
}


def _flat(rng: Random, steps: int) -> list[float]:
    return [0.0] * steps


def _jumps(rng: Random, steps: int) -> list[float]:
    places = [rng.randint(3, steps - 1) for _ in range(rng.randint(1, 3))]
    return [sum(step >= place for place in places) / len(places) for step in range(steps)]


def _warming(rng: Random, steps: int) -> list[float]:
    slow = rng.uniform(1, min(30, steps / 4))
    return [-math.expm1(-step / slow) for step in range(steps)]


def _peaks(rng: Random, steps: int) -> list[float]:
    places = {rng.randint(3, steps - 1) for _ in range(rng.randint(1, 4))}
    return [float(step in places) for step in range(steps)]


def _teeth(rng: Random, steps: int) -> list[float]:
    period = rng.randint(2, 12)
    return [step % period / period for step in range(steps)]


def _levelling(rng: Random, steps: int) -> list[float]:
    slow = rng.uniform(0.1, 0.5) * steps
    return [-math.expm1(-step / slow) for step in range(steps)]


CALM: dict[str, Shape] = {
    "noise": _flat,
    "one to three jumps": _jumps,
    "warm-up": _warming,
    "one-off peaks": _peaks,
    "lengths that level off below the limit": _levelling,
    "sawtooth that stays": _teeth,
    "leak that outlasts the job": _line,
}


def drawn_series(bases: Sequence[Base], each: int, seed: int) -> Iterator[Series]:
    """Yield so many series of each kind, with drifts and without."""
    for kind, shape in DRIFTS.items():
        rng = Random(f"{seed} {kind}")
        for _ in range(each):
            yield _drifting(rng, kind, shape, rng.choice(bases))
    for kind, shape in CALM.items():
        rng = Random(f"{seed} {kind}")
        for _ in range(each):
            yield _calm(rng, kind, shape, rng.choice(bases))


def _drifting(rng: Random, kind: str, shape: Shape, base: Base) -> Series:
    """Return a job that fails by a drift, at a limit that nobody knows to the byte."""
    limit = rng.uniform(0.985, 1.0)
    while True:
        about = int(math.exp(rng.uniform(math.log(FIRST), math.log(_LAST))))
        of = int(about * rng.uniform(1.1, 4.0)) + 10
        level, steps = rng.uniform(0.5, 0.9), about + 10
        grown = shape(rng, steps)
        noise = _noisy(rng, base, steps)
        rise = (limit - level) * steps / about
        used = [level * noise[step] + rise * grown[step] for step in range(steps)]
        fails = next((step + 1 for step, share in enumerate(used) if share > limit), None)
        if fails is not None and fails >= FIRST:
            return Series(
                kind=kind, phase=base.phase, used=used[: fails - 1], fails=fails, of=max(of, fails + 1)
            )


def _calm(rng: Random, kind: str, shape: Shape, base: Base) -> Series:
    """Return a job that runs to its end."""
    while True:
        of = rng.choice(_CALM_STEPS)
        most = rng.uniform(0.7, 0.97)
        rise = most * rng.uniform(0.02, 0.3)
        grown, noise = shape(rng, of), _noisy(rng, base, of)
        used = [(most - rise) * noise[step] + rise * grown[step] for step in range(of)]
        if max(used) < 0.985:
            return Series(kind=kind, phase=base.phase, used=used, fails=None, of=of)


def injected_series(bases: Sequence[Base], each: int, seed: int) -> Iterator[Series]:
    """Yield recorded steps as they are, at a level near the limit, and with a drift."""
    for kind, shape in DRIFTS.items():
        rng = Random(f"{seed} recorded {kind}")
        for number in range(each):
            base = bases[number % len(bases)]
            steps = len(base.noise)
            limit, fails = rng.uniform(0.985, 1.0), None
            while fails is None or fails < FIRST:
                about, level = rng.randint(FIRST, steps - 8), rng.uniform(0.5, 0.9)
                grown, rise = shape(rng, steps), (limit - level) * steps / about
                used = [level * own + rise * g for own, g in zip(base.noise, grown, strict=True)]
                fails = next((step + 1 for step, share in enumerate(used) if share > limit), None)
            lengths = base.lengths
            if shape is _slowing:
                lengths = lengthened(base, [rise * g / level for g in grown])
            yield Series(kind, base.phase, used[: fails - 1], fails, 2 * steps, lengths, base.run)
    for number, base in enumerate(bases):
        rng = Random(f"{seed} recorded {number}")
        for _ in range(max(_FEWEST_LEVELS, _CALM // len(bases))):
            level = rng.uniform(0.7, 0.97) / max(base.noise)
            used = [level * own for own in base.noise]
            of = rng.choice((1, 2, 5)) * len(used)
            yield Series("as recorded", base.phase, used, None, of, base.lengths, base.run)


def lengthened(base: Base, more: Sequence[float]) -> dict[str, list[float]]:
    """Return the lengths that need so much more memory, as shares of the usual one.

    The slope is that of the recorded steps; where their memory does not follow the lengths, it is taken as
    proportional to them.
    """
    result = {}
    for name, lengths in base.lengths.items():
        usual = statistics.fmean(lengths)
        longer = np.diff(lengths[WARM_UP:]) / usual
        slope = float(np.diff(base.noise[WARM_UP:]) @ longer) / float(longer @ longer)
        share = slope if slope > _LEAST_SLOPE else 1.0
        result[name] = [own + usual * grown / share for own, grown in zip(lengths, more, strict=True)]
    return result


def _simulated(jobs: int, each: int, seed: int) -> list[Series]:
    return [*drawn_series([*simulated_bases(jobs, seed)], each, seed)]


def _recorded(jobs: int, each: int, seed: int) -> list[Series]:
    return [*injected_series([*recorded_bases()], each, seed)]


def _seen(jobs: int, each: int, seed: int) -> list[Series]:
    return [*injected_series([*recorded_bases(WITH_LENGTHS, seeds=SEEN)], each, seed)]


def _held_out(jobs: int, each: int, seed: int) -> list[Series]:
    return [*injected_series([*recorded_bases(WITH_LENGTHS, seeds=HELD_OUT)], each, seed)]


def _later(jobs: int, each: int, seed: int) -> list[Series]:
    return [*injected_series([*recorded_bases(RECORDED_LATER, seeds=LATER)], each, seed)]


SETS: dict[str, Callable[[int, int, int], list[Series]]] = {
    "simulated": _simulated,
    "recorded": _recorded,
    "recorded with lengths, seen": _seen,
    "recorded with lengths, held out": _held_out,
    "recorded later with lengths": _later,
}


# --------------------------------------------------------------------- what is said


def watched(series: Series, says: Method) -> Outcome:
    """Return after which step a failure was said first."""
    rows: list[Measured] = []
    for number, share in enumerate(series.used):
        peak = Peak(used_bytes=int(share * CAPACITY), capacity_bytes=CAPACITY)
        lengths = {name: values[number] for name, values in series.lengths.items()}
        rows.append(Measured(step=number + 1, peaks={series.phase: peak}, lengths=lengths))
        if says(rows, series.phase, series.of):
            return Outcome(series.kind, series.fails, number + 1, series.run)
    return Outcome(series.kind, series.fails, None, series.run)


def _forecast(rows: Sequence[Measured], phase: str, of: int) -> bool:
    return bool(foresee(rows, last={}, of=of))


def _without_lengths(rows: Sequence[Measured], phase: str, of: int) -> bool:
    return _forecast([msgspec.structs.replace(row, lengths={}) for row in rows], phase, of)


def _without_fit(rows: Sequence[Measured], phase: str, of: int) -> bool:
    """Say it where the newest step leaves less than 5 % of the device, whatever came before."""
    return rows[-1].peaks[phase].used_bytes > 0.95 * CAPACITY


def _through_all(rows: Sequence[Measured], phase: str, of: int) -> bool:
    """Say it where a least-squares line through all steps is above the device at the end of the training."""
    if len(rows) < FEWEST + WARM_UP:
        return False
    used = [float(row.peaks[phase].used_bytes) for row in rows[WARM_UP:]]
    slope, start = np.polyfit(np.arange(len(used)), used, 1)
    return bool(start + slope * (of - WARM_UP) > CAPACITY)


METHODS: dict[str, Method] = {
    "forecast": _forecast,
    "without the fit: 95 % in use": _without_fit,
    "a line through all steps": _through_all,
}
WITHOUT_LENGTHS: dict[str, Method] = {"forecast, lengths unknown": _without_lengths}


if __name__ == "__main__":
    main()
