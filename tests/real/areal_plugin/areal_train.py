"""A user's training script of AReaL: prompts of a file, and a reward of digits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.trainer import PPOTrainer
from datasets import Dataset


def share(prompt, completion, prompt_ids, completion_ids, **row) -> float:
    """Return the share of odd digits."""
    digits = [letter for letter in completion if letter.isdigit()]
    return sum(letter in "13579" for letter in digits) / max(1, len(digits))


def main(words: list[str]) -> None:
    """Train."""
    config, _ = load_expr_config(words, GRPOConfig)
    lines = Path(config.train_dataset.path).read_text().splitlines()
    rows = [{"messages": [{"role": "user", "content": json.loads(line)["prompt"]}]} for line in lines]
    with PPOTrainer(config, train_dataset=Dataset.from_list(rows)) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": "areal_train.share",
                "gconfig": config.gconfig,
                "tokenizer": config.tokenizer_path,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
