"""Forecast which memories of an attempt run out before its end, from its measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.forecast.trend import FEWEST, Trend, slope_of, spread_of, trend
from autotune.policies.values.events import SURE, Foreseen
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.observation import HOST, Peak
from autotune.policies.values.value import Value

FOLLOWS = 3.0  # standard errors from which on peaks depend on lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """A memory whose peaks depend on the lengths of a step's responses."""

    steps: Floats
    used: Floats  # bytes
    lengths: Floats  # tokens
    slope: float  # bytes per token

    @property
    def rest(self) -> Floats:
        """The peaks as if every step had the median length."""
        return np.asarray(self.used - self.slope * (self.lengths - np.median(self.lengths)))

    def trend(self) -> Trend | None:
        """Return the growth that lengths do not explain, with the spread that they cause; None if none."""
        # Lengths explain temporary changes; lasting ones that remain are a random walk.
        result = trend(self.steps, self.rest, resembling=False)
        if result is None:
            return None
        recent = self.lengths[-max(FEWEST, result.count) :]
        middle = float(np.median(recent))
        own = self.slope * spread_of(recent - middle)
        return replace(
            result,
            level=result.level + self.slope * (middle - float(np.median(self.lengths))),
            spread=math.hypot(result.spread, own),
        )


def adjusted(steps: Floats, used: Floats, lengths: Mapping[str, Floats]) -> Adjusted | None:
    """Return a memory with the lengths that best explain its peaks; None if none do.

    The slope is fitted to differences between consecutive steps, in which a drift of the memory is constant,
    so that a drift is separated from lengths that grow at the same time. Steps without lengths (NaN) are left
    out.
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


# ---- the step at which a trend crosses a limit, and the chance that it does

# How far ahead a trend is extrapolated, as a multiple of the steps that show it: growth that levels off does
# so within them. Measured with `python -m benchmarks.forecast`.
AHEAD = 1.0
_EARLIEST, _LATEST = 0.05, 0.95
# Rates from two standard errors below to two above, with their weights.
_SIGMAS = np.linspace(-2.0, 2.0, 9)
_WEIGHTS = np.exp(-0.5 * _SIGMAS**2) / np.exp(-0.5 * _SIGMAS**2).sum()
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """When a series crosses a limit: the steps, and the chance that it does by the last step considered."""

    chance: float
    step: int  # 50 % chance that it crosses by then
    earliest: int
    latest: int
    until: int  # the last step considered
    at_end: float  # the usual value there


def crossing(growth: Trend, limit: float, *, last: int | None) -> Crossing | None:
    """Return when a trend crosses a limit by the step `last`; None if that is less likely than not.

    Given the mean rate until then, future steps cross the limit independently, each with the chance of its
    spread. The rate is integrated over nine values within two standard errors, which include the random walk
    that accumulates by then.
    """
    now = int(growth.now)
    until = now + max(1, int(AHEAD * growth.count))
    if last is not None:
        until = min(until, last)
    if until <= now:
        return None
    ahead = np.arange(1.0, until - now + 1)
    held = np.zeros(len(ahead))
    errors = np.sqrt(growth.error**2 + growth.walk**2 / ahead)
    for sigmas, weight in zip(_SIGMAS.tolist(), _WEIGHTS.tolist(), strict=True):
        grown = growth.grown(ahead, np.maximum(0.0, growth.rate + sigmas * errors))
        passes = 0.5 * _erfc((limit - growth.level - grown) / (growth.spread * math.sqrt(2)))
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
        at_end=float(growth.level + growth.grown(ahead[-1:], growth.rate)[0]),
    )


# ---- the forecasts of an attempt's memories

WARM_UP = 2  # first steps of an attempt, in which optimizer state and caches of kernels and allocator appear
_DROPPED = 0.7  # chance below which a forecast is withdrawn
_SURER = 0.05  # beyond SURE, before a forecast that had fallen below it counts as sure again
_DUE = 3  # steps: a forecast that is due within them is not repeated
_HEADROOM = 0.01  # share of a device that no peak reaches: an allocator fails before its last byte
_MOVED = 0.25  # share of the remaining steps by which the expected step must move to be reported again
_FASTER = 2.0  # times the range of all steps so far
_KNOWN = 0.9  # share of the steps whose lengths must be known


class Measured(Value, frozen=True, kw_only=True):
    """The measurements of one step of an attempt."""

    step: int
    peaks: dict[str, Peak] = {}  # phase -> peak
    host: Peak | None = None  # of the fullest node
    host_phase: Phase = Phase.NONE  # in which it was fullest
    lengths: dict[str, float] = {}  # of responses in tokens, by the framework's names


def foresee(
    measured: Sequence[Measured],
    *,
    last: Mapping[str, Foreseen],
    attempt: int = 0,
    of: int | None = None,
    longest: float | None = None,
) -> dict[str, Foreseen]:
    """Return the forecasts that are new or changed, by phase or `host`.

    `last`: the last forecast for each; `of`: the last step of the training; `longest`: the tokens of the
    longest response that the job allows.
    """
    if len(measured) < FEWEST + WARM_UP:
        return {}
    names = dict.fromkeys(name for one in measured[-FEWEST:] for name in one.peaks)
    newest, result = measured[-1], {}
    for name in (*names, HOST):
        # A phase that this step did not have, such as a validation, has no new measurement.
        if not _peak(newest, name):
            continue
        rows = _rows(measured, name)
        if len(rows) < FEWEST:
            continue
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            present = _expected(rows, name, of=of, longest=longest)
        before = last.get(name)
        if before is not None and before.holds and (present is None or present.chance < _DROPPED):
            if _reaches(rows, before):
                result[name] = _taken_back(before, newest)
        elif present is not None and _news(present, before):
            result[name] = msgspec.structs.replace(present, attempt=attempt)
    gone = [name for name, before in last.items() if before.holds and _vanished(measured, name)]
    return result | {name: _taken_back(last[name], newest) for name in gone}


def host_growth(measured: Sequence[Measured]) -> int | None:
    """Return the bytes per step by which host memory grew at the end; None if it did not grow."""
    rows = _rows(measured, HOST)
    if len(rows) < FEWEST:
        return None
    each = [one for one, _ in rows]
    steps = np.array([float(one.step) for one in each])
    used = np.array([float(peak.used_bytes) for _, peak in rows])
    follows = adjusted(steps, used, _lengths(each))
    grows = trend(steps, used) if follows is None else follows.trend()
    return None if grows is None else int(grows.rate)


def _taken_back(before: Foreseen, last: Measured) -> Foreseen:
    return msgspec.structs.replace(before, seen_at=last.step, holds=False, at="", after_s=None)


def _reaches(rows: Sequence[tuple[Measured, Peak]], before: Foreseen) -> bool:
    """Return whether a memory has enough steps to withdraw its forecast.

    A driver that attaches to a running attempt has the host's series from its middle only, and can forecast
    only as far ahead as it has steps.
    """
    first, last = rows[0][0].step, rows[-1][0].step
    return first <= before.seen_at or before.step is None or len(rows) >= before.step - last


def _vanished(measured: Sequence[Measured], name: str) -> bool:
    """Return whether a phase is missing while others are measured, for longer than ever before."""
    if name == HOST or not all(one.peaks for one in measured[-FEWEST:]):
        return False
    places = [place for place, one in enumerate(measured) if name in one.peaks]
    longest = max((after - before for before, after in pairwise(places)), default=1)
    missing = len(measured) - 1 - (places[-1] if places else -1)
    return missing >= max(FEWEST, 2 * longest)


def _news(present: Foreseen, before: Foreseen | None) -> bool:
    if before is None or not before.holds:
        return present.chance >= SURE
    assert present.step is not None and before.step is not None
    if before.chance >= SURE > present.chance or before.chance < SURE <= present.chance - _SURER:
        return True
    if max(before.step, present.step) <= present.seen_at + _DUE:
        return False
    return abs(present.step - before.step) > max(3.0, _MOVED * max(0, before.step - present.seen_at))


def _peak(one: Measured, name: str) -> Peak | None:
    return one.host if name == HOST else one.peaks.get(name)


def _rows(measured: Sequence[Measured], name: str) -> list[tuple[Measured, Peak]]:
    """Return the steps with a peak and capacity of a memory, without those of the warm-up."""
    return [
        (one, peak)
        for one in measured[WARM_UP:]
        if (peak := _peak(one, name)) is not None and peak.capacity_bytes
    ]


def _expected(
    rows: Sequence[tuple[Measured, Peak]], name: str, *, of: int | None, longest: float | None
) -> Foreseen | None:
    """Return the forecast of a failure that is more likely than not; None if there is none."""
    one, last = rows[-1]
    limit = last.capacity_bytes * (HOST_LIMIT if name == HOST else 1 - _HEADROOM)
    steps = np.array([float(each.step) for each, _ in rows])
    # The fullest node may differ from step to step, and so may its capacity.
    used = np.array([peak.used_bytes * (last.capacity_bytes / peak.capacity_bytes) for _, peak in rows])
    if limit - used.max() > _FASTER * AHEAD * np.ptp(used):
        return None  # even the fastest growth so far would not reach the limit
    each = [one for one, _ in rows]
    result = trend(steps, used)
    crosses, explained = None, False
    if result is not None:
        crosses, explained = _by_length(each, steps, used, limit, of=of, longest=longest)
    if not explained:
        follows = adjusted(steps, used, _lengths(each))
        result = result if follows is None else follows.trend() or result
        crosses = None if result is None else crossing(result, limit, last=of)
    if crosses is None or result is None:
        return None
    return Foreseen(
        cause=Cause.HOST_OOM if name == HOST else Cause.GPU_OOM,
        phase=one.host_phase if name == HOST else Phase(name),
        seen_at=one.step,
        step=crosses.step,
        earliest=crosses.earliest,
        latest=crosses.latest,
        of=of,
        chance=round(crosses.chance, 3),
        since=int(result.since),
        used_bytes=int(result.level),
        limit_bytes=int(limit),
        per_step_bytes=int(result.rate),
        at_end_bytes=int(crosses.at_end),
        lengths=explained,
        component=last.component,
        upper_bound=last.upper_bound,
    )


def _lengths(measured: Sequence[Measured]) -> dict[str, Floats]:
    """Return the lengths by step, NaN if missing; names that are missing in many steps are left out."""
    names = dict.fromkeys(name for one in measured[-FEWEST:] for name in one.lengths)
    result = {name: np.array([one.lengths.get(name, np.nan) for one in measured]) for name in names}
    return {name: values for name, values in result.items() if np.mean(~np.isnan(values)) >= _KNOWN}


def _by_length(
    measured: Sequence[Measured],
    steps: Floats,
    used: Floats,
    limit: float,
    *,
    of: int | None,
    longest: float | None,
) -> tuple[Crossing | None, bool]:
    """Return when growing lengths make a memory run out, and whether lengths explain its growth.

    They do if peaks depend on lengths and have no trend once these are removed. Lengths grow at most to the
    longest that the job allows.
    """
    for values in _lengths(measured).values():
        known = ~np.isnan(values)
        lengths = values[known]
        grows = trend(steps[known], lengths)
        if grows is None:
            continue
        slope, error = slope_of(lengths, used[known])
        rest = used[known] - slope * lengths
        if slope <= FOLLOWS * error or trend(steps[known], rest) is not None:
            continue
        fixed = float(np.median(rest))
        most = (limit - fixed) / slope
        if longest is not None and most >= longest:
            return None, True
        own = float(np.std(rest)) / slope
        crosses = crossing(replace(grows, spread=float(np.hypot(grows.spread, own))), most, last=of)
        if crosses is None:
            return None, True
        end = crosses.at_end if longest is None else min(longest, crosses.at_end)
        return replace(crosses, at_end=fixed + slope * end), True
    return None, False
