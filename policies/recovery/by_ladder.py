"""Choose remedies by the ladder's order alone: one step, or several savers of a phase at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from autotune.policies.recovery.permissions import (
    may_cure,
    may_follow,
    relapse_of,
    started_before,
    undoes_offload,
)
from autotune.policies.remedies.allow_deny import denied
from autotune.policies.remedies.ladder import candidates, joinable
from autotune.policies.remedies.relevance import SMALLER_PASSES, runs_on_host
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.remedy import Effect, Remedy

# Phases with the same savers, which mostly fail together: a failure in another of them is not a new one.
PASSES = frozenset({Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.NONE})
_ENGINE = frozenset(ENGINE_PHASES)
_SYNC = frozenset({Phase.WEIGHT_SYNC, Phase.COMM})
_GROUPS = (PASSES, _ENGINE, _SYNC)
# A phase that fitted with optimizer state misses by little if it fails later: one step is enough.
_SETTLED = 2
_OFFLOADS = frozenset({"offload_params", "offload_grads", "offload_optimizer", "offload_activations"})
_ALLOCATOR = "expandable_segments"
_CLIMB_AFTER = 3  # failures in a row with the same cause and phase and no new step
_COMBINED = 3  # remedies that may be combined so that an earlier failure does not recur


def last_failure(run: Run) -> Diagnosis | None:
    """Return the diagnosis of the last attempt, with its streak of equal failures; None if it has none."""
    diagnosis = run.attempts[-1].diagnosis
    streak = in_a_row(run, lambda phase: phase)
    return None if diagnosis is None else msgspec.structs.replace(diagnosis, streak=len(streak))


def climbed(run: Run) -> tuple[Remedy, ...]:
    """Return the ladder's remedies already used in a long streak of equal failures; empty in a short one."""
    streak = in_a_row(run, lambda phase: phase)
    # The remedy that led to the oldest of them answered another failure; one that a wrong estimate made too
    # small does not rule out its rung.
    used = tuple(a.remedy for a in streak[:-1] if a.remedy is not None and not a.remedy.predicted)
    return used if len(streak) >= _CLIMB_AFTER else ()


def by_ladder(
    run: Run, *, single: bool = False, useful: Callable[[Remedy], bool] = lambda _: True
) -> Iterator[Remedy]:
    """Yield the permitted remedies that repeat no earlier failure, in the order in which they are used.

    `single`: one step of the ladder each, for advice. `useful`: whether a remedy may free some of the failed
    memory; others are left out.
    """
    knobs, diagnosis, failures = run.attempts[-1].knobs, last_failure(run), failures_in_group(run)
    if diagnosis is None:
        return
    names = frozenset[str]() if single else savers(run, failures)
    if names:
        # A failed micro-batch shrinks further at once: the next phases hold more, and small ones cost little.
        bolder = 1 if diagnosis.phase in PASSES else 0
        diagnosis = msgspec.structs.replace(diagnosis, streak=failures + bolder)
    remedies = [r for r in permitted(run, knobs, diagnosis) if useful(r)]
    # On a full host, undoing offloads comes first. Numeric remedies come late, and last those of a long
    # streak that are not combined: they may still help when no others do.
    filled, before = diagnosis.cause is Cause.HOST_OOM, climbed(run)
    used = {(old.name, knob) for old in before for knob in old.changes}
    remedies.sort(
        key=lambda remedy: (
            remedy.name not in names and all((remedy.name, knob) in used for knob in remedy.changes),
            remedy.effect is not Effect.EXACT,
            not (filled and undoes_offload(run, knobs, remedy.apply(knobs))),
            remedy.name not in names,
        )
    )

    def legal(remedy: Remedy) -> bool:
        return may_follow(run, knobs, remedy.apply(knobs))

    for place in range(len(remedies)):
        remedy = joined(remedies, place, names, legal)
        whole = _without_relapse(run, knobs, remedy, _COMBINED)
        if whole is not None and may_cure(run, knobs, whole.apply(knobs)):
            yield whole


def defragmenting(run: Run, diagnosis: Diagnosis) -> Remedy | None:
    """Return the permitted change of the allocator if the message shows reserved, unused memory."""
    if not diagnosis.fragmentation:
        return None
    knobs = run.attempts[-1].knobs
    remedy = next((r for r in permitted(run, knobs, diagnosis) if r.name == _ALLOCATOR), None)
    return remedy if remedy is not None and may_follow(run, knobs, remedy.apply(knobs)) else None


def together(run: Run, cure: Remedy, allocator: Remedy) -> Remedy:
    """Return `cure` with the change of the allocator; `cure` alone if both together are not legal."""
    if allocator.changes.keys() <= cure.changes.keys():
        return cure
    whole, knobs = cure.joined(allocator), run.attempts[-1].knobs
    return whole if may_follow(run, knobs, whole.apply(knobs)) else cure


