"""Predict the step times of a run's configurations: the roofline, corrected by measured step times.

The model is a Gaussian process whose mean is the roofline: each part of a step has an unknown factor, and
each knob an unknown effect. Errors that two configurations share cancel in their difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from statistics import median
from typing import TypeAlias

import msgspec
import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.outlook import Outlook
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs, Setting, is_number, new_values
from autotune.policies.values.profile import Placement

Axes: TypeAlias = Mapping[str, Sequence[Setting]]  # the values of each knob, in order

_GROUPS = (
    (Phase.ROLLOUT,),
    (Phase.LOG_PROB,),
    (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
    (Phase.WEIGHT_SYNC,),
)
# A roofline is off by tens of percent and by different amounts for generation and for training; time that no
# phase explains (scheduling, the driver) is a constant share of a step.
_FACTOR_ERROR, _CONSTANT_ERROR = 0.4, 0.15
# Shares of a step by which the effect of one knob alone, and of all together, may differ from the roofline.
_ONE_KNOB, _TOGETHER = 0.06, 0.06
_LENGTH = 0.4  # share of a knob's whole range over which that effect changes
_MEASUREMENT = 0.015  # share by which a step time differs between two runs
_LEAST_FACTOR = 0.2
_LEAST_SHARE = 0.05  # of a usual step, below which no step is predicted
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Configurations as the input of a pace: the predicted seconds of their parts, and their coordinates."""

    rows: Floats  # (configuration, group of phases)
    codes: Floats  # (configuration, knob), 0 to 1

    def part(self, some: slice) -> Offered:
        """Return some of the configurations."""
        return Offered(rows=self.rows[some], codes=self.codes[some])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The belief about the seconds of a step."""

    usual_s: float  # predicted seconds of a usual step
    scale: float  # measured seconds over predicted ones
    factors: Floats  # of each group, if generation and training overlap
    overlapped: bool  # generation and training run at the same time
    known: Offered
    inverse: Floats  # of the covariance of the measurements
    surprise: Floats  # that inverse times the residuals of the measurements from the roofline


def offered(
    estimate: Estimates, knobs: Sequence[Knobs], axes: Axes, *, rollout_s: Floats | None = None
) -> Offered:
    """Return configurations as the input of a pace; `rollout_s` replaces the seconds of generation."""
    groups = [sum(estimate.seconds[PHASES.index(phase)] for phase in group) for group in _GROUPS]
    if rollout_s is not None:
        groups[0] = rollout_s
    codes = np.zeros((len(knobs), len(axes)))
    for column, (knob, values) in enumerate(axes.items()):
        places = {value: place / max(1, len(values) - 1) for place, value in enumerate(values)}
        codes[:, column] = list(map(places.get, map(attrgetter(knob), knobs), repeat(0.0)))
    return Offered(rows=np.stack(groups, axis=1), codes=codes)


def pace_of(
    offers: Offered, step_s: Floats, rates: Sequence[float], noises: Sequence[float], *, overlapped: bool
) -> Pace:
    """Return the pace after at least one configuration, predicted to take `step_s`, ran at `rates`.

    `noises` are the relative standard errors of the rates.
    """
    taken = 1.0 / np.array(rates)
    scale, usual = float(np.median(taken / np.maximum(1e-9, step_s))), float(np.median(step_s))
    target: Floats = taken / scale
    factors: Floats = np.ones(len(_GROUPS))
    if overlapped:
        factors = _factors(offers.rows, target, usual)
    rows = _active(offers.rows, factors, overlapped=overlapped)
    known = Offered(rows=rows, codes=offers.codes)
    error = np.maximum(_MEASUREMENT, np.array(noises)) * target
    covariance = _covariance(known, known, usual) + np.diag(error**2)
    inverse = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    return Pace(
        usual_s=usual,
        scale=scale,
        factors=factors,
        overlapped=overlapped,
        known=known,
        inverse=inverse,
        surprise=inverse @ (target - rows.sum(axis=1)),
    )


def unmeasured(usual_s: float, knobs: int, *, overlapped: bool) -> Pace:
    """Return the pace before any step time was measured: the roofline with its error."""
    return Pace(
        usual_s=usual_s,
        scale=1.0,
        factors=np.ones(len(_GROUPS)),
        overlapped=overlapped,
        known=Offered(rows=np.zeros((0, len(_GROUPS))), codes=np.zeros((0, knobs))),
        inverse=np.zeros((0, 0)),
        surprise=np.zeros(0),
    )


def expected_s(pace: Pace, candidates: Offered) -> Floats:
    """Return the expected seconds of a step on the roofline's scale; times `scale` they are real ones."""
    there = _visible(pace, candidates)
    expected: Floats = there.rows.sum(axis=1) + _covariance(there, pace.known, pace.usual_s) @ pace.surprise
    return np.maximum(expected, _LEAST_SHARE * pace.usual_s)


