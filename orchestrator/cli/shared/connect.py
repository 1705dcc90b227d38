"""The cluster that a run is driven on: opened, compared with what the job says, and its cards' size taken."""

from __future__ import annotations

import msgspec

from autotune.launchers.base import Runner
from autotune.orchestrator.cluster_fit import misfits
from autotune.policies.values.job import Cluster, Job


def open_runner(job: Job, *, before: Cluster | None = None) -> Runner:
    """Return the cluster of a job, the same one as `before`; raises Unreachable."""
    from autotune.launchers.runners.cluster.runner import RayRunner

    spec = job.cluster
    address = spec.address
    if address is None and before is not None:
        address = "local" if before.address == "local" else "auto"
    return RayRunner.open(address=address, nodes=spec.nodes, gpus_per_node=spec.gpus_per_node)


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
