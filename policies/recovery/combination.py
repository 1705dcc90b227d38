"""How much one relaunch changes by the ladder alone: one step, or several savers of a phase at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.policies.remedies.ladder import joinable
from autotune.policies.remedies.relevance import SMALLER_PASSES, runs_on_host
from autotune.policies.values.failure import ENGINE_PHASES, Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.job import Cluster
from autotune.policies.values.knob_table import ROWS, Knob, Memory, Way
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.remedy import Effect, Remedy

# Phases that share their savers, and mostly their fate: a failure in the next of them is no other failure.
PASSES = frozenset({Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.NONE})
_ENGINE = frozenset(ENGINE_PHASES)
_SYNC = frozenset({Phase.WEIGHT_SYNC, Phase.COMM})
_GROUPS = (PASSES, _ENGINE, _SYNC)
# A phase that passed with the optimizer's state misses by little when it fails later: one step is enough.
_SETTLED = 2

_OFFLOADS = frozenset({"offload_params", "offload_grads", "offload_optimizer", "offload_activations"})


def failures_in_group(run: Run) -> int:
    """Return how many failures in a row hit phases that share their savers, the last one included.

    All that an engine said of too small a pool count: a share that other failures lowered again is squeezed.
    """
    last = run.attempts[-1].diagnosis
    if last is not None and last.cause is Cause.POOL_TOO_SMALL:
        causes = (None if a.diagnosis is None else a.diagnosis.cause for a in run.since_resumed)
        return sum(cause is Cause.POOL_TOO_SMALL for cause in causes)
    return len(in_a_row(run, _group))


def in_a_row(run: Run, group: Callable[[Phase], object]) -> list[Attempt]:
    """Return the failures in a row of one cause and one group of phases, newest first.

    What the cluster ended says nothing; a new step begins another row.
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


def _steps_before(run: Run) -> int:
    """Return the steps of the last process before it failed: those since the checkpoint that it loaded."""
    last = run.attempts[-1]
    step = None if last.diagnosis is None else last.diagnosis.step
    done = (last.step or 0) if step is None else max(0, step - 1)
    if last.progress and len(run.attempts) > 1:
        return len(last.progress)
    return 0 if any(attempt.progress for attempt in run.attempts[:-1]) else done


def _host_has_room(cluster: Cluster) -> bool:
    """Return whether a node's host could hold all that its cards hold, so that no offload overflows it."""
    return cluster.host_memory_bytes >= cluster.gpus_per_node * cluster.gpu_memory_bytes


def own_offloads(run: Run, knobs: Knobs) -> tuple[Knob, ...]:
    """Return the knobs by which a configuration holds more in host memory than the job as written."""
    written = run.accepted.profile.knobs
    return tuple(
        row
        for row in ROWS
        if row.saves.get(Memory.GPU) is Way.UP
        and row.saves.get(Memory.HOST) is Way.DOWN
        and row.asks_less(Memory.HOST, getattr(knobs, row.name), getattr(written, row.name))
    )


def undoes_offload(run: Run, before: Knobs, after: Knobs) -> bool:
    """Return whether a change takes back something of what relaunches moved to the host."""
    return any(
        row.asks_less(Memory.HOST, getattr(before, row.name), getattr(after, row.name))
        for row in own_offloads(run, before)
    )


def keeps_offload(run: Run, attempt: Attempt, proposed: Knobs) -> bool:
    """Return whether a host is to hold again all that relaunches had moved to it when it ran out.

    Whatever else asks for less of the host: such an offload is undone, and the device gets another cure.
    """
    if attempt.diagnosis is None or attempt.diagnosis.cause is not Cause.HOST_OOM:
        return False
    phase = attempt.diagnosis.phase
    own = [row for row in own_offloads(run, attempt.knobs) if row.holds(phase)]
    return bool(own) and not undoes_offload(run, attempt.knobs, proposed)


def savers(run: Run, failures: int) -> frozenset[str]:
    """Return the names of the remedies that one relaunch may join after so many failures of a group.

    Empty: one step at a time. What ran for some steps misses by little, and after a change that the job
    refused the next error is to show what it follows.
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
    """Return the remedy at a place with those after it that may be joined: exact ones, of other knobs.

    Where several values of a knob are among them, as modes are, the most saving one is taken.
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
        wider = _together(own, other)
        if legal(wider):
            whole = wider
            own.append(other)
    return whole


def _together(own: Sequence[Remedy], other: Remedy) -> Remedy:
    kept = [r for r in own if not r.changes.keys() <= other.changes.keys()]
    every = [*kept, other]
    changes = {knob: value for remedy in every for knob, value in remedy.changes.items()}
    return Remedy(
        name=own[0].name,
        changes=changes,
        reason="; ".join(dict.fromkeys(r.reason for r in every)),
        frees="; ".join(dict.fromkeys(r.frees for r in every if r.frees)),
        slows="; ".join(dict.fromkeys(r.slows for r in every if r.slows and r.slows != "nothing")),
    )


def _group(phase: Phase) -> frozenset[Phase]:
    return next((group for group in _GROUPS if phase in group), frozenset({phase}))
