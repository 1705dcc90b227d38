"""At which step a trend crosses a limit, and how surely."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.policies.forecast.trend import Trend

# How far ahead a trend is believed, in times the steps in which it was seen: growth that levels off has shown
# it by then. Measured with `python -m benchmarks.forecast`.
AHEAD = 1.0
_EARLIEST, _LATEST = 0.05, 0.95
# Rates from two standard errors below to two above, with their weights.
_SIGMAS = np.linspace(-2.0, 2.0, 9)
_WEIGHTS = np.exp(-0.5 * _SIGMAS**2) / np.exp(-0.5 * _SIGMAS**2).sum()
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a series passes a limit: steps, and the chance that it does by the last one looked at."""

    chance: float
    step: int  # as likely before as after
    earliest: int
    latest: int
    until: int  # the last step looked at
    at_end: float  # the usual value there


def crossing(found: Trend, limit: float, *, last: int | None) -> Crossing | None:
    """Return when a trend passes a limit before the step `last`; None if that is less likely than not.

    Each future step passes the limit with the chance that its spread gives it, as if no step said anything of
    another; the mean rate until then is taken at nine places of its error and of the lasting changes that
    add up by then.
    """
    now = int(found.now)
    until = now + max(1, int(AHEAD * found.seen))
    if last is not None:
        until = min(until, last)
    if until <= now:
        return None
    ahead = np.arange(1.0, until - now + 1)
    held = np.zeros(len(ahead))
    errors = np.sqrt(found.error**2 + found.walk**2 / ahead)
    for sigmas, weight in zip(_SIGMAS.tolist(), _WEIGHTS.tolist(), strict=True):
        grown = found.grown(ahead, np.maximum(0.0, found.rate + sigmas * errors))
        passes = 0.5 * _erfc((limit - found.level - grown) / (found.spread * math.sqrt(2)))
        held += weight * np.exp(np.cumsum(np.log1p(-np.minimum(passes, 1 - 1e-12))))
    chances = 1 - held

    def when(chance: float) -> int:
        return now + 1 + int(np.searchsorted(chances, min(chance, float(chances[-1]))))

    chance = float(chances[-1])
    if chance < 0.5:
        return None
    return Crossing(
        chance=chance,
        step=when(0.5),
        earliest=when(_EARLIEST),
        latest=when(_LATEST),
        until=until,
        at_end=float(found.level + found.grown(ahead[-1:], found.rate)[0]),
    )
