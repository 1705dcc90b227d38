"""Runs attempts on a Ray cluster, an existing one or our own."""

from __future__ import annotations

from typing import Any

from launchers.base import Unreachable
from launchers.runners.actor import NodeActor
from launchers.runners.connection import NAMESPACE, Connection, connect, disconnect
from launchers.runners.host import Machine, measure
from launchers.runners.node import Start, sweep_machine
from launchers.runners.ray_handle import Posts, RayHandle
from launchers.runners.ray_jobs import inherited_job_config, jobs_of, remove_leftovers
from policies.types import Cluster, Command

_START_S = 120.0  # Ray may have to start workers on busy nodes
_ANSWER_S = 15.0
_SWEEP_GRACE_S = 2.0


class RayRunner:
    """Attempts as programs supervised by actors of a Ray cluster."""

    def __init__(self, connection: Connection, *, nodes: int, gpus_per_node: int | None) -> None:
        self._connection = connection
        self._nodes = nodes
        self._gpus_per_node = gpus_per_node
        self.note = connection.note

    @classmethod
    def open(
        cls, address: str | None, *, nodes: int = 1, gpus_per_node: int | None = None, gpus: int | None = None
    ) -> RayRunner:
        """Connect to `address`; `gpus` overrides how many cards our own local Ray has.

        `nodes` and `gpus_per_node` are what a command that is not Ray-native reserves.
        """
        return cls(connect(address, gpus=gpus), nodes=nodes, gpus_per_node=gpus_per_node)

    def cluster(self) -> Cluster:
        """Return what the nodes report; with cards anywhere, only the nodes that have some count."""
        import ray

        probe = ray.remote(num_cpus=0, max_retries=0)(measure)
        nodes = living_nodes()
        machines: list[Machine] = self._get([probe.options(**_on(node)).remote() for node in nodes], _START_S)
        counts = [
            min(len(machine.cards), int(node["Resources"].get("GPU", 0)))
            for node, machine in zip(nodes, machines, strict=True)
        ]
        with_cards = [(m, count) for m, count in zip(machines, counts, strict=True) if count]
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

        posts = Posts(run=run, attempt=attempt, detached=not self._connection.ours)
        if posts.find_supervisor() is not None:
            raise Unreachable(f"attempt {attempt} of {run} is running already", hint="resume it, or stop it first")
        nodes, head = living_nodes(), head_node()
        reserved: dict[str, Any] = {}
        if not command.ray_native:
            reserved = self._reserve(posts)
        try:
            actors = {
                node["NodeID"]: posts.create(node, supervisor=node is head or node == head, extra=reserved if node == head else {})
                for node in nodes
            }
            supervisor = actors[head["NodeID"]]
            starts = dict(
                zip(
                    actors,
                    self._get([actor.follow.remote(command.logs) for actor in actors.values()], _START_S),
                    strict=True,
                )
            )
            (starts[head["NodeID"]],) = self._get(
                [supervisor.supervise.remote(command, python=python, job_config=inherited_job_config())], _START_S
            )
        except BaseException:
            posts.dismiss()
            raise
        return RayHandle(posts, actors=actors, starts=starts, head=head["NodeID"])

    def attach(self, *, run: str, attempt: int) -> RayHandle | None:
        """Return the attempt if its supervisor lives, to be read from the start once more."""
        posts = Posts(run=run, attempt=attempt, detached=not self._connection.ours)
        found = posts.find()
        if found is None:
            return None
        actors, head = found
        starts: list[Start] = self._get([actor.begun.remote() for actor in actors.values()], _ANSWER_S)
        return RayHandle(posts, actors=actors, starts=dict(zip(actors, starts, strict=True)), head=head)

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """End what is left of a run's attempts without a living supervisor, on all nodes."""
        import ray

        spared: set[str] = set()
        ended: list[str] = []
        for attempt in Posts.attempts(run):
            posts = Posts(run=run, attempt=attempt, detached=True)
            if posts.find_supervisor() is not None:
                spared.add(f"{run}/{attempt}")
            elif posts.dismiss():
                ended.append(f"samplers of attempt {run}/{attempt}")
        for attempt in _attempts_with_jobs(run):
            if f"{run}/{attempt}" not in spared:
                ended += remove_leftovers(jobs_of(f"{run}/{attempt}"))
        task = ray.remote(num_cpus=0, max_retries=0)(sweep_machine)
        refs = [
            task.options(**_on(node)).remote(run, spared=spared, grace_s=_SWEEP_GRACE_S) for node in living_nodes()
        ]
        return (*ended, *(what for found in self._get(refs, _START_S) for what in found))

    def close(self) -> None:
        """Leave the cluster; our own ends."""
        disconnect(self._connection)
