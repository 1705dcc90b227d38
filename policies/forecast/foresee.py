"""Which memories of an attempt will run out before it is done, by what its steps showed so far."""

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
        recent = self.lengths[-max(FEWEST, result.count) :]
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


# ---- at which step a trend crosses a limit, and how surely

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


def crossing(growth: Trend, limit: float, *, last: int | None) -> Crossing | None:
    """Return when a trend passes a limit before the step `last`; None if that is less likely than not.

    Each future step passes the limit with the chance that its spread gives it, as if no step said anything of
    another; the mean rate until then is taken at nine places of its error and of the lasting changes that
    add up by then.
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


# ---- which memories of an attempt will run out before it is done, by what its steps showed so far

WARM_UP = 2  # steps of an attempt: the optimizer's state and the caches of kernels and allocator appear
_DROPPED = 0.7  # chance below which it is taken back
_SURER = 0.05  # beyond SURE, before what was less sure meanwhile counts as sure again
_DUE = 3  # steps: what was expected by now, and still is, is not said again
_HEADROOM = 0.01  # share of a device that no peak shows: an allocator fails before its last byte
_MOVED = 0.25  # of the steps that were left, by which the expected step moves before it is said again
_FASTER = 2.0  # times what all steps so far differ by
_KNOWN = 0.9  # share of the steps whose lengths must be known


class Measured(Value, frozen=True, kw_only=True):
    """What one step of an attempt showed."""

    step: int
    peaks: dict[str, Peak] = {}  # phase -> peak
    host: Peak | None = None  # of the fullest node
    host_phase: Phase = Phase.NONE  # in which it was so full
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

    `last` is the last forecast of each, `of` the last step of the training and `longest` the tokens of the
    longest response that the job allows.
    """
    if len(measured) < FEWEST + WARM_UP:
        return {}
    names = dict.fromkeys(name for one in measured[-FEWEST:] for name in one.peaks)
    newest, result = measured[-1], {}
    for name in (*names, HOST):
        # A phase that this step did not have, such as a validation, said nothing new.
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
    """Return the bytes that host memory gained with each step at the end; None: it did not grow."""
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
    """Return whether enough is known of a memory to withdraw its forecast.

    A driver that attaches takes the host's series up in its middle: it sees as far ahead as it has steps.
    """
    first, last = rows[0][0].step, rows[-1][0].step
    return first <= before.seen_at or before.step is None or len(rows) >= before.step - last


def _vanished(measured: Sequence[Measured], name: str) -> bool:
    """Return whether a phase is missing where others are measured, for longer than it ever was before."""
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
    """Return the steps that show a memory against its size, those of the warm-up left out."""
    return [
        (one, peak)
        for one in measured[WARM_UP:]
        if (peak := _peak(one, name)) is not None and peak.capacity_bytes
    ]


def _expected(
    rows: Sequence[tuple[Measured, Peak]], name: str, *, of: int | None, longest: float | None
) -> Foreseen | None:
    """Return the failure that a memory's steps make more likely than not."""
    one, last = rows[-1]
    limit = last.capacity_bytes * (HOST_LIMIT if name == HOST else 1 - _HEADROOM)
    steps = np.array([float(each.step) for each, _ in rows])
    # The fullest node may be another one, with more memory or less.
    used = np.array([peak.used_bytes * (last.capacity_bytes / peak.capacity_bytes) for _, peak in rows])
    if limit - used.max() > _FASTER * AHEAD * np.ptp(used):
        return None  # growth as fast as any that was seen would not do
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
    """Return the lengths by step, NaN where one is missing; a name that is missing often is left out."""
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
    """Return when lengths that grow make a memory run out, and whether lengths explain its growth.

    They do where peaks follow lengths and nothing of their trend is left without them. Lengths end at the
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
