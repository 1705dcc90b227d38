"""Judge a search's candidates by the calibrated estimate: which must not run, and which are worth a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.policies.estimate.belief.calibration import Prediction, predicted
from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.outlook import (
    Outlook,
    any_of,
    chances,
    less_than,
    outlook,
    with_host_and_pool,
)
from autotune.policies.recovery.step_times import Axes, Offered, Pace, offered, pace_of, slower
from autotune.policies.remedies.beam_search import beam, in_order
from autotune.policies.search.schedule import trials_on_a_node
from autotune.policies.search.space import Dimension
from autotune.policies.search.trials import unit_of
from autotune.policies.values.events import Accepted, Event, Result, Tried
from autotune.policies.values.failure import HOST_LIMIT
from autotune.policies.values.history import fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement

# The chance of an overflow above which a candidate is not run, so that about one run in twenty overflows.
RISK = 0.07
_OPTIMISM = 0.5  # standard deviations by which a candidate may be faster than predicted
_SPEEDS = 60  # results of each kind from which the pace is fitted
_MARGIN = 1.5  # standard deviations kept free during the beam search
_KEPT = 3
_WEIGHTS = (0.03, 0.3, 3.0, 30.0)  # of the overflow against the relative step time
_SURELY, _AS_FAST = 2.0, 0.1  # standard deviations, and a share for the error of the model beyond them

Neighbours: TypeAlias = Callable[[Knobs], Sequence[Knobs]]


class Forecast:
    """The prediction for configurations before they run; this base class predicts nothing."""

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much a candidate is predicted to overflow, in units of the limits; empty: it fits."""
        return {}

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much each phase is predicted to exceed what it may use; empty if unknown."""
        return {}

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return the share by which a candidate is certainly slower than `best`; 0 if it may be as fast."""
        return 0.0

    def proposals(self, centers: Sequence[Knobs], *, gain: float) -> Sequence[Knobs]:
        """Return the candidates worth a run, most promising first."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight(Forecast):
    """The prediction of the calibrated estimate."""

    view: Outlook
    dimensions: tuple[Dimension, ...]
    neighbours: Neighbours  # configurations that one move reaches
    pace: Pace | None
    needs_less: Callable[[Estimates], NDArray[np.bool_]]  # of what ran out, than each failed attempt

    @property
    def axes(self) -> Axes:
        """The values of the space, by knob."""
        return _axes(self.dimensions)

    @property
    def headroom(self) -> float:
        """The share of every memory that must stay free."""
        return self.view.run.accepted.job.goal.headroom

    @property
    def host_share(self) -> float:
        """The share of a node's host memory that a trial may use beside parallel trials."""
        accepted = self.view.run.accepted
        parallel = accepted.job.search.parallel
        return HOST_LIMIT / trials_on_a_node(accepted.profile, accepted.cluster, parallel=parallel)

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much a candidate is predicted to overflow, in units of the limits; empty: it fits."""
        one = assess(self, (knobs,))
        expected = _expected(self, one.estimate, one.prediction)
        out = {phase: value for phase, value in expected.items() if value > 0}
        if one.risk[0] > RISK:
            gpu = (one.prediction.gpu[:, 0] + one.prediction.gpu_error[:, 0]) / one.estimate.gpu_capacity[
                :, 0
            ] - 1
            host = (
                float(((one.prediction.host + one.prediction.host_error)[:, 0]).max())
                / (self.host_share * one.estimate.host_capacity)
                - 1
            )
            worst = {phase.value: float(gpu[place]) for place, phase in enumerate(PHASES)} | {"host": host}
            worst["pool"] = -float(one.prediction.pool[0])
            name = max(worst, key=lambda key: worst[key])
            out[name] = max(out.get(name, 0.0), worst[name], 0.001)
        if not out and not one.allowed[0]:
            out["failed before"] = 0.001  # it needs no less of a memory than an attempt that ran out of it
        return {name: round(value, 4) for name, value in out.items()}

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much each phase's predicted peak exceeds what it may use, in units of the limit."""
        estimate = self.view.estimates((knobs,))
        return _expected(self, estimate, predicted(self.view.calibration, estimate))

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return the share by which a candidate is certainly slower than `best`; 0 if it may be as fast."""
        if self.pace is None:
            return 0.0
        both = offered(self.view.estimates((knobs, best)), (knobs, best), self.axes)
        more, error = slower(self.pace, both.part(slice(0, 1)), both.part(slice(1, 2)))
        least = float(more[0] - _SURELY * error[0])
        return least if least > _AS_FAST else 0.0

    def proposals(self, centers: Sequence[Knobs], *, gain: float) -> tuple[Knobs, ...]:
        """Return the candidates that are predicted to fit and are worth a run, fastest first.

        A beam search assesses every single move from `centers` (the fastest so far first) and continues from
        the best by several weights of fit against speed. A gain below `gain` over the fastest is not worth a
        run.
        """
        reference = self.view.estimates(centers[:1])
        center = offered(reference, centers[:1], self.axes)
        risky: list[NDArray[np.bool_]] = []

        def score(knobs: list[Knobs]) -> tuple[Floats, Floats]:
            one = assess(self, knobs)
            risky.append(~one.allowed)
            return _hoped(self, knobs, one.estimate, reference, center), one.over

        every, slow, _ = beam(centers, self.neighbours, score, weights=_WEIGHTS, kept=_KEPT)
        refused = np.concatenate(risky)
        enough = np.inf if self.pace is None else -gain
        order = in_order(np.where(refused, np.inf, slow)).tolist()
        return tuple(every[i] for i in order if not refused[i] and slow[i] <= enough)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The predictions for many candidates."""

    estimate: Estimates
    prediction: Prediction
    risk: Floats  # chance that some memory overflows
    over: Floats  # overflow with the margin, in units of the limits
    allowed: NDArray[np.bool_]  # whether it may run


