"""The card that a look-alike takes from Ray in a placement group, where the cluster's cards are scripted."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "SCRIPTED_CARDS"  # in the environment of a node whose cards are files; see the scripted pynvml
_GIB = 1 << 30


class Card:
    """A card in use until this program ends."""

    def __init__(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray.init(log_to_driver=False)
        group = ray.util.placement_group([{"GPU": 1}])
        ray.get(group.ready())

        class Rank:
            def place(self) -> tuple[int, int]:
                return int(os.environ["CUDA_VISIBLE_DEVICES"]), os.getpid()

        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        worker = ray.remote(num_cpus=0, num_gpus=1)(Rank)
        self._rank = worker.options(scheduling_strategy=strategy).remote()
        self.index, self._pid = ray.get(self._rank.place.remote())

    def fill(self, gib: float) -> None:
        """Hold so much of it."""
        Path(os.environ[FOLDER], str(self.index)).write_text(f"{int(gib * _GIB)} {self._pid}")
