"""What the trials of a search say: which is best, whether to go on, and what cannot be worth a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from policies.attempts import MEMORY_CAUSES
from policies.events import Diagnosed, History, Progressed, Purpose, Result, Started, Tried
from policies.evidence import Diagnosis, Peak
from policies.repeats import repeats
from policies.sizing import missing_bytes
from policies.types import Knobs, Phase, Profile, Search

_WARM_UP_STEPS = 1  # compiles kernels, fills caches
_LEAST_PATIENCE, _PATIENCE_SHARE = 8, 0.3  # trials without gain before a search ends
_BLIND_EXCESS = 0.05  # of the limit: an out-of-memory message without figures
_SLOW_SHARE = 0.8  # of the best: below, and certainly so, a trial is not worth its remaining steps
_SIGMAS = 3.0
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


def speed(steps: Sequence[Progressed]) -> tuple[float, float] | None:
    """Return the median throughput after the warm-up in tokens/s, and its relative standard error.

    A framework that reports no tokens is compared by steps per second.
    """
    counted = list(steps)[_WARM_UP_STEPS:] or list(steps)
    rates = [s.tokens_per_second for s in counted if s.tokens_per_second]
    if not rates:
        rates = [1.0 / s.seconds for s in counted if s.seconds]
    if not rates:
        return None
    middle = median(rates)
    spread = _MAD_TO_SIGMA * median(abs(rate - middle) for rate in rates)
    return middle, spread / middle / len(rates) ** 0.5 if middle else 0.0


def excess(peaks: Mapping[str, Peak], *, headroom: float) -> dict[str, float]:
    """Return by how much each phase exceeds what it may use, in units of the limit; below 0 fits."""
    return {
        str(phase): peak.used_bytes / peak.capacity_bytes - (1.0 - headroom)
        for phase, peak in peaks.items()
        if peak.capacity_bytes
    }


def excess_of_failure(diagnosis: Diagnosis) -> dict[str, float]:
    """Return by how much the failed phase exceeds its limit, in units of the limit."""
    missing, capacity = missing_bytes(diagnosis.facts), diagnosis.facts.capacity_bytes
    share = missing / capacity if missing is not None and capacity else _BLIND_EXCESS
    phase = diagnosis.phase if diagnosis.phase is not Phase.NONE else Phase.INIT
    return {str(phase): max(_BLIND_EXCESS, share)}


def too_slow(steps: Sequence[Progressed], *, best: float | None) -> bool:
    """Return whether the first steps already say that a trial cannot come near the best."""
    found = speed(steps)
    if best is None or found is None or len(steps) <= _WARM_UP_STEPS + 1:
        return False
    middle, noise = found
    return middle * (1.0 + _SIGMAS * noise) < _SLOW_SHARE * best


def tried(history: History) -> tuple[Tried, ...]:
    """Return the results of a search so far."""
    return tuple(event for event in history if isinstance(event, Tried))


def fastest(results: Iterable[Tried], *, confirmed: bool = False) -> Tried | None:
    """Return the fastest result that keeps every limit; `confirmed`: that held for goal.steps."""
    fitting = [
        r
        for r in results
        if r.result is Result.FITS
        and r.tokens_per_second is not None
        and all(value <= 0 for value in r.constraints.values())
        and (r.purpose is Purpose.CONFIRM) >= confirmed
    ]
    return max(fitting, key=lambda r: r.tokens_per_second or 0.0, default=None)


def why_end(results: Sequence[Tried], search: Search, *, elapsed_s: float) -> str:
    """Return why no further trial is begun; empty while the search goes on."""
    run = [r for r in results if r.result not in (Result.GATED, Result.LOST)]
    if len(run) >= search.trials:
        return f"all {search.trials} trials are spent"
    if elapsed_s >= search.duration_s:
        return f"the {search.duration_s:.0f} s of search.duration are over"
    patience = max(_LEAST_PATIENCE, round(_PATIENCE_SHARE * search.trials))
    if len(run) > patience:
        before, after = fastest(run[:-patience]), fastest(run)
        old = 0.0 if before is None else before.tokens_per_second or 0.0
        new = 0.0 if after is None else after.tokens_per_second or 0.0
        if old and new < old * (1.0 + search.min_gain):
            return f"no gain of {search.min_gain:.0%} in {patience} trials"
    return ""


def known_to_fail(profile: Profile, history: History, proposed: Knobs) -> str:
    """Return the failure that `proposed` would repeat, in words; empty when none is known."""
    knobs = {e.attempt: e.knobs for e in history if isinstance(e, Started)}
    for event in history:
        if not isinstance(event, Diagnosed) or event.cause not in MEMORY_CAUSES or event.attempt not in knobs:
            continue
        if repeats(profile, knobs[event.attempt], event, proposed):
            return f"attempt #{event.attempt} failed with {event.cause.value} and asked for no more"
    return ""


def front(results: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return the results that no other beats in both throughput and headroom, the fastest first."""
    usable = [
        r
        for r in results
        if r.result is Result.FITS and r.tokens_per_second is not None and r.headroom is not None
    ]
    usable.sort(key=lambda r: (r.tokens_per_second or 0.0, r.headroom or 0.0), reverse=True)
    found: list[Tried] = []
    for result in usable:
        if not found or (result.headroom or 0.0) > (found[-1].headroom or 0.0):
            found.append(result)
    return tuple(found)


def spent(results: Iterable[Tried]) -> dict[str, float]:
    """Return the GPU-hours of a search by what they were spent on."""
    hours: dict[str, float] = {}
    for result in results:
        what = result.purpose.value if result.result is Result.FITS else result.result.value
        hours[what] = hours.get(what, 0.0) + result.gpu_hours
    return hours
