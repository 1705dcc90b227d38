"""decide(history) -> Launch | Await | Stop | Finish: the only place that decides what a run does next."""

from __future__ import annotations

import math
from typing import assert_never

import msgspec

from autotune.policies.forecast.last_checkpoint import forewarned, why_now
from autotune.policies.recovery.first_launch import first_launch
from autotune.policies.recovery.give_up import gave_up
from autotune.policies.recovery.growth import (
    after_restart,
    answer,
    describe,
    growth,
    in_vain,
    is_for_restarts,
    restart,
    restart_now,
)
from autotune.policies.recovery.next_remedy import next_remedy
from autotune.policies.recovery.permissions import exclusion
from autotune.policies.recovery.refused_changes import refusals_text, without_refused
from autotune.policies.recovery.rehearsal import while_rehearsing
from autotune.policies.recovery.upgrade import CLIMB, back, due, offer, stopped_to_climb
from autotune.policies.remedies.foreign_memory import OCCUPIED, without_foreign
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Action,
    Await,
    Ended,
    Finish,
    GaveUp,
    History,
    Infrastructure,
    Interrupted,
    Launch,
    NeedsHuman,
    Stable,
    Stop,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import FORECAST, RESTART, RESUMED, Attempt, Folding, Run
from autotune.policies.values.job import Then
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost
from autotune.policies.values.remedy import Remedy

EDITED = "as the job file says now"
_BACKOFF_S = 30.0  # doubled with every loss
_BACKOFF_MOST_S = 600.0
_OCCUPIED_S = 600.0  # a GPU that others hold takes longer to become free than a node to come back
_AN_HOUR_S = 3600.0
_BACKOFF_DOUBLINGS = 10  # more than the maximum needs
_MOST_ATTEMPTS = 1000  # of a run that always gains steps: only to end an endless loop
# Advice for faults of the cluster that persist after all retries.
_HINTS = {
    "gpu-unavailable": "add nodes with GPUs, or make the job ask for as many as there are",
    OCCUPIED: "others use its GPUs: free them, or give the job GPUs of its own",
}


def decide(history: History) -> Action:
    """Return the next action of a run, given its whole history."""
    return decide_on(Folding(history))


def decide_on(folding: Folding) -> Action:
    """Return the next action of a run, given its folded history.

    A finished run stays finished until the loop appends `Decided(reason=RESUMED)` because the user resumed
    it: budgets then start from zero, and the last attempt continues with its own knobs or with a remedy.
    """
    run = without_refused(without_foreign(folding.run()))
    rehearsal, action = run.accepted.rehearsal, None
    if rehearsal is not None and not run.attempts and not run.refused:
        rehearsed = without_refused(folding.rehearsal())
        action = while_rehearsing(rehearsed, rehearsal, _next)
        run = run if action is None else rehearsed
    action = action or _next(run)
    excluded = exclusion(run, action) if isinstance(action, Launch) else ""
    if excluded:
        return Finish(verdict=GaveUp(reason=f"the next change is excluded by the job's recovery: {excluded}"))
    undone = refusals_text(run)
    if isinstance(action, Launch) and undone:
        return msgspec.structs.replace(action, reason=f"{action.reason}; {undone}")
    return action


def _next(run: Run) -> Action:
    if run.finished is not None:
        return Finish(verdict=run.finished)
    if not run.attempts:
        return first_launch(run)
    last = run.attempts[-1]
    if run.edited and last.ended is not None:
        return Launch(knobs=run.accepted.profile.knobs, reason=EDITED)
    return _while_running(run, last) if last.ended is None else _after_end(run, last, last.ended)


def _after_end(run: Run, last: Attempt, ended: Ended) -> Action:
    match ended.outcome:
        case Completed():
            return Finish(
                verdict=TrainingCompleted(marginal=_marginal(run), faster=offer(run), growth=run.growth)
            )
        case Cancelled(by="goal"):
            return Finish(verdict=Stable(marginal=_marginal(run), faster=offer(run), growth=run.growth))
        case Cancelled(by="user") if not last.resumed:
            return Finish(verdict=Interrupted(by="user"))
        case Completed() | Crashed() | Hung() | Lost() | Cancelled():
            pass
        case _:
            assert_never(ended.outcome)
    if ended.held and not last.resumed and _rule(last) != OCCUPIED:
        return Finish(verdict=Infrastructure(reason=f"memory was not released: {ended.held}"))
    relaunch = _after_stop(run, last)
    if relaunch is not None:
        return relaunch
    if stopped_to_climb(last) and last.diagnosis is None:
        faster = offer(run)
        if faster is None:
            return _again(last, "no faster configuration is left; relaunched with the same knobs")
        return Launch(knobs=faster.apply(last.knobs), reason=faster.reason, remedy=faster)
    if last.infrastructure:
        return _after_loss(run, last)
    if last.diagnosis is None:
        return Await()
    return _after_failure(run, last, last.diagnosis)


