"""The memory that the longest sequences of a job would need, and the remedy kept ready for them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autotune.policies.estimate.lengths import Assumption
from autotune.policies.estimate.peaks import OF_PASSES
from autotune.policies.recovery.outlook import LATE, Outlook, outlook
from autotune.policies.recovery.permissions import may_follow
from autotune.policies.recovery.ranking import assess, best, overflowing
from autotune.policies.recovery.remedy_text import words
from autotune.policies.values.failure import Cause
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs, new_values


def longest_sequences(view: Outlook) -> Outlook:
    """Return the outlook of steps in which every sequence is as long as the job allows."""
    return replace(view, assumption=Assumption.LONGEST)


def came_late(run: Run) -> bool:
    """Return whether a micro-batch failed after so many steps that its sequences may be unusually long."""
    last = run.attempts[-1]
    diagnosis = last.diagnosis
    if diagnosis is None or diagnosis.cause is not Cause.GPU_OOM or diagnosis.phase not in OF_PASSES:
        return False
    return len(last.progress) >= LATE


def cautions(run: Run, knobs: Knobs) -> tuple[str, ...]:
    """Return warnings before the launch, in addition to the framework's."""
    accepted, more = run.accepted, worst_case(run, knobs)
    if not accepted.job.recovery.in_place or accepted.profile.cures_in_place:
        return more
    profile = accepted.profile
    why = profile.not_in_place or "its failures are cured by relaunches"
    return (f"recovery.in_place: true has no effect with {profile.framework}: {why}", *more)


def worst_case(run: Run, knobs: Knobs) -> tuple[str, ...]:
    """Return a warning if a configuration fits the steps of the goal but not the longest sequences."""
    view = outlook(run)
    if view is None:
        return ()
    longest = longest_sequences(view)
    misses = overflowing(longest, assess(longest, knobs))
    if not misses or overflowing(view, assess(view, knobs)):
        return ()
    phase, missing = misses[0]
    remedy = _remedy(longest, knobs)
    ready = f"; kept ready for a failure: {remedy}" if remedy else ""
    warning = (
        f"{phase} is predicted to fit; with sequences as long as the job allows it would need"
        f" {show_gib(missing)} more than there is{ready}"
    )
    return (warning,)


def _remedy(longest: Outlook, knobs: Knobs) -> str:
    started = longest.run.accepted.job.resume
    permitted = partial(may_follow, longest.run, knobs, started=started)
    cure = best(longest, knobs, diagnosis=None, started=started, permitted=permitted)
    if cure is None or overflowing(longest, cure):
        return ""
    return words(knobs, new_values(knobs, cure.knobs))
