"""Whether a cluster is what a job file says of it."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.units import show_gib
from autotune.policies.values.job import Cluster, Job

_CAPACITY_TOLERANCE = 0.03


def misfits(job: Job, cluster: Cluster) -> Iterator[Failure]:
    """Yield why a cluster cannot take a job: it is smaller than the job says, or its GPUs differ."""
    spec = job.cluster
    if spec.nodes > cluster.nodes:
        yield Failure(
            f"the job needs {spec.nodes} nodes; the cluster has {cluster.nodes}",
            hint="lower `cluster.nodes`, or add nodes and launch again",
        )
    if spec.gpus_per_node is not None and spec.gpus_per_node > cluster.gpus_per_node:
        yield Failure(
            f"the job needs {spec.gpus_per_node} GPUs per node; the cluster has {cluster.gpus_per_node}",
            hint="lower `cluster.gpus_per_node`, or remove it to use all GPUs",
        )
    stated, measured = spec.gpu_memory_bytes, cluster.gpu_memory_bytes
    if stated and measured and abs(stated - measured) > _CAPACITY_TOLERANCE * measured:
        yield Failure(
            f"`cluster.gpu_memory` is {show_gib(stated)} in the job; the cluster has {show_gib(measured)}",
            hint="remove it from the job; autotune then measures it",
            code=ExitCode.USAGE,
        )
