"""What a job needs from a cluster, and whether a cluster has it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Problem
from autotune.orchestrator.errors import Failure, UserError
from autotune.orchestrator.units import counted, show_gib
from autotune.policies.values.job import Cluster, Job

_CAPACITY_TOLERANCE = 0.03
# A node with GPUs starts within minutes, mostly spent on pulling an image of tens of GB.
_WAIT_S = 1800.0
_ON_CPUS_TOO = ("builtin", "command")  # frameworks whose jobs need no GPU


def with_gpu_memory(job: Job, cluster: Cluster) -> Job:
    """Return the job with the memory of the cluster's GPUs, which some engine defaults depend on."""
    if job.cluster.gpu_memory_bytes is not None or not cluster.gpu_memory_bytes:
        return job
    spec = msgspec.structs.replace(job.cluster, gpu_memory_bytes=cluster.gpu_memory_bytes)
    return msgspec.structs.replace(job, cluster=spec)


def with_stated_gpus(cluster: Cluster, stated: Cluster) -> Cluster:
    """Return the cluster with the GPU memory that a job states, if NVML could not measure it."""
    if cluster.gpu_memory_bytes or not cluster.gpus_per_node:
        return cluster
    return msgspec.structs.replace(
        cluster, gpu_memory_bytes=stated.gpu_memory_bytes, gpu_name=stated.gpu_name
    )


def on_gpus(job: Job, *, nodes: int, per_node: int) -> tuple[Job, tuple[str, ...]]:
    """Return a job with its framework's own sizes set to a number of GPUs, and the changes.

    Raises Failure if the sizes cannot be set to it, or if the framework refuses them.
    """
    framework = frameworks.find(job.framework)
    asked, wanted = framework.gpus(job), nodes * per_node
    if asked is None or asked == wanted:
        return job, ()
    where = "1 GPU" if wanted == 1 else f"{nodes} x {per_node} GPUs"
    resized = framework.on_gpus(job, nodes=nodes, per_node=per_node)
    if resized is None:
        raise UserError(
            f"{where}: the settings ask for {asked} GPUs, and no layout of this job is known for {wanted}",
            hint="engines and batches must divide them; roles with GPUs of their own keep theirs",
        )
    changes = tuple(
        f"{name} {before.get(name, 'unset')} → {value}"
        for before, after in ((job.settings, resized.settings), (job.env, resized.env))
        for name, value in after.items()
        if before.get(name) != value
    )
    before = framework.check(job)
    problems = [problem for problem in framework.check(resized) if problem not in before]
    if problems:
        raise UserError(f"{where}: {_named(problems[0])} (with {', '.join(changes)})", hint=problems[0].hint)
    return resized, changes


def _named(problem: Problem) -> str:
    """Return a problem's message, with the setting's name."""
    name = str(problem.path[-1]) if problem.path else ""
    return problem.message if name in problem.message else f"{name}: {problem.message}"


def misfits(job: Job, cluster: Cluster) -> Iterator[Failure]:
    """Yield why a cluster cannot run a job: it is smaller than the job requires, or its GPUs differ."""
    spec = job.cluster
    here = cluster.address == "local"
    place = "this machine" if here else f"the Ray cluster at {cluster.address}"
    elsewhere = "; write the cluster's host:port as `cluster.address` to use one" if here else ""
    if spec.nodes > cluster.nodes:
        yield Failure(
            f"the job needs {spec.nodes} nodes; {place} " + ("is one" if here else f"has {cluster.nodes}"),
            hint=f"lower `cluster.nodes`{elsewhere}"
            if here
            else "lower `cluster.nodes`, or add nodes and launch again; "
            "`cluster.wait_for_nodes` in the job waits for nodes that join later",
        )
    if spec.gpus_per_node is not None and spec.gpus_per_node > cluster.gpus_per_node:
        has = f"{cluster.gpus_per_node}" if cluster.gpus_per_node else "none"
        lower = "lower `cluster.gpus_per_node`, or remove it to use all GPUs"
        hint = lower + elsewhere if cluster.gpus_per_node else elsewhere.removeprefix("; ") or "add GPU nodes"
        yield Failure(f"the job needs {spec.gpus_per_node} GPUs per node; {place} has {has}", hint=hint)
    there = cluster.gpus
    asked = frameworks.find(job.framework).gpus(job) or 0
    if cluster.gpus_per_node and asked > there and spec.gpus_per_node is None:
        yield Failure(
            f"the job's settings ask for {asked} GPUs; the cluster has {there}",
            hint=f"set {job.framework}'s own sizes to the cluster's, or add nodes and launch again",
        )
    stated, measured = spec.gpu_memory_bytes, cluster.gpu_memory_bytes
    if stated and measured and abs(stated - measured) > _CAPACITY_TOLERANCE * measured:
        yield UserError(
            f"`cluster.gpu_memory` is {show_gib(stated)} in the job; the cluster has {show_gib(measured)}",
            hint="remove it from the job; autotune then measures it",
        )


def without_gpus(job: Job, cluster: Cluster) -> str:
    """Return that a cluster has no GPU although the job's framework trains on GPUs; else empty."""
    if cluster.gpus_per_node or job.framework in _ON_CPUS_TOO:
        return ""
    place = "this machine" if cluster.address == "local" else f"the Ray cluster at {cluster.address}"
    return f"{place} has no GPU, and {job.framework} usually trains on GPUs"


def is_too_small(job: Job, cluster: Cluster) -> bool:
    """Return whether a cluster lacks nodes or GPUs that the job needs."""
    return job.cluster.nodes > cluster.nodes or (gpus_of_a_node(job) or 0) > cluster.gpus_per_node


def wait_s(job: Job, *, grows: bool) -> float | None:
    """Return how many seconds a run waits for missing nodes; None if it does not wait."""
    stated = job.cluster.wait_for_nodes_s
    return stated if stated is not None else _WAIT_S if grows else None


def gpus_of_a_node(job: Job) -> int | None:
    """Return the least number of GPUs per node that a job needs; None if it may run without GPUs.

    Without `cluster.gpus_per_node` that is one: a run then uses all GPUs that its nodes have.
    """
    spec = job.cluster
    if spec.gpus_per_node is not None:
        return spec.gpus_per_node
    stated = spec.gpu is not None or spec.gpu_memory_bytes is not None
    return 1 if stated or job.framework not in _ON_CPUS_TOO else None


def nodes_of(count: int, gpus: int) -> str:
    """Return a description of nodes, such as `4 nodes with 8 GPUs each`."""
    nodes = counted(count, "node")
    if not gpus:
        return nodes
    return f"{nodes} with {counted(gpus, 'GPU')}{' each' if count > 1 else ''}"
