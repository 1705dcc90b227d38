"""What recovery may take for a failure of memory, by the ladder's order alone and without an estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from autotune.policies.recovery.combination import (
    PASSES,
    failures_in_group,
    in_a_row,
    joined,
    keeps_offload,
    savers,
    undoes_offload,
)
from autotune.policies.recovery.refusals import is_refused
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.permissions import denial, denied
from autotune.policies.remedies.repeats import repeats
from autotune.policies.remedies.step_size import fragmentation_prevails
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Launch
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Effect, Remedy
from autotune.policies.values.value import Value

_ALLOCATOR = "expandable_segments"
_CLIMB_AFTER = 3  # failures in a row with the same cause and phase and no new step
_COMBINED = 3  # cures that may be joined so that an earlier failure does not come back


class Failure(Value, frozen=True, kw_only=True):
    """The last failure of a run, with what was already done against equal ones in a row before it."""

    knobs: Knobs
    diagnosis: Diagnosis  # its streak counts them
    climbed: tuple[Remedy, ...] = ()  # the ladder's remedies already used in a long streak


def last_failure(run: Run) -> Failure | None:
    """Return the last failure of a run; None if its last attempt has no diagnosis."""
    last = run.attempts[-1]
    if last.diagnosis is None:
        return None
    streak = in_a_row(run, lambda phase: phase)
    return Failure(
        knobs=last.knobs,
        diagnosis=msgspec.structs.replace(last.diagnosis, streak=len(streak)),
        climbed=_climbed(streak),
    )


def by_ladder(
    run: Run, *, single: bool = False, is_idle: Callable[[Remedy], bool] = lambda _: False
) -> Iterator[Remedy]:
    """Yield the permitted remedies that repeat no earlier failure, in the order in which they are taken.

    Where fragmentation was detected the allocator goes with each of them that comes before it.

    `single`: one step of the ladder each, as advice that knows only some of the settings gives them. What
    `is_idle` says moves nothing of the memory that failed, and is left out.
    """
    failure = last_failure(run)
    if failure is None:
        return
    profile, failures = run.accepted.profile, failures_in_group(run)
    names = frozenset[str]() if single else savers(run, failures)
    diagnosis = failure.diagnosis
    if names:
        # A pass that failed is cut further at once: the next phases hold more, and small passes cost little.
        bolder = 1 if diagnosis.phase in PASSES else 0
        diagnosis = msgspec.structs.replace(diagnosis, streak=failures + bolder)
    remedies = [r for r in permitted(run, failure.knobs, diagnosis) if not is_idle(r)]
    # Fragmentation is the allocator's; a host that filled when something was moved to it gets rid of that.
    # Numeric remedies come late, and last a streak's own that cannot be joined: they may still have room when
    # all others are used.
    fragmented, filled = fragmentation_prevails(diagnosis), diagnosis.cause is Cause.HOST_OOM
    remedies.sort(
        key=lambda remedy: (
            remedy.name not in names and _used(remedy, failure.climbed),
            remedy.effect is not Effect.EXACT,
            not (fragmented and remedy.name == _ALLOCATOR),
            not (filled and undoes_offload(run, failure.knobs, remedy.apply(failure.knobs))),
            remedy.name not in names,
        )
    )

    def legal(remedy: Remedy) -> bool:
        after = remedy.apply(failure.knobs)
        return not objections(profile, failure.knobs, after, started=started_before(run))

    allocator = None if single else defragmenting(run, failure)
    for place in range(len(remedies)):
        remedy = joined(remedies, place, names, legal)
        whole = _without_relapse(run, failure.knobs, remedy, _COMBINED)
        if whole is not None and not is_refused(run, whole.apply(failure.knobs)):
            yield whole if allocator is None else together(run, failure, whole, allocator)
        if remedies[place].name == _ALLOCATOR:
            allocator = None  # what comes after it is for those who may not take it


def defragmenting(run: Run, failure: Failure) -> Remedy | None:
    """Return the other allocator where the message shows memory that is reserved and unused."""
    if not failure.diagnosis.fragmentation:
        return None
    offered = permitted(run, failure.knobs, failure.diagnosis)
    remedy = next((r for r in offered if r.name == _ALLOCATOR), None)
    return None if remedy is None or is_refused(run, remedy.apply(failure.knobs)) else remedy


def together(run: Run, failure: Failure, cure: Remedy, allocator: Remedy) -> Remedy:
    """Return a cure with the other allocator, where both together are legal."""
    if allocator.changes.keys() <= cure.changes.keys():
        return cure
    whole = msgspec.structs.replace(
        cure, changes=cure.changes | allocator.changes, reason=f"{cure.reason}; {allocator.reason}"
    )
    return whole if may_follow(run, failure.knobs, whole.apply(failure.knobs)) else cure


def _climbed(streak: list[Attempt]) -> tuple[Remedy, ...]:
    """Return the ladder's remedies already used in a long streak."""
    # The remedy that led to the oldest of them answered another failure; one that a wrong estimate sized too
    # small says nothing against its rung.
    used = tuple(a.remedy for a in streak[:-1] if a.remedy is not None and not a.remedy.predicted)
    return used if len(streak) >= _CLIMB_AFTER else ()


