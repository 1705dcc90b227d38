"""Connect to the cluster of a run, and compare it with the job's description."""

from __future__ import annotations

from collections.abc import Callable

from autotune.launchers.base import Runner
from autotune.orchestrator.cluster_fit import misfits
from autotune.policies.values.job import Cluster, Job


def open_runner(
    job: Job, *, before: Cluster | None = None, say: Callable[[str], None] = lambda _: None
) -> Runner:
    """Return the cluster of a job, the same one as `before` if its head answers.

    A cluster that answers is always used: otherwise, what runs on it would be considered dead. `say` prints
    what is being waited for. Raises Unreachable, and Failure if a local Ray on this machine would be too
    small, without starting one.
    """
    from autotune.launchers.runners.cluster.connection import Head
    from autotune.launchers.runners.cluster.runner import RayRunner

    spec = job.cluster
    address = spec.address
    if before is not None and before.address == "local":
        address = "local" if address is None else address
    elif before is not None and address in (None, "auto"):
        address = before.address if Head(before.address).answers() else "auto"
    if address == "local":
        match(job, here())
        say("starting Ray on this machine ...")
    elif address in (None, "auto"):
        say("looking for a Ray cluster ...")
    else:
        say(f"connecting to the Ray cluster at {address} ...")
    return RayRunner.open(
        address=address,
        nodes=spec.nodes,
        gpus_per_node=spec.gpus_per_node,
        starting=lambda: match(job, here()),
    )


def here() -> Cluster:
    """Return this machine as a local cluster, without its memory."""
    from autotune.launchers.runners.cluster.connection import visible_gpus

    return Cluster(
        address="local", nodes=1, gpus_per_node=visible_gpus(), gpu_memory_bytes=0, host_memory_bytes=0
    )


def left(runner: Runner, *, before: Cluster | None) -> Cluster | None:
    """Return the cluster that a run was on if `runner` is on another; None also for a local cluster."""
    if before is None or before.address == "local":
        return None
    return None if runner.address == before.address else before


def match(job: Job, cluster: Cluster) -> None:
    """Raise Failure if the cluster is smaller than the job requires, or its GPUs differ."""
    for failure in misfits(job, cluster):
        raise failure
