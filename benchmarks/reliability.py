"""`python -m benchmarks.reliability`: how often a failure came against the chance predicted for it.

Jobs are drawn as in `benchmarks.policies`, those that would run as written included. Before every launch of
the default policy the chance that a phase runs out of memory is noted, and whether it did so within the
goal's steps.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import msgspec

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import chances, outlook
from autotune.policies.values.events import Decided, Event, Launch
from autotune.policies.values.history import fold
from autotune.policies.values.job import Preflight
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.value import Value
from benchmarks.simulation.cluster import overflowing, run
from benchmarks.simulation.jobs import undecided
from benchmarks.simulation.play import rows
from benchmarks.simulation.truth import PHASES as MET
from benchmarks.simulation.world import Stratum, World

_LAUNCHES = 6  # of one job
_OF_A_BIN = 300
_BINS = 5
_BOUND = 0.1


class Forecast(Value, frozen=True, kw_only=True):
    """The chance that one phase of one launch was given, and what came."""

    phase: str
    placement: str
    first: bool  # the first launch of its job
    chance: float
    failed: bool


class Bin(Value, frozen=True, kw_only=True):
    """Forecasts of about the same chance."""

    count: int
    predicted: float  # mean chance
    observed: float  # share that failed

    @property
    def gap(self) -> float:
        """By how much the chance was off."""
        return abs(self.predicted - self.observed)


def main() -> int:
    """Print the table; exit 1 where the chance of any bin is off by more than 0.1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--certain", action="store_true", help="show it with every chance rounded to 0 or 1, as a bound would"
    )
    options = parser.parse_args()
    strata = tuple(Stratum)
    tasks = [
        (strata[number % len(strata)], options.seed * 100_003 + number) for number in range(options.jobs)
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        forecasts = [f for own in pool.map(partial(forecasts_of), tasks, chunksize=8) for f in own]
    if options.certain:
        forecasts = [msgspec.structs.replace(f, chance=float(round(f.chance))) for f in forecasts]
    sys.stdout.write(f"{options.jobs} jobs, seed {options.seed}, {len(forecasts)} chances of a phase.\n\n")
    sys.stdout.write(table(forecasts))
    return 0 if all(b.gap <= _BOUND for _, bins in _by_phase(forecasts) for b in bins) else 1


def table(forecasts: Iterable[Forecast]) -> str:
    """Return predicted and observed shares of failures by phase, and of first launches, in equal bins."""
    forecasts = tuple(forecasts)
    firsts = bins_of(f for f in forecasts if f.first)
    lines = [
        "| phase | chances | " + " | ".join(f"bin {n}" for n in range(1, _BINS + 1)) + " | largest gap |",
        "|---" * (_BINS + 3) + "|",
    ]
    groups = [
        *_by_phase(forecasts),
        ("all", bins_of(forecasts)),
        ("first launch", firsts),
    ]
    for name, bins in groups:
        cells = [f"{b.predicted:.2f} / {b.observed:.2f}" for b in bins]
        cells += [""] * (_BINS - len(cells))
        gap = max((b.gap for b in bins), default=0.0)
        lines.append(f"| {name} | {sum(b.count for b in bins)} | " + " | ".join(cells) + f" | {gap:.2f} |")
    return "\n".join(lines) + "\n"


def bins_of(forecasts: Iterable[Forecast]) -> list[Bin]:
    """Return bins of equal counts in the order of their chances, of at least 300 forecasts each."""
    ordered = sorted(forecasts, key=lambda f: f.chance)
    number = max(1, min(_BINS, len(ordered) // _OF_A_BIN))
    size = -(-len(ordered) // number) if ordered else 1
    parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [
        Bin(
            count=len(part),
            predicted=sum(f.chance for f in part) / len(part),
            observed=sum(f.failed for f in part) / len(part),
        )
        for part in parts
    ]


def _by_phase(forecasts: Iterable[Forecast]) -> Iterator[tuple[str, list[Bin]]]:
    groups: dict[str, list[Forecast]] = defaultdict(list)
    for forecast in forecasts:
        groups[forecast.phase].append(forecast)
    for phase in MET:
        if groups[phase.value]:
            yield phase.value, bins_of(groups[phase.value])


def forecasts_of(task: tuple[Stratum, int]) -> list[Forecast]:
    """Return the chances of every launch of one job, by its stratum and seed."""
    world = undecided(task[0], seed=task[1])
    accepted = world.accepted
    recovery = msgspec.structs.replace(accepted.job.recovery, preflight=Preflight.APPLY)
    job = msgspec.structs.replace(accepted.job, recovery=recovery)
    events: list[Event] = [msgspec.structs.replace(accepted, job=job)]
    result: list[Forecast] = []
    for number in range(1, _LAUNCHES + 1):
        action = decide(tuple(events))
        if not isinstance(action, Launch):
            break
        ran = run(world, action.knobs)
        failure = ran.failure if ran.failure and ran.failure.step <= job.goal.steps else None
        result += _forecasts(tuple(events), world, action.knobs)
        if failure is None:
            break
        events.append(Decided(remedy=action.remedy, reason=action.reason))
        events += rows(world, action.knobs, ran, number, lasted=max(0, failure.step - 1), searching=False)
    return result


def _forecasts(events: tuple[Event, ...], world: World, knobs: Knobs) -> Iterator[Forecast]:
    """Yield the chances of all phases, as the policy saw them before the launch, and which would fail.

    Those that an attempt does not reach because another one failed count as well: what is forecast is each
    phase by itself.
    """
    view = outlook(fold(events))
    if view is None:
        return
    estimate = view.estimates((knobs,))
    prediction = predicted(view.calibration, estimate)
    risks = chances(estimate, prediction)
    first = len(events) == 1
    failing = overflowing(world, knobs, steps=world.accepted.job.goal.steps)
    for phase in MET:
        yield Forecast(
            phase=phase.value,
            placement=world.accepted.profile.placement.value,
            first=first,
            chance=float(risks[PHASES.index(phase), 0]),
            failed=phase in failing,
        )


if __name__ == "__main__":
    raise SystemExit(main())
