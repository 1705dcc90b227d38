"""The cluster that a run is driven on: opened, compared with what the job says, and its cards' size taken."""

from __future__ import annotations

from collections.abc import Callable

from autotune.launchers.base import Runner
from autotune.orchestrator.cluster_fit import misfits
from autotune.policies.values.job import Cluster, Job


def open_runner(
    job: Job, *, before: Cluster | None = None, say: Callable[[str], None] = lambda _: None
) -> Runner:
    """Return the cluster of a job, the same one as `before` if its head answers.

    A cluster that answers is never passed over: what runs on it would be taken for dead. `say` shows what is
    being waited for. Raises Unreachable, and Failure where a Ray of our own on this machine would be too
    small: none is started to find that out.
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
    """Return this machine as a cluster of our own would be, without its memory."""
    from autotune.launchers.runners.cluster.connection import visible_gpus

    return Cluster(
        address="local", nodes=1, gpus_per_node=visible_gpus(), gpu_memory_bytes=0, host_memory_bytes=0
    )


def left(runner: Runner, *, before: Cluster | None) -> Cluster | None:
    """Return the cluster that a run was on, where `runner` is another one; our own is new every time."""
    if before is None or before.address == "local":
        return None
    return None if runner.address == before.address else before


def match(job: Job, cluster: Cluster) -> None:
    """Raise Failure where the cluster is smaller than the job says, or its GPUs differ."""
    for failure in misfits(job, cluster):
        raise failure
