"""Evaluate the results of a search's trials: the best one, its gain, and what is not worth a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

import msgspec

from autotune.policies.remedies.repeats import repeats
from autotune.policies.remedies.step_size import missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Diagnosed,
    Progressed,
    Purpose,
    Result,
    Tried,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Search
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.observation import Peak, Speed, Unit
from autotune.policies.values.profile import Profile
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

_WARM_UP_STEPS = 1  # compiles kernels, fills caches
_BLIND_EXCESS = 0.05  # of the limit, for an out-of-memory message without figures
_MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution per median absolute deviation
_NUMBERS = re.compile(r"\d+")  # pids, times and line numbers, in which equal messages differ
BETTER = "is surely faster and keeps every limit"
_ROUNDED_S = 0.05  # rounding error of a result's seconds


def speed(steps: Sequence[Progressed]) -> Speed | None:
    """Return the median speed after the warm-up, in steps/s if the log gives no tokens; None if unknown."""
    counted = list(steps)[_WARM_UP_STEPS:] or list(steps)
    unit, rates = Unit.TOKENS, [s.tokens_per_second for s in counted if s.tokens_per_second]
    if not rates:
        unit, rates = Unit.STEPS, [1.0 / s.seconds for s in counted if s.seconds]
    if not rates:
        return None
    middle = median(rates)
    spread = _MAD_TO_SIGMA * median(abs(rate - middle) for rate in rates)
    return Speed(per_second=middle, unit=unit, noise=spread / middle / len(rates) ** 0.5)


def timed(result: Tried, measured: Speed | None) -> Tried:
    """Return `result` with a measured speed, or with none."""
    if measured is None:
        return msgspec.structs.replace(result, tokens_per_second=None, steps_per_second=None, noise=None)
    tokens = measured.unit is Unit.TOKENS
    return msgspec.structs.replace(
        result,
        tokens_per_second=measured.per_second if tokens else None,
        steps_per_second=None if tokens else measured.per_second,
        noise=measured.noise,
    )


def unit_of(results: Iterable[Tried]) -> Unit | None:
    """Return the unit in which results are compared: that of the first measured result.

    A result in another unit, from a log that gave its tokens only sometimes, counts as not measured.
    """
    return next((r.unit for r in results if r.unit is not None), None)


def highest(*peaks: Mapping[str, Peak]) -> dict[str, Peak]:
    """Return the largest peak of each phase."""
    result: dict[str, Peak] = {}
    for some in peaks:
        for phase, peak in some.items():
            if phase not in result or result[phase].used_bytes < peak.used_bytes:
                result[phase] = peak
    return result


def excess(peaks: Mapping[str, Peak], *, headroom: float) -> dict[str, float]:
    """Return by how much each phase exceeds what it may use, in units of the limit; below 0 fits.

    Upper bounds are ignored, because a caching allocator fills the GPU in healthy runs too.
    """
    return {
        str(phase): peak.used_bytes / peak.capacity_bytes - (1.0 - headroom)
        for phase, peak in peaks.items()
        if peak.capacity_bytes and not peak.upper_bound
    }


def free_share(peaks: Mapping[str, Peak]) -> float | None:
    """Return the smallest free share over phases, from upper bounds of use only if there is nothing else."""
    known = [p for p in peaks.values() if p.capacity_bytes]
    exact = [p for p in known if not p.upper_bound]
    free = [1 - p.used_bytes / p.capacity_bytes for p in exact or known]
    return round(min(free), 4) if free else None


def excess_of_failure(diagnosis: Diagnosis) -> dict[str, float]:
    """Return by how much the failed phase exceeds its limit, in units of the limit, as phase -> excess."""
    missing, capacity = missing_bytes(diagnosis.facts), diagnosis.facts.limit_bytes
    share = missing / capacity if missing is not None and capacity else _BLIND_EXCESS
    phase = diagnosis.phase if diagnosis.phase is not Phase.NONE else Phase.INIT
    return {str(phase): max(_BLIND_EXCESS, share)}


def fastest(
    results: Iterable[Tried], *, confirmed: bool = False, besides: Collection[Knobs] = ()
) -> Tried | None:
    """Return the fastest result that keeps every limit; with `confirmed`, only of runs for goal.steps.

    A configuration measured several times under the same conditions counts with its median speed. One that
    ever failed or exceeded a limit, or that is in `besides`, does not count.
    """
    every = list(results)
    unit = unit_of(every)
    failed = {r.knobs for r in every if r.result in (Result.FAILS, Result.REFUSED) or exceeds(r)}
    compared = [r for r in every if r.unit is unit and (_held(r) or not confirmed)]
    best: Tried | None = None
    for r in sorted(compared, key=lambda r: r.rate, reverse=True):
        if unit is None or (best is not None and r.rate <= best.rate):
            break  # no later result has a higher median
        if r.knobs in failed or r.knobs in besides or not keeps_limits(r):
            continue
        same = [s for s in compared if s.knobs == r.knobs and _held(s) is _held(r) and keeps_limits(s)]
        rate, last = median(s.rate for s in same), same[-1]
        if best is None or rate > best.rate:
            best = timed(last, Speed(per_second=rate, unit=unit, noise=last.noise or 0.0))
    return best


def _held(result: Tried) -> bool:
    """Return whether a result is from a run for goal.steps."""
    return result.purpose is Purpose.CONFIRM


def keeps_limits(result: Tried) -> bool:
    """Return whether a configuration ran with a measured speed and the headroom of the goal."""
    return result.result is Result.FITS and result.unit is not None and not exceeds(result)


def exceeds(result: Tried) -> bool:
    """Return whether a configuration needs more of a memory than it may use."""
    return any(value > 0 for value in result.constraints.values())


def winner(results: Sequence[Tried], search: Search, *, start: Knobs | None) -> Tried | None:
    """Return the fastest confirmed configuration, or the stable `start` if none is certainly faster.

    Confirmed means a run for goal.steps, if the search makes any. Certainly faster means a gain of
    `search.min_gain` over the start, and every run faster than all of the start's, because runs of one
    configuration differ too. None if nothing was confirmed within its limits.
    """
    confirmed = bool(search.confirm)
    best = fastest(results, confirmed=confirmed)
    if best is None or start is None or best.knobs == start:
        return best
    own = fastest((r for r in results if r.knobs == start), confirmed=confirmed)
    if own is None or own.unit is not best.unit:
        return best
    runs, others = (
        [r.rate for r in results if r.knobs == k and r.purpose is best.purpose and keeps_limits(r)]
        for k in (best.knobs, start)
    )
    gains = best.rate >= own.rate * (1.0 + search.min_gain) and min(runs) > max(others, default=0.0)
    return best if gains else own


class Gain(Value, frozen=True, kw_only=True):
    """The speeds of the winner and the stable start under the same conditions."""

    fast: float  # medians, in the winner's unit
    slow: float
    runs: int  # of each
    apart: float  # the fastest over the slowest run of one configuration: the noise of the machine


def gain(results: Sequence[Tried], search: Search, *, start: Knobs) -> Gain | None:
    """Return the winner's speed compared with the stable start's; None if only one of them was measured.

    The start counts even if it leaves less headroom than the goal asks.
    """
    best = winner(results, search, start=start)
    if best is None:
        return None
    for purpose in (Purpose.CONFIRM, Purpose.PROBE):
        rates = [
            [
                r.rate
                for r in results
                if r.knobs == k
                and r.purpose is purpose
                and r.unit is best.unit
                and (keeps_limits(r) or (k == start and r.result is Result.FITS))
            ]
            for k in (best.knobs, start)
        ]
        if all(rates):
            fast, slow = (median(own) for own in rates)
            apart = max(max(own) / min(own) for own in rates)
            return Gain(fast=fast, slow=slow, runs=min(len(own) for own in rates), apart=apart)
    return None


def known_to_fail(profile: Profile, failures: Iterable[tuple[Knobs, Diagnosed]], proposed: Knobs) -> str:
    """Return the known failure that `proposed` would repeat, in words; empty if there is none."""
    for failed, event in failures:
        if repeats(profile, failed, event, proposed):
            return f"attempt #{event.attempt} failed with {event.cause.value} and asked for no more"
    return ""


class Suspects(Value, frozen=True, kw_only=True):
    """Settings of trials that the job refused, which no configuration that ran had."""

    trial: int  # the first of them
    settings: dict[str, Setting]


def with_expectations(result: Tried, expected: Mapping[str, float]) -> Tried:
    """Return a result in which no phase's need is below the predicted one."""
    merged = {phase: max(value, result.constraints.get(phase, value)) for phase, value in expected.items()}
    return msgspec.structs.replace(
        result, constraints=result.constraints | {p: round(v, 4) for p, v in merged.items()}
    )


