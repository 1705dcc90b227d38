"""The first launch: as written if it may fit, otherwise the nearest configuration predicted to fit.

Also as written if the verdict rests on an assumption, which changes no setting before the first launch.
"""

from __future__ import annotations

from functools import partial

from autotune.policies.recovery.assumptions import is_hopeless, rests_on
from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.permissions import may_follow, started_before
from autotune.policies.recovery.ranking import Ranked, assess, best, overflowing
from autotune.policies.recovery.rehearsal import passed
from autotune.policies.recovery.remedy_text import peaks, step, words
from autotune.policies.values.events import Launch
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Run
from autotune.policies.values.job import Preflight
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.provenance import Fact

PREFLIGHT = "preflight"
AS_WRITTEN = "as written"
REHEARSED = "the rehearsal passed"


def first_launch(run: Run) -> Launch:
    """Return the first launch of a run, or the next one after the job refused the changes of the first."""
    written, mode = run.accepted.profile.knobs, run.accepted.job.recovery.preflight
    rehearsed = passed(run)
    if rehearsed is not None and not run.refused:
        return Launch(
            knobs=rehearsed.knobs, reason=f"{REHEARSED} in attempt #{rehearsed.number}; the training starts"
        )
    view = None if mode is Preflight.OFF or len(run.refused) > 1 else outlook(run)
    before = None if view is None else assess(view, written)
    if view is None or before is None or not is_hopeless(view, written):
        return Launch(knobs=written, reason=AS_WRITTEN)
    why = _why(view, before)
    if doubts := rests_on(run, view):
        return Launch(knobs=written, reason=f"{AS_WRITTEN}: {why}, but {_assumed(doubts)}")
    candidate = _nearest_fit(view, written)
    if candidate is None or candidate.risk >= before.risk:
        return Launch(
            knobs=written, reason=f"{AS_WRITTEN}: {why}, and no configuration near it is predicted to fit"
        )
    if mode is Preflight.ADVISE:
        changes = words(written, new_values(written, candidate.knobs))
        advice = f"{changes} is predicted to fit ({peaks(view, candidate)})"
        return Launch(knobs=written, reason=f"{AS_WRITTEN}, although {why}; {advice}")
    remedy = step(view, written, candidate, before, name=PREFLIGHT, why=why)
    return Launch(knobs=candidate.knobs, reason=remedy.reason, remedy=remedy)


def _nearest_fit(view: Outlook, written: Knobs) -> Ranked | None:
    permitted = partial(may_follow, view.run, written)
    return best(view, written, diagnosis=None, started=started_before(view.run), permitted=permitted)


def _assumed(doubts: tuple[Fact, ...]) -> str:
    """Return, in words, the assumptions of a verdict and what would resolve them."""
    values = " and ".join(fact.value for fact in doubts)
    known = "; ".join(dict.fromkeys(fact.resolve for fact in doubts if fact.resolve))
    return f"that rests on an assumption: {values}" + (f" ({known})" if known else "")


def _why(view: Outlook, before: Ranked) -> str:
    misses = overflowing(view, before)
    if not misses:
        return "the KV cache is predicted to hold no whole sequence"
    where, missing = misses[0]
    user, device = ("the job", "the host") if where == "host" else (where, "the device")
    return f"{user} is predicted to need {show_gib(missing)} more than {device} has"
