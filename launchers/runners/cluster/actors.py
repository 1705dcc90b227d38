"""The named actors of an attempt in a Ray cluster: created, found again, dismissed."""

from __future__ import annotations

from typing import Any

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.actor import NodeActor
from autotune.launchers.runners.cluster.connection import NAMESPACE
from autotune.launchers.runners.node.agent import Start

_ANSWER_S = 15.0
_PLACEMENT_S = 60.0


class Posts:
    """Where an attempt's actors stand: the supervisor `autotune:<run>:<n>`, samplers `...:<node>`."""

    def __init__(self, *, run: str, attempt: int, detached: bool) -> None:
        self.run = run
        self.attempt = attempt
        self.name = f"autotune:{run}:{attempt}"
        self._detached = detached

    @staticmethod
    def attempts(run: str) -> tuple[int, ...]:
        """Return the attempts of a run that have actors in the cluster."""
        prefix = f"autotune:{run}:"
        found = {name[len(prefix) :].split(":")[0] for name in _names() if name.startswith(prefix)}
        return tuple(sorted(int(number) for number in found if number.isdigit()))

    def create(
        self,
        node: dict[str, Any],
        *,
        supervisor: bool,
        start: Start | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Any:
        """Return a new actor on `node`."""
        import ray

        options: dict[str, Any] = {
            "name": self.name if supervisor else f"{self.name}:{node['NodeID'][:12]}",
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": 0,
            **on_node(node),
            **(extra or {}),
        }
        if self._detached:
            options["lifetime"] = "detached"
        actor = ray.remote(NodeActor).options(**options)
        return actor.remote(run=self.run, attempt=self.attempt, name=node["NodeManagerAddress"], start=start)

    def find_supervisor(self) -> Any | None:
        """Return the supervisor if it lives and answers."""
        import ray

        try:
            actor = ray.get_actor(self.name, namespace=NAMESPACE)
            ray.get(actor.begun.remote(), timeout=_ANSWER_S)
        except (ValueError, ray.exceptions.RayError):
            return None
        return actor

    def find(self) -> tuple[dict[str, Any], str] | None:
        """Return the living actors by node id and the supervisor's node; None without a living supervisor."""
        import ray

        supervisor = self.find_supervisor()
        if supervisor is None:
            return None
        head = str(ray.get(supervisor.node_id.remote(), timeout=_ANSWER_S))
        actors = {head: supervisor}
        for name in _names():
            if name.startswith(f"{self.name}:"):
                try:
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    actors[str(ray.get(actor.node_id.remote(), timeout=_ANSWER_S))] = actor
                except (ValueError, ray.exceptions.RayError):
                    continue  # its node is gone; the handle replaces it where the node lives
        return actors, head

    def dismiss(self) -> int:
        """Release and remove the attempt's actors and its reservation; return how many actors there were."""
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        names = [name for name in _names() if name == self.name or name.startswith(f"{self.name}:")]
        for name in names:
            try:
                actor = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                continue  # ended meanwhile
            try:
                ray.get(actor.release.remote(), timeout=_ANSWER_S)
            except ray.exceptions.RayError:
                continue  # dead already; its child has gone with it
            finally:
                ray.kill(actor, no_restart=True)
        try:
            remove_placement_group(get_placement_group(self.name))
        except ValueError:
            return len(names)  # it had reserved nothing
        return len(names)

    def reserve(self, *, nodes: int, gpus_per_node: int) -> dict[str, dict[str, Any]]:
        """Hold the GPUs of a command that asks Ray for none; return the options of its actors by node id."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [{"GPU": gpus_per_node}] * nodes,
            strategy="STRICT_SPREAD",
            name=self.name,
            lifetime="detached" if self._detached else None,
        )
        if not group.wait(_PLACEMENT_S):
            remove_placement_group(group)
            raise Unreachable(
                f"{nodes} x {gpus_per_node} GPUs did not become free within {_PLACEMENT_S:.0f} s",
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


def living_nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes that are alive, the head node first."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))


def _names() -> list[str]:
    import ray

    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]
