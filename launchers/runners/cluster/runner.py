"""Runs attempts on a Ray cluster, an existing one or our own."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.actors import Posts, living_nodes, on_node
from autotune.launchers.runners.cluster.connection import (
    Connection,
    Head,
    connect,
    disconnect,
    in_main_thread,
)
from autotune.launchers.runners.cluster.handle import RayHandle
from autotune.launchers.runners.cluster.jobs import (
    attempts_with_jobs,
    inherited_job_config,
    jobs_of,
    remove_leftovers,
)
from autotune.launchers.runners.node.agent import Start, sweep_machine
from autotune.launchers.runners.node.host import Machine, measure
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster

_START_S = 120.0  # Ray may have to start workers on busy nodes
_ANSWER_S = 15.0
_SWEEP_GRACE_S = 2.0


class RayRunner:
    """Attempts as programs supervised by actors of a Ray cluster."""

    def __init__(
        self,
        connection: Connection,
        *,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        gpus: int | None = None,
    ) -> None:
        self._connection = connection
        self._link = Head(connection.address)
        self._gpus = gpus
        self._nodes = nodes
        self._gpus_per_node = gpus_per_node
        self.note = connection.note  # a line for the console; empty when the user asked for just this cluster

    @classmethod
    def open(
        cls, address: str | None, *, nodes: int = 1, gpus_per_node: int | None = None, gpus: int | None = None
    ) -> RayRunner:
        """Connect to `address`; `gpus` overrides how many cards our own local Ray has.

        `nodes` and `gpus_per_node` are what a command that is not Ray-native reserves.
        """
        return cls(connect(address, gpus=gpus), nodes=nodes, gpus_per_node=gpus_per_node, gpus=gpus)

    @property
    def address(self) -> str:
        """The cluster's GCS address."""
        return self._connection.address

    def cluster(self) -> Cluster:
        """Return what the nodes report; with cards anywhere, only the nodes that have some count."""
        import ray

        self._reach()
        probe = ray.remote(num_cpus=0, max_retries=0)(measure)
        nodes = living_nodes()
        machines: list[Machine] = _get([probe.options(**on_node(node)).remote() for node in nodes], _START_S)
        counts = [
            min(len(machine.cards), int(node["Resources"].get("GPU", 0)))
            for node, machine in zip(nodes, machines, strict=True)
        ]
        with_cards = [(machine, count) for machine, count in zip(machines, counts, strict=True) if count]
        cards = [card for machine, _ in with_cards for card in machine.cards]
        return Cluster(
            address="local" if self._connection.ours else self._connection.address,
            nodes=len(with_cards) or len(nodes),
            gpus_per_node=min((count for _, count in with_cards), default=0),
            gpu_memory_bytes=min((card.total_bytes for card in cards), default=0),
            host_memory_bytes=min(machine.host_total_bytes for machine in machines),
            gpu_name=with_cards[0][0].card_name if with_cards else "",
        )

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> RayHandle:
        """Start an attempt: a supervisor on the head node, a sampler on every other node."""
        import ray

        self._reach()
        posts = self._posts(run, attempt)
        if posts.find_supervisor() is not None:
            raise Unreachable(
                f"attempt {attempt} of {run} is running already", hint="resume it, or stop it first"
            )
        nodes = living_nodes()
        head, reserved = str(nodes[0]["NodeID"]), dict[str, dict[str, Any]]()
        gpus = self._gpus_to_reserve(nodes) if not command.ray_native else 0
        try:
            if gpus:
                reserved = posts.reserve(nodes=self._nodes, gpus_per_node=gpus)
                head = next(iter(reserved))
            actors = {
                str(node["NodeID"]): posts.create(
                    node,
                    supervisor=node["NodeID"] == head,
                    extra=reserved.get(str(node["NodeID"])),
                )
                for node in nodes
            }
            asked = [actor.begun.remote() for actor in actors.values()]
            starts: dict[str, Start] = dict(zip(actors, _get(asked, _START_S), strict=True))
            supervise = actors[head].supervise.remote(
                command, python=python, job_config=inherited_job_config()
            )
            starts[head] = _get([supervise], _START_S)[0]
        except ray.exceptions.RayTaskError as error:
            posts.dismiss()
            if isinstance(error.cause, Unreachable):
                raise error.cause from None
            raise
        except (ray.exceptions.RayError, RuntimeError) as error:
            posts.dismiss()
            raise Unreachable(f"the Ray cluster did not take the attempt: {error}") from error
        return RayHandle(posts, actors=actors, starts=starts, head=head, link=self._link)

    def _gpus_to_reserve(self, nodes: list[dict[str, Any]]) -> int:
        if self._gpus_per_node is not None:
            return self._gpus_per_node
        counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        return min((count for count in counts if count), default=0)

    def attach(self, *, run: str, attempt: int) -> RayHandle | None:
        """Return the attempt if its supervisor lives, to be read from the start once more."""
        self._reach()
        posts = self._posts(run, attempt)
        found = posts.find()
        if found is None:
            return None
        actors, head = found
        starts = _get([actor.begun.remote() for actor in actors.values()], _ANSWER_S)
        begun = dict(zip(actors, starts, strict=True))
        return RayHandle(posts, actors=actors, starts=begun, head=head, link=self._link)

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """End what is left of a run's attempts without a living supervisor, on all nodes."""
        import ray

        self._reach()
        spared: set[str] = set()
        ended: list[str] = []
        for attempt in Posts.attempts(run):
            posts = self._posts(run, attempt)
            if posts.find_supervisor() is not None:
                spared.add(f"{run}/{attempt}")
            elif posts.dismiss():
                ended.append(f"samplers of attempt {run}/{attempt}")
        for name in attempts_with_jobs(run):
            if name not in spared:
                ended += remove_leftovers(jobs_of(name))
        task = ray.remote(num_cpus=0, max_retries=0)(sweep_machine)
        asked = [
            task.options(**on_node(node)).remote(run, spared=spared, grace_s=_SWEEP_GRACE_S)
            for node in living_nodes()
        ]
        return (*ended, *(what for found in _get(asked, _START_S) for what in found))

    def close(self) -> None:
        """Leave the cluster; our own ends."""
        disconnect(self._connection)

    def _reach(self) -> None:
        """Connect once more when the cluster was left because its head was gone."""
        answers = self._link.answers()
        if not answers and not in_main_thread():
            raise Unreachable("the Ray cluster's head does not answer")
        if not answers and not self._link.gone:
            self._link.leave("the Ray cluster's head does not answer")
        if self._link.gone:
            disconnect(self._connection)
            self._connection = replace(self._connection, lifeline=-1, reaper=-1)
            self._connection = connect("local" if self._connection.ours else self.address, gpus=self._gpus)
            self._link = Head(self._connection.address)

    def _posts(self, run: str, attempt: int) -> Posts:
        return Posts(run=run, attempt=attempt, detached=not self._connection.ours)


def _get(references: list[Any], timeout_s: float) -> list[Any]:
    import ray

    return list(ray.get(references, timeout=timeout_s))
