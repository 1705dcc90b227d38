"""The next remedy after failures of memory, or why there is none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from autotune.policies.recovery.by_ladder import Failure, by_ladder, defragmenting, last_failure, together
from autotune.policies.recovery.outlook import Outlook, measures, of_host, outlook, trusted
from autotune.policies.recovery.permissions import may_cure, started_before, undoes_offload
from autotune.policies.recovery.ranking import Ranked, assess, best, overflowing
from autotune.policies.recovery.relief import CLEARLY, relieving
from autotune.policies.recovery.remedy_text import cure
from autotune.policies.recovery.shortfall import shortfall
from autotune.policies.recovery.worst_case import came_late, longest_sequences
from autotune.policies.remedies.allow_deny import denied, remedies_of
from autotune.policies.remedies.candidate_values import values_in_range
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.proposals import free_before_relaunch
from autotune.policies.remedies.relevance import runs_on_host
from autotune.policies.remedies.repeats import repeats
from autotune.policies.remedies.step_size import fragmentation_prevails, missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import GaveUp
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Run
from autotune.policies.values.knob_table import KNOB_TABLE, ROWS, Knob, Unit, Way
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.remedy import Remedy

_MEMORY = {
    Cause.GPU_OOM: "GPU memory",
    Cause.HOST_OOM: "host memory",
    Cause.KV_POOL: "the KV cache",
    Cause.POOL_TOO_SMALL: "the KV cache",
    Cause.SHM: "shared memory",
    Cause.OBJECT_STORE: "Ray's object store",
}


def next_remedy(run: Run) -> Remedy | None:
    """Return the best permitted remedy that repeats no earlier failure; None if none is left.

    An estimate that is available and trusted ranks all legal neighbours, and the ladder's order breaks its
    ties; otherwise the ladder's order alone decides. Either way the allocator comes first if fragmentation
    prevails and no estimate shows that the micro-batch needs more than it returns; if it is not enough alone,
    it is combined with the remedy, because it costs nothing. A share that was both too small and too large is
    set half way between before anything else changes.
    """
    failure = last_failure(run)
    if failure is None:
        return None
    allocator = defragmenting(run, failure)
    if allocator is not None and _is_enough(run, failure, allocator):
        return allocator
    middle = _between_bounds(run, failure)
    if middle is not None:
        return middle
    estimated = None if failure.climbed else _estimated(run, failure.diagnosis)
    if estimated is None:
        return next(by_ladder(run, is_idle=_idleness(run, failure)), None)
    return estimated if allocator is None else together(run, failure, estimated, allocator)


def _is_enough(run: Run, failure: Failure, allocator: Remedy) -> bool:
    """Return whether the other allocator may be enough against a failure.

    The fragmented memory must cover the failed request and be more than a micro-batch usually loses; and a
    trusted estimate must predict that the phase fits.
    """
    if not fragmentation_prevails(failure.diagnosis):
        return False
    view = outlook(run)
    if view is None or not trusted(run, failure.diagnosis) or not measures(view, failure.diagnosis):
        return True
    after = assess(view, allocator.apply(failure.knobs))
    return failure.diagnosis.phase.value not in dict(overflowing(view, after))


def _idleness(run: Run, failure: Failure) -> Callable[[Remedy], bool]:
    """Return a predicate: which remedies free none of the failed memory by the estimate."""
    view, present = outlook(run), failure.knobs
    if view is None:
        return lambda _: False
    idle = relieving(view, present, failure.diagnosis, started=started_before(run)).idle

    def is_idle(remedy: Remedy) -> bool:
        if failure.diagnosis.cause is Cause.HOST_OOM:
            return _spares_host(view, present, remedy, failure.diagnosis)
        return remedy.changes.keys() <= idle

    return is_idle


def _spares_host(view: Outlook, present: Knobs, remedy: Remedy, diagnosis: Diagnosis) -> bool:
    """Return whether, by the estimate, a remedy for the host frees none of it; False if not estimated."""
    after_it = remedy.apply(present)
    if not all(KNOB_TABLE[knob].estimated for knob in remedy.changes):
        return False
    if undoes_offload(view.run, present, after_it):
        return False  # the job as written did not need the offload
    if runs_on_host(present, diagnosis):
        return False  # micro-batches themselves use host memory there
    before, after = of_host(view.estimates((present, after_it)).host, diagnosis)
    return bool(after > before * (1 - CLEARLY))


def _estimated(run: Run, diagnosis: Diagnosis) -> Remedy | None:
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


def _shares_less(present: Knobs, knobs: Knobs) -> bool:
    before, after = present.memory_fraction, knobs.memory_fraction
    return before is not None and after is not None and after < before


def _between_bounds(run: Run, failure: Failure) -> Remedy | None:
    """Return the change of one share to the middle of its bounds; None without both, or a value between."""
    offered = run.accepted.profile.supported
    for row in (row for row in ROWS if row.unit is Unit.SHARE and row.name in offered):
        middle = _middle(run, failure, row)
        if middle is not None:
            return middle
    return None


def _middle(run: Run, failure: Failure, row: Knob) -> Remedy | None:
    profile, present = run.accepted.profile, failure.knobs
    if getattr(present, row.name) is None or not _bounded(run, failure.diagnosis, row):
        return None
    too_small, too_large = _bounds(run, failure, row)
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
        effect=profile.supported[row.name].effect,
    )
    if denied(run.accepted.job.recovery, profile, present, remedy):
        return None
    return remedy if may_cure(run, present, remedy.apply(present)) else None


def _bounds(run: Run, failure: Failure, row: Knob) -> tuple[list[float], list[float]]:
    """Return the values that were too small, and those that were too large.

    A failure bounds the value as long as no other knob that acts on the memory needs less of it by now.
    """
    small: list[float] = []
    large: list[float] = []
    for attempt in run.attempts:
        diagnosis, value = attempt.diagnosis, getattr(attempt.knobs, row.name)
        if diagnosis is None or value is None or not _bounded(run, diagnosis, row):
            continue
        again = msgspec.structs.replace(failure.knobs, **{row.name: value})
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


def gave_up(run: Run, reason: str = "") -> GaveUp:
    """Return the verdict when no remedy is left or a budget is spent."""
    last = run.attempts[-1]
    diagnosis = last.diagnosis
    if diagnosis is None:
        return GaveUp(reason=reason or "the last failure has no diagnosis")
    if not reason:
        where = "" if diagnosis.phase is Phase.NONE else f" in {diagnosis.phase.value}"
        reason = f"no remedy is left for {diagnosis.cause.value}{where}"
    missing = shortfall(run, started=started_before(run))
    if missing is None:
        return GaveUp(reason=reason, nearest=_nearest(run, diagnosis), would_help=_would_help(run, diagnosis))
    nearest = "; ".join(text for text in (missing.nearest, _closest(run, diagnosis)) if text)
    # If something is predicted to fit, changes that may not suffice are not advised.
    helping = missing.would_fit or _would_help(run, diagnosis)
    return GaveUp(reason=reason, nearest=nearest, would_help=helping)


def nearest_text(diagnosis: Diagnosis, attempt: int) -> str:
    """Return by how much an attempt missed, in words; empty if its message has no figures."""
    missing = missing_bytes(diagnosis.facts)
    if missing is None:
        return ""
    memory = _MEMORY.get(diagnosis.cause, "memory")
    return f"attempt #{attempt}, {show_gib(missing)} of {memory} short"


def _nearest(run: Run, diagnosis: Diagnosis) -> str:
    closest = _closest(run, diagnosis)
    if diagnosis.own_limit:
        return "; ".join(text for text in (diagnosis.own_limit, closest) if text)
    if not closest:
        return "how much memory was missing is not known"
    return f"closest: {closest}"


def _closest(run: Run, diagnosis: Diagnosis) -> str:
    """Return the attempt that missed by the smallest amount in its message; empty if no message has one."""
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


_LORA = "LoRA, which keeps less optimizer state"
_USERS = {
    "gpu": ("shorter prompts or responses", "more or larger GPUs", "a smaller model", _LORA),
    "gpu_pool": ("a smaller maximum length", "more GPUs for the engine", "a smaller or quantised model"),
    "host": ("more host memory or more nodes", _LORA),
    "shm": ("a larger /dev/shm (in a container: --shm-size or an emptyDir of medium Memory)",),
    "object_store": ("a larger object store (ray start --object-store-memory)",),
}

_HARDWARE = {
    **_USERS,
    "gpu": _USERS["gpu"][1:2],
    "gpu_pool": _USERS["gpu_pool"][1:2],
    "host": _USERS["host"][:1],
}


def _would_help(run: Run, diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the changes that only the user may make."""
    profile, recovery, knobs = run.accepted.profile, run.accepted.job.recovery, run.attempts[-1].knobs
    now = list(candidates(profile, knobs, diagnosis, started=started_before(run)))
    anew = candidates(profile, knobs, diagnosis, started=False)
    result = [remedy.reason for remedy in free_before_relaunch(diagnosis)]
    result += [
        f"{remedy.name}, which recovery.allow or recovery.deny excludes"
        for remedy in now
        if denied(recovery, profile, knobs, remedy)
    ]
    legal = [remedy.changes for remedy in now]
    result += [
        f"a new run with {', '.join(f'{knob} = {value}' for knob, value in remedy.changes.items())}, "
        "which a checkpoint of this run does not allow"
        for remedy in anew
        if remedy.changes not in legal
    ]
    if diagnosis.host_growth and profile.unknown_program and not profile.resumable:
        grown = show_gib(diagnosis.host_growth)
        result.append(
            f"a start that continues checkpoints (`settings.resume`): its memory grew by {grown} a step, and"
            " autotune restarts what continues from its last checkpoint"
        )
    if diagnosis.own_limit:
        result.append("a higher limit of the process")
    elif profile.unknown_program:
        result += _HARDWARE.get(diagnosis.cause.resource, ())
    else:
        general = _USERS.get(diagnosis.cause.resource, ())
        result += [text for text in general if not (text == _LORA and profile.layout.lora_rank)]
    return tuple(dict.fromkeys(result))
