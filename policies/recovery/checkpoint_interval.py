"""The checkpoint interval if the job sets none: long enough to cost little, short enough to lose little."""

from __future__ import annotations

import math
from itertools import islice
from statistics import median

from msgspec.structs import replace

from autotune.policies.recovery.outlook import outlook
from autotune.policies.values.events import SURE, Decided, Foreseen, History, Progressed
from autotune.policies.values.history import fold
from autotune.policies.values.job import SAVE_S, SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs

_UNMEASURED = 0.5  # of SAVE_S while step times are only predicted: steps may take twice as long
_LOOKED_AT = 20  # of the latest steps
_BEFORE_GROWTH = 8  # checkpoints of a process before memory that grows runs out: an eighth may be lost


def with_saves(job: Job, history: History, knobs: Knobs) -> Job:
    """Return the job with `recovery.save_every` filled in; max(10 steps, 20 minutes) if it is not set.

    If memory grows, or is forecast to run out, a process saves several times before it does.
    """
    if job.recovery.save_every is not None:
        return job
    every = steps_between(history, knobs)
    lasts = _steps_of_growth(history)
    if lasts:
        every = min(every, max(1, lasts // _BEFORE_GROWTH))
    return replace(job, recovery=replace(job.recovery, save_every=every))


def _steps_of_growth(history: History) -> int:
    """Return the steps of a process until growth ends it, by a decision or a forecast; 0 if unknown.

    The last forecast for each memory counts, unless it was withdrawn.
    """
    visited: set[str] = set()
    for event in reversed(history):
        if isinstance(event, Decided) and event.growth is not None:
            return event.growth.steps
        if not isinstance(event, Foreseen) or event.memory in visited:
            continue
        visited.add(event.memory)
        if event.holds and not event.lengths and event.chance >= SURE:
            return max(0, (event.step or 0) - (event.since or 0))
    return 0


def steps_between(history: History, knobs: Knobs) -> int:
    """Return the steps from one checkpoint to the next, by the run's latest steps or by the estimate."""
    steps = (event.seconds for event in reversed(history) if isinstance(event, Progressed) and event.seconds)
    measured = list(islice(steps, _LOOKED_AT))
    if measured:
        return max(SAVE_STEPS, math.ceil(SAVE_S / median(measured)))
    view = outlook(fold(history))
    predicted_s = float(view.estimates((knobs,)).step_s[0]) if view is not None else 0.0
    if not predicted_s > 0.0:
        return SAVE_STEPS
    return max(SAVE_STEPS, math.ceil(_UNMEASURED * SAVE_S / predicted_s))
