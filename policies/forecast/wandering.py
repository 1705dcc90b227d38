"""How surely a memory drifts, when what it holds may also wander from step to step without a drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.forecast.spread import clipped

# Variance of a step of the random walk, as a share of the variance of a single step's noise.
_SHARES = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
_KEPT = 128  # designs: one for each number of steps in a window, 14 MiB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """Steps by which a slope is estimated, in the basis in which noise and random walk are independent."""

    slope: Floats  # weights of ordinary least squares
    basis: Floats  # orthonormal, orthogonal to every line
    powers: Floats  # variance of the random walk along each of them
    along: Floats  # its covariance with the slope
    own: float  # its variance of the slope


def drift(steps: Floats, values: Floats) -> tuple[float, float, float]:
    """Return a series' slope, its standard error, and the standard deviation of a step of its random walk.

    It is the local level model with a constant drift (Harvey 1989, chapter 2.3), by generalized least
    squares; the share of the random walk is averaged over its restricted likelihood (Patterson and
    Thompson 1971).
    """
    design = _design(tuple((steps - steps[0]).tolist()))
    values = clipped(values)
    found, free = design.basis.T @ values, len(design.powers)
    powers = 1 + _SHARES[:, None] * design.powers
    noise = np.maximum((found**2 / powers).sum(axis=1) / free, np.finfo(float).tiny)
    slopes = design.slope @ values - _SHARES * (design.along * found / powers).sum(axis=1)
    errors = noise * (
        float(design.slope @ design.slope)
        + _SHARES * design.own
        - _SHARES**2 * (design.along**2 / powers).sum(axis=1)
    )
    likelihoods = -0.5 * (np.log(powers).sum(axis=1) + free * np.log(noise))
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    slope = float(weights @ slopes)
    error = math.sqrt(max(0.0, float(weights @ (errors + (slopes - slope) ** 2))))
    return slope, error, math.sqrt(float(weights @ (noise * _SHARES)))


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