def _used(remedy: Remedy, climbed: tuple[Remedy, ...]) -> bool:
    """Return whether a remedy of the same name in `climbed` already changed all its knobs."""
    return any(
        remedy.name == other.name and remedy.changes.keys() <= other.changes.keys() for other in climbed
    )


def permitted(run: Run, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the legal remedies that change something and that the job's `recovery` allows, cheapest first."""
    recovery = run.accepted.job.recovery
    for remedy in candidates(run.accepted.profile, knobs, diagnosis, started=started_before(run)):
        if remedy.changes and not denied(recovery, run.accepted.profile, knobs, remedy):
            yield remedy


def exclusion(run: Run, action: Launch) -> str:
    """Return the name in the job's `recovery` that excludes a launch; empty if it is permitted.

    What ran before may run again, and what the job itself wrote always may.
    """
    accepted, name = run.accepted, "" if action.remedy is None else action.remedy.name
    before = run.attempts[-1].knobs if run.attempts else accepted.profile.knobs
    known = (accepted.profile.knobs, *(a.knobs for a in run.attempts))
    after = before if action.knobs in known else action.knobs
    return denial(accepted.job.recovery, accepted.profile, before, after, name=name)


def may_follow(run: Run, present: Knobs, proposed: Knobs, *, started: bool | None = None) -> bool:
    """Return whether a configuration is legal after the present one and holds no change that was refused.

    `started`: whether a checkpoint may exist; as far as the run shows, if it is not given.
    """
    started = started_before(run) if started is None else started
    return not is_refused(run, proposed) and not objections(
        run.accepted.profile, present, proposed, started=started
    )


def may_cure(run: Run, present: Knobs, proposed: Knobs) -> bool:
    """Return whether a configuration may follow the present one, and repeats no earlier failure."""
    return may_follow(run, present, proposed) and relapse_of(run, proposed) is None


def started_before(run: Run) -> bool:
    """Return whether a checkpoint may exist that the next attempt continues."""
    if run.attempts and run.attempts[-1].rehearsal is Part.WORST:
        return False  # a rehearsal begins anew
    return run.accepted.job.resume or run.saved or run.best_step is not None


def _without_relapse(run: Run, knobs: Knobs, remedy: Remedy, depth: int) -> Remedy | None:
    """Return the remedy with what keeps earlier failures from coming back; None if nothing does."""
    proposed = remedy.apply(knobs)
    relapse = relapse_of(run, proposed)
    if relapse is None:
        return remedy
    if relapse.diagnosis is None or depth == 0 or relapse is run.attempts[-1]:
        return None
    for other in permitted(run, proposed, relapse.diagnosis):
        if not set(other.changes).isdisjoint(remedy.changes):
            continue
        joined = Remedy(
            name=remedy.name,
            changes=remedy.changes | other.changes,
            reason=f"{remedy.reason}; so that {relapse.diagnosis.phase.value} still fits: {other.reason}",
            frees=remedy.frees,
            slows="; ".join(dict.fromkeys(text for text in (remedy.slows, other.slows) if text)),
            effect=max(remedy.effect, other.effect, key=list(Effect).index),
        )
        whole = _without_relapse(run, knobs, joined, depth - 1)
        if whole is not None:
            return whole
    return None


def relapse_of(run: Run, proposed: Knobs) -> Attempt | None:
    """Return the earlier attempt whose failure `proposed` would repeat."""
    for attempt in reversed(run.attempts):
        if attempt.diagnosis is None or not attempt.out_of_memory:
            continue
        again = repeats(run.accepted.profile, attempt.knobs, attempt.diagnosis, proposed)
        if again or keeps_offload(run, attempt, proposed):
            return attempt
    return None
