"""What follows in the rehearsal before a training, by the same rules as in the training itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.lengths import Assumption
from autotune.policies.estimate.peaks import OF_PASSES, PHASES
from autotune.policies.recovery.outlook import chances, outlook
from autotune.policies.recovery.remedy_text import words
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Action,
    Finish,
    GaveUp,
    Launch,
    NeedsHuman,
    Rehearsed,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.observation import Completed
from autotune.policies.values.rehearsing import Part, Rehearsal

_LIKELY = 0.5  # chance over the training's steps above which a failure of forced lengths is cured beforehand
_LENGTHS = OF_PASSES | {Phase.ROLLOUT, Phase.NONE}  # phases whose need follows the lengths
_FOLLOWS_LENGTHS = frozenset({Cause.GPU_OOM, Cause.HOST_OOM, Cause.KV_POOL, Cause.SHM, Cause.OBJECT_STORE})


def while_rehearsing(run: Run, rehearsal: Rehearsal, ordinary: Callable[[Run], Action]) -> Action | None:
    """Return what follows the rehearsals of `run`; None: the training does.

    `ordinary` is what would follow if they were attempts at the training. A failure that only answers of
    full length cause is cured where it is likely in the training; else its remedy is kept ready, and the
    rehearsal goes on with the job's own lengths. A rehearsal that ends without a cure keeps no training from
    its start: it may be to blame itself.
    """
    last = run.attempts[-1] if run.attempts else None
    if last is not None and not last.longest:
        # What failed at full length alone is known to the estimate, and asks for no cure any more.
        own = tuple(a for a in run.attempts if not a.longest)
        forced = tuple(a for a in run.attempts if a.longest)
        run = msgspec.structs.replace(run, attempts=own, rehearsed=forced)
    action = ordinary(run)
    match action:
        case Launch() if last is None:
            return _start(action, Part.WORST, longest=rehearsal.forces)
        case Finish(verdict=TrainingCompleted()) if last is not None:
            if last.rehearsal is Part.WORST and rehearsal.reloads:
                reason = "rehearsal: goes on from its checkpoint"
                return _start(Launch(knobs=last.knobs, reason=reason), Part.RELOAD, longest=last.longest)
            return Finish(verdict=_passed(run, last)) if rehearsal.only else None
        case Finish(verdict=GaveUp() | NeedsHuman()) if last is not None:
            if kept := _kept(run, last, rehearsal, action):
                return kept
            return action if rehearsal.only or run.finished is not None else None
        case Launch() if last is not None:
            part = Part.WORST if run.edited else last.rehearsal or Part.WORST
            longest = rehearsal.forces if run.edited else last.longest
            return _kept(run, last, rehearsal, action) or _start(action, part, longest=longest)
        case _:
            return action


def passed(run: Run) -> Attempt | None:
    """Return the rehearsal that got through to its end, if the last one did."""
    last = run.rehearsed[-1] if run.rehearsed else None
    if last is None or last.ended is None or not isinstance(last.ended.outcome, Completed):
        return None
    return last


def chance(run: Run, steps: int) -> float | None:
    """Return the chance that so many steps meet the last failure with the job's own lengths.

    None where no estimate knows.
    """
    last = run.attempts[-1]
    goal = msgspec.structs.replace(run.accepted.job.goal, steps=steps)
    job = msgspec.structs.replace(run.accepted.job, goal=goal)
    view = outlook(msgspec.structs.replace(run, accepted=msgspec.structs.replace(run.accepted, job=job)))
    place = None if last.diagnosis is None else _row(last.diagnosis)
    if view is None or place is None:
        return None
    estimate = replace(view, assumption=Assumption.EXPECTED).estimates((last.knobs,))
    return float(chances(estimate, predicted(view.calibration, estimate), headroom=0.0)[place, 0])


def _row(diagnosis: Diagnosis) -> int | None:
    """Return the row of `chances` that a failure is about."""
    if diagnosis.cause is Cause.HOST_OOM:
        return len(PHASES)
    if diagnosis.cause is Cause.GPU_OOM and diagnosis.phase in PHASES:
        return PHASES.index(diagnosis.phase)
    return None


def _kept(run: Run, last: Attempt, rehearsal: Rehearsal, action: Action) -> Launch | None:
    """Return the rehearsal with the job's own lengths where the failure is not likely in the training."""
    diagnosis = last.diagnosis
    if not last.longest or run.edited or diagnosis is None:
        return None
    if diagnosis.cause not in _FOLLOWS_LENGTHS or diagnosis.phase not in _LENGTHS:
        return None
    likely = chance(run, rehearsal.steps)
    if likely is not None and likely > _LIKELY:
        return None
    known = "not known" if likely is None else f"{likely:.0%}"
    remedy = action.remedy if isinstance(action, Launch) else None
    ready = f"; kept ready: {words(last.knobs, remedy.changes)}" if remedy is not None else ""
    reason = (
        f"rehearsal: {diagnosis.phase.value} fails with every answer at full length, whose chance in "
        f"{rehearsal.steps} steps is {known}: on with the job's own lengths{ready}"
    )
    return _start(Launch(knobs=last.knobs, reason=reason), last.rehearsal or Part.WORST, longest=False)


def _passed(run: Run, last: Attempt) -> Rehearsed:
    return Rehearsed(cured=last.knobs != run.accepted.profile.knobs)


def _start(action: Launch, part: Part, *, longest: bool) -> Launch:
    return msgspec.structs.replace(action, rehearsal=part, longest=longest)
