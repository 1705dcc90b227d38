"""The next remedy after failures of memory."""

from __future__ import annotations

import msgspec

from autotune.policies.recovery.by_estimate import by_estimate, fits_with, usefulness
from autotune.policies.recovery.by_ladder import by_ladder, climbed, defragmenting, last_failure, together
from autotune.policies.recovery.permissions import may_cure
from autotune.policies.remedies.allow_deny import remedies_of
from autotune.policies.remedies.candidate_values import values_in_range
from autotune.policies.remedies.repeats import repeats
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.history import Run
from autotune.policies.values.knob_table import ROWS, Knob, Unit, Way
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Remedy


def next_remedy(run: Run) -> Remedy | None:
    """Return the best permitted remedy that repeats no earlier failure; None if none is left.

    An estimate that is available and trusted ranks all legal neighbours, and the ladder's order breaks its
    ties; otherwise the ladder's order alone decides. Either way the allocator comes first if fragmentation
    prevails and no estimate shows that the micro-batch needs more than it returns; if it is not enough alone,
    it is combined with the remedy, because it costs nothing. A share that was both too small and too large is
    set half way between before anything else changes.
    """
    diagnosis = last_failure(run)
    if diagnosis is None:
        return None
    allocator = defragmenting(run, diagnosis)
    prevails = fragmentation_prevails(diagnosis)
    if allocator is not None and prevails and fits_with(run, diagnosis, allocator):
        return allocator
    remedy = _between_bounds(run, diagnosis)
    if remedy is not None:
        return remedy
    remedy = None if climbed(run) else by_estimate(run, diagnosis)
    remedy = remedy or next(by_ladder(run, useful=usefulness(run, diagnosis)), None)
    return remedy if remedy is None or allocator is None else together(run, remedy, allocator)


def _between_bounds(run: Run, diagnosis: Diagnosis) -> Remedy | None:
    """Return the change of one share to the middle of its bounds; None without both, or a value between."""
    offered = run.accepted.profile.supported
    shares = (row for row in ROWS if row.unit is Unit.SHARE and row.name in offered)
    return next((middle for row in shares if (middle := _middle(run, diagnosis, row)) is not None), None)


def _middle(run: Run, diagnosis: Diagnosis, row: Knob) -> Remedy | None:
    profile, present = run.accepted.profile, run.attempts[-1].knobs
    if getattr(present, row.name) is None or not _bounded(run, diagnosis, row):
        return None
    too_small, too_large = _bounds(run, row)
    if not too_small or not too_large:
        return None
    low, high = max(too_small), min(too_large)
    offered = values_in_range(profile, present, row.name)
    values = [value for value in offered if isinstance(value, float) and low < value < high]
    if not values:
        return None
    value: Setting = values[(len(values) - 1) // 2]
    remedy = Remedy(
        name=next(remedies_of(row.name, getattr(present, row.name), value)),
        changes={row.name: value},
        reason=f"{row.name} {low:g} was too small and {high:g} is too large: half way between them",
        effect=profile.effect_of((row.name,)),
    )
    return remedy if may_cure(run, present, remedy.apply(present)) else None


def _bounds(run: Run, row: Knob) -> tuple[list[float], list[float]]:
    """Return the values that were too small, and those that were too large.

    A failure bounds the value as long as no other knob that acts on the memory needs less of it by now.
    """
    small: list[float] = []
    large: list[float] = []
    for attempt in run.attempts:
        diagnosis, value = attempt.diagnosis, getattr(attempt.knobs, row.name)
        if diagnosis is None or value is None or not _bounded(run, diagnosis, row):
            continue
        again = msgspec.structs.replace(run.attempts[-1].knobs, **{row.name: value})
        if repeats(run.accepted.profile, attempt.knobs, diagnosis, again):
            missed = _missed(diagnosis)
            if row.way(diagnosis.cause) is Way.DOWN:
                large.append(value - missed)
            else:
                small.append(value + missed)
    return small, large


def _bounded(run: Run, diagnosis: Diagnosis, row: Knob) -> bool:
    """Return whether a failure bounds a share; a micro-batch beside the engine has other remedies."""
    own = not row.phases or diagnosis.phase in row.phases
    acts = row.acts(diagnosis.cause, diagnosis.phase, run.accepted.profile.placement)
    return own and acts and row.way(diagnosis.cause) is not None


def _missed(diagnosis: Diagnosis) -> float:
    """Return the share of the device that a failed request lacked; 0 if its message has no figures."""
    missing, limit = missing_bytes(diagnosis.facts), diagnosis.facts.limit_bytes
    return missing / limit if missing and limit else 0.0
