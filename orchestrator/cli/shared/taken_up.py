"""What changed since a run was driven last, and is recorded before it goes on: its job, its cluster."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.cli.shared import connect
from autotune.orchestrator.cli.shared.edit import RequestedJob
from autotune.orchestrator.cluster_fit import with_gpu_memory, with_stated_gpus
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.job_changes import concerns_training
from autotune.orchestrator.config.loader import assumed, written
from autotune.orchestrator.driver import reconcile
from autotune.orchestrator.driver.attempt import doubtful
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.errors import Failure
from autotune.policies.values.events import Edited, Finished
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Cluster, Job


def taken_up(context: RunContext, *, edit: RequestedJob | None, fixed: bool) -> RunContext:
    """Record what changed; returns the context of the run as it goes on.

    Raises Failure where a run is to be stopped whose attempt may still run on a cluster that was not reached.
    """
    history = context.journal.history()
    left = connect.left(context.runner, before=accepted_of(history).cluster)
    if left is not None and context.interrupts.by and doubtful(history):
        raise Failure(
            f"the Ray cluster of the run, {left.address}, could not be reached; "
            "its processes may still be running",
            hint="start that cluster again, or run "
            f"`{context.folder.call('resume')}` to continue on this one",
        )
    if edit is not None:
        context = _take_edit(context, edit, left=left)
    elif left is not None:
        context = _move(context, left)
    elif fixed and isinstance(history[-1], Finished):
        context.observer.say("job file unchanged; continuing the run")
        context.record(reconcile.resumed(history[-1].attempt))
    return context


def _take_edit(context: RunContext, edit: RequestedJob, *, left: Cluster | None) -> RunContext:
    """Record what the user changed; returns the context with the changed job."""
    before = accepted_of(context.journal.history()).profile
    context, row = _on_this_cluster(context, edit.job, left=left, changes=edit.changes)
    knobs, forgets = row.profile.knobs != before.knobs, concerns_training(edit.changes, row.profile)
    context.record(msgspec.structs.replace(row, file=edit.file, knobs=knobs, forgets=forgets))
    context.folder.change(edit.text, edit.request)
    return context


def _move(context: RunContext, left: Cluster) -> RunContext:
    """Record that the run goes on elsewhere; returns the context with the size of the cards there."""
    stated = written(context.folder.job_text)
    job = context.job if stated is None else msgspec.structs.replace(context.job, cluster=stated.cluster)
    context, row = _on_this_cluster(context, job, left=left, changes={})
    changes = {"cluster.address": (left.address, row.cluster.address)}
    context.record(msgspec.structs.replace(row, changes=changes))
    return context


def _on_this_cluster(
    context: RunContext, job: Job, *, left: Cluster | None, changes: dict[str, tuple[Any, Any]]
) -> tuple[RunContext, Edited]:
    """Return the context of a job as it is on this cluster, and the row that says so."""
    cluster = with_stated_gpus(context.runner.cluster(), assumed(job))
    connect.match(job, cluster)
    if left is not None:
        context.observer.say(
            f"the run was on the Ray cluster at {left.address}; "
            f"it continues on the one at {cluster.address}: {messages.cluster(cluster)}"
        )
    job = with_gpu_memory(job, cluster)
    row = Edited(
        attempt=context.journal.view.last_number,
        job=secrets.masked(job),
        profile=context.framework.profile(job, cluster),
        cluster=cluster,
        changes=changes,
    )
    return msgspec.structs.replace(context, job=job), row
