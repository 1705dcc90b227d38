"""`autotune launch` on the built-in job: real Ray, real SGLang, allocations that really fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GIB = 1 << 30
# 7.7 million parameters; its peaks: `python -m benchmarks.builtin_peaks`.
SHAPE = {"hidden": 320, "layers": 4, "heads": 10, "kv_heads": 5, "intermediate": 1280, "vocab": 2048}
FITS = {
    "model_shape": SHAPE,
    "prompts": 16,
    "samples": 12,
    "prompt_tokens": 8,
    "response_tokens": 24,
    "lr": 0.001,
    "steps": 2,
    "save_every": 1,
    "trainer_budget": "116MiB",
    "engine_budget": "1GiB",
    "memory_fraction": 0.85,
    "concurrency": 128,
    "tokens_per_microbatch": 256,
    "logprob_tokens": 3072,
    "optimizer_offload": True,
    "sync_buffer": "16MiB",
}

Event = dict[str, Any]


class Finished:
    """What a finished `autotune` left behind."""

    def __init__(self, folder: Path, result: subprocess.CompletedProcess[str]) -> None:
        self.result = result
        journals = sorted((folder / "runs").glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        self.run = journals[-1].parent
        self.events: list[Event] = [json.loads(line) for line in journals[-1].read_text().splitlines()]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def failures(self) -> list[tuple[str, str]]:
        return [(event["cause"], event["phase"]) for event in self.of("diagnosed")]

    @property
    def remedies(self) -> list[str]:
        return [event["remedy"]["name"] for event in self.of("decided") if event["remedy"]]

    @property
    def story(self) -> str:
        return self.result.stderr


def autotune(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, policy: str = "ladder"
) -> Finished:
    """Run `autotune`; by the ladder alone, every forced failure happens: the estimate would avoid it.

    With one thread: beside other tests the threads of a team wait for each other at every operator.
    """
    home = folder / f"home-{policy}"
    home.mkdir(exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-m", "autotune.orchestrator.cli", *arguments, "--policy", policy],
        cwd=folder,
        env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=2200,
    )
    return Finished(folder, result)


def launch(
    folder: Path,
    settings: dict[str, Any],
    *,
    recovery: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
) -> Finished:
    job = {
        "name": "recovery",
        "framework": "builtin",
        "settings": FITS | settings,
        "cluster": {"address": "local"},
        "goal": {"steps": 2},
        "recovery": recovery or {"in_place": False},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return autotune(folder, "launch", "job.yaml", env=env)


def shorter(source: Path, target: Path) -> str:
    """Write a job that is stable after two steps and ends after three; returns its file."""
    job = yaml.safe_load(source.read_text())
    job["settings"]["steps"] = 3
    job["goal"]["steps"] = 2
    target.write_text(yaml.safe_dump(job))
    return str(target)


@pytest.mark.alone  # what others take counts against its limit, so it is the first of the first file
def test_host_memory_killed_by_ray_is_not_cured_by_more_offload(tmp_path: Path) -> None:
    """Offloaded activations fill the host; Ray's memory monitor kills a worker."""
    memory = psutil.virtual_memory()
    limit = memory.total - memory.available + 3 * GIB
    done = launch(
        tmp_path,
        {
            "engine": "light",
            "prompts": 36,
            "steps": 1,
            "trainer_budget": None,
            "tokens_per_microbatch": 13824,
            "activation_offload": True,
        },
        env={
            "RAY_memory_usage_threshold": f"{limit / memory.total:.4f}",
            "RAY_memory_monitor_refresh_ms": "200",
        },
    )
    assert done.result.returncode == 0, done.story
    first = done.of("diagnosed")[0]
    assert first["cause"] == "host-oom", done.story
    assert first["phase"] in ("forward", "backward"), done.story
    assert done.remedies[0] == "reduce_tokens_per_mb"
    assert not any("offload" in name and name.startswith("offload") for name in done.remedies)


