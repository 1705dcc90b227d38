"""Choose remedies by the calibrated estimate, and judge by it those that the ladder offers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from autotune.policies.recovery.outlook import Outlook, measures, outlook, trusted
from autotune.policies.recovery.permissions import may_cure, started_before, undoes_offload
from autotune.policies.recovery.ranking import Ranked, assess, best, overflowing
from autotune.policies.recovery.relief import CLEARLY, freed, relieving
from autotune.policies.recovery.remedy_text import cure
from autotune.policies.recovery.worst_case import came_late, longest_sequences
from autotune.policies.remedies.relevance import runs_on_host
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Run
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.remedy import Remedy


def by_estimate(run: Run, diagnosis: Diagnosis) -> Remedy | None:
    """Return the best configuration by the calibrated estimate; None if it is not available or trusted."""
    view = outlook(run)
    if view is None:
        return None
    run, named = view.run, diagnosis.phase
    last = run.attempts[-1].diagnosis
    if last is not None:
        diagnosis = msgspec.structs.replace(diagnosis, phase=last.phase)
    if not trusted(run, diagnosis) or not measures(view, diagnosis):
        return None
    present, started = run.attempts[-1].knobs, started_before(run)

    def may_run(knobs: Knobs) -> bool:
        if diagnosis.cause is Cause.POOL_TOO_SMALL and _shares_less(present, knobs):
            return False  # the engine says that its share is too small
        return may_cure(run, present, knobs)

    def ranked(by: Outlook) -> Ranked | None:
        return best(by, present, diagnosis=diagnosis, started=started, permitted=may_run)

    longest = longest_sequences(view)
    candidate = ranked(longest) if came_late(run) else None
    if candidate is None or overflowing(longest, candidate):
        candidate = ranked(view)
    if candidate is None:
        return None
    return cure(view, present, assess(view, candidate.knobs), assess(view, present), diagnosis, named=named)


def fits_with(run: Run, diagnosis: Diagnosis, remedy: Remedy) -> bool:
    """Return whether the failed phase may fit with a remedy: True unless a trusted estimate denies it."""
    view = outlook(run)
    if view is None or not trusted(run, diagnosis) or not measures(view, diagnosis):
        return True
    after = assess(view, remedy.apply(run.attempts[-1].knobs))
    return diagnosis.phase.value not in dict(overflowing(view, after))


def usefulness(run: Run, diagnosis: Diagnosis) -> Callable[[Remedy], bool]:
    """Return a predicate: which remedies may free some of the failed memory by the estimate."""
    view, present = outlook(run), run.attempts[-1].knobs
    if view is None:
        return lambda _: True
    if diagnosis.cause is not Cause.HOST_OOM:
        idle = relieving(view, present, diagnosis, started=started_before(run)).idle
        return lambda remedy: not remedy.changes.keys() <= idle

    def frees_host(remedy: Remedy) -> bool:
        after = remedy.apply(present)
        return (
            not all(KNOB_TABLE[knob].estimated for knob in remedy.changes)
            or undoes_offload(view.run, present, after)  # the job as written did not need the offload
            or runs_on_host(present, diagnosis)  # micro-batches themselves use host memory there
            or bool(freed(view, view.estimates((present, after)), diagnosis)[0, 0] >= CLEARLY)
        )

    return frees_host


def _shares_less(present: Knobs, knobs: Knobs) -> bool:
    before, after = present.memory_fraction, knobs.memory_fraction
    return before is not None and after is not None and after < before
