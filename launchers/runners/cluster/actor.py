"""The Ray actor of one attempt on one node; on the head node it is the attempt's supervisor."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.launchers.runners.cluster.jobs import job_environment
from autotune.launchers.runners.node.agent import Node, Start
from autotune.launchers.runners.node.child import outside_ray_worker
from autotune.launchers.runners.node.host import card_indices
from autotune.policies.values.command import Command


class NodeActor(Node):
    """A node's share of an attempt inside a Ray worker."""

    def __init__(self, *, run: str, attempt: int, name: str, start: Start | None = None) -> None:
        import ray
        from ray._private.worker import global_worker

        workers = global_worker.node.get_logs_dir_path()
        visible = _initial_environment().get("CUDA_VISIBLE_DEVICES", "")
        self._offered = card_indices(visible)  # to Ray, which counts from 0
        own = ",".join(str(name) for name in ray.get_gpu_ids())
        cards = card_indices(own) if own else ()
        super().__init__(run=run, attempt=attempt, name=name, workers=workers, cards=cards, start=start)

    def claim_offered(self, places: tuple[int, ...], pids: tuple[int, ...] = ()) -> None:
        """Take note that Ray gave processes of the attempt these of the GPUs that it has on this node."""
        self.claim([self._offered[place] for place in places if place < len(self._offered)], pids=pids)

    def node_id(self) -> str:
        """Return the id of the node that the actor runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def supervise(self, command: Command, *, python: str | None, job_config: str | None) -> Start:
        """Start the framework as a program of its own that finds this Ray cluster."""
        import ray

        environment = outside_ray_worker(dict(os.environ), initial=_initial_environment())
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        # What names the attempt's private folder is the program's alone: its workers may be elsewhere.
        variables = {name: value for name, value in command.env.items() if "{" not in value}
        environment.update(
            job_environment(self.attempt, inherited=job_config, python=python, variables=variables)
        )
        return self.launch(command, python=python, environment=environment)


def _initial_environment() -> dict[str, str]:
    entries = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
