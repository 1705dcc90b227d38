"""verl 0.9.1 as published, out of memory in earnest on this machine's processor, recovered by autotune.

Trainer, FSDP2, agent loop, checkpoints and Ray are verl's own; the engine is transformers' `generate`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_driver import Head
from tests.real.results import Row, story
from tests.real.verl_job import BUDGET, SIZES, write_material, write_script

pytestmark = [pytest.mark.e2e_long, pytest.mark.timeout(3600)]

VERL = "verl 0.9.1"
PLAYED = "class and text of the error"
CARD = {"VERL_PLUGIN_BUDGET": str(BUDGET), "VERL_PLUGIN_WORDS": "cuda"}
Recorder = Callable[[Row], None]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_material(tmp_path_factory.mktemp("verl"))


def launched(head: Head, *words: str) -> tuple[list[dict[str, Any]], float]:
    """Make a job.yaml of the folder's script, launch it; return its events, and the seconds of the launch."""
    done = head.autotune("init", "run_grpo.sh")
    assert done.returncode == 0, done.stderr
    job = head.folder / "job.yaml"
    text = job.read_text()
    assert "gpus_per_node: 1" in text  # this machine's GPU is a number that Ray is given; NVML shows none
    job.write_text(text.replace(", gpus_per_node: 1", ""))
    began = time.monotonic()
    done = head.autotune(*(words or ("launch",)), "job.yaml", timeout_s=3000)
    assert done.returncode == 0, done.stderr
    return list(head.events()), time.monotonic() - began


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def logs(head: Head) -> list[str]:
    """Return what verl printed, by attempt."""
    return [path.read_text() for path in sorted(head.folder.glob("runs/*/attempts/*/run.log"))]


def is_cured_from_the_checkpoint(head: Head, events: list[dict[str, Any]]) -> None:
    """Check that every step was made once, from verl's checkpoint, with the batch as written."""
    progressed = of(events, "progressed")
    assert [event["step"] for event in progressed] == [1, 2, 3, 4]
    assert progressed[1]["resumed_from"] == 1
    for text in logs(head):
        assert re.findall(r"'train_batch_size': (\d+)", text) == [str(SIZES.prompts)]
        assert set(re.findall(r"'ppo_mini_batch_size': (\d+)", text)) == {str(SIZES.prompts)}
        assert re.findall(r"Total training steps: (\d+)", text) == [str(SIZES.steps)]
    last = logs(head)[-1]
    assert re.search(r"Resuming from \S*global_step_1, setting global step to 1\b", last)
    assert re.findall(r"\bstep:(\d+) - ", last) == ["2", "3", "4"]
    (tracker,) = head.folder.glob("**/latest_checkpointed_iteration.txt")
    assert tracker.read_text() == str(SIZES.steps)


def test_backward_is_cured_from_the_checkpoint(head: Head, material: Path, record: Recorder) -> None:
    write_script(head.folder, material, CARD)
    events, seconds = launched(head)
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "backward")
    assert diagnosed["facts"]["requested_bytes"] > 0
    assert diagnosed["facts"]["capacity_bytes"] == pytest.approx(BUDGET, rel=0.03)  # printed with two digits
    first, second = of(events, "started")
    assert second["knobs"]["tokens_per_microbatch"] < first["knobs"]["tokens_per_microbatch"]
    is_cured_from_the_checkpoint(head, events)
    record(
        Row(
            framework=VERL,
            case="backward over its budget, cured, resumed from verl's checkpoint",
            outcome=story(head.folder / "runs"),
            seconds=seconds,
            played=PLAYED,
        )
    )
