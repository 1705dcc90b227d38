"""Decide what follows in the rehearsal before a training, by the same rules as in the training itself."""

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
_LENGTHS = OF_PASSES | {Phase.ROLLOUT, Phase.NONE}  # phases whose memory depends on the lengths
_FOLLOWS_LENGTHS = frozenset({Cause.GPU_OOM, Cause.HOST_OOM, Cause.KV_POOL, Cause.SHM, Cause.OBJECT_STORE})


def while_rehearsing(run: Run, rehearsal: Rehearsal, ordinary: Callable[[Run], Action]) -> Action | None:
    """Return the next action in the rehearsals of `run`; None if the training follows.

    `ordinary`: the next action if they were attempts at the training. After a failure with every response at
    full length the rehearsal continues with the job's own lengths; its measurements show whether the training
    is likely to fail so, and only then is the failure cured. A rehearsal that fails without a remedy does not
    prevent the training, because the rehearsal itself may be the cause.
    """
    last = run.attempts[-1] if run.attempts else None
    if last is not None and not last.longest:
        run = _apart(run)
    action = ordinary(run)
    if last is None:
        if not isinstance(action, Launch):
            return action
        return _start(action, Part.WORST, longest=rehearsal.forces)
    if isinstance(action, Launch) and run.edited:
        return _start(action, Part.WORST, longest=rehearsal.forces)
    part = last.rehearsal or Part.WORST
    if _by_length(last) and _answers(run, action) and not _likely(run, last, rehearsal, action):
        return _start(_own_lengths(last, action), part, longest=False)
    match action:
        case Launch():
            return _start(action, part, longest=last.longest)
        case Finish(verdict=TrainingCompleted()):
            if part is Part.WORST and rehearsal.reloads:
                reload = Launch(knobs=last.knobs, reason="rehearsal: restarts from its own checkpoint")
                return _start(reload, Part.RELOAD, longest=last.longest)
            cure = _cure(run, last, rehearsal, ordinary)
            if cure is not None:
                return _start(cure, Part.WORST, longest=True)
            cured = last.knobs != run.accepted.profile.knobs
            return Finish(verdict=Rehearsed(cured=cured)) if rehearsal.only else None
        case Finish(verdict=GaveUp() | NeedsHuman()) if not rehearsal.only and run.finished is None:
            return None
        case _:
            return action


def passed(run: Run) -> Attempt | None:
    """Return the last rehearsal if it completed, otherwise None."""
    last = run.rehearsed[-1] if run.rehearsed else None
    if last is None or last.ended is None or not isinstance(last.ended.outcome, Completed):
        return None
    return last


def chance(run: Run, failed: Attempt, *, steps: int) -> float | None:
    """Return the chance that the failure of `failed` occurs in `steps` steps with the job's own lengths.

    None if there is no estimate of it.
    """
    goal = msgspec.structs.replace(run.accepted.job.goal, steps=steps)
    job = msgspec.structs.replace(run.accepted.job, goal=goal)
    accepted = msgspec.structs.replace(run.accepted, job=job)
    view = outlook(msgspec.structs.replace(run, accepted=accepted))
    place = None if failed.diagnosis is None else _row(failed.diagnosis)
    if view is None or place is None:
        return None
    estimate = replace(view, assumption=Assumption.EXPECTED).estimates((failed.knobs,))
    return float(chances(estimate, predicted(view.calibration, estimate), headroom=0.0)[place, 0])


def _row(diagnosis: Diagnosis) -> int | None:
    """Return the row of `chances` for a failure; None if there is none."""
    if diagnosis.cause is Cause.HOST_OOM:
        return len(PHASES)
    if diagnosis.cause is Cause.GPU_OOM and diagnosis.phase in PHASES:
        return PHASES.index(diagnosis.phase)
    return None


def _apart(run: Run) -> Run:
    """Return the run without its rehearsals at full length, whose failures alone need no remedy."""
    forced = tuple(a for a in run.attempts if a.longest)
    return msgspec.structs.replace(
        run, attempts=tuple(a for a in run.attempts if not a.longest), rehearsed=forced
    )


def _answers(run: Run, action: Action) -> bool:
    """Return whether an action answers a failure, rather than memory that is still held or the user."""
    gives_up = isinstance(action, Finish) and isinstance(action.verdict, GaveUp | NeedsHuman)
    return isinstance(action, Launch) or (gives_up and run.finished is None)


def _by_length(attempt: Attempt) -> bool:
    """Return whether the forced full length may be why an attempt failed."""
    diagnosis = attempt.diagnosis
    if diagnosis is None or not attempt.longest:
        return False
    return diagnosis.cause in _FOLLOWS_LENGTHS and diagnosis.phase in _LENGTHS


def _likely(run: Run, last: Attempt, rehearsal: Rehearsal, action: Action) -> bool:
    """Return whether measurements at the job's own lengths make a failure at full length worth a remedy."""
    measured = any(a.progress for a in run.attempts if not a.longest)
    if not measured or not isinstance(action, Launch) or action.remedy is None:
        return False
    return (chance(run, last, steps=rehearsal.steps) or 0.0) > _LIKELY


def _own_lengths(last: Attempt, action: Action) -> Launch:
    """Return the rehearsal with the job's own lengths, after one at full length that failed."""
    phase = "it" if last.diagnosis is None else last.diagnosis.phase.value
    remedy = action.remedy if isinstance(action, Launch) else None
    ready = f"; kept ready: {words(last.knobs, remedy.changes)}" if remedy is not None else ""
    reason = (
        f"rehearsal: {phase} fails with every answer at full length; on with the job's own lengths{ready}"
    )
    return Launch(knobs=last.knobs, reason=reason)


def _cure(run: Run, last: Attempt, rehearsal: Rehearsal, ordinary: Callable[[Run], Action]) -> Launch | None:
    """Return the remedy for the last failure at full length, if it is likely in the training."""
    failed = run.rehearsed[-1] if run.rehearsed else None
    if last.longest or failed is None or failed.knobs != last.knobs:
        return None
    likely = chance(run, failed, steps=rehearsal.steps)
    if likely is None or likely <= _LIKELY:
        return None
    action = ordinary(msgspec.structs.replace(run, attempts=run.rehearsed, rehearsed=run.attempts))
    if not isinstance(action, Launch) or action.remedy is None:
        return None
    reason = f"{likely:.0%} chance in {rehearsal.steps} steps; {action.reason}"
    remedy = msgspec.structs.replace(action.remedy, reason=reason)
    return msgspec.structs.replace(action, reason=reason, remedy=remedy)


def _start(action: Launch, part: Part, *, longest: bool) -> Launch:
    return msgspec.structs.replace(action, rehearsal=part, longest=longest)
