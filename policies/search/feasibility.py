"""What the calibrated estimate says of a search's candidates: which may not run, which are worth a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.policies.estimate.calibration import Prediction, predicted
from autotune.policies.estimate.gaussian import Floats, exceeded
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.ranking import Outlook, outlook
from autotune.policies.search.packing import trials_on_a_node
from autotune.policies.search.space import Dimension
from autotune.policies.search.step_time_model import Offered, Pace, offered, pace_of, slower
from autotune.policies.search.trials import unit_of
from autotune.policies.values.events import Accepted, Event, Result, Tried
from autotune.policies.values.failure import HOST_LIMIT, Cause
from autotune.policies.values.history import Attempt, fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement

# The chance that some memory overflows above which a candidate is not run; one in twenty runs may.
RISK = 0.07
_OPTIMISM = 0.5  # standard deviations by which a candidate may be faster than predicted
_SPEEDS = 60  # results of each kind that the pace looks at
_MARGIN = 1.5  # standard deviations kept free while looking around
_ROUNDS, _KEPT = 6, 3
_WEIGHTS = (0.03, 0.3, 3.0, 30.0)  # of what does not fit against the share of a step's seconds
_SURELY, _AS_FAST = 2.0, 0.1  # standard deviations, and the share by which no model is off beyond them

Neighbours: TypeAlias = Callable[[Knobs], Sequence[Knobs]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """Everything that judges candidates before they run."""

    view: Outlook
    dimensions: tuple[Dimension, ...]
    neighbours: Neighbours  # what one move leads to
    pace: Pace | None
    failed: tuple[Attempt, ...]
    asked: Estimates  # by the failed attempts, of each memory
    expected: Prediction  # of the failed attempts, before any growth

    @property
    def headroom(self) -> float:
        """The share of every memory that is to stay free."""
        return self.view.run.accepted.job.goal.headroom

    @property
    def host_share(self) -> float:
        """The share of a node's host memory that a trial may use beside those that run with it."""
        accepted = self.view.run.accepted
        parallel = accepted.job.search.parallel
        return HOST_LIMIT / trials_on_a_node(accepted.profile, accepted.cluster, parallel=parallel)

    def offered(self, knobs: Sequence[Knobs], found: Estimates | None = None) -> Offered:
        """Return candidates as the pace sees them."""
        return offered(self.view.estimates(knobs) if found is None else found, knobs, self.dimensions)

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much a candidate is foreseen to overflow, in units of the limits; empty: it fits."""
        one = judged(self, (knobs,))
        expected = _expected(self, one.found, one.seen)
        out = {phase: value for phase, value in expected.items() if value > 0}
        if one.risk[0] > RISK:
            gpu = (one.seen.gpu[:, 0] + one.seen.gpu_error[:, 0]) / one.found.gpu_capacity[:, 0] - 1
            host = (
                float(((one.seen.host + one.seen.host_error)[:, 0]).max())
                / (self.host_share * one.found.host_capacity)
                - 1
            )
            worst = {phase.value: float(gpu[place]) for place, phase in enumerate(PHASES)} | {"host": host}
            worst["pool"] = -float(one.seen.pool[0])
            name = max(worst, key=lambda key: worst[key])
            out[name] = max(out.get(name, 0.0), worst[name], 0.001)
        if not out and not one.allowed[0]:
            out["failed before"] = 0.001  # it needs no less of a memory than an attempt that ran out of it
        return {name: round(value, 4) for name, value in out.items()}

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much each phase's expected peak exceeds what it may use, in units of the limit."""
        found = self.view.estimates((knobs,))
        return _expected(self, found, predicted(self.view.calibration, found))

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return by what share a candidate is surely slower than the fastest so far; 0: it may be as fast."""
        if self.pace is None:
            return 0.0
        both = self.offered((knobs, best))
        more, error = slower(self.pace, both.part(slice(0, 1)), both.part(slice(1, 2)))
        least = float(more[0] - _SURELY * error[0])
        return least if least > _AS_FAST else 0.0

    def proposals(self, centers: Sequence[Knobs], *, gain: float) -> tuple[Knobs, ...]:
        """Return the candidates that are foreseen to fit and are worth a run, the fastest first.

        From the centers, the fastest so far first, every single move is judged; the best by several weights
        of fit against speed are moved again. Less than `gain` above the fastest so far is not worth a run.
        """
        known: dict[Knobs, int] = {}
        slow, over, risky = np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool)
        front = list(centers)
        expanded: set[Knobs] = set()
        reference = self.view.estimates(centers[:1])
        center = offered(reference, centers[:1], self.dimensions)
        for _ in range(_ROUNDS):
            new = list(
                dict.fromkeys(
                    k for center in front for k in (center, *self.neighbours(center)) if k not in known
                )
            )
            expanded.update(front)
            if new:
                one = judged(self, new)
                known |= {k: len(known) + place for place, k in enumerate(new)}
                slow = np.concatenate([slow, _hoped(self, new, one.found, reference, center)])
                over = np.concatenate([over, one.over])
                risky = np.concatenate([risky, ~one.allowed])
            every = list(known)
            front = []
            for weight in _WEIGHTS:
                order = _ranked(slow + weight * over)[:_KEPT]
                front += [every[i] for i in order if every[i] not in expanded and every[i] not in front]
            if not front:
                break
        enough = np.inf if self.pace is None else -gain
        order = _ranked(np.where(risky, np.inf, slow))
        every = list(known)
        return tuple(every[i] for i in order.tolist() if not risky[i] and slow[i] <= enough)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What is foreseen of many candidates."""

    found: Estimates
    seen: Prediction
    risk: Floats  # chance that some memory overflows
    over: Floats  # what does not fit with its margin, in units of the limits
    allowed: NDArray[np.bool_]  # to run