def slower(pace: Pace, candidates: Offered, reference: Offered) -> tuple[Floats, Floats]:
    """Return the share by which a step takes longer than the reference's, and its standard deviation.

    The reference is one configuration for all candidates, or one for each.
    """
    there, here = _visible(pace, candidates), _visible(pace, reference)
    apart = _covariance(there, pace.known, pace.usual_s) - _covariance(here, pace.known, pace.usual_s)
    own, expected = expected_s(pace, reference), expected_s(pace, candidates)
    # The variance of the difference, given what was measured.
    prior = _together(there, there, pace.usual_s) + _together(here, here, pace.usual_s)
    prior = prior - 2 * _together(there, here, pace.usual_s)
    left = prior - (apart @ pace.inverse * apart).sum(axis=1)
    return expected / own - 1, np.sqrt(np.maximum(0.0, left)) / own


def _visible(pace: Pace, some: Offered) -> Offered:
    return Offered(rows=_active(some.rows, pace.factors, overlapped=pace.overlapped), codes=some.codes)


def _covariance(one: Offered, other: Offered, usual_s: float) -> Floats:
    """Return the prior covariance of the step times' errors in s², shape (len(one), len(other))."""
    rows = Offered(rows=one.rows[:, None, :], codes=one.codes[:, None, :])
    columns = Offered(rows=other.rows[None, :, :], codes=other.codes[None, :, :])
    return _together(rows, columns, usual_s)


def _together(one: Offered, other: Offered, usual_s: float) -> Floats:
    """Return the prior covariance in s² of configurations, pair by pair."""
    apart = ((one.codes - other.codes) / _LENGTH) ** 2
    variance = _FACTOR_ERROR**2 * (one.rows * other.rows).sum(axis=-1) + (_CONSTANT_ERROR * usual_s) ** 2
    alone, far = np.exp(-0.5 * apart).sum(axis=-1), apart.sum(axis=-1)
    result: Floats = variance + usual_s**2 * (_ONE_KNOB**2 * alone + _TOGETHER**2 * np.exp(-0.5 * far))
    return result


def _factors(rows: Floats, target: Floats, usual_s: float) -> Floats:
    """Return the measured factors of the parts of a step in which generation and training overlap."""
    prior = np.ones(rows.shape[1])
    mean: Floats = prior
    for _ in range(_ROUNDS):
        active = _active(rows, mean, overlapped=True)
        weight = 1.0 / (2 * _MEASUREMENT * target) ** 2
        information = np.eye(len(prior)) / _FACTOR_ERROR**2
        solved = np.linalg.solve(
            information + (active * weight[:, None]).T @ active,
            information @ prior + active.T @ (weight * target),
        )
        mean = np.maximum(np.asarray(solved, dtype=np.float64), _LEAST_FACTOR)
    return mean


def _active(rows: Floats, factors: Floats, *, overlapped: bool) -> Floats:
    """Return the seconds of the parts, 0 for a part that a longer one hides."""
    if not overlapped:
        return rows
    generating = rows[:, 0] * factors[0]
    training = rows[:, 1] * factors[1] + rows[:, 2] * factors[2]
    visible = rows.copy()
    visible[generating < training, 0] = 0.0
    visible[generating >= training, 1:3] = 0.0
    return visible


# ---- the step times of a run

