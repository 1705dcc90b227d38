"""The remedies that could have followed a failure, and why each was or was not taken.

The journal holds what was decided, not what was refused: the same policies are asked again with the history
as it was then.
"""

from __future__ import annotations

from itertools import islice

from autotune.orchestrator import messages
from autotune.orchestrator.report.document import Candidate
from autotune.orchestrator.report.past import Past
from autotune.orchestrator.units import show_gib
from autotune.policies.recovery.outlook import Outlook, measures, outlook, trusted
from autotune.policies.recovery.permissions import relapse_of, started_before
from autotune.policies.recovery.ranking import Ranked, judged, overflowing
from autotune.policies.recovery.refusals import is_refused, without_refused
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.permissions import denied
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Decided, Diagnosed, Policy
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.remedy import Effect, Remedy

_MOST_ROWS = 16
_NOISE = 0.04  # predicted step times that differ by less are equal, as in the ranking


def alternatives(past: Past, place: int, diagnosed: Diagnosed) -> tuple[Candidate, ...]:
    """Return the ladder's remedies for the failure at a place of the history, the one taken first."""
    decided = next((e for e in islice(past.history, place, None) if isinstance(e, Decided)), None)
    taken = decided.remedy if decided is not None else None
    run = without_refused(past.run(place + 1))
    if not run.attempts or run.attempts[-1].diagnosis is None:
        return ()
    present = run.attempts[-1].knobs
    view = _view(run, diagnosed, past, place + 1)
    chosen = judged(view, taken.apply(present)) if view is not None and taken is not None else None
    rows = []
    if taken is not None:
        rows.append(_row(present, taken, taken=True, why=_why_taken(chosen)))
    for remedy in candidates(run.accepted.profile, present, diagnosed, started=started_before(run)):
        if remedy.changes and (taken is None or remedy.changes != taken.changes):
            why = _why_not(run, view, present, remedy, chosen, taken)
            rows.append(_row(present, remedy, taken=False, why=why))
    return tuple(rows[:_MOST_ROWS])


def _view(run: Run, diagnosis: Diagnosis, past: Past, count: int) -> Outlook | None:
    """Return the estimate where it ranked the cures of this failure."""
    shared = run.accepted.policy is Policy.ESTIMATE and not run.refused
    view = past.view(count) if shared else outlook(run)
    if view is None or not trusted(view.run, diagnosis) or not measures(view, diagnosis):
        return None
    return view


def _row(present: Knobs, remedy: Remedy, *, taken: bool, why: str) -> Candidate:
    change = messages.setting_changes(present, remedy.apply(present))
    return Candidate(remedy=remedy.name, change=change, taken=taken, why=why)


def _why_taken(chosen: Ranked | None) -> str:
    if chosen is None:
        return "the cheapest that is permitted and repeats no earlier failure"
    return f"about {_seconds(chosen)} a step, chance of another failure {chosen.risk:.0%}, as predicted"


def _why_not(
    run: Run,
    view: Outlook | None,
    present: Knobs,
    remedy: Remedy,
    chosen: Ranked | None,
    taken: Remedy | None,
) -> str:
    accepted, after = run.accepted, remedy.apply(present)
    if denied(accepted.job.recovery, accepted.profile, present, remedy):
        return "`recovery.allow` or `recovery.deny` of the job excludes it"
    if is_refused(run, after):
        return "the job refused this change before"
    relapse = relapse_of(run, after)
    if relapse is not None:
        return f"would repeat the failure of attempt #{relapse.number}"
    if view is None:
        if taken is not None and remedy.changes.keys() <= taken.changes.keys():
            same = remedy.changes.items() <= taken.changes.items()
            return "part of the one taken" if same else "another step of what the one taken turns"
        return "not the next on the ladder"
    own = judged(view, after)
    misses = overflowing(view, own)
    if misses:
        where, missing = misses[0]
        return f"predicted to be {show_gib(missing)} short in {where}"
    if chosen is None:
        return ""
    if own.step_s > chosen.step_s * (1 + _NOISE):
        return f"predicted slower: {_seconds(own)} a step"
    if own.risk > chosen.risk:
        return f"chance of another failure {own.risk:.0%}, as predicted"
    if taken is not None and taken.effect is Effect.EXACT and remedy.effect is not Effect.EXACT:
        return "predicted to fit too, but alters rounding (numeric)"
    return f"predicted to fit too, at about {_seconds(own)} a step; ranked lower"


def _seconds(ranked: Ranked) -> str:
    return f"{ranked.step_s:.3g} s"
