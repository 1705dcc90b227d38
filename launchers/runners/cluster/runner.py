"""Runs attempts on a Ray cluster, an existing one or our own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from msgspec.structs import replace

from autotune.launchers.base import Capacity, Unreachable
from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.actors import Posts, living_nodes, name_of, on_node
from autotune.launchers.runners.cluster.capacity import NodeRequest, answering, large_enough
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
from autotune.launchers.runners.cluster.readers import NodeReader, Places, answers_of, has_died
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits
from autotune.launchers.runners.node.agent import SWEEP_GRACE_S, end_run, sweep_machine
from autotune.launchers.runners.node.host import Machine, measure
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster


class RayRunner:
    """Attempts as programs supervised by actors of a Ray cluster."""

    def __init__(
        self,
        connection: Connection,
        *,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        waits: Waits = WAITS,
    ) -> None:
        self._connection = connection
        self._link = Head(connection.address, waits=waits)
        self._waits = waits
        self._handles: WeakSet[RayHandle] = WeakSet()
        self._given_up: list[RayHandle] = []  # handles whose actors could not be reached when stopped
        self._nodes = nodes
        self._gpus_per_node = gpus_per_node
        self._request = NodeRequest(nodes=nodes, waits=waits)
        self._opened_at = time.monotonic()
        self.note = connection.note  # a line for the console; empty if the user named this cluster

    @classmethod
    def open(
        cls,
        address: str | None,
        *,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        starting: Callable[[], None] = lambda: None,
    ) -> RayRunner:
        """Connect to `address` for a job that needs `nodes` and `gpus_per_node`.

        `starting` is called before a local Ray is started, and may raise.
        """
        return cls(connect(address, starting=starting), nodes=nodes, gpus_per_node=gpus_per_node)

    @property
    def address(self) -> str:
        """The cluster's GCS address."""
        return self._connection.address

    def capacity(self, *, gpus: int | None, joining: bool) -> Capacity | None:
        """Return the capacity of the cluster, and request missing nodes if more can join."""
        if self._connection.ours:
            return None
        self._reach()
        with answering():
            growth, nodes = internals.growth(), living_nodes()
        each = self._gpus_to_reserve(nodes) if gpus is None else gpus
        if not growth.grows and not joining:
            there = len(large_enough(nodes, gpus=each))
            early = growth.grows is None and time.monotonic() - self._opened_at < self._waits.report
            if there >= self._nodes or not early:
                return None
            note = "whether the cluster has an autoscaler is not known yet"
            return Capacity(ready=False, nodes=there, wanted=self._nodes, gpus=each, note=note)
        return self._request.look(gpus=each)

    def withdraw(self) -> None:
        """Stop requesting nodes."""
        import ray

        if ray.is_initialized() and not self._link.gone:
            self._request.withdraw()

    def cluster(self) -> Cluster:
        """Return the cluster as its nodes report it; see `summarize`."""
        import ray

        self._reach()
        probe = ray.remote(num_cpus=0, max_retries=0)(measure)
        nodes = living_nodes()
        asked = [probe.options(**on_node(node)).remote() for node in nodes]
        machines: list[Machine] = self._answers(nodes, asked)
        offered = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        address = "local" if self._connection.ours else self._connection.address
        return summarize(address, machines, offered)

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> RayHandle:
        """Start an attempt: a supervisor on the head node, a sampler on every other node."""
        import ray

        self._reach()
        posts = self._posts(run, attempt)
        if posts.find() is not None:
            raise Unreachable(
                f"attempt {attempt} of {run} is running already", hint="resume it, or stop it first"
            )
        nodes = living_nodes()
        head, reserved = str(nodes[0]["NodeID"]), dict[str, dict[str, Any]]()
        gpus = self._gpus_to_reserve(nodes) if not command.ray_native else 0
        try:
            self._settle()
            if gpus:
                reserved = posts.reserve(nodes=self._nodes, gpus_per_node=gpus)
                head = next(iter(reserved))
            readers, places = {}, Places({})
            for node in nodes:
                identity = str(node["NodeID"])
                actor = posts.create(node, supervisor=identity == head, extra=reserved.get(identity))
                readers[identity] = NodeReader(name=name_of(node), actor=actor, places=places)
            begun = self._answers(nodes, [reader.actor.begun.remote() for reader in readers.values()])
            for reader, start in zip(readers.values(), begun, strict=True):
                reader.answered(start)
            supervise = readers[head].actor.supervise.remote(
                command, python=python, job_config=inherited_job_config()
            )
            readers[head].answered(
                *answers_of([(readers[head].name, supervise)], timeout_s=self._waits.start)
            )
        except ray.exceptions.RayTaskError as error:
            posts.dismiss()
            if isinstance(error.cause, Unreachable):
                raise error.cause from None
            if isinstance(error.cause, OSError):  # of the node, such as a full disk
                raise Unreachable(f"the Ray cluster did not take the attempt: {error.cause}") from error
            raise
        except Unreachable:
            posts.dismiss()
            raise
        except (ray.exceptions.RayError, RuntimeError) as error:
            posts.dismiss()
            raise Unreachable(f"the Ray cluster did not take the attempt: {error}") from error
        except (KeyboardInterrupt, SystemError):  # a second interrupt: do not wait
            posts.dismiss(at_once=True)
            raise
        return self._handle(posts, readers, head=head)

    def _handle(self, posts: Posts, readers: dict[str, NodeReader], *, head: str) -> RayHandle:
        handle = RayHandle(
            posts,
            readers=readers,
            head=head,
            link=self._link,
            reach=None if self._connection.ours else self._reach,  # a local Ray does not come back
            give_up=self._given_up.append,
            waits=self._waits,
        )
        self._handles.add(handle)
        return handle

    def _answers(self, nodes: list[dict[str, Any]], asked: list[Any]) -> list[Any]:
        named = [(name_of(node), reference) for node, reference in zip(nodes, asked, strict=True)]
        return answers_of(named, timeout_s=self._waits.start)

    def _settle(self) -> None:
        """Kill the attempts that could not be reached when they should have been stopped."""
        given_up = self._given_up[:]
        self._given_up.clear()
        for handle in given_up:
            handle.relink(self._link)
            with contextlib.suppress(Unreachable):
                handle.stop(grace_s=0.0)
            handle.release()

    def _gpus_to_reserve(self, nodes: list[dict[str, Any]]) -> int:
        if self._gpus_per_node is not None:
            return self._gpus_per_node
        counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
        return min((count for count in counts if count), default=0)

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> RayHandle | None:
        """Return the attempt if its supervisor lives; its files are read from the offsets `read`.

        Raises Unreachable if the supervisor lives but does not answer, as training may be continuing.
        """
        import ray

        self._reach()
        posts = self._posts(run, attempt)
        supervisor = posts.find()
        if supervisor is None:
            return None
        asked = [("its supervisor", question.remote()) for question in (supervisor.node_id, supervisor.begun)]
        try:
            head, start = answers_of(asked, timeout_s=self._waits.attach)
        except ray.exceptions.RayActorError as error:
            if has_died(error):
                return None
            raise _slow(attempt, run, error) from error
        except Unreachable as unreachable:
            raise _slow(attempt, run, unreachable) from None
        if not start.output:  # its driver ended before it could say what to run
            posts.dismiss()
            return None
        readers, places = {}, Places(read)
        for node in living_nodes():
            identity = str(node["NodeID"])
            actor = supervisor if identity == head else posts.find(identity)
            readers[identity] = NodeReader(name=name_of(node), actor=actor, places=places)
        if head not in readers:
            return None  # its node has just left the cluster
        readers[head].answered(start)
        return self._handle(posts, readers, head=head)

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """Kill what is left of a run's attempts without a live supervisor, on all nodes."""
        import ray

        self._reach()
        spared: set[str] = set()
        ended: list[str] = []
        for attempt in Posts.attempts(run):
            posts = self._posts(run, attempt)
            if posts.find() is not None:
                spared.add(f"{run}/{attempt}")
            elif posts.dismiss():
                ended.append(f"samplers of attempt {run}/{attempt}")
        for name in attempts_with_jobs(run):
            if name not in spared:
                ended += remove_leftovers(jobs_of(name))
        task = ray.remote(num_cpus=0, max_retries=0)(sweep_machine)
        nodes = living_nodes()
        asked = [
            task.options(**on_node(node)).remote(run, spared=spared, grace_s=SWEEP_GRACE_S) for node in nodes
        ]
        return (*ended, *(what for answer in self._answers(nodes, asked) for what in answer))

    def end_all(self, *, run: str) -> tuple[str, ...]:
        """Kill every process of a run on all nodes; return those that survive SIGKILL."""
        import ray

        self._reach()
        task = ray.remote(num_cpus=0, max_retries=0)(end_run)
        nodes = living_nodes()
        asked = [task.options(**on_node(node)).remote(run, grace_s=SWEEP_GRACE_S) for node in nodes]
        return tuple(dict.fromkeys(what for left in self._answers(nodes, asked) for what in left))

    def close(self) -> None:
        """Disconnect; a local cluster ends."""
        for handle in self._handles:
            handle.leave()
        disconnect(self._connection)  # a request for nodes ends with it

    def _reach(self) -> Head:
        """Return the connection, reconnecting if this process had disconnected from a missing head."""
        answers = self._link.answers()
        if not answers and not in_main_thread():
            raise Unreachable("the Ray cluster's head does not answer")
        if not answers and not self._link.gone:
            self._link.leave("the Ray cluster's head does not answer")
        if self._link.gone:
            disconnect(self._connection)
            self._connection = replace(self._connection, lifeline=-1, reaper=-1)
            self._connection = connect("local" if self._connection.ours else self.address)
            self._link = Head(self._connection.address, waits=self._waits)
            self._request = NodeRequest(nodes=self._nodes, waits=self._waits)
        return self._link

    def _posts(self, run: str, attempt: int) -> Posts:
        return Posts(run=run, attempt=attempt, detached=not self._connection.ours, waits=self._waits)