def permitted(run: Run, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the legal remedies that change something and that the job's `recovery` allows, cheapest first."""
    recovery = run.accepted.job.recovery
    for remedy in candidates(run.accepted.profile, knobs, diagnosis, started=started_before(run)):
        if remedy.changes and not denied(recovery, run.accepted.profile, knobs, remedy):
            yield remedy


def _without_relapse(run: Run, knobs: Knobs, remedy: Remedy, depth: int) -> Remedy | None:
    """Return the remedy with changes that prevent earlier failures from recurring; None if none do."""
    proposed = remedy.apply(knobs)
    relapse = relapse_of(run, proposed)
    if relapse is None:
        return remedy
    if relapse.diagnosis is None or depth == 0 or relapse is run.attempts[-1]:
        return None
    for other in permitted(run, proposed, relapse.diagnosis):
        if not set(other.changes).isdisjoint(remedy.changes):
            continue
        why = f"so that {relapse.diagnosis.phase.value} still fits: "
        whole = _without_relapse(run, knobs, remedy.joined(other, why=why), depth - 1)
        if whole is not None:
            return whole
    return None


def savers(run: Run, failures: int) -> frozenset[str]:
    """Return the names of the remedies that one relaunch may combine after so many failures of a group.

    Empty: one step at a time, as after a refused change, so that the next error shows its cause. A job that
    ran for some steps misses by little, so one failure less counts.
    """
    last, diagnosis = run.attempts[-1], run.attempts[-1].diagnosis
    if diagnosis is None or run.refused:
        return frozenset()
    late = diagnosis.cause is Cause.GPU_OOM and _steps_before(run) >= _SETTLED
    names = joinable(diagnosis, failures - late)
    if diagnosis.cause is Cause.HOST_OOM:
        smaller = frozenset(SMALLER_PASSES)
        names = names & smaller if runs_on_host(last.knobs, diagnosis) else names - smaller
    return names if _host_has_room(run.accepted.cluster) else names - _OFFLOADS


def joined(
    remedies: Sequence[Remedy], place: int, names: frozenset[str], legal: Callable[[Remedy], bool]
) -> Remedy:
    """Return the remedy at `place` combined with later ones that may be: exact ones, of other knobs.

    Of several values of a knob, such as modes, the one that saves most is used.
    """
    whole = remedies[place]
    if whole.name not in names or whole.effect is not Effect.EXACT:
        return whole
    first, own = whole.changes.keys(), [whole]
    for other in remedies[place + 1 :]:
        if other.name not in names or other.effect is not Effect.EXACT:
            continue
        if other.name != whole.name and not first.isdisjoint(other.changes):
            continue
        kept = [r for r in own if not r.changes.keys() <= other.changes.keys()]
        wider = functools.reduce(Remedy.joined, [*kept, other])
        if legal(wider):
            whole = msgspec.structs.replace(wider, name=own[0].name)
            own.append(other)
    return whole


def failures_in_group(run: Run) -> int:
    """Return the number of failures in a row in phases that share their savers, including the last.

    All failures of too small a pool count, in a row or not, because others may have lowered the share
    between.
    """
    last = run.attempts[-1].diagnosis
    if last is not None and last.cause is Cause.POOL_TOO_SMALL:
        causes = (None if a.diagnosis is None else a.diagnosis.cause for a in run.since_resumed)
        return sum(cause is Cause.POOL_TOO_SMALL for cause in causes)
    return len(in_a_row(run, _group))


def in_a_row(run: Run, group: Callable[[Phase], object]) -> list[Attempt]:
    """Return the failures in a row of one cause and one group of phases, newest first.

    Attempts that the cluster ended are skipped; a new step starts another row.
    """
    row: list[Attempt] = []
    first: tuple[Cause, object] | None = None
    for attempt in reversed([a for a in run.attempts if not a.infrastructure]):
        if attempt.diagnosis is None:
            break
        own = attempt.diagnosis.cause, group(attempt.diagnosis.phase)
        first = first or own
        if own != first:
            break
        row.append(attempt)
        if attempt.new_step:
            break
    return row


def _group(phase: Phase) -> frozenset[Phase]:
    return next((group for group in _GROUPS if phase in group), frozenset({phase}))


def _steps_before(run: Run) -> int:
    """Return the steps of the last process before it failed: those since the checkpoint that it loaded."""
    last = run.attempts[-1]
    step = None if last.diagnosis is None else last.diagnosis.step
    done = (last.step or 0) if step is None else max(0, step - 1)
    if last.progress and len(run.attempts) > 1:
        return len(last.progress)
    return 0 if any(attempt.progress for attempt in run.attempts[:-1]) else done


def _host_has_room(cluster: Cluster) -> bool:
    """Return whether a node's host could hold the memory of all its GPUs, so that no offload overflows it."""
    return cluster.host_memory_bytes >= cluster.gpus_per_node * cluster.gpu_memory_bytes
