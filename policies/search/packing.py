"""How the trials of a search share a cluster when several run at once."""

from __future__ import annotations

from autotune.policies.values.job import Cluster
from autotune.policies.values.profile import Placement, Profile


def gpus_of(profile: Profile) -> int:
    """Return the GPUs that one trial takes."""
    trainers = max(1, profile.layout.ranks)
    if profile.placement is Placement.COLOCATED:
        return trainers
    return trainers + max(0, profile.layout.engine_ranks)


def trials_on_a_node(profile: Profile, cluster: Cluster, *, parallel: int) -> int:
    """Return how many of `parallel` trials can share one node and its host memory.

    Ray fills nodes one after the other; a trial that needs all GPUs of a node has its nodes to itself.
    """
    if not cluster.gpus_per_node:
        return -(-parallel // max(1, cluster.nodes))
    return max(1, min(parallel, cluster.gpus_per_node // gpus_of(profile)))
