"""The next remedy after failures of memory, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.policies.recovery.ranking import best, judged, measures, outlook, trusted
from autotune.policies.recovery.remedy_text import cure
from autotune.policies.recovery.shortfall import shortfall
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.proposals.host import free_before_relaunch
from autotune.policies.remedies.repeats import repeats
from autotune.policies.remedies.step_size import missing_bytes
from autotune.policies.values.events import GaveUp
from autotune.policies.values.evidence import Diagnosis, Remedy
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.types import Cause, Effect, Knobs, Phase, Recovery

_CLIMB_AFTER = 3  # failures in a row with the same cause and phase and no new step
_COMBINED = 3  # cures that may be joined so that an earlier failure does not come back
_MEMORY = {
    Cause.GPU_OOM: "device memory",
    Cause.HOST_OOM: "host memory",
    Cause.KV_POOL: "the engine's pool",
    Cause.POOL_TOO_SMALL: "the engine's pool",
    Cause.SHM: "shared memory",
    Cause.OBJECT_STORE: "Ray's object store",
}


def next_remedy(run: Run) -> Remedy | None:
    """Return the best permitted remedy that repeats no earlier failure; None: none is left.

    Where an estimate is available and trusted it ranks all legal neighbours, and the ladder's order breaks
    its ties; where it is not, the ladder's order alone decides.
    """
    last = run.attempts[-1]
    if last.diagnosis is None:
        return None
    streak = _streak(run)
    climbed = _climbed(streak)
    diagnosis = msgspec.structs.replace(last.diagnosis, streak=len(streak))
    if not climbed and trusted(run, diagnosis):
        ranked = _estimated(run, diagnosis)
        if ranked is not None:
            return ranked
    permitted = list(_permitted(run, last.knobs, diagnosis))
    # The streak's own remedies come last, and only then: they may still have room when all others are used.
    permitted.sort(key=lambda remedy: _used(remedy, climbed))
    for remedy in permitted:
        whole = _without_relapse(run, last.knobs, remedy, _COMBINED)
        if whole is not None:
            return whole
    return None


def _estimated(run: Run, diagnosis: Diagnosis) -> Remedy | None:
    """Return the best configuration by the calibrated estimate; None where nothing is known of the job."""
    view = outlook(run)
    if view is None or not measures(view, diagnosis):
        return None
    present, started = run.attempts[-1].knobs, started_before(run)

    def permitted(knobs: Knobs) -> bool:
        if diagnosis.cause is Cause.POOL_TOO_SMALL and _shares_less(present, knobs):
            return False  # the engine says that its share is too small
        legal = not objections(run.accepted.profile, present, knobs, started=started)
        return legal and _relapse(run, knobs) is None

    found = best(view, present, diagnosis=diagnosis, started=started, permitted=permitted)
    if found is None:
        return None
    return cure(view, present, found, judged(view, present), diagnosis)


def _shares_less(present: Knobs, knobs: Knobs) -> bool:
    before, after = present.memory_fraction, knobs.memory_fraction
    return before is not None and after is not None and after < before


def gave_up(run: Run, reason: str = "") -> GaveUp:
    """Return the verdict when no remedy is left or a budget is spent."""
    last = run.attempts[-1]
    diagnosis = last.diagnosis
    if diagnosis is None:
        return GaveUp(reason=reason or "nothing is known of the last failure")
    if not reason:
        where = "" if diagnosis.phase is Phase.NONE else f" in {diagnosis.phase.value}"
        reason = f"nothing left cures {diagnosis.cause.value}{where}"
    missing = shortfall(run, started=started_before(run))
    if missing is None:
        return GaveUp(reason=reason, nearest=_nearest(run, diagnosis), would_help=_would_help(run, diagnosis))
    helping = (*missing.would_fit, *_would_help(run, diagnosis))
    nearest = "; ".join(text for text in (missing.nearest, _closest(run, diagnosis)) if text)
    return GaveUp(reason=reason, nearest=nearest, would_help=tuple(dict.fromkeys(helping)))


def nearest_text(diagnosis: Diagnosis, attempt: int) -> str:
    """Return by how much an attempt missed, in words; empty where its message has no figures."""
    missing = missing_bytes(diagnosis.facts)
    if missing is None:
        return ""
    memory = _MEMORY.get(diagnosis.cause, "memory")
    return f"attempt #{attempt} misses by {show_gib(missing)} of {memory}"


def _streak(run: Run) -> list[Attempt]:
    """Return the equal failures in a row without a new step, newest first."""
    streak: list[Attempt] = []
    for attempt in reversed([a for a in run.attempts if not a.infrastructure]):
        if attempt.diagnosis is None or (streak and _failure(attempt) != _failure(streak[0])):
            break
        streak.append(attempt)
        if attempt.new_step:
            break
    return streak


def _climbed(streak: list[Attempt]) -> tuple[Remedy, ...]:
    """Return the ladder's remedies already used in a long streak."""
    # The remedy that led to the oldest of them answered another failure; one that a wrong estimate sized too
    # small says nothing against its rung.
    used = tuple(a.remedy for a in streak[:-1] if a.remedy is not None and not a.remedy.predicted)
    return used if len(streak) >= _CLIMB_AFTER else ()


