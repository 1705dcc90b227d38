"""Choose the checkpoint at which a run changes its configuration before growing memory runs out."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

import numpy as np

from autotune.policies.forecast.foresee import WARM_UP
from autotune.policies.forecast.trend import WINDOW
from autotune.policies.values.events import Foreseen, Progressed
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Forecasting, Then

SHOWN = 100  # steps of a process, or half of a shorter training, before its growth is acted on
_SEEN = 4 * WINDOW  # latest steps that are considered
_PARTS = 4  # of these steps; their minimum peaks rise from part to part if memory is not released
_GOES_ON = 0.5  # share of the rise from the first part to the second that the last rise must reach


def lasts(run: Run, last: Attempt, ahead: Foreseen) -> bool:
    """Return whether memory has grown for long enough to act on its forecast before it ran out even once.

    The minimum peaks of a sawtooth, which returns to its start, and of a cache, which fills ever more slowly,
    stop rising or rise less than before. A forecast that was withdrawn once may be wrong again. Not acting
    costs one failure, and with it the steps since the last checkpoint.
    """
    of = last.progress[-1].of
    if len(last.progress) < (SHOWN if of is None else min(SHOWN, of / 2)):
        return False
    if any(ahead.memory in each.withdrawn for each in run.attempts if each.knobs == last.knobs):
        return False
    recent = last.progress[max(WARM_UP, len(last.progress) - _SEEN) :]
    used = [event.peaks[ahead.memory].used_bytes for event in recent if ahead.memory in event.peaks]
    if len(used) < _PARTS:
        return True  # host memory, whose peaks are not in the history
    parts = np.array(used[len(used) % _PARTS :], dtype=float).reshape(_PARTS, -1)
    rises = np.diff(parts.min(axis=1))
    return bool(rises.min() > 0 and rises[-1] >= _GOES_ON * rises[0])


# ---- the checkpoint at which to stop

_FRESH = 1  # steps after a checkpoint that a stop may cost: a decision may come a step late
_FRESH_S = 3.0  # or seconds of training: a driver polls an attempt every 1.5 s
_SAVES_IN = 1000  # of the latest steps, for the usual interval of checkpoints
_MOST = 2  # stops per run


def forewarned(run: Run, last: Attempt) -> Foreseen | None:
    """Return the expected failure for which to stop now; None if none, not yet, or not `forecast: act`.

    It is time at the last checkpoint before the earliest likely step of the failure, by the usual interval
    between checkpoints, while a stop loses almost nothing. A run is not stopped if its job ends first, or if
    such stops brought no progress.
    """
    ahead = last.imminent
    if run.accepted.job.recovery.forecast is not Forecasting.ACT or ahead is None or not last.progress:
        return None
    if not run.accepted.profile.resumable:
        return None
    earliest = ahead.soonest
    if earliest > last_step(run, last) or _in_vain(run, last, ahead) or not is_fresh(last.progress[-1]):
        return None
    return ahead if next_save(last) >= earliest and (ahead.lengths or lasts(run, last, ahead)) else None


def why_now(ahead: Foreseen) -> str:
    """Return the reason for a stop before an expected failure."""
    memory = "host memory" if ahead.cause is Cause.HOST_OOM else f"GPU memory in {ahead.phase.value}"
    memory = f"the memory of process {ahead.process}" if ahead.own_limit else memory
    return f"{memory} is expected to run out at step {ahead.step}, and this is the checkpoint before"


def last_step(run: Run, last: Attempt) -> float:
    """Return the step at which the job ends; infinity if unknown."""
    goal, of = run.accepted.job.goal, last.progress[-1].of
    ends = math.inf if of is None else float(of)
    if goal.then is not Then.STOP or last.goal is not None:
        return ends
    return min(ends, last.progress[0].step + goal.steps - 1)


def is_fresh(done: Progressed) -> bool:
    """Return whether a stop after a step loses almost nothing since the last checkpoint."""
    if done.saved is None or done.saved > done.step:
        return False
    return done.step - done.saved <= max(_FRESH, _FRESH_S / done.seconds if done.seconds else 0.0)


def next_save(last: Attempt) -> int:
    """Return the step of an attempt's next checkpoint, by the median steps between those so far.

    Before a second one, by the steps to the first; without any, that of its start.
    """
    saves = sorted({event.saved for event in last.progress[-_SAVES_IN:] if event.saved is not None})
    if len(saves) > 1:
        return saves[-1] + int(median(after - before for before, after in pairwise(saves)))
    return saves[0] + max(1, saves[0] - last.progress[0].step + 1) if saves else 0


def _in_vain(run: Run, last: Attempt, ahead: Foreseen) -> bool:
    """Return whether the stops are used up, or the last one was for the same memory and gained no step."""
    if sum(attempt.foregone for attempt in run.attempts) >= _MOST:
        return True
    before = run.attempts[-2] if len(run.attempts) > 1 else None
    if before is None or not before.foregone or (before.new_step and last.new_step):
        return False
    return before.imminent is not None and before.imminent.memory == ahead.memory
