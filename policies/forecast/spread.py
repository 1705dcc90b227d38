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
    usual = _MEDIAN_TO_SIGMA * float(np.median(np.abs(residuals - np.median(residuals))))
    return max(usual, float(np.quantile(residuals, _TAIL)) / _TAIL_SIGMAS if len(residuals) >= 20 else 0.0)
