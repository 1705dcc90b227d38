"""Whether a cluster is what a job file says of it."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.launchers import frameworks
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.units import show_gib
from autotune.policies.values.job import Cluster, Job

_CAPACITY_TOLERANCE = 0.03


def on_gpus(job: Job, *, nodes: int, per_node: int) -> tuple[Job, tuple[str, ...]]:
    """Return a job with its framework's own sizes set to a number of GPUs, and what was changed.

    Raises Failure where they cannot be set to it, or where the framework refuses the sizes.
    """
    framework = frameworks.find(job.framework)
    asked, wanted = framework.gpus(job), nodes * per_node
    if asked is None or asked == wanted:
        return job, ()
    where = f"{nodes} x {per_node} GPUs"
    resized = framework.on_gpus(job, nodes=nodes, per_node=per_node)
    if resized is None:
        raise Failure(
            f"{where}: the settings ask for {asked} GPUs, and no layout of this job is known for {wanted}",
            hint="engines and batches must divide them; roles with GPUs of their own keep theirs",
            code=ExitCode.USAGE,
        )
    changes = tuple(
        f"{name} {before.get(name, 'unset')} → {value}"
        for before, after in ((job.settings, resized.settings), (job.env, resized.env))
        for name, value in after.items()
        if before.get(name) != value
    )
    problems = framework.check(resized)
    if problems:
        raise Failure(
            f"{where}: {problems[0].message} (with {', '.join(changes)})",
            hint=problems[0].hint,
            code=ExitCode.USAGE,
        )
    return resized, changes


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
    there = cluster.nodes * cluster.gpus_per_node
    asked = frameworks.find(job.framework).gpus(job) or 0
    if cluster.gpus_per_node and asked > there and spec.gpus_per_node is None:
        yield Failure(
            f"the job's settings ask for {asked} GPUs; the cluster has {there}",
            hint=f"set {job.framework}'s own sizes to the cluster's, or add nodes and launch again",
        )
    stated, measured = spec.gpu_memory_bytes, cluster.gpu_memory_bytes
    if stated and measured and abs(stated - measured) > _CAPACITY_TOLERANCE * measured:
        yield Failure(
            f"`cluster.gpu_memory` is {show_gib(stated)} in the job; the cluster has {show_gib(measured)}",
            hint="remove it from the job; autotune then measures it",
            code=ExitCode.USAGE,
        )
