"""The task is learnt with SGLang as the sampler, and only when new weights reach it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_recovery import autotune

pytestmark = [pytest.mark.e2e_long, pytest.mark.timeout(1800)]

JOB = """\
name: learning
framework: builtin
settings: {steps: 30, prompts: 16, samples: 8, prompt_tokens: 7, response_tokens: 12, engine_budget: 256MiB,
           memory_fraction: 0.5, save_every: 30, sync_mode: %s}
cluster: {address: local}
goal: {steps: 30}
"""


def rewards(folder: Path, mode: str) -> list[float]:
    (folder / "job.yaml").write_text(JOB % mode)
    done = autotune(folder, "launch", "job.yaml")
    assert done.result.returncode == 0, done.story
    log = (done.run / "attempts/0001/run.log").read_text(errors="replace")
    return [float(results) for results in re.findall(r"builtin: step \d+/\d+ .*reward=([0-9.]+)", log)]


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_reward_rises_within_30_steps(tmp_path: Path, mode: str) -> None:
    curve = rewards(tmp_path, mode)
    assert len(curve) == 30
    assert curve[0] < 0.35
    assert sum(curve[-5:]) / 5 > 0.8


def test_reward_does_not_rise_without_weight_sync(tmp_path: Path) -> None:
    curve = rewards(tmp_path, "none")
    assert max(curve) < 0.35