def _after_stop(run: Run, last: Attempt) -> Launch | None:
    """Return the relaunch of an attempt that was stopped while healthy, or is restarted for growth."""
    if last.resumed and not last.out_of_memory:
        return _again(last, RESUMED)
    if last.growth is not None:
        return answer(run, last, last.growth, lambda: None)
    if last.restarted:
        return after_restart(run, last)
    return _after_forecast(run, last) if last.foregone else None


def _while_running(run: Run, last: Attempt) -> Action:
    if last.stopping:
        return Await()
    if last.failure is not None:
        finding = last.failure.finding
        return Stop(by="failure", reason=finding.line.text or finding.line.rule)
    if last.goal is not None and run.accepted.job.goal.then is Then.STOP:
        return Stop(by="goal", reason=f"the goal was reached at step {last.goal.step}")
    grown = restart_now(run, last)
    if grown is not None:
        return Stop(by=RESTART, reason=f"this is the checkpoint before memory runs out: {describe(grown)}")
    ahead = None if is_for_restarts(run, last) else forewarned(run, last)
    if ahead is not None:
        failed = msgspec.structs.replace(last, diagnosis=ahead.diagnosis)
        after = msgspec.structs.replace(run, attempts=(*run.attempts[:-1], failed))
        if not _spent(after) and (back(after, failed) or next_remedy(after)) is not None:
            return Stop(by=FORECAST, reason=why_now(ahead))
    climb = due(run, last)
    return Await() if climb is None else Stop(by=CLIMB, reason=climb.reason)


def _after_loss(run: Run, last: Attempt) -> Action:
    """Return the action after a loss: a relaunch with the same knobs, with a longer wait after each loss.

    These relaunches have their own budget, `recovery.infrastructure_retries`, in which an hour of waiting for
    a GPU that others hold counts as one; budget and wait start again after an attempt that saved new steps.
    """
    lost = [a for a in run.since_gain if a.infrastructure]
    reason = _loss(last)
    if _killed(last) and any(_killed(a) and a.step == last.step for a in lost[:-1]):
        where = "before the first step" if last.step is None else f"after step {last.step}"
        twice = f"killed twice {where}: {reason}"
        diagnosis = Diagnosis(cause=Cause.UNKNOWN, step=last.step, confidence=0.0, reason=twice)
        if run.accepted.job.recovery.infrastructure_retries == 0:
            return Finish(verdict=Infrastructure(reason=twice))
        return Finish(verdict=NeedsHuman(diagnosis=diagnosis))
    advice = _HINTS.get(_rule(last))
    retries = run.accepted.job.recovery.infrastructure_retries
    waited = sum(_rule(a) == OCCUPIED for a in lost)
    used = len(lost) - waited + math.ceil(waited * _OCCUPIED_S / _AN_HOUR_S)
    if used > retries or len(run.since_resumed) > _MOST_ATTEMPTS:
        times = f"lost {len(lost)} times, {retries} retries allowed"
        times += ", of which an hour of waiting for a GPU is one" if waited else ""
        hint = f"; {advice}" if advice is not None else ""
        return Finish(verdict=Infrastructure(reason=f"{reason} ({times}){hint}"))
    if late := _late(run):
        return Finish(verdict=Infrastructure(reason=f"{reason}; {late}"))
    wait_s = _OCCUPIED_S if _rule(last) == OCCUPIED else backoff_s(len(lost))
    return Launch(knobs=last.knobs, reason=f"relaunched with the same knobs: {reason}", not_before_s=wait_s)


def backoff_s(losses: int) -> float:
    """Return the seconds to wait after so many losses before a relaunch with the same knobs."""
    return min(_BACKOFF_MOST_S, _BACKOFF_S * 2.0 ** min(losses - 1, _BACKOFF_DOUBLINGS))


