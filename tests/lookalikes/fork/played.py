"""What an old verl would train with: its trainer is a formula of memory, everything else a name.

The trainer reads its settings as verl 0.2 and 0.4 do, and logs through the release's own `Tracking`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
from omegaconf import OmegaConf

from tests.lookalikes.core import Shortage, main, number, say, write
from tests.lookalikes.verl_main_ppo import setup_of

Role = Enum("Role", ["ActorRollout", "Critic", "RefPolicy", "RewardModel"])


class RayPPOTrainer:
    """Trains by a formula."""

    def __init__(self, *, config: Any, **_: Any) -> None:
        self.config = config

    def init_workers(self) -> None:
        """Do nothing: the formula has no workers."""

    def fit(self) -> None:
        settings = OmegaConf.to_container(self.config, resolve=True)
        main(setup_of(dict(_flat(settings))), Voice(settings))


class Voice:
    """What verl 0.2 and 0.4 say and write."""

    def __init__(self, settings: Any) -> None:
        from verl.utils.tracking import Tracking

        self.trainer = settings["trainer"]
        self.logger = Tracking(
            project_name=self.trainer["project_name"],
            experiment_name=self.trainer["experiment_name"],
            default_backend=self.trainer["logger"],
            config=settings,
        )
        self.folder = Path(self.trainer["default_local_dir"])

    def begin(self) -> None:
        say(f"Total training steps: {self.trainer['total_training_steps']}")

    def pool_too_small(self, *, available_gib: float) -> int:
        raise ValueError(f"No available memory for the cache blocks: {available_gib:.2f} GiB")

    def ready(self, *, resumed: int) -> None:
        say(f"Setting global step to {resumed}" if resumed else "Training from scratch")

    def out_of_memory(self, short: Shortage) -> int:
        def fail() -> int:
            raise torch.OutOfMemoryError(short.text)

        update_policy = _frame("workers/actor/dp_actor.py", "update_policy", "loss.backward()", fail)
        return int(_frame("workers/fsdp_workers.py", "update_actor", "actor.update_policy(", update_policy)())

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        metrics = {"actor/pg_loss": 0.01, "critic/score/mean": 0.4, "timing_s/step": seconds}
        metrics |= {"timing_s/save_checkpoint": 0.1} if self.trainer["save_freq"] > 0 else {}
        if step == of and verl.__version__.startswith("0.2"):  # its loop ends a step before
            metrics = {"val/test_score/gsm8k": 0.4}
        self.logger.log(data=metrics, step=step)

    def checkpoint(self, step: int) -> None:
        write(self.folder / f"global_step_{step}" / "actor" / "model_world_size_8_rank_0.pt", "weights")
        write(self.folder / "latest_checkpointed_iteration.txt", str(step))

    def stuck(self, step: int) -> None:
        """Say nothing."""

    def done(self) -> None:
        say("Final validation metrics: {'val/test_score/gsm8k': 0.4}")

    def saved(self) -> int:
        if self.trainer["resume_mode"] == "disable":
            return 0
        return number(self.folder / "latest_checkpointed_iteration.txt")


def _frame(file: str, name: str, line: str, call: Callable[[], int]) -> Callable[[], int]:
    """Return a function that a traceback shows at a line of the release's own file."""
    path = Path(verl.__file__).parent / file
    at = next(number for number, text in enumerate(path.read_text().splitlines()) if line in text)
    result: dict[str, Any] = {"call": call}
    exec(compile("\n" * at + f"def {name}(): return call()", str(path), "exec"), result)
    return result[name]


def _flat(node: dict[str, Any], at: str = "") -> Any:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


class _Named:
    """Anything that the entry point only hands on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __len__(self) -> int:
        return 1


RLHFDataset = ResourcePoolManager = NaiveRewardManager = _Named
ActorRolloutRefWorker = AsyncActorRolloutRefWorker = CriticWorker = _Named
load_reward_manager = hf_tokenizer = hf_processor = lambda *_, **__: SimpleNamespace()
collate_fn = is_version_ge = load_reward_manager
__all__ = ["hf_processor", "hf_tokenizer"]  # `verl.utils` hands on what its tokenizer module names