_ROLLOUT = PHASES.index(Phase.ROLLOUT)
SURELY = 2.0  # standard deviations beyond which a predicted gain counts as real
_ONE_STEP = 0.1  # relative error of the first step's time, which includes the warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The belief about the step times around one configuration."""

    view: Outlook
    present: Knobs | None  # None: every prediction of speed is accepted
    axes: Axes
    pace: Pace

    def seconds(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Floats:
        """Return the expected seconds of a step."""
        result: Floats = self.pace.scale * expected_s(self.pace, self._offered(estimate, knobs))
        return result

    def sure(self, estimate: Estimates, knobs: Sequence[Knobs], acting: Collection[str]) -> Floats:
        """Return the expected seconds without the gains that may be errors of the prediction.

        The gain by changes of knobs outside `acting` counts only if it exceeds twice the error of that
        difference, which is small between configurations with measured step times. It is compared both in
        addition to the other changes and alone, because these may be slow only without it.
        """
        taken = self.seconds(estimate, knobs)
        if self.present is None:
            return taken
        without = [self.only(k, acting) for k in knobs]
        moved = [place for place, other in enumerate(without) if other != knobs[place]]
        if moved:
            taken[moved] *= self._unsure(
                [knobs[place] for place in moved], [without[place] for place in moved]
            )
        return taken

    def _unsure(self, knobs: Sequence[Knobs], without: Sequence[Knobs]) -> Floats:
        """Return the factors by which seconds grow if uncertain gains over `without` do not count."""
        assert self.present is not None
        alone = [
            msgspec.structs.replace(self.present, **new_values(before, after))
            for before, after in zip(without, knobs, strict=True)
        ]
        result = np.ones(len(knobs))
        for here, there in ((knobs, without), (alone, [self.present] * len(knobs))):
            gain, error = self.gain(here, there)
            result = np.where((gain > 0) & (gain <= SURELY * error) & (result == 1), 1 / (1 - gain), result)
        return result

    def gain(self, knobs: Sequence[Knobs], others: Sequence[Knobs]) -> tuple[Floats, Floats]:
        """Return how much faster each configuration is than its counterpart, and the error.

        Both are shares of the counterpart's seconds per step, of shape (len(knobs),); negative is slower.
        """
        here = self._offered(self.view.estimates(others), others)
        more, error = slower(self.pace, self._offered(self.view.estimates(knobs), knobs), here)
        return -more, error

    def only(self, knobs: Knobs, acting: Collection[str]) -> Knobs:
        """Return the present configuration with those changes of another one that are of `acting` knobs."""
        assert self.present is not None
        changes = new_values(self.present, knobs)
        return msgspec.structs.replace(
            self.present, **{knob: value for knob, value in changes.items() if knob in acting}
        )

    def _offered(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Offered:
        return offered(estimate, knobs, self.axes, rollout_s=self._rollout_s(estimate, knobs))

    def _rollout_s(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Floats:
        """Return the seconds of generation, which a smaller pool or fewer requests never shorten."""
        rollout: Floats = estimate.seconds[_ROLLOUT].copy()
        if self.present is None:
            return rollout
        fuller = [_fuller(k, self.present) for k in knobs]
        less = [place for place, other in enumerate(fuller) if other is not knobs[place]]
        if less:
            reference = self.view.estimates([fuller[place] for place in less]).seconds[_ROLLOUT]
            rollout[less] = np.maximum(rollout[less], reference)
        return rollout


def step_times(
    view: Outlook, present: Knobs | None, options: Mapping[str, Sequence[Setting]] | None = None
) -> StepTimes:
    """Return the belief about step times; `options`: by knob, the values that candidates may have."""
    run = view.run
    overlapped = run.accepted.profile.placement is Placement.ASYNCHRONOUS
    measured = _measured(run)
    axes = {
        knob: _ordered([*values, *(getattr(k, knob) for k in measured)])
        for knob, values in (options or {}).items()
    }
    if measured:
        knobs = list(measured)
        estimate = view.estimates(knobs)
        rates, noises = zip(*measured.values(), strict=True)
        offers = offered(estimate, knobs, axes)
        pace = pace_of(offers, estimate.step_s, rates, noises, overlapped=overlapped)
    else:
        usual = float(view.estimates((present or run.accepted.profile.knobs,)).step_s[0])
        pace = unmeasured(usual, len(axes), overlapped=overlapped)
    return StepTimes(view=view, present=present, axes=axes, pace=pace)


def _measured(run: Run) -> dict[Knobs, tuple[float, float]]:
    """Return the rates of the configurations that ran for a step, with their relative standard errors."""
    taken: dict[Knobs, list[float]] = {}
    for attempt in run.attempts:
        timed = [p.seconds for p in attempt.progress if p.seconds]
        if timed:
            # The first step of an attempt includes the warm-up.
            taken.setdefault(attempt.knobs, []).extend(timed[1:] or timed)
    return {
        knobs: (1 / median(timed), float(np.std(timed, ddof=1)) / median(timed) / len(timed) ** 0.5)
        if len(timed) > 1
        else (1 / timed[0], _ONE_STEP)
        for knobs, timed in taken.items()
    }


def _ordered(values: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return distinct values, numbers in ascending order."""
    result = list(dict.fromkeys(values))
    return (*sorted(filter(is_number, result)), *(value for value in result if not is_number(value)))


def _fuller(knobs: Knobs, present: Knobs) -> Knobs:
    """Return the configuration with at least the pool and the requests of the present one."""
    changes = {
        knob: before
        for knob in ("memory_fraction", "concurrency")
        if (before := getattr(present, knob)) is not None
        and (after := getattr(knobs, knob)) is not None
        and after < before
    }
    return msgspec.structs.replace(knobs, **changes) if changes else knobs
