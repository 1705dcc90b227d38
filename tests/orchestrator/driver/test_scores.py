"""The loss and the reward among the metrics of a step."""

from __future__ import annotations

import pytest

from autotune.orchestrator.driver.scores import scores_of


@pytest.mark.parametrize(
    ("metrics", "loss", "scores"),
    [
        ({"loss": 0.25, "reward/mean": 0.5}, "", {"loss": 0.25, "reward": 0.5}),
        (
            {"actor/pg_loss": 0.1, "critic/rewards/mean": 0.2, "critic/rewards/max": 1.0},
            "actor/pg_loss",
            {"loss": 0.1, "reward": 0.2},
        ),
        (
            {"train/kl_loss": 9.0, "train/loss": 0.3, "rollout/raw_reward": 0.4},
            "",
            {"loss": 0.3, "reward": 0.4},
        ),
        ({"reward": 0.4, "rewards/format/mean": 0.9}, "", {"reward": 0.4}),
        ({"loss": float("nan"), "loss_scale": 8.0, "reward_std": 0.1}, "", {}),
    ],
)
def test_loss_and_reward_have_one_name_whatever_the_framework_calls_them(
    metrics: dict[str, float], loss: str, scores: dict[str, float]
) -> None:
    assert scores_of(metrics, loss=loss) == scores