def suspects(results: Sequence[Tried], *, start: Knobs) -> tuple[Suspects, ...]:
    """Return the settings that may be why the job refused to run, for reasons other than memory.

    Trials with the same reason share their suspects, unless they have none in common. Settings that ran in
    another trial or in the stable `start` are not suspects.
    """
    refused = [(r, changed(start, r.knobs)) for r in results if r.result is Result.REFUSED]
    ran = [r.knobs for r in results if r.result in (Result.FITS, Result.SLOW)] if refused else []
    ran_with = {name: {getattr(k, name) for k in ran} for _, change in refused for name in change}
    alike: dict[str, Suspects] = {}  # by reason
    result: list[Suspects] = []
    for r, change in refused:
        new = {name: value for name, (_, value) in change.items() if value not in ran_with[name]}
        if not new:
            continue
        own = Suspects(trial=r.trial, settings=new)
        reason = _NUMBERS.sub("", r.reason)
        first = alike.setdefault(reason, own)
        common = {name: value for name, value in first.settings.items() if (name, value) in new.items()}
        if common:
            alike[reason] = msgspec.structs.replace(first, settings=common)
        else:
            result.append(own)
    return (*alike.values(), *result)


def suspected(suspects_of_trials: Iterable[Suspects], proposed: Knobs) -> str:
    """Return the refused trial all of whose suspects `proposed` has, in words; empty if there is none."""
    for suspect in suspects_of_trials:
        if all(getattr(proposed, name) == value for name, value in suspect.settings.items()):
            settings = ", ".join(f"{name} = {value}" for name, value in suspect.settings.items())
            return f"trial {suspect.trial} did not run with {settings}"
    return ""


