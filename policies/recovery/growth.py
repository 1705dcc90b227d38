"""Restart a process whose memory grows with its steps from a checkpoint.

No setting is the cause of such a failure, and none cures it for long. A fresh process starts without the
growth and completes about as many steps; the settings change only where restarts would take much of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from statistics import median

import numpy as np

from autotune.policies.forecast.foresee import WARM_UP
from autotune.policies.forecast.last_checkpoint import SHOWN, is_fresh, last_step, lasts, next_save
from autotune.policies.forecast.trend import WINDOW, trend
from autotune.policies.recovery.longer_lasting import longer_lasting
from autotune.policies.remedies.step_size import fragmentation_prevails
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Foreseen, Launch
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Forecasting
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import HOST, MemoryGrowth
from autotune.policies.values.remedy import Remedy

NAME = "restart_every"
_GROWING = frozenset({Cause.GPU_OOM, Cause.HOST_OOM, Cause.SHM, Cause.OBJECT_STORE})
_FEWEST = 20  # steps of a process: one that fails sooner needs too much from the start
_UNEXPLAINED = 100  # steps after which an unexplained failure is worth one try with the same settings
_WORTH = 0.05  # share of the time that restarts may take before a change of the settings is considered
_PLANNED = 0.15  # and, after `SHOWN` steps, before one is planned: it needs a restart too and stops no growth
_START_S = 600.0  # of a process up to its first step, if none was measured
_AS_FAR = 0.5  # of the steps of the previous process: one that ended sooner did not fail by growth
_AS_NEAR = 0.9  # of them, where nothing was measured and each process begins with the first step
_LEAST = 0.02  # share of a memory that must have grown to explain why it ran out
_NEAR = 0.1  # share of a memory that may be free in a usual step when growth makes it run out
_BEFORE = 0.9  # of the steps after which a process ran out of a memory: the next one is restarted by then
_FASTER = 1.25  # times the growth of that process, from which on the next one runs out sooner
_LOOKED_AT = 50  # of the latest steps, for their usual time


def growth(
    run: Run, last: Attempt, diagnosis: Diagnosis, *, last_resort: bool = False
) -> MemoryGrowth | None:
    """Return the growth because of which to restart an attempt that failed; None if its settings change."""
    if obstacle(run, last) or (fragmentation_prevails(diagnosis) and _has_other_allocator(run, last.knobs)):
        return None  # the other allocator costs nothing
    return growth_behind(run, last, diagnosis, last_resort=last_resort)


def growth_behind(
    run: Run, last: Attempt, diagnosis: Diagnosis, *, last_resort: bool = False
) -> MemoryGrowth | None:
    """Return the growth that made an attempt fail; None if its settings are the cause.

    Growth was measured, or an earlier process failed in the same way after about as many steps. An
    unexplained failure after very many steps is tried once with the same settings: whether it recurs after as
    many steps shows if it is growth. As a `last_resort`, before a run would give up, fewer steps are enough.
    A validation fails after as many steps each time because it comes so often.
    """
    steps = len(last.progress)
    if diagnosis.cause not in _GROWING or steps < _FEWEST:
        return None
    measured = _forecast(last, diagnosis) or _measured(last, diagnosis)
    if measured is not None or _by_lengths(last):
        return measured
    if diagnosis.facts.validation or _is_flat(last, diagnosis) or _is_refuted(run, steps):
        return None
    unexplained = steps >= _UNEXPLAINED and restart_share(run, last) <= _WORTH
    if last_resort or unexplained or _failed_so_before(run, last, diagnosis):
        return MemoryGrowth(memory=_memory(diagnosis), steps=steps, component=diagnosis.component)
    return None


def obstacle(run: Run, last: Attempt) -> str:
    """Return what would permit a restart from the last checkpoint, in words; empty if nothing prevents it."""
    general = _obstacle(run)
    if general or _saved_new_steps(last):
        return general
    return "a checkpoint before memory runs out (`recovery.save_every`), from which a fresh process continues"


def in_vain(run: Run, last: Attempt, diagnosis: Diagnosis) -> str:
    """Return why relaunches are in vain, in words, if a second process ran out of memory that grew.

    Without a checkpoint each begins with the first step, and lasts hardly longer with other settings.
    """
    first = next((each.progress[0].step for each in run.attempts if each.progress), None)
    if not last.progress or last.progress[0].step != first:
        return ""
    if run.accepted.profile.resumable and any(each.saved is not None for each in run.attempts):
        return ""
    grown = growth_behind(run, last, diagnosis)
    if grown is None or last_step(run, last) < 2 * grown.steps:
        return ""
    if grown.steps < _UNEXPLAINED and not grown.per_step_bytes:
        return ""
    if not _failed_so_before(run, last, diagnosis, _AS_FAR if grown.per_step_bytes else _AS_NEAR):
        return ""
    return "memory grows until it runs out, and there is no checkpoint to continue from"


def restart_now(run: Run, last: Attempt) -> MemoryGrowth | None:
    """Return the growth because of which to restart a running attempt now; None if not now.

    The time is the last checkpoint before memory runs out. It takes an earlier failure by the same growth, or
    a job with `forecast: act` and a process that ran for long compared to the cost of a restart.
    """
    forecast = run.accepted.job.recovery.forecast
    if forecast is Forecasting.OFF or _obstacle(run) or len(last.progress) < _FEWEST:
        return None
    known, ran_out = _known(run, last.knobs), _known(run)
    if known is None and not (last.expected and (ran_out or forecast is Forecasting.ACT)):
        return None
    if not is_fresh(last.progress[-1]):
        return None
    first, following = last.progress[0].step, next_save(last)
    for ahead in last.expected:
        again = known if known is not None and known.memory == ahead.memory else None
        grew = ran_out is not None and ran_out.memory == ahead.memory
        if ahead.lengths or not (again or grew or forecast is Forecasting.ACT):
            continue
        if ahead.soonest > min(following, last_step(run, last)):
            continue
        if again and following < first + int(_BEFORE * again.steps) and not _is_faster(ahead, again):
            continue  # a forecast is more cautious than the previous process required
        if again or grew or (_is_worth_planning(run, last) and lasts(run, last, ahead)):
            return _as_forecast(ahead, steps=_steps_until(last, ahead))
    if known is None or (known.per_step_bytes and not known.own_limit):
        return None  # measured growth is forecast before memory runs out
    runs_out = first + int(_BEFORE * known.steps)
    return known if following >= runs_out and runs_out <= last_step(run, last) else None


def _is_faster(ahead: Foreseen, before: MemoryGrowth) -> bool:
    """Return whether memory grows faster than in the process that ran out of it, if that was measured."""
    return ahead.per_step_bytes > _FASTER * before.per_step_bytes


def is_for_restarts(run: Run, last: Attempt) -> bool:
    """Return whether an expected failure will be answered by a restart rather than by other settings."""
    ahead = last.imminent
    if ahead is None or ahead.lengths or _obstacle(run):
        return False
    return _is_worth_planning(run, last)


def _is_worth_planning(run: Run, last: Attempt) -> bool:
    return restart_share(run, last) <= (_PLANNED if len(last.progress) >= SHOWN else _WORTH)


def after_restart(run: Run, last: Attempt) -> Launch:
    """Return the relaunch of an attempt that was stopped for a fresh process."""
    known = _known(run, last.knobs)
    if known is None:
        ahead = next((each for each in last.expected if not each.lengths), None)
        known = None if ahead is None else _as_forecast(ahead, steps=_steps_until(last, ahead))
    if known is None:
        return Launch(knobs=last.knobs, reason="restarted with the same settings")
    return answer(run, last, known, lambda: None) or restart(last, known)


def restart(last: Attempt, grown: MemoryGrowth) -> Launch:
    """Return the relaunch with the same settings."""
    return Launch(
        knobs=last.knobs,
        reason=describe(grown),
        remedy=Remedy(name=NAME, changes={}, reason=describe(grown)),
        growth=grown,
    )


def describe(grown: MemoryGrowth) -> str:
    """Return, in words, what grew, by how much and where, and why the settings stay."""
    why = "since a fresh process begins without what accumulated"
    return f"{grown.text}; restarted with the same settings, {why}"


def restart_share(run: Run, last: Attempt) -> float:
    """Return the share of the time that restarts take if each process runs as long as the last one."""
    ran_s, start_s = _usual_s(last) * len(last.progress), _start_s(run)
    return start_s / (start_s + ran_s)


def _usual_s(last: Attempt) -> float:
    """Return the usual seconds of the latest steps; 0 if none was measured."""
    recent = [event.seconds for event in last.progress[-_LOOKED_AT:] if event.seconds]
    return median(recent) if recent else 0.0


def _start_s(run: Run) -> float:
    starts = [attempt.start_s for attempt in run.attempts if attempt.start_s > 0]
    return median(starts) if starts else _START_S


def answer(run: Run, last: Attempt, grown: MemoryGrowth, other: Callable[[], Remedy | None]) -> Launch | None:
    """Return the restart of a process that grew; None if the `other` remedy takes less time.

    Where restarts take much of the time, it changes the settings to those with which a process lasts longer.
    No setting is tried against a host that fills step by step, because what settings move there does not
    grow.
    """
    share = restart_share(run, last)
    changed = any(a.growth is not None and a.knobs != last.knobs for a in run.attempts)
    if not grown.on_gpu or (share <= _WORTH and not changed):
        return restart(last, grown)
    left = last_step(run, last) - (last.saved or 0)
    longer = longer_lasting(run, last, grown, start_s=_start_s(run), left=left) if left > 0 else None
    if longer is not None:
        return Launch(knobs=longer.apply(last.knobs), reason=longer.reason, remedy=longer, growth=grown)
    cure = other()
    if cure is None:
        return restart(last, grown)
    usual_s = _usual_s(last)
    pays = bool(cure.step_s and usual_s) and share < 1 - usual_s / (cure.step_s or math.inf)
    return restart(last, grown) if pays else None


def _obstacle(run: Run) -> str:
    """Return what would permit such restarts of a job, in words; empty if nothing prevents them."""
    profile, recovery = run.accepted.profile, run.accepted.job.recovery
    if NAME in recovery.deny:
        return f"{NAME}, which recovery.deny excludes"
    if recovery.relaunches == 0:
        return "relaunches, which `recovery.relaunches: 0` excludes"
    if run.is_late:
        return "a longer `recovery.duration`"
    if profile.resumable:
        return ""
    what = "`settings.resume`" if profile.unknown_program else "checkpoints that the job continues from"
    return f"{what}, with which a restart from the last checkpoint frees what grew"


def _saved_new_steps(last: Attempt) -> bool:
    """Return whether the next attempt can continue from new steps that this one saved."""
    if last.saved is None or not last.progress:
        return False
    return last.saved >= last.progress[0].step and last.new_step


def _is_refuted(run: Run, steps: int) -> bool:
    """Return whether the last attempt, restarted for growth, failed much sooner or unlike it much later."""
    before = run.attempts[-2].growth if len(run.attempts) > 1 else None
    if before is None:
        return False
    return steps < _AS_FAR * before.steps or (not before.per_step_bytes and steps > before.steps / _AS_FAR)


def _known(run: Run, knobs: Knobs | None = None) -> MemoryGrowth | None:
    """Return the growth by which the latest earlier attempt ran out of memory, with these settings or any."""
    earlier = (a for a in reversed(run.attempts[:-1]) if knobs is None or a.knobs == knobs)
    ended = (a.growth for a in earlier if not a.restarted)
    return next((each for each in ended if each is not None), None)


def _has_other_allocator(run: Run, knobs: Knobs) -> bool:
    return "allocator" in run.accepted.profile.supported and knobs.allocator != "expandable"


def _memory(diagnosis: Diagnosis) -> str:
    return diagnosis.phase.value if diagnosis.cause is Cause.GPU_OOM else diagnosis.cause.resource


def _forecast(last: Attempt, diagnosis: Diagnosis) -> MemoryGrowth | None:
    """Return the growth that was forecast for the memory that ran out."""
    for ahead in last.foreseen:
        if ahead.holds and not ahead.lengths and ahead.memory == _memory(diagnosis):
            return _as_forecast(ahead, steps=len(last.progress))
    return None


def _steps_until(last: Attempt, ahead: Foreseen) -> int:
    """Return the steps of an attempt until an expected failure."""
    return (ahead.step or 0) - last.progress[0].step + 1


def _as_forecast(ahead: Foreseen, *, steps: int) -> MemoryGrowth:
    return MemoryGrowth(
        memory=ahead.memory,
        steps=steps,
        per_step_bytes=ahead.per_step_bytes,
        component=ahead.component,
        process=ahead.process,
        own_limit=ahead.own_limit,
    )


def _by_lengths(last: Attempt) -> bool:
    """Return whether memory grows with the lengths of the responses, of which no fresh process is free."""
    return any(each.holds and each.lengths for each in last.foreseen)


def _rows(
    last: Attempt, diagnosis: Diagnosis, part: slice = slice(-WINDOW, None)
) -> list[tuple[int, int, int]]:
    """Return step, bytes and capacity of the failed phase's peaks in `part` of the steps."""
    name = diagnosis.phase.value
    if diagnosis.cause is not Cause.GPU_OOM:
        return []
    result = ((event.step, event.peaks.get(name)) for event in last.progress[part])
    return [
        (step, peak.used_bytes, peak.capacity_bytes)
        for step, peak in result
        if peak is not None and peak.capacity_bytes and not peak.upper_bound
    ]