def foreseen(
    accepted: Accepted,
    events: Iterable[Event],
    results: Sequence[Tried],
    dimensions: Sequence[Dimension],
    *,
    neighbours: Neighbours,
) -> Foresight | None:
    """Return the prediction after these events; None if no model is known or the ladder is to decide."""
    run = fold((accepted, *events), trials=True)
    view = outlook(run)
    if view is None:
        return None
    # The few steps of a trial do not show that the hours of the winner fit.
    view = replace(view, calibration=replace(view.calibration, completed=()))
    failed = [a for a in run.attempts if a.diagnosis is not None and a.diagnosis.cause.is_memory]
    measured = _telling_speeds(results)
    pace = None
    if measured:
        knobs = [r.knobs for r in measured]
        estimate = view.estimates(knobs)
        pace = pace_of(
            offered(estimate, knobs, _axes(dimensions)),
            estimate.step_s,
            [r.rate for r in measured],
            [r.noise or 0.0 for r in measured],
            overlapped=accepted.profile.placement is Placement.ASYNCHRONOUS,
        )
    return Foresight(
        view=view,
        dimensions=tuple(dimensions),
        neighbours=neighbours,
        pace=pace,
        needs_less=less_than(view, failed),
    )


def _axes(dimensions: Sequence[Dimension]) -> Axes:
    return {d.knob: d.values for d in dimensions}


def _telling_speeds(results: Sequence[Tried]) -> list[Tried]:
    """Return the measured results that are most informative about speed: the fastest and the latest."""
    unit = unit_of(results)
    measured = [r for r in results if r.rate and r.unit is unit and r.result in (Result.FITS, Result.SLOW)]
    before, latest = measured[:-_SPEEDS], measured[-_SPEEDS:]
    fastest = sorted(before, key=lambda r: r.rate, reverse=True)[:_SPEEDS]
    return [*fastest, *latest]


def assess(sight: Foresight, knobs: Sequence[Knobs]) -> Assessment:
    """Return the predictions for candidates."""
    estimate = sight.view.estimates(knobs)
    prediction = predicted(sight.view.calibration, estimate)
    risk = any_of(chances(estimate, prediction, headroom=0.0, host_share=sight.host_share))
    gpu = prediction.gpu / estimate.gpu_capacity - (1 - sight.headroom)
    tight = (prediction.gpu + _MARGIN * prediction.gpu_error) / estimate.gpu_capacity - 1
    over = np.maximum(0.0, np.maximum(gpu, tight)).sum(axis=0)
    over = with_host_and_pool(over, estimate, prediction, margin=_MARGIN, host_share=sight.host_share)
    allowed = (gpu <= 0).all(axis=0) & (risk <= RISK) & sight.needs_less(estimate)
    return Assessment(estimate=estimate, prediction=prediction, risk=risk, over=over, allowed=allowed)


def _expected(sight: Foresight, estimate: Estimates, prediction: Prediction) -> dict[str, float]:
    shares = prediction.gpu[:, 0] / estimate.gpu_capacity[:, 0] - (1 - sight.headroom)
    out = {
        p.value: float(s)
        for p, s in zip(PHASES, shares, strict=True)
        if estimate.gpu_capacity[PHASES.index(p), 0] < np.inf
    }
    if np.isfinite(estimate.host_capacity):
        out["host"] = float(prediction.host[:, 0].max()) / (HOST_LIMIT * estimate.host_capacity) - 1
    return out


def _hoped(
    sight: Foresight, knobs: Sequence[Knobs], estimate: Estimates, reference: Estimates, center: Offered
) -> Floats:
    """Return an optimistic share by which steps take longer than the reference's; negative is faster."""
    if sight.pace is None:
        plain: Floats = estimate.step_s / float(reference.step_s[0]) - 1
        return plain
    more, error = slower(sight.pace, offered(estimate, knobs, sight.axes), center)
    hoped: Floats = more - _OPTIMISM * error
    return hoped