def foreseen(
    accepted: Accepted,
    events: Iterable[Event],
    results: Sequence[Tried],
    dimensions: Sequence[Dimension],
    *,
    neighbours: Neighbours,
) -> Foresight | None:
    """Return the foresight after these events; None where no model is known or none is wanted."""
    run = fold((accepted, *events), trials=True)
    view = outlook(run)
    if view is None:
        return None
    failed = tuple(a for a in run.attempts if a.diagnosis is not None and a.diagnosis.cause.is_memory)
    measured = _telling_speeds(results)
    pace = None
    if measured:
        knobs = [r.knobs for r in measured]
        found = view.estimates(knobs)
        pace = pace_of(
            offered(found, knobs, dimensions),
            found.step_s,
            [r.rate for r in measured],
            [r.noise or 0.0 for r in measured],
            overlapped=accepted.profile.placement is Placement.ASYNCHRONOUS,
        )
    asked = view.estimates([a.knobs for a in failed])
    return Foresight(
        view=view,
        dimensions=tuple(dimensions),
        neighbours=neighbours,
        pace=pace,
        failed=failed,
        asked=asked,
        expected=predicted(view.calibration, asked, late=False),
    )


def _telling_speeds(results: Sequence[Tried]) -> list[Tried]:
    """Return the measured results that say most about speed: the fastest and the latest."""
    unit = unit_of(results)
    measured = [r for r in results if r.rate and r.unit is unit and r.result in (Result.FITS, Result.SLOW)]
    before, latest = measured[:-_SPEEDS], measured[-_SPEEDS:]
    fastest = sorted(before, key=lambda r: r.rate, reverse=True)[:_SPEEDS]
    return [*fastest, *latest]


def judged(sight: Foresight, knobs: Sequence[Knobs]) -> Judged:
    """Return what is foreseen of candidates."""
    found = sight.view.estimates(knobs)
    seen = predicted(sight.view.calibration, found)
    fits = np.prod(1 - exceeded((found.gpu_capacity - seen.gpu) / seen.gpu_error), axis=0)
    limit = sight.host_share * found.host_capacity
    fits = (
        fits * (1 - exceeded((limit - seen.host) / seen.host_error).max(axis=0)) * (1 - exceeded(seen.pool))
    )
    gpu = seen.gpu / found.gpu_capacity - (1 - sight.headroom)
    tight = (seen.gpu + _MARGIN * seen.gpu_error) / found.gpu_capacity - 1
    host = (seen.host + _MARGIN * seen.host_error) / limit - 1
    over = np.maximum(0.0, np.maximum(gpu, tight)).sum(axis=0) + np.maximum(0.0, host).max(axis=0)
    over = over + 0.1 * np.maximum(0.0, _MARGIN - np.maximum(-20.0, seen.pool))
    allowed = (gpu <= 0).all(axis=0) & (1 - fits <= RISK) & _asks_less(sight, found)
    return Judged(found=found, seen=seen, risk=1 - fits, over=over, allowed=allowed)


def _expected(sight: Foresight, found: Estimates, seen: Prediction) -> dict[str, float]:
    shares = seen.gpu[:, 0] / found.gpu_capacity[:, 0] - (1 - sight.headroom)
    out = {
        p.value: float(s)
        for p, s in zip(PHASES, shares, strict=True)
        if found.gpu_capacity[PHASES.index(p), 0] < np.inf
    }
    if np.isfinite(found.host_capacity):
        out["host"] = float(seen.host[:, 0].max()) / (HOST_LIMIT * found.host_capacity) - 1
    return out


def _ranked(cost: Floats) -> NDArray[np.intp]:
    """Return the places of the costs in rising order; equal ones as they came, on every machine."""
    return np.argsort(np.round(cost, 9), kind="stable")


def _hoped(
    sight: Foresight, knobs: Sequence[Knobs], found: Estimates, reference: Estimates, center: Offered
) -> Floats:
    """Return by what share steps may be hoped to take longer than the reference's; negative is faster."""
    if sight.pace is None:
        plain: Floats = found.step_s / float(reference.step_s[0]) - 1
        return plain
    more, error = slower(sight.pace, offered(found, knobs, sight.dimensions), center)
    hoped: Floats = more - _OPTIMISM * error
    return hoped


def _asks_less(sight: Foresight, found: Estimates) -> NDArray[np.bool_]:
    """Return which candidates need less than every failed attempt of the memory on which it failed."""
    less = np.ones(len(found.step_s), dtype=bool)
    before, after = sight.expected, predicted(sight.view.calibration, found, late=False)
    for column, attempt in enumerate(sight.failed):
        assert attempt.diagnosis is not None
        match attempt.diagnosis.cause:
            case Cause.GPU_OOM if attempt.diagnosis.phase in PHASES:
                place = PHASES.index(attempt.diagnosis.phase)
                less &= after.gpu[place] < before.gpu[place, column]
            case Cause.HOST_OOM:
                less &= after.host.max(axis=0) < before.host[:, column].max()
            case Cause.POOL_TOO_SMALL:
                less &= found.pool_tokens > sight.asked.pool_tokens[column]
            case _:
                pass
    return less
