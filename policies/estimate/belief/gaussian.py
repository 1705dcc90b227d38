"""A Gaussian belief about factors of an estimate, updated by measurements and bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_FAR = 6.0  # standard deviations beyond which a tail is taken from its asymptote

_SURPRISE, _STRONG_SURPRISE = 1.0, 2.0  # standard deviations
_WIDEST = 4.0
_PROJECTIONS = 1000
_TOUCHING = 1e-3  # standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Deviations from the estimate: their mean and covariance."""

    mean: Floats
    covariance: Floats
    # Factor by which a bound showed each deviation's error to be too small; 1: not at all.
    surprise: Floats | None = None

    def about(self, row: Floats) -> tuple[float, float]:
        """Return mean and standard deviation of one linear combination of the deviations."""
        return float(row @ self.mean), math.sqrt(max(0.0, float(row @ self.covariance @ row)))


def measured(belief: Belief, row: Floats, value: float, *, error: float) -> Belief:
    """Return the belief after the combination `row` was measured as `value` with deviation `error`."""
    spread = belief.covariance @ row
    total = float(row @ spread) + error**2
    if total <= 0:
        return belief
    gain = spread / total
    return replace(
        belief,
        mean=belief.mean + gain * (value - float(row @ belief.mean)),
        covariance=belief.covariance - np.outer(gain, spread),
    )


def replaced(belief: Belief, columns: Sequence[int], value: float, *, error: float) -> Belief:
    """Return the belief with one known value of some deviations, whatever was believed of them."""
    mean, covariance = belief.mean.copy(), belief.covariance.copy()
    mean[columns] = value
    covariance[columns, :] = covariance[:, columns] = 0.0
    covariance[np.ix_(columns, columns)] = error**2
    return replace(belief, mean=mean, covariance=covariance)


def within(belief: Belief, least: Floats, most: Floats) -> Belief:
    """Return the belief with the mean of every deviation between its bounds, of shape (deviations,).

    The one furthest outside moves to its bound first, and the others move with it by the covariance, so that
    measured combinations keep their values. The covariance is unchanged, because a bound does not say how far
    inside it the truth is.
    """
    mean, covariance = belief.mean.copy(), belief.covariance
    errors = np.sqrt(np.maximum(1e-30, np.diag(covariance)))
    for _ in range(_PROJECTIONS):
        outside = np.maximum(least - mean, mean - most) / errors
        worst = int(outside.argmax())
        if outside[worst] <= _TOUCHING:
            break
        bound = least[worst] if mean[worst] < least[worst] else most[worst]
        mean += covariance[:, worst] * (bound - mean[worst]) / errors[worst] ** 2
    return replace(belief, mean=np.clip(mean, least, most))


def less_sure(belief: Belief, surprise: Floats) -> Belief:
    """Return the belief with wider errors for surprising deviations and those correlated with them."""
    errors = np.sqrt(np.maximum(1e-30, np.diag(belief.covariance)))
    shared = belief.covariance / np.outer(errors, errors)
    wider = np.sqrt(1.0 + (np.square(shared) * (np.square(surprise) - 1.0)[None, :]).max(axis=1))
    return replace(belief, covariance=belief.covariance * np.outer(wider, wider))


def at_least(
    belief: Belief, row: Floats, bound: float, *, error: float, beyond: float | None = None
) -> Belief:
    """Return the belief after the combination was observed to be at least `bound`: a truncated Gaussian.

    If the bound is a strong surprise, the belief does not say how far above it the truth is, and `beyond` is
    assumed if given.
    """
    spread = belief.covariance @ row
    variance = float(row @ spread)
    total = variance + error**2
    if variance <= 0:
        return belief
    below = (bound - float(row @ belief.mean)) / math.sqrt(total)
    if below > _SURPRISE:
        # Such a surprise means that the belief was too narrow: widen every deviation that contributes.
        wider = np.where(row != 0, min(_WIDEST, below / _SURPRISE), 1.0)
        before = np.ones_like(wider) if belief.surprise is None else belief.surprise
        belief = replace(
            belief,
            covariance=belief.covariance * np.outer(wider, wider),
            surprise=np.maximum(before, wider),
        )
        spread = belief.covariance @ row
        total = float(row @ spread) + error**2
        if beyond is not None and below > _STRONG_SURPRISE:
            thought = measured(belief, row, bound + beyond, error=beyond)
            return at_least(thought, row, bound, error=error)
        below = (bound - float(row @ belief.mean)) / math.sqrt(total)
    deviation = math.sqrt(total)
    shift = _hazard(below)
    shrink = shift * (shift - below)
    gain = spread / total
    return replace(
        belief,
        mean=belief.mean + gain * deviation * shift,
        covariance=belief.covariance - np.outer(gain, spread) * min(1.0, max(0.0, shrink)),
    )


def at_most(belief: Belief, row: Floats, bound: float, *, error: float) -> Belief:
    """Condition the belief on an upper bound of the combination."""
    return at_least(belief, -row, -bound, error=error)


def doubted(belief: Belief, column: int, error: float) -> Belief:
    """Return the belief with a standard deviation of at least `error` for one deviation."""
    present = math.sqrt(max(1e-18, float(belief.covariance[column, column])))
    # Its covariance with the others is not widened.
    covariance = belief.covariance.copy()
    covariance[column, column] *= max(1.0, error / present) ** 2
    return replace(belief, covariance=covariance)


def exceeded(excess: Floats) -> Floats:
    """Return the chance that a normal deviate exceeds `excess` standard deviations."""
    # Logistic approximation of the normal distribution, within 0.0095 of it (Bowling et al. 2009).
    result: Floats = 1.0 / (1.0 + np.exp(np.clip(1.702 * excess, -60.0, 60.0)))
    return result


def _hazard(place: float) -> float:
    """Return the mean of a standard normal deviate known to be above `place`."""
    if place > _FAR:
        return place + 1.0 / place
    density = math.exp(-0.5 * place * place) / math.sqrt(2.0 * math.pi)
    return density / (0.5 * math.erfc(place / math.sqrt(2.0)))
