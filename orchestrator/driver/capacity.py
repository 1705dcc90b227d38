"""Waits until a cluster has the nodes that the next attempt needs."""

from __future__ import annotations

from autotune.launchers.base import Capacity
from autotune.orchestrator.clock import timestamp
from autotune.orchestrator.cluster_fit import gpus_of_a_node, nodes_of, wait_s
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import waiting
from autotune.orchestrator.run.waiting import Waiting
from autotune.orchestrator.units import show_duration

_LOOK_S = 1.0
_SILENT_S = 3.0  # seconds before the wait is announced; free nodes are granted sooner
_REMIND_S = 60.0


class NodesMissing(Failure):
    """The nodes that the job needs did not join in time."""


def await_nodes(context: RunContext) -> bool:
    """Wait until the nodes of a run's job are there; false if the user interrupted.

    Raises NodesMissing after `cluster.wait_for_nodes`, Unreachable if the cluster does not answer.
    """
    keeps = False
    try:
        return _await(context)
    except NodesMissing:
        keeps = True  # `waiting.json` names what was missing
        raise
    finally:
        if not keeps:
            context.observer.write_view("waiting.json", lambda: waiting.clear(context.folder.path))


def await_to_measure(context: RunContext, *, changed: bool) -> bool:
    """Wait for the nodes to be measured: for a new run, or if its job or cluster `changed`.

    Returns false if the user interrupted; raises like `await_nodes`.
    """
    view = context.journal.view
    measures = view.last is None or (changed and not view.unended)
    return await_nodes(context) if measures else True


def _await(context: RunContext) -> bool:
    runner, spec, clock = context.runner, context.job.cluster, context.clock
    limit_s = wait_s(context.job, grows=True) or 0.0
    begun_at, since = clock.monotonic(), timestamp(clock.now())
    last_state: tuple[int, str] | None = None
    notified_at = begun_at
    try:
        while not context.interrupts.by:
            capacity = runner.capacity(
                gpus=gpus_of_a_node(context.job), joining=spec.wait_for_nodes_s is not None
            )
            now = clock.monotonic()
            waited_s = now - begun_at
            if capacity is None:
                return True
            if capacity.ready:
                if last_state is not None:
                    ready = nodes_of(capacity.wanted, capacity.gpus)
                    context.observer.say(f"{ready} ready after {show_duration(waited_s)}")
                return True
            if waited_s >= limit_s:
                raise _missing(capacity, limit_s, context)
            state = capacity.nodes, capacity.note
            if waited_s >= _SILENT_S and (state != last_state or now - notified_at >= _REMIND_S):
                note = f"; {capacity.note}" if capacity.note else ""
                context.observer.say(
                    f"waiting for {nodes_of(capacity.wanted, capacity.gpus)}: {_there(capacity)}{note}"
                    f" ({show_duration(waited_s)} of at most {show_duration(limit_s)})"
                )
                last_state, notified_at = state, now
                _write(context, capacity, since=since, limit_s=limit_s)
            clock.sleep(_LOOK_S)
        return False
    finally:
        runner.withdraw()


def _write(context: RunContext, capacity: Capacity, *, since: str, limit_s: float) -> None:
    row = Waiting(
        since=since,
        nodes=capacity.nodes,
        wanted=capacity.wanted,
        gpus=capacity.gpus,
        note=capacity.note,
        limit_s=limit_s,
    )
    context.observer.write_view("waiting.json", lambda: waiting.write(context.folder.path, row))


def _there(capacity: Capacity) -> str:
    if capacity.nodes < capacity.wanted:
        return f"{capacity.nodes} of {capacity.wanted} there"
    return "all there, not all free" if capacity.wanted > 1 else "there, not free"


def _missing(capacity: Capacity, limit_s: float, context: RunContext) -> NodesMissing:
    note = f"; {capacity.note}" if capacity.note else ""
    return NodesMissing(
        f"{nodes_of(capacity.wanted, capacity.gpus)} were not ready within {show_duration(limit_s)}: "
        f"{_there(capacity)}{note}",
        hint="look at `ray status` on the head; "
        f"`{context.folder.call('resume')}` waits again, `cluster.wait_for_nodes` in the job sets how long",
    )