def front(results: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return the results that no other beats in both speed and headroom, fastest first.

    Every configuration counts with its first measurement, so that all are compared alike.
    """
    every, first = list(results), dict[Knobs, Tried]()
    unit = unit_of(every)
    for r in every:
        if r.result is Result.FITS and r.unit is not None and r.unit is unit and r.headroom is not None:
            first.setdefault(r.knobs, r)
    usable = list(first.values())
    usable.sort(key=lambda r: (r.rate, r.headroom or 0.0), reverse=True)
    kept: list[Tried] = []
    for result in usable:
        if not kept or (result.headroom or 0.0) > (kept[-1].headroom or 0.0):
            kept.append(result)
    return tuple(kept)


def spent(view: RunView) -> dict[str, float]:
    """Return the seconds of attempts by purpose or result; `becoming stable` comes first."""
    seconds: dict[str, float] = {}
    results = view.tried
    every, own = (
        sum(attempt.ended.seconds or 0.0 for attempt in group if attempt.ended is not None)
        for group in (view.attempts.values(), view.launched)
    )
    if own:
        seconds["becoming stable"] = own
    for result in results:
        what = result.purpose.value if result.result is Result.FITS else result.result.value
        if result.seconds:
            seconds[what] = seconds.get(what, 0.0) + result.seconds
    stopped = every - sum(seconds.values())  # trials stopped by a deadline or the user have no result
    if stopped > _ROUNDED_S * len(results):
        seconds["stopped"] = round(stopped, 3)
    return seconds
