"""What the overhead benchmark computes from what it read: intervals, rates, delays, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from autotune.orchestrator.clock import seconds_of
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Ended,
    FailureSeen,
    History,
    Progressed,
    Started,
    StopRequested,
)

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table the normal quantile.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_NORMAL95 = 1.960


class Interval(NamedTuple):
    """A mean with its 95 % interval; the interval of a single value is unknown."""

    mean: float
    low: float
    high: float


class Reading(NamedTuple):
    """CPU seconds used so far, per group of processes, at one moment."""

    at: float  # Unix seconds
    cpu_s: dict[str, float]


class Recovery(NamedTuple):
    """Delays of one failed attempt, in seconds; None where a moment was not seen."""

    phase: str
    seen_s: float | None  # failure line written -> seen by the driver
    stopped_s: float | None  # failure line written -> every process of the attempt gone
    drained_s: float | None  # processes gone -> last words read and memory back
    gate_s: float | None  # of that, the drain gate alone
    decided_s: float | None  # memory back -> actors given up, failure diagnosed, remedy recorded
    policy_s: float | None  # of that, the choice of the remedy alone
    relaunched_s: float | None  # failure line written -> the next attempt's program runs
    job_s: float | None  # the job's own start: its program runs -> its first step, or its next failure


def interval95(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with Student's 95 % interval."""
    mean = statistics.fmean(values)
    degrees = len(values) - 1
    if degrees < 1:
        return Interval(mean, math.nan, math.nan)
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else _NORMAL95
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired_ratios(
    with_autotune: Sequence[Sequence[float]], without: Sequence[Sequence[float]]
) -> list[float]:
    """Return, for each pair of runs, the ratio of their median step times."""
    return [statistics.median(a) / statistics.median(b) for a, b in zip(with_autotune, without, strict=True)]


def rates(readings: Sequence[Reading], *, since: float, until: float) -> dict[str, float]:
    """Return CPU seconds per second of each group between the first and the last reading of a window."""
    inside = [reading for reading in readings if since <= reading.at <= until]
    if len(inside) < 2:
        return {}
    first, last = inside[0], inside[-1]
    elapsed_s = last.at - first.at
    return {name: (used - first.cpu_s.get(name, 0.0)) / elapsed_s for name, used in last.cpu_s.items()}


def recoveries(history: History, *, written: Sequence[float], launched: Sequence[float]) -> list[Recovery]:
    """Return the delays of every attempt whose failure was seen while it ran.

    `written` holds the times at which a failure line appeared in a log of the job, `launched` those at which
    an attempt's program began.
    """
    result = []
    for row in history:
        if not isinstance(row, FailureSeen):
            continue
        rows = [event for event in history if event.attempt == row.attempt]
        begun = _at(next((e for e in rows if isinstance(e, Started)), None))
        ended = next((e for e in rows if isinstance(e, Ended)), None)
        stop = next((e for e in rows if isinstance(e, StopRequested)), None)
        diagnosed = _at(next((e for e in rows if isinstance(e, Diagnosed)), None))
        decided = _at(next((e for e in rows if isinstance(e, Decided)), None))
        over = _at(ended)
        line = _first(written, after=begun, before=_at(row))
        gone = None if stop is None or ended is None else _sum(_at(stop), ended.stop_s)
        program = _first(launched, after=begun, before=over)
        following = _first(launched, after=over, before=None)
        stepped = _at(next((e for e in rows if isinstance(e, Progressed)), None))
        result.append(
            Recovery(
                phase=str(row.finding.phase),
                seen_s=_gap(line, _at(row)),
                stopped_s=_gap(line, gone),
                drained_s=_gap(gone, over),
                gate_s=None if ended is None else ended.drain_s,
                decided_s=_gap(over, decided),
                policy_s=_gap(diagnosed, decided),
                relaunched_s=_gap(line, following),
                job_s=_gap(program, stepped or line),
            )
        )
    return result


def _at(
    event: Started | Progressed | FailureSeen | StopRequested | Ended | Diagnosed | Decided | None,
) -> float | None:
    return None if event is None else seconds_of(event.at)


def _first(times: Sequence[float], *, after: float | None, before: float | None) -> float | None:
    if after is None:
        return None
    return min((time for time in times if time >= after and (before is None or time <= before)), default=None)


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _sum(start: float | None, seconds: float | None) -> float | None:
    return None if start is None or seconds is None else start + seconds


def spread(values: Sequence[float | None]) -> str:
    """Return median, range and count of what is known, for a table."""
    known = [value for value in values if value is not None]
    if not known:
        return "not seen"
    return f"{statistics.median(known):.3f} s   ({min(known):.3f} to {max(known):.3f}, n={len(known)})"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of a label and a value, aligned."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}".rstrip() for label, value in rows)