def _after_failure(run: Run, last: Attempt, diagnosis: Diagnosis) -> Action:
    if diagnosis.cause is not Cause.HANG and not diagnosis.cause.is_memory:
        return Finish(verdict=NeedsHuman(diagnosis=diagnosis))
    if diagnosis.cause is Cause.HANG and _hung_before(run):
        return Finish(verdict=NeedsHuman(diagnosis=diagnosis))
    grown = growth(run, last, diagnosis)
    if grown is not None:
        launch = answer(run, last, grown, lambda: None if _spent(run) else _cure(run, last))
        if launch is not None:
            return launch
    spent = _spent(run) or in_vain(run, last, diagnosis)
    if spent:
        return Finish(verdict=gave_up(run, spent))
    if diagnosis.cause is Cause.HANG:
        where = "before its first step" if last.step is None else f"after step {last.step}"
        return _again(last, f"it hung for the first time {where}; relaunched with the same knobs")
    remedy = _cure(run, last)
    if remedy is None:
        grown = growth(run, last, diagnosis, last_resort=True)
        return Finish(verdict=gave_up(run)) if grown is None else restart(last, grown)
    reason = remedy.reason if grown is None else f"{grown.text}; {remedy.reason}"
    return Launch(knobs=remedy.apply(last.knobs), reason=reason, remedy=remedy)


def _cure(run: Run, last: Attempt) -> Remedy | None:
    return back(run, last) or next_remedy(run)


def _spent(run: Run) -> str:
    """Return the budget that is used up, in words; empty if a relaunch is left."""
    recovery, since = run.accepted.job.recovery, run.since_gain
    failed = [
        a
        for a in since
        if not (
            a.infrastructure
            or a.interrupted
            or a.foregone
            or a.restarted
            or a.growth is not None
            or a.cured
            or stopped_to_climb(a)
        )
    ]
    first = since[0].number if since else 0
    refused = [each for each in run.refused if each.renewed == run.renewed and each.number >= first]
    if len(failed) + len(refused) > recovery.relaunches:
        allowed = recovery.relaunches
        used = {0: "no relaunch is allowed", 1: "its only relaunch is used"}
        return used.get(allowed, f"all {allowed} relaunches are used")
    if len(run.since_resumed) > _MOST_ATTEMPTS:
        return f"{len(run.since_resumed)} attempts were made, although steps were gained in between"
    return _late(run)


def _late(run: Run) -> str:
    """Return that the run's time limit has passed, in words; empty if it has not."""
    limit_s = run.accepted.job.recovery.duration_s
    return f"the time limit of {limit_s:.0f} s (recovery.duration) has passed" if run.is_late else ""


def _after_forecast(run: Run, last: Attempt) -> Launch:
    """Return the relaunch after a stop for a forecast: with the remedy, otherwise with the same knobs.

    A forecast failure never ends the run; `forewarned` limits how often one stops it.
    """
    follows = None if last.diagnosis is None else _after_failure(run, last, last.diagnosis)
    if isinstance(follows, Launch):
        return follows
    return _again(last, "no remedy is left for the failure that is expected; relaunched with the same knobs")


def _hung_before(run: Run) -> bool:
    """Return whether the previous attempt hung too and the last one completed no further step."""
    last, before = run.attempts[-1], run.attempts[-2:-1]
    hung = any(a.diagnosis is not None and a.diagnosis.cause is Cause.HANG and not a.resumed for a in before)
    return hung and not last.new_step


def _again(last: Attempt, reason: str) -> Launch:
    return Launch(knobs=last.knobs, reason=reason)


def _marginal(run: Run) -> bool:
    goals = [a.goal for a in run.attempts if a.goal is not None]
    return bool(goals) and goals[-1].marginal


def _killed(attempt: Attempt) -> bool:
    outcome = None if attempt.ended is None else attempt.ended.outcome
    return isinstance(outcome, Lost) and outcome.killed and attempt.diagnosis is None


def _rule(attempt: Attempt) -> str:
    """Return the rule of the line that says why an attempt ended; empty if there is none."""
    evidence = () if attempt.diagnosis is None else attempt.diagnosis.evidence
    return evidence[0].rule if evidence else ""


def _loss(attempt: Attempt) -> str:
    if attempt.diagnosis is not None and attempt.diagnosis.evidence:
        return attempt.diagnosis.evidence[0].text
    outcome = None if attempt.ended is None else attempt.ended.outcome
    return outcome.reason if isinstance(outcome, Lost) else "the cluster failed"