def _failure(attempt: Attempt) -> tuple[Cause, Phase] | None:
    return None if attempt.diagnosis is None else (attempt.diagnosis.cause, attempt.diagnosis.phase)


def _used(remedy: Remedy, climbed: tuple[Remedy, ...]) -> bool:
    """Return whether a remedy moves again what one of `climbed` moved."""
    return any(
        remedy.name == other.name and remedy.changes.keys() <= other.changes.keys() for other in climbed
    )


def _permitted(run: Run, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    recovery = run.accepted.job.recovery
    for remedy in candidates(run.accepted.profile, knobs, diagnosis, started=started_before(run)):
        if remedy.changes and not _denied(recovery, remedy):
            yield remedy


def _denied(recovery: Recovery, remedy: Remedy) -> bool:
    names = {remedy.name, remedy.effect.value, *remedy.changes}
    return remedy.effect not in recovery.allow or not names.isdisjoint(recovery.deny)


def started_before(run: Run) -> bool:
    """Return whether a checkpoint may exist that the next attempt continues."""
    return run.accepted.job.resume or run.best_step is not None


def _without_relapse(run: Run, knobs: Knobs, remedy: Remedy, depth: int) -> Remedy | None:
    """Return the remedy with what keeps earlier failures from coming back; None where nothing does."""
    proposed = remedy.apply(knobs)
    relapse = _relapse(run, proposed)
    if relapse is None:
        return remedy
    if relapse.diagnosis is None or depth == 0 or relapse is run.attempts[-1]:
        return None
    for other in _permitted(run, proposed, relapse.diagnosis):
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


def _relapse(run: Run, proposed: Knobs) -> Attempt | None:
    """Return the earlier attempt whose failure `proposed` would repeat."""
    for attempt in reversed(run.attempts):
        if attempt.diagnosis is None or not attempt.out_of_memory:
            continue
        if repeats(run.accepted.profile, attempt.knobs, attempt.diagnosis, proposed):
            # A failure after many steps may come again later; a planned restart is its cure.
            restarts = proposed.restart_every
            if restarts is not None and restarts != attempt.knobs.restart_every:
                continue
            return attempt
    return None


def _nearest(run: Run, diagnosis: Diagnosis) -> str:
    closest = _closest(run, diagnosis)
    if not closest:
        return "the messages do not say by how much the nearest configuration misses"
    return f"the nearest configuration, {closest}"


def _closest(run: Run, diagnosis: Diagnosis) -> str:
    """Return which attempt missed by least by its own message; empty where no message says."""
    misses = [
        (missing, attempt)
        for attempt in run.attempts
        if attempt.diagnosis is not None
        and (attempt.diagnosis.cause, attempt.diagnosis.phase) == (diagnosis.cause, diagnosis.phase)
        and (missing := missing_bytes(attempt.diagnosis.facts)) is not None
    ]
    if not misses:
        return ""
    _, attempt = min(misses, key=lambda miss: miss[0])
    return nearest_text(attempt.diagnosis or diagnosis, attempt.number)


_USERS = {
    "gpu": ("shorter prompts or responses", "more or larger GPUs", "a smaller model or LoRA"),
    "gpu_pool": ("a smaller maximum length", "more GPUs for the engine", "a smaller or quantised model"),
    "host": ("more host memory or more nodes", "LoRA, which keeps less optimizer state"),
    "shm": ("a larger /dev/shm (in a container: --shm-size or an emptyDir of medium Memory)",),
    "object_store": ("a larger object store (ray start --object-store-memory)",),
}


def _would_help(run: Run, diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the changes that are the user's to make."""
    last = run.attempts[-1]
    profile, recovery = run.accepted.profile, run.accepted.job.recovery
    found = [remedy.reason for remedy in free_before_relaunch(profile, last.knobs, diagnosis)]
    found += [
        f"{remedy.name}, which recovery.allow or recovery.deny rules out"
        for remedy in candidates(profile, last.knobs, diagnosis, started=started_before(run))
        if remedy.changes and _denied(recovery, remedy)
    ]
    after_start = (
        candidates(profile, last.knobs, diagnosis, started=False) if started_before(run) else iter(())
    )
    legal_now = {_key(r) for r in candidates(profile, last.knobs, diagnosis, started=started_before(run))}
    found += [
        f"a new run with {_words(remedy)}, which a checkpoint of this run does not allow"
        for remedy in after_start
        if _key(remedy) not in legal_now
    ]
    return tuple(dict.fromkeys([*found, *_USERS.get(diagnosis.cause.resource, ())]))


def _key(remedy: Remedy) -> bytes:
    return msgspec.json.encode(remedy.changes)


def _words(remedy: Remedy) -> str:
    return ", ".join(f"{knob} = {value}" for knob, value in remedy.changes.items())
