"""The nodes that a job needs and a cluster does not have yet: requested, counted, kept.

A request is a placement group of the nodes' GPUs, one bundle a node, on different nodes. Ray's autoscaler
serves it like the demand of any program, whatever provider starts the nodes: all of it or nothing, beside
what other programs request. It belongs to this process's Ray job, so that Ray removes it when this process
ends, however that happens. `ray.autoscaler.sdk.request_resources` would be one value for the whole cluster,
which replaces the request of any other program and outlives the one that made it.

    idle --request--> pending --placed--> kept --request--> pending ...

Once it is placed, the group is removed, because frameworks create placement groups of their own on the same
GPUs. From then on one actor without any resource on each node keeps the autoscaler from ending it as idle:
before the framework uses its GPUs, and between two attempts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from autotune.launchers.base import Capacity, Unreachable
from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.actors import living_nodes, on_node
from autotune.launchers.runners.cluster.survey import first_line
from autotune.launchers.runners.cluster.waits import WAITS, Waits

_NAME = "autotune: nodes"


def large_enough(nodes: list[dict[str, Any]], *, gpus: int) -> list[dict[str, Any]]:
    """Return the nodes that have what a job needs of each, whoever uses it now."""
    share = _share(gpus).items()
    return [node for node in nodes if all(node["Resources"].get(name, 0.0) >= least for name, least in share)]


def _share(gpus: int) -> dict[str, float]:
    """Return the resources that are requested of one node."""
    return {"GPU": float(gpus)} if gpus else {"CPU": 1.0}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Raise Unreachable for what Ray raises when its head does not answer."""
    import ray

    try:
        yield
    except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
        raise Unreachable(
            f"the Ray cluster does not answer: {first_line(error)}",
            hint="look at `ray status` and at the head",
        ) from error


class _Keeper:
    """Makes the autoscaler count its node as used."""

    def ready(self) -> None:
        """Return once the actor is there."""


class NodeRequest:
    """The request for `nodes` nodes of a cluster, and the actors that keep them."""

    def __init__(self, *, nodes: int, waits: Waits = WAITS) -> None:
        self._nodes, self._waits = nodes, waits
        self._group: Any = None
        self._keepers: dict[str, Any] = {}  # by node id

    def look(self, *, gpus: int) -> Capacity:
        """Request nodes with `gpus` GPUs each, if that is not pending yet, and return how many are there.

        Raises Unreachable when the cluster does not answer.
        """
        with answering():
            return self._look(gpus)

    def withdraw(self) -> None:
        """Remove the request."""
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def _look(self, gpus: int) -> Capacity:
        from ray.util.placement_group import placement_group, placement_group_table

        if self._group is None:
            bundles = [_share(gpus) for _ in range(self._nodes)]
            self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=_NAME)
        table = placement_group_table(self._group)
        placed = table.get("state") == "CREATED"
        if placed:
            self._keep(set(map(str, table["bundles_to_node_id"].values())))
            self.withdraw()
        there = len(large_enough(living_nodes(), gpus=gpus))
        return Capacity(
            ready=placed,
            nodes=self._nodes if placed else min(self._nodes, there),
            wanted=self._nodes,
            gpus=gpus,
            note="" if placed else internals.growth().note,
        )

    def _keep(self, nodes: set[str]) -> None:
        """Keep these nodes and no others."""
        import ray

        alive = {str(node["NodeID"]) for node in living_nodes()}
        for node in [node for node in self._keepers if node not in nodes & alive]:
            ray.kill(self._keepers.pop(node))
        keeper = ray.remote(num_cpus=0, max_restarts=0)(_Keeper)
        fresh = {
            node: keeper.options(**on_node({"NodeID": node})).remote()
            for node in sorted(nodes - set(self._keepers))
        }
        asked = [actor.ready.remote() for actor in fresh.values()]
        if asked:  # one that does not start in time may still do so
            ray.wait(asked, num_returns=len(asked), timeout=self._waits.answer)
        self._keepers.update(fresh)
