"""The Ray actor of one attempt on one node; on the head node it is the attempt's supervisor."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping

from autotune.launchers.runners.cluster.internals import worker_logs
from autotune.launchers.runners.cluster.jobs import job_environment
from autotune.launchers.runners.node.agent import EXPIRES_S, Node, Start
from autotune.launchers.runners.node.child import initial_environment, outside_ray_worker
from autotune.launchers.runners.node.host import card_indices
from autotune.policies.values.command import Command

_LOOK_S = 600.0  # seconds between checks whether the actor has expired


class NodeActor(Node):
    """A node's share of an attempt inside a Ray worker."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        name: str,
        start: Start | None = None,
        expires_s: float = EXPIRES_S,
    ) -> None:
        import ray

        workers = worker_logs()
        visible = initial_environment().get("CUDA_VISIBLE_DEVICES", "")
        self._offered = card_indices(visible)  # to Ray, which counts from 0
        own = ",".join(str(name) for name in ray.get_gpu_ids())
        cards = card_indices(own) if own else ()
        super().__init__(
            run=run,
            attempt=attempt,
            name=name,
            workers=workers,
            cards=cards,
            start=start,
            expires_s=expires_s,
        )
        self._reservation = ""
        look_s = min(_LOOK_S, expires_s)
        threading.Thread(target=self._expire, args=(look_s,), name="autotune-expiry", daemon=True).start()

    def _expire(self, look_s: float) -> None:
        """Exit once no driver polls the attempt and none of its processes runs on this node."""
        while not self.expired():
            time.sleep(look_s)
        self.release()
        if self._reservation:
            remove_reservation(self._reservation)
        os._exit(0)  # ray.actor.exit_actor works only inside an actor call

    def claim_offered(self, places: tuple[int, ...], pids: tuple[int, ...] = ()) -> None:
        """Record the GPUs of this node that Ray gave to processes of the attempt."""
        self.claim([self._offered[place] for place in places if place < len(self._offered)], pids=pids)

    def node_id(self) -> str:
        """Return the id of the node that the actor runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def supervise(self, command: Command, *, python: str | None, job_config: str | None) -> Start:
        """Start the framework as a separate program that connects to this Ray cluster."""
        import ray

        self._reservation = reservation_of(self.attempt)
        environment = outside_ray_worker(dict(os.environ), initial=initial_environment())
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        variables = workers_variables(command.env, python=python or sys.executable)
        environment.update(
            job_environment(self.attempt, inherited=job_config, python=python, variables=variables)
        )
        return self.launch(command, python=python, environment=environment)


def reservation_of(attempt: str) -> str:
    """Return the name of the placement group, and of the supervisor, of an attempt `<run>/<n>`."""
    return f"autotune:{attempt.replace('/', ':')}"


def remove_reservation(name: str) -> None:
    """Release the GPUs reserved for an attempt, if any."""
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):  # nothing was reserved
        remove_placement_group(get_placement_group(name))


def workers_variables(variables: Mapping[str, str], *, python: str) -> dict[str, str]:
    """Return the program's environment variables that its workers get as well.

    Variables that name the attempt's private folder are left out: workers may run on other nodes.
    """
    return {
        name: value.replace("{python}", python)
        for name, value in variables.items()
        if "{attempt}" not in value
    }
