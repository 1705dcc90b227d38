"""Creates, finds and removes the named actors of an attempt in a Ray cluster."""

from __future__ import annotations

import contextlib
from typing import Any

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.actor import NodeActor, remove_reservation, reservation_of
from autotune.launchers.runners.cluster.connection import NAMESPACE, NORMAL_NICENESS
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits
from autotune.launchers.runners.node.agent import Start


class Posts:
    """The actors of an attempt: the supervisor `autotune:<run>:<n>` and samplers `...:<node>`."""

    def __init__(self, *, run: str, attempt: int, detached: bool, waits: Waits = WAITS) -> None:
        self.run = run
        self.attempt = attempt
        self.name = reservation_of(f"{run}/{attempt}")
        self._detached = detached
        self._waits = waits

    @staticmethod
    def attempts(run: str) -> tuple[int, ...]:
        """Return the attempts of a run that have actors in the cluster."""
        prefix = f"autotune:{run}:"
        result = {name[len(prefix) :].split(":")[0] for name in _names() if name.startswith(prefix)}
        return tuple(sorted(int(number) for number in result if number.isdigit()))

    def create(
        self,
        node: dict[str, Any],
        *,
        supervisor: bool,
        start: Start | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Any:
        """Return a new actor on `node`, or the sampler that is already there."""
        import ray

        options: dict[str, Any] = {
            "name": self._name_on(node["NodeID"], supervisor=supervisor),
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": 0,
            "get_if_exists": not supervisor,
            **on_node(node),
            **(extra or {}),
        }
        if self._detached:
            options |= {"lifetime": "detached", "runtime_env": NORMAL_NICENESS}
        actor = ray.remote(NodeActor).options(**options)
        return actor.remote(run=self.run, attempt=self.attempt, name=name_of(node), start=start)

    def _name_on(self, node: str, *, supervisor: bool) -> str:
        return self.name if supervisor else f"{self.name}:{node[:12]}"

    def names(self) -> frozenset[str]:
        """Return the names of the attempt's actors that are not dead."""
        return frozenset(n for n in _names() if n == self.name or n.startswith(f"{self.name}:"))

    def find(self, node: str = "") -> Any | None:
        """Return the sampler on a node, or the supervisor, if Ray has it; it may not answer yet."""
        import ray

        try:
            return ray.get_actor(self._name_on(node, supervisor=not node), namespace=NAMESPACE)
        except ValueError:
            return None

    def dismiss(self, *, at_once: bool = False) -> int:
        """Release and remove the attempt's actors and its reservation; return how many actors there were.

        `at_once` does not wait for their release; processes that they started end with them.
        """
        import ray

        actors = []
        for name in self.names():
            with contextlib.suppress(ValueError):  # it has ended in the meantime
                actors.append(ray.get_actor(name, namespace=NAMESPACE))
        released = [actor.release.remote() for actor in actors if not at_once]
        if released:  # one that is dead or does not answer ends with its processes
            ray.wait(released, num_returns=len(released), timeout=self._waits.answer)
        for actor in actors:
            ray.kill(actor, no_restart=True)
        remove_reservation(self.name)
        return len(actors)

    def reserve(self, *, nodes: int, gpus_per_node: int) -> dict[str, dict[str, Any]]:
        """Reserve GPUs for a command that requests none from Ray; return its actors' options by node id."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [{"GPU": gpus_per_node}] * nodes,
            strategy="STRICT_SPREAD",
            name=self.name,
            lifetime="detached" if self._detached else None,
        )
        if not group.wait(self._waits.placement):
            remove_placement_group(group)
            raise Unreachable(
                f"{nodes} x {gpus_per_node} GPUs did not become free within {self._waits.placement:.0f} s",
                hint="`ray status` shows what holds them",
            )
        places = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return {
            str(node): {
                "num_gpus": gpus_per_node,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            }
            for bundle, node in sorted(places.items())
        }


def on_node(node: dict[str, Any]) -> dict[str, Any]:
    """Return the options that pin an actor or a task to a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}


def name_of(node: dict[str, Any]) -> str:
    """Return a node's name: its address."""
    return str(node["NodeManagerAddress"])


def living_nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes that are alive, the head node first."""
    import ray

    if not ray.is_initialized():  # in a thread, Ray would start a new cluster
        raise RuntimeError("not connected to a Ray cluster")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))


def _names() -> list[str]:
    import ray

    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]