def summarize(address: str, machines: list[Machine], offered: list[int]) -> Cluster:
    """Return the cluster formed by machines, with the GPUs that Ray offers on each.

    If any machine has GPUs, those without are ignored: the head may be small. Where NVML does not answer, as
    with AMD GPUs, the number that Ray offers counts, and the memory is unknown.
    """
    counts = [
        min(len(machine.cards), gpus) if machine.has_nvml else gpus
        for machine, gpus in zip(machines, offered, strict=True)
    ]
    with_gpus = [machine for machine, count in zip(machines, counts, strict=True) if count]
    counted = with_gpus or machines
    cards = [card for machine in with_gpus for card in machine.cards]
    return Cluster(
        address=address,
        nodes=len(counted),
        gpus_per_node=min((count for count in counts if count), default=0),
        gpu_memory_bytes=min((card.total_bytes for card in cards), default=0),
        host_memory_bytes=min(machine.host_total_bytes for machine in counted),
        gpu_name=with_gpus[0].card_name if with_gpus else "",
    )


def _slow(attempt: int, run: str, error: Exception) -> Unreachable:
    return Unreachable(
        f"attempt {attempt} of {run} has a supervisor that does not answer: {error};"
        " nothing was ended, its training may go on",
        hint="wait until its node answers",
    )