def test_the_demo_recovers_from_every_phase(tmp_path: Path) -> None:
    job = shorter(ROOT / "configs/builtin-cpu.yaml", tmp_path / "demo.yaml")
    done = autotune(tmp_path, "launch", job)
    assert done.result.returncode == 0, done.story
    assert {cause for cause, _ in done.failures} == {"gpu-oom"}
    phases = [phase for _, phase in done.failures]
    # What cures the scoring pass cures the training pass, which would not fit either.
    assert phases == ["rollout_init", "log_prob", "optimizer"], done.story
    answers = dict(zip(phases, done.remedies, strict=True))
    assert answers["rollout_init"] == "reduce_mem_fraction"
    assert answers["log_prob"] == "reduce_tokens_per_mb"
    assert answers["optimizer"] == "offload_optimizer"
    tried = [json.dumps(event["knobs"], sort_keys=True) for event in done.of("started")]
    assert len(set(tried)) == len(tried)
    assert [event["marginal"] for event in done.of("goal_reached")] == [False], done.story
    stable = done.run / "stable.yaml"
    assert Path(done.result.stdout.strip()).resolve() == stable.resolve() or str(stable).endswith(
        done.result.stdout.strip()
    )


def test_memory_that_arrives_with_the_first_step_is_cured_from_the_checkpoint(tmp_path: Path) -> None:
    """Adam's state is there from step 2 on; the scoring pass no longer fits beside it."""
    done = launch(
        tmp_path,
        {"optimizer_offload": False, "trainer_budget": "140MiB", "tokens_per_microbatch": 64, "steps": 3}
        | {"engine": "light", "prompts": 9},
    )
    assert done.result.returncode == 0, done.story
    first = done.of("diagnosed")[0]
    assert (first["cause"], first["phase"], first["step"]) == ("gpu-oom", "log_prob", 2), done.story
    assert done.remedies[0] == "reduce_tokens_per_mb"
    resumed = [event for event in done.of("progressed") if event["attempt"] == 2]
    assert resumed[0]["step"] == 2
    assert resumed[0]["resumed_from"] == 1
    steps = [event["step"] for event in done.of("progressed")]
    assert steps == sorted(set(steps)), "no step was trained twice"


def test_a_pass_is_cured_in_place_and_the_stable_job_has_the_smaller_value(tmp_path: Path) -> None:
    """The default: the attempt in which the scoring pass ran out of memory is the one that trains."""
    done = launch(tmp_path, {"engine": "light", "logprob_tokens": 6144}, recovery={"relaunches": 12})
    assert done.result.returncode == 0, done.story
    assert len(done.of("started")) == 1 and done.failures == [], done.story
    cures = done.of("cured_in_place")
    assert {(cure["phase"], cure["step"], cure["knob"]) for cure in cures} == {
        ("log_prob", 1, "logprob_tokens")
    }, done.story
    assert [cures[0]["before"], *(cure["after"] for cure in cures)] == [
        6144 >> cut for cut in range(len(cures) + 1)
    ]
    assert [event["step"] for event in done.of("progressed")] == [1, 2]
    stable = yaml.safe_load((done.run / "stable.yaml").read_text())
    assert stable["settings"]["logprob_tokens"] == cures[-1]["after"]
    proof = yaml.safe_load((done.run / "certificate.json").read_text())
    assert "logprob_tokens" in {change["knob"] for change in proof["changes"]}

    again = autotune(tmp_path, "launch", str(done.run / "stable.yaml"))
    assert again.result.returncode == 0, again.story
    assert again.failures == [] and again.of("cured_in_place") == [], again.story
    assert len(again.of("started")) == 1


def test_a_weight_sync_that_does_not_fit_gets_smaller_buckets(tmp_path: Path) -> None:
    """Two ranks hold half the weights each; the sync gathers them into buckets."""
    done = launch(
        tmp_path,
        {
            "model_shape": {"hidden": 384, "layers": 16, "heads": 12, "kv_heads": 6}
            | {"intermediate": 1536, "vocab": 512},
            "engine": "light",
            "prompts": 4,
            "samples": 2,
            "ranks": 2,
            "trainer_budget": "218MiB",
            "engine_budget": "1GiB",
            "tokens_per_microbatch": 64,
            "logprob_tokens": 128,
            "recompute": "full",
            "sync_buffer": "160MiB",
        },
    )
    assert done.result.returncode == 0, done.story
    first = done.of("diagnosed")[0]
    assert (first["cause"], first["phase"], first["component"]) == ("gpu-oom", "weight_sync", "trainer")
    assert done.remedies[0] == "reduce_sync_buffer"
