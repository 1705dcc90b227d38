"""Requests, counts and keeps the nodes that a job needs and a cluster does not have yet.

A request is a placement group with one bundle per node, on different nodes. Ray's autoscaler serves it like
any program's demand, all or nothing, with every node provider. It belongs to this process's Ray job, so that
Ray removes it when this process ends for any reason. `ray.autoscaler.sdk.request_resources` has one value per
cluster: it would replace other programs' requests and outlive this process.

    idle --request--> pending --placed--> kept --request--> pending ...

The placed group is removed, because frameworks create their own placement groups on the same GPUs. From then
on an actor without resources on each node keeps the autoscaler from terminating the node as idle, before the
framework uses its GPUs and between attempts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from autotune.launchers.base import Capacity, Unreachable
from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.actors import living_nodes, on_node
from autotune.launchers.runners.cluster.survey import first_line
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits

_NAME = "autotune: nodes"


def large_enough(nodes: list[dict[str, Any]], *, gpus: int) -> list[dict[str, Any]]:
    """Return the nodes with the resources that a job needs per node, in use or not."""
    share = _share(gpus).items()
    return [node for node in nodes if all(node["Resources"].get(name, 0.0) >= least for name, least in share)]


def _share(gpus: int) -> dict[str, float]:
    """Return the resources to request per node."""
    return {"GPU": float(gpus)} if gpus else {"CPU": 1.0}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn Ray's errors for a head that does not answer into Unreachable."""
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
        """Return once the actor runs."""


class NodeRequest:
    """The request for `nodes` nodes of a cluster, and the actors that keep them."""

    def __init__(self, *, nodes: int, waits: Waits = WAITS) -> None:
        self._nodes, self._waits = nodes, waits
        self._group: Any = None
        self._keepers: dict[str, Any] = {}  # by node id

    def look(self, *, gpus: int) -> Capacity:
        """Request nodes with `gpus` GPUs each, unless that is pending, and return how many there are.

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
        """Keep exactly these nodes."""
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
        if asked:  # an actor that did not start in time may still start
            ray.wait(asked, num_returns=len(asked), timeout=self._waits.answer)
        self._keepers.update(fresh)
