"""How fast configurations are: predicted phase times, moved by the step times that were measured.

A Gaussian process whose mean is the roofline: each part of a step has a factor that is not known, and each
knob may do what no roofline says. What two configurations have in common says nothing of their difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs, Setting

Axes: TypeAlias = Mapping[str, Sequence[Setting]]  # the values of each knob, in order

_GROUPS = (
    (Phase.ROLLOUT,),
    (Phase.LOG_PROB,),
    (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
    (Phase.WEIGHT_SYNC,),
)
# A roofline is off by tens of percent and by different amounts for generation and for training; what no
# phase explains (scheduling, the driver) is a constant share of a step.
_FACTOR_ERROR, _CONSTANT_ERROR = 0.4, 0.15
# Shares of a step by which one knob alone, and all together, may do what the roofline does not say.
_ONE_KNOB, _TOGETHER = 0.06, 0.06
_LENGTH = 0.4  # of a knob's whole range, over which that changes
_MEASUREMENT = 0.015  # share by which a step time is off between two runs
_LEAST_FACTOR = 0.2
_LEAST_SHARE = 0.05  # of a usual step, below which no step is expected
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What a configuration is to the pace: the predicted seconds of its parts, and its place in the space."""

    rows: Floats  # (configuration, group of phases)
    codes: Floats  # (configuration, knob), 0 to 1

    def part(self, some: slice) -> Offered:
        """Return some of the configurations."""
        return Offered(rows=self.rows[some], codes=self.codes[some])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is believed of the seconds of a step."""

    usual_s: float  # predicted seconds of a usual step
    scale: float  # measured seconds over predicted ones
    factors: Floats  # of each group, for what overlaps
    overlapped: bool  # generation and training run at the same time
    known: Offered
    inverse: Floats  # of the covariance of what was measured
    surprise: Floats  # that inverse times what was measured beyond the roofline


def offered(
    estimate: Estimates, knobs: Sequence[Knobs], axes: Axes, *, rollout_s: Floats | None = None
) -> Offered:
    """Return configurations as the pace sees them; `rollout_s` are the seconds of generation, if others."""
    groups = [sum(estimate.seconds[PHASES.index(phase)] for phase in group) for group in _GROUPS]
    if rollout_s is not None:
        groups[0] = rollout_s
    places: dict[str, dict[Setting, float]] = {
        knob: {value: place / max(1, len(values) - 1) for place, value in enumerate(values)}
        for knob, values in axes.items()
    }
    codes = [[place.get(getattr(k, knob), 0.0) for knob, place in places.items()] for k in knobs]
    return Offered(rows=np.stack(groups, axis=1), codes=np.array(codes).reshape(len(knobs), len(axes)))


def pace_of(
    seen: Offered, step_s: Floats, rates: Sequence[float], noises: Sequence[float], *, overlapped: bool
) -> Pace:
    """Return the pace after at least one configuration with these predicted step times ran at these rates.

    `noises` are the relative standard errors of the rates.
    """
    taken = 1.0 / np.array(rates)
    scale, usual = float(np.median(taken / np.maximum(1e-9, step_s))), float(np.median(step_s))
    target: Floats = taken / scale
    factors: Floats = np.ones(len(_GROUPS))
    if overlapped:
        factors = _factors(seen.rows, target, usual)
    rows = _active(seen.rows, factors, overlapped=overlapped)
    known = Offered(rows=rows, codes=seen.codes)
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
    """Return the expected seconds of a step, in predicted ones: `scale` makes measured ones of them."""
    there = _shown(pace, candidates)
    expected: Floats = there.rows.sum(axis=1) + _covariance(there, pace.known, pace.usual_s) @ pace.surprise
    return np.maximum(expected, _LEAST_SHARE * pace.usual_s)


def slower(pace: Pace, candidates: Offered, reference: Offered) -> tuple[Floats, Floats]:
    """Return by how much a step takes longer than the reference's, as a share of it, and how surely.

    The reference is one configuration for all candidates, or one for each.
    """
    there, here = _shown(pace, candidates), _shown(pace, reference)
    apart = _covariance(there, pace.known, pace.usual_s) - _covariance(here, pace.known, pace.usual_s)
    own, expected = expected_s(pace, reference), expected_s(pace, candidates)
    # The variance of the difference, given what was measured.
    prior = _together(there, there, pace.usual_s) + _together(here, here, pace.usual_s)
    prior = prior - 2 * _together(there, here, pace.usual_s)
    left = prior - (apart @ pace.inverse * apart).sum(axis=1)
    return expected / own - 1, np.sqrt(np.maximum(0.0, left)) / own


def _shown(pace: Pace, some: Offered) -> Offered:
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
    shown = rows.copy()
    shown[generating < training, 0] = 0.0
    shown[generating >= training, 1:3] = 0.0
    return shown
