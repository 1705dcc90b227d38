"""How surely a memory drifts, when what it holds may also wander from step to step without a drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.forecast.spread import clipped

# How much of a step's noise is left in the next one, in the models without a random walk.
_LEFT = np.array([[0.3], [0.6]])
# Variance of a step of the random walk, as a share of the variance of a single step's noise.
_SHARES = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
# Standard errors by which a slope differs from none: 5 % false alarms, one-sided, of a series that is tested
# again and again, as at ten equally spaced looks (Pocock 1977; Jennison and Turnbull 2000, table 2.1).
SURE = 2.27
_KEPT = 128  # designs: one for each number of steps in a window, 14 MiB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """Steps by which a slope is estimated, in the basis in which noise and random walk are independent."""

    slope: Floats  # weights of ordinary least squares
    basis: Floats  # orthonormal, orthogonal to every line
    powers: Floats  # variance of the random walk along each of them
    along: Floats  # its covariance with the slope
    own: float  # its variance of the slope


def drift(steps: Floats, values: Floats, *, resembling: bool = True) -> tuple[float, float, float]:
    """Return a series' slope, its standard error, and the standard deviation of a step of its random walk.

    It is the local level model with a constant drift (Harvey 1989, chapter 2.3), by generalized least
    squares. With `resembling` it may as well be noise that resembles that of the step before, as a sawtooth
    does, and wanders nowhere. The share of the random walk and what is left of noise are averaged over their
    restricted likelihood (Patterson and Thompson 1971). The error is widened, since few steps tell it.
    """
    run, values = steps - steps[0], clipped(values)
    models = [_walking(run, values)]
    if resembling:
        models.append(_resembling(run - run.mean(), values))
    slopes, errors, likelihoods, walks = (np.concatenate(each) for each in zip(*models, strict=True))
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    slope = float(weights @ slopes)
    error = math.sqrt(max(0.0, float(weights @ (errors + (slopes - slope) ** 2))))
    return slope, error * _widened(len(run) - 2), math.sqrt(float(weights @ walks))


def _widened(free: int) -> float:
    """Return Student's quantile as a share of the normal one (Abramowitz and Stegun 1964, 26.7.5)."""
    return 1 + (SURE**2 + 1) / (4 * free) + (5 * SURE**4 + 16 * SURE**2 + 3) / (96 * free**2)


def _walking(run: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return slope, its variance, likelihood and variance of a step of the walk, by share of the walk."""
    design = _design(tuple(run.tolist()))
    projected, free = design.basis.T @ values, len(design.powers)
    powers = 1 + _SHARES[:, None] * design.powers
    noise = np.maximum((projected**2 / powers).sum(axis=1) / free, np.finfo(float).tiny)
    slopes = design.slope @ values - _SHARES * (design.along * projected / powers).sum(axis=1)
    errors = noise * (
        float(design.slope @ design.slope)
        + _SHARES * design.own
        - _SHARES**2 * (design.along**2 / powers).sum(axis=1)
    )
    likelihoods = -0.5 * (np.log(powers).sum(axis=1) + free * np.log(noise))
    return slopes, errors, likelihoods, noise * _SHARES


def _resembling(run: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the same without a walk, by what is left of a step's noise in the next one."""
    kept = _LEFT ** np.maximum(1.0, np.diff(run))
    new = np.sqrt(1 - kept**2)

    def alone(series: Floats) -> Floats:
        """Return what each step adds to those before it, in standard deviations of its noise."""
        first = np.full_like(_LEFT, series[0])
        return np.concatenate([first, (series[1:] - kept * series[:-1]) / new], axis=1)

    level, line, seen = alone(np.ones_like(run)), alone(run), alone(values)
    ones, both, lines = (level**2).sum(axis=1), (level * line).sum(axis=1), (line**2).sum(axis=1)
    on_level, on_line = (level * seen).sum(axis=1), (line * seen).sum(axis=1)
    power, free = ones * lines - both**2, len(run) - 2
    slopes = (ones * on_line - both * on_level) / power
    levels = (lines * on_level - both * on_line) / power
    rest = seen - levels[:, None] * level - slopes[:, None] * line
    noise = np.maximum((rest**2).sum(axis=1) / free, np.finfo(float).tiny)
    plain = math.log(len(run) * float(run @ run))
    spread = 2 * np.log(new).sum(axis=1) + np.log(power) - plain
    return slopes, noise * ones / power, -0.5 * (spread + free * np.log(noise)), np.zeros(len(_LEFT))


@lru_cache(maxsize=_KEPT)
def _design(steps: tuple[float, ...]) -> _Design:
    run = np.array(steps)
    line = np.stack([np.ones_like(run), run - run.mean()], axis=1)
    slope = line[:, 1] / float(line[:, 1] @ line[:, 1])
    complement = np.linalg.qr(line, mode="complete")[0][:, 2:]
    walk = np.minimum.outer(run, run)
    powers, vectors = np.linalg.eigh(complement.T @ walk @ complement)
    basis = complement @ vectors
    return _Design(
        slope=slope,
        basis=basis,
        powers=np.maximum(powers, 0.0),
        along=slope @ walk @ basis,
        own=float(slope @ walk @ slope),
    )
