"""How far single steps lie from a trend, single peaks left out."""

from __future__ import annotations

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats

_MEDIAN_TO_SIGMA = 1.4826  # of a normal distribution, from its median absolute deviation
_TAIL, _TAIL_SIGMAS = 0.95, 1.645
_OUTLIER = 3.0  # standard deviations


def clipped(residuals: Floats) -> Floats:
    """Return residuals whose outliers are moved to three standard deviations."""
    most = _OUTLIER * spread_of(residuals)
    return np.clip(residuals, -most, most)


def spread_of(residuals: Floats) -> float:
    """Return the standard deviation of residuals that their upper side shows, single peaks left out."""
    ordered = np.sort(residuals)
    usual = _MEDIAN_TO_SIGMA * middle(np.sort(np.abs(ordered - middle(ordered))))
    return max(usual, quantile(ordered, _TAIL) / _TAIL_SIGMAS if len(ordered) >= 20 else 0.0)


def middle(ordered: Floats) -> float:
    """Return the median of values in ascending order."""
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (float(ordered[half - 1]) + float(ordered[half])) / 2


def quantile(ordered: Floats, share: float) -> float:
    """Return a quantile of values in ascending order, interpolated as numpy does by default."""
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 2)
    return float(ordered[below]) + (place - below) * (float(ordered[below + 1]) - float(ordered[below]))
