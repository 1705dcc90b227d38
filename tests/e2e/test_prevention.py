"""Failures met before they happen: by the estimate, in a rehearsal, and by a forecast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_recovery import ROOT, Finished, autotune, shorter

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

LEAKING = Path(__file__).parents[1] / "lookalikes" / "leaking"
TINY = {"engine": "light", "prompts": 2, "samples": 2, "prompt_tokens": 8, "response_tokens": 8}


def run(folder: Path, verb: str, settings: dict[str, Any], **keys: Any) -> Finished:
    """Run a job as users do, by the estimate and with the defaults of recovery, but for `keys`."""
    job = {"name": "early", "framework": "builtin", "cluster": {"address": "local"}, "settings": settings}
    (folder / "job.yaml").write_text(yaml.safe_dump(job | keys))
    return autotune(folder, verb, "job.yaml", policy="estimate")


def test_the_estimate_avoids_the_failures_of_the_demo(tmp_path: Path) -> None:
    """By the ladder alone it takes four attempts."""
    job = shorter(ROOT / "configs/builtin-cpu.yaml", tmp_path / "demo.yaml")
    done = autotune(tmp_path, "launch", job, policy="estimate")
    assert done.result.returncode == 0, done.story
    assert len(done.of("started")) <= 2, done.story
    assert [event["marginal"] for event in done.of("goal_reached")] == [False], done.story


def test_a_load_that_needs_more_than_any_step_is_cured_before_the_training(tmp_path: Path) -> None:
    """A rank loads the whole reference before it keeps half: only a reload has the optimizer's state too.

    Above the process, in MiB: 122 at a first start, 150 in a step, 181 in a reload.
    """
    done = run(
        tmp_path,
        "rehearse",
        TINY
        | {
            "model_shape": {"hidden": 320, "layers": 10, "heads": 10, "kv_heads": 5}
            | {"intermediate": 1280, "vocab": 128},
            "ranks": 2,
            "kl_coef": 0.1,
            "param_offload": True,
            "sync_mode": "none",
            "trainer_budget": "166MiB",
        },
    )
    assert done.result.returncode == 0, done.story
    assert [event["rehearsal"] for event in done.of("started")] == ["worst", "reload", "reload"], done.story
    assert [event["attempt"] for event in done.of("diagnosed")] == [2]
    assert done.failures == [("gpu-oom", "resume")]
    assert "gpu-oom while loading a checkpoint" in done.story
    _, failed, cured = (event["knobs"] for event in done.of("started"))
    assert cured == failed | {"optimizer_offload": True}, "the passes are left alone"
    (resumed,) = (event for event in done.of("progressed") if event["attempt"] == 3)
    assert (resumed["step"], resumed["resumed_from"]) == (4, 3)
    rehearsed = yaml.safe_load((done.run / "rehearsed.yaml").read_text())
    assert rehearsed["settings"]["optimizer_offload"] is True


def test_a_leak_is_stopped_at_the_checkpoint_before_it_fails_and_goes_on_with_a_change(
    tmp_path: Path,
) -> None:
    """The backward pass would run out of memory in step 15; checkpoints are those of steps 4, 8 and 12."""
    paths = [str(LEAKING), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run(
        tmp_path,
        "launch",
        TINY
        | {
            "model_shape": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2}
            | {"intermediate": 256, "vocab": 2048},
            "prompts": 8,
            "samples": 8,
            "response_tokens": 24,
            "tokens_per_microbatch": 2048,
            "logprob_tokens": 512,
            "save_every": 4,
            "steps": 16,
            "trainer_budget": "178MiB",
        },
        env={"PYTHONPATH": os.pathsep.join(paths)},
        recovery={"forecast": "act", "in_place": False, "preflight": "off"},
    )
    assert done.result.returncode == 0, done.story
    assert done.failures == [], done.story
    assert {(event["cause"], event["component"]) for event in done.of("foreseen")} == {("gpu-oom", "trainer")}
    ahead = next(event for event in done.of("foreseen") if event["phase"] == "backward")
    (stop,) = done.of("stop_requested")
    assert stop["by"] == "forecast"
    assert stop["reason"].startswith(f"GPU memory in backward is expected to run out at step {ahead['step']}")
    ended, last = done.of("ended")
    assert ended["outcome"] == {"outcome": "cancelled", "by": "forecast"}
    assert ended["saved"] == 12 and ended["step"] in (12, 13)
    assert ended["step"] < ahead["earliest"]
    assert last["outcome"] == {"outcome": "completed"}
    before, after = (event["knobs"] for event in done.of("started"))
    assert after["tokens_per_microbatch"] < before["tokens_per_microbatch"]
    assert done.remedies, "what would cure the failure came before it"
    again = [event for event in done.of("progressed") if event["attempt"] == 2]
    assert [event["step"] for event in again] == [13, 14, 15, 16] and again[0]["resumed_from"] == 12
