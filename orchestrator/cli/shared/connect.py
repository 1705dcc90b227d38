"""The cluster that a run is driven on: opened, compared with what the job says, and its cards' size taken."""

from __future__ import annotations

import msgspec

from autotune.launchers.base import Runner
from autotune.orchestrator.cluster_fit import misfits
from autotune.policies.values.job import Cluster, Job


def open_runner(job: Job, *, before: Cluster | None = None) -> Runner:
    """Return the cluster of a job, the same one as `before` if its head answers; raises Unreachable.

    A cluster that answers is never passed over: what runs on it would be taken for dead.
    """
    from autotune.launchers.runners.cluster.connection import Head
    from autotune.launchers.runners.cluster.runner import RayRunner

    spec = job.cluster
    address = spec.address
    if before is not None and before.address == "local":
        address = "local" if address is None else address
    elif before is not None and address in (None, "auto"):
        address = before.address if Head(before.address).answers() else "auto"
    return RayRunner.open(address=address, nodes=spec.nodes, gpus_per_node=spec.gpus_per_node)


def left(runner: Runner, *, before: Cluster | None) -> Cluster | None:
    """Return the cluster that a run was on, where `runner` is another one; our own is new every time."""
    if before is None or before.address == "local":
        return None
    return None if runner.address == before.address else before


def match(job: Job, cluster: Cluster) -> None:
    """Raise Failure where the cluster is smaller than the job says, or its GPUs differ."""
    for failure in misfits(job, cluster):
        raise failure


def measured(job: Job, cluster: Cluster) -> Job:
    """Return the job with the size of the cards, which some defaults of a framework follow."""
    if job.cluster.gpu_memory_bytes is not None or not cluster.gpu_memory_bytes:
        return job
    spec = msgspec.structs.replace(job.cluster, gpu_memory_bytes=cluster.gpu_memory_bytes)
    return msgspec.structs.replace(job, cluster=spec)
