"""After the goal: offer a faster configuration for the memory that stayed free, or try it with `climb`."""

from __future__ import annotations

from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.permissions import may_follow, relapse_of
from autotune.policies.recovery.ranking import assess, faster
from autotune.policies.recovery.remedy_text import step
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Then
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.observation import Cancelled
from autotune.policies.values.remedy import Remedy

CLIMB = "climb"  # the name of the remedy, and `by` of the stop before it
RETURN = "return"
_MOST = 2  # climbs of one run


def offer(run: Run) -> Remedy | None:
    """Return the faster neighbour of the stable configuration; None if nothing certainly faster fits."""
    stable = next((a for a in reversed(run.attempts) if a.goal is not None), None)
    view = outlook(run)
    if stable is None or view is None or (stable.goal is not None and stable.goal.marginal):
        return None

    def permitted(knobs: Knobs) -> bool:
        tried = any(a.knobs == knobs for a in run.attempts)
        relapse = relapse_of(run, knobs, rehearsed=True)
        return relapse is None and not tried and may_follow(run, stable.knobs, knobs, started=True)

    candidate = faster(view, stable.knobs, started=True, permitted=permitted)
    if candidate is None:
        return None
    why = "every phase left memory free"
    return step(view, stable.knobs, candidate, assess(view, stable.knobs), name=CLIMB, why=why)


def due(run: Run, last: Attempt) -> Remedy | None:
    """Return the climb to make now, if the job sets `climb` and a checkpoint was written since the goal."""
    job = run.accepted.job
    if not job.recovery.climb or job.goal.then is Then.STOP or last.goal is None:
        return None
    saved = last.progress[-1].saved if last.progress else None
    climbed = sum(a.remedy is not None and a.remedy.name == CLIMB for a in run.attempts)
    if saved is None or saved < last.goal.step or climbed >= _MOST:
        return None
    return offer(run)


def stopped_to_climb(attempt: Attempt) -> bool:
    """Return whether an attempt was stopped in order to try a faster configuration."""
    return (
        attempt.ended is not None
        and isinstance(attempt.ended.outcome, Cancelled)
        and attempt.ended.outcome.by == CLIMB
    )


def back(run: Run, last: Attempt) -> Remedy | None:
    """Return the change back to the stable configuration after a failed climb; None otherwise."""
    place = len(run.attempts) - 1
    # A climb that was lost or hung was relaunched with its own knobs.
    while place and run.attempts[place].remedy is None and run.attempts[place - 1].knobs == last.knobs:
        place -= 1
    remedy = run.attempts[place].remedy
    if remedy is None or remedy.name != CLIMB:
        return None
    stable = next(
        (a for a in reversed(run.attempts[:place]) if a.goal is not None and a.diagnosis is None), None
    )
    if stable is None:
        return None
    return Remedy(
        name=RETURN,
        changes=new_values(last.knobs, stable.knobs),
        reason=f"the faster configuration failed; back to attempt #{stable.number}, which reached the goal",
    )
