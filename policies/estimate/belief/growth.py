"""Memory that grows from step to step: fragmentation, leaks, remains of sleeping engines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from autotune.policies.values.events import Progressed
from autotune.policies.values.history import Attempt
from autotune.policies.values.observation import Peak
from autotune.policies.values.value import Value

_FEWEST = 6  # steps with a peak that a trend needs
_WARM_UP = 1  # steps: the optimizer state appears at the end of the first
_NOISE = 0.004  # share of a peak by which equal steps differ
_SLOWING = 0.6  # growth whose rate falls below this share of the earlier rate is levelling off
_SAMPLED = 200  # steps kept of an attempt whose memory grew, roughly
_AHEAD = 10  # times the last step, if the length of the training is unknown


class Growth(Value, frozen=True, kw_only=True):
    """How one phase's peaks grew over the steps of an attempt.

    `settled_bytes` and `grown_bytes` together are at least the largest peak.
    """

    settled_bytes: float  # the largest peak of a step without the growth until then
    grown_bytes: float  # since the first step of the process, at the rate of the usual steps
    expected_bytes: float  # beyond the settled peak by the end of the training, if growth continues
    error_bytes: float


def growth(progress: Sequence[Progressed], phase: str) -> Growth | None:
    """Return how a phase's measured peaks grew; None if too few were measured.

    The medians of the early, the middle and the latest third of the steps give the trend. What single steps
    exceed it by is due to the length of their batches, and belongs to the settled peak.
    """
    peaks = [
        (event.step, float(event.peaks[phase].used_bytes))
        for event in progress
        if phase in event.peaks and not event.peaks[phase].upper_bound
    ]
    first = peaks[0][0] if peaks else 0
    peaks = [(step, used) for step, used in peaks if step - first >= _WARM_UP]
    if len(peaks) < _FEWEST:
        return None
    third = len(peaks) // 3
    parts = peaks[:third], peaks[third : len(peaks) - third], peaks[len(peaks) - third :]
    early, middle, late = (median([used for _, used in part]) for part in parts)
    start, halfway, end = (median([float(step) for step, _ in part]) for part in parts)
    largest = max([used for _, used in peaks])  # no call per step
    noise = _NOISE * largest
    before, after = (middle - early) / max(1.0, halfway - start), (late - middle) / max(1.0, end - halfway)
    grown = max(0.0, late - early)
    if grown <= noise:
        return Growth(settled_bytes=largest, grown_bytes=0.0, expected_bytes=0.0, error_bytes=noise)
    rate = grown / max(1.0, end - start)
    settled = max([used - rate * (step - first) for step, used in peaks])
    grown = largest - settled
    ahead = 0.0
    if after * (end - halfway) > noise / 2:
        last, total = peaks[-1][0], progress[-1].of
        remaining = float(max(0, total - last)) if total is not None else float(_AHEAD * last)
        ahead = after * remaining
        if after < _SLOWING * before:
            # A geometric series: each further stretch adds the same share of the previous one.
            share = after / before
            ahead = min(ahead, after * (end - halfway) * share / (1.0 - share))
    return Growth(
        settled_bytes=largest - grown,
        grown_bytes=grown,
        expected_bytes=grown + ahead,
        error_bytes=max(noise, 0.3 * ahead),
    )


def without_growth(attempt: Attempt) -> Attempt:
    """Return an attempt without the growth of its memory: its peaks minus the growth since its start.

    Unchanged if no growth is known. Of a long attempt a sample of the steps is kept, which gives the same
    trend.
    """
    grows = any(ahead.holds and not ahead.lengths for ahead in attempt.foreseen)
    if attempt.growth is None and not grows:
        return attempt
    every = max(1, len(attempt.progress) // _SAMPLED)
    rows = tuple(attempt.progress[::every])
    rates = {name: _rate(rows, name) for name in dict.fromkeys(n for row in rows for n in row.peaks)}
    first = rows[0].step if rows else 0

    def settled(peak: Peak, grown: float) -> Peak:
        return msgspec.structs.replace(peak, used_bytes=int(max(0.0, peak.used_bytes - grown)))

    rows = tuple(
        msgspec.structs.replace(
            row, peaks={n: settled(peak, rates[n] * (row.step - first)) for n, peak in row.peaks.items()}
        )
        for row in rows
    )
    ended = attempt.ended and msgspec.structs.replace(attempt.ended, peaks={})
    return msgspec.structs.replace(attempt, progress=rows, ended=ended)


def _rate(rows: Sequence[Progressed], name: str) -> float:
    """Return the bytes per step by which a phase's usual peak grows, at least 0."""
    peaks = [(row.step, row.peaks[name].used_bytes) for row in rows if name in row.peaks][_WARM_UP:]
    if len(peaks) < _FEWEST:
        return 0.0
    third = len(peaks) // 3
    early, late = peaks[:third], peaks[-third:]
    steps = median(step for step, _ in late) - median(step for step, _ in early)
    return max(0.0, (median(used for _, used in late) - median(used for _, used in early)) / max(1.0, steps))