def _measured(last: Attempt, diagnosis: Diagnosis) -> MemoryGrowth | None:
    """Return the growth that was measured up to the failure, if it explains the failure."""
    if _by_lengths(last):
        return None
    if diagnosis.own_limit and diagnosis.host_growth:
        return MemoryGrowth(
            memory=HOST,
            steps=len(last.progress),
            per_step_bytes=diagnosis.host_growth,
            component=diagnosis.component,
            own_limit=True,
        )
    rows = _rows(last, diagnosis)
    if len(rows) < _FEWEST:
        return None
    steps, used, capacities = np.array(rows, dtype=float).T
    grows, limit = trend(steps, used), capacities[-1]
    if grows is None or grows.decay < 1.0:
        return None
    grown = grows.rate * (steps[-1] - last.progress[0].step)
    near = max(_NEAR * limit, 10 * grows.rate)
    if grown < _LEAST * limit or limit - grows.level > near:
        return None
    return MemoryGrowth(
        memory=_memory(diagnosis),
        steps=len(last.progress),
        per_step_bytes=int(grows.rate),
        component=diagnosis.component,
    )


def _is_flat(last: Attempt, diagnosis: Diagnosis) -> bool:
    """Return whether the phase that ran out was measured and did not grow, so that one step was too large.

    The peaks of a phase leave out what an allocator reserves and cannot use.
    """
    if fragmentation_prevails(diagnosis):
        return False
    late, early = _rows(last, diagnosis), _rows(last, diagnosis, slice(WARM_UP, WARM_UP + WINDOW))
    if len(late) < _FEWEST or not early:
        return len(late) >= _FEWEST
    before, after = (median(used for _, used, _ in rows) for rows in (early, late))
    return after - before < _LEAST * late[-1][2]


def _failed_so_before(run: Run, last: Attempt, diagnosis: Diagnosis, share: float = _AS_FAR) -> bool:
    """Return whether an earlier process ran out of the same memory after about as many steps."""
    steps = len(last.progress)
    for attempt in islice(reversed(run.attempts[:-1]), 3):
        done = len(attempt.progress)
        if attempt.growth is not None and not attempt.restarted:
            alike = attempt.growth.memory == _memory(diagnosis)
        else:
            alike = attempt.diagnosis is not None and attempt.diagnosis.cause is diagnosis.cause
        if alike and done >= _FEWEST and share <= steps / done <= 1 / share:
            return True
    return False
