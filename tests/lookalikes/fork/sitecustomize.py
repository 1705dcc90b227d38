"""Plays the training of an old verl: its workers, its data and its loop are those of `played`.

Configuration, entry point, version and loggers stay those of the release that the job runs.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_PLAYED = Path(__file__).with_name("played.py")
_MODULES = frozenset(
    f"verl.{name}"
    for name in (
        *("trainer.ppo.ray_trainer", "trainer.ppo.reward"),
        *("utils.dataset.rl_dataset", "utils.tokenizer", "utils.vllm_utils"),
        *("workers.fsdp_workers", "workers.reward_manager"),
    )
)


class Finder:
    """Finds the played modules before Python looks for the release's own."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(name, _PLAYED) if name in _MODULES else None


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
