"""What of a memory's growth is left once the lengths of the responses are taken into account."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.forecast.spread import spread_of
from autotune.policies.forecast.trend import FEWEST, Trend, slope_of, trend

FOLLOWS = 3.0  # standard errors by which peaks follow lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """A memory whose peaks follow the lengths of a step's responses."""

    steps: Floats
    used: Floats  # bytes
    lengths: Floats  # tokens
    slope: float  # bytes a token

    @property
    def rest(self) -> Floats:
        """Return the peaks as if every step had the same lengths."""
        return np.asarray(self.used - self.slope * (self.lengths - np.median(self.lengths)))

    def trend(self) -> Trend | None:
        """Return the growth that lengths do not explain, with the spread that they cause; None: none."""
        # Lengths explain what comes and goes; what they leave, and lasts for steps, wanders.
        result = trend(self.steps, self.rest, resembling=False)
        if result is None:
            return None
        recent = self.lengths[-max(FEWEST, result.seen) :]
        middle = float(np.median(recent))
        own = self.slope * spread_of(recent - middle)
        return replace(
            result,
            level=result.level + self.slope * (middle - float(np.median(self.lengths))),
            spread=math.hypot(result.spread, own),
        )


def adjusted(steps: Floats, used: Floats, lengths: Mapping[str, Floats]) -> Adjusted | None:
    """Return a memory with the lengths that its peaks follow most closely; None if they follow none.

    The slope is that of the differences between consecutive steps, in which a drift of the memory is a
    constant: a drift and lengths that grow at the same time are told apart. Steps without lengths (NaN) are
    left out.
    """
    return min(_each(steps, used, lengths), key=_unexplained, default=None)


def _each(steps: Floats, used: Floats, lengths: Mapping[str, Floats]) -> Iterator[Adjusted]:
    for values in lengths.values():
        known = ~np.isnan(values)
        if known.sum() < FEWEST:
            continue
        slope, error = slope_of(np.diff(values[known]), np.diff(used[known]))
        if slope > FOLLOWS * error:
            yield Adjusted(steps=steps[known], used=used[known], lengths=values[known], slope=slope)


def _unexplained(one: Adjusted) -> float:
    changes = np.diff(one.rest)
    return float(np.median(np.abs(changes - np.median(changes))))
