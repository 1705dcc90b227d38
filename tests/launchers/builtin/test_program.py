"""The program as a user runs it, on a private Ray with the light engine."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import yaml

from autotune.launchers.builtin.process.records import PREFIX, FailureRecord

SMALL = {
    "engine": "light",
    "save_every": 0,
    "prompts": 4,
    "samples": 2,
    "response_tokens": 6,
    "model_shape": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64, "vocab": 64},
}


@pytest.fixture(scope="module")
def cluster(normal_niceness: None) -> Iterator[str]:
    # A socket's path is limited to 107 characters; pytest's folders are too deep.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        context = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


def command(tmp_path: Path, settings: dict[str, Any]) -> list[str]:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "autotune.launchers.builtin", "--config", str(path)]


def run(cluster: str, tmp_path: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, SMALL | settings),
        env=os.environ | {"RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def curve(output: str, name: str) -> list[float]:
    lines = [line for line in output.splitlines() if line.startswith("builtin: step ")]
    return [float(re.search(rf" {name}=(\S+)", line)[1]) for line in lines]  # type: ignore[index]


@pytest.mark.e2e
def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(cluster: str, tmp_path: Path) -> None:
    common = {"kl_coef": 0.01, "replay_path": None}
    recorded = str(tmp_path / "rollouts")
    straight = run(cluster, tmp_path, steps=4, record_path=recorded, **common)
    assert straight.returncode == 0, straight.stdout
    assert "builtin: done steps=4" in straight.stdout
    common = common | {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 1}
    common |= {"engine": "replay", "replay_path": recorded}
    first = run(cluster, tmp_path, steps=2, **common)
    second = run(cluster, tmp_path, steps=4, resume="auto", optimizer_offload=True, **common)
    assert second.returncode == 0, second.stdout
    assert "builtin: resumed step=2" in second.stdout
    for name in ("loss", "kl", "grad_norm"):
        assert curve(first.stdout, name) + curve(second.stdout, name) == curve(straight.stdout, name)
    refused = run(cluster, tmp_path, steps=4, **common)
    assert refused.returncode == 2
    assert "builtin: config error checkpoint_dir:" in refused.stdout


@pytest.mark.e2e_long
def test_it_learns_only_when_weights_reach_the_engine(cluster: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {"prompts": 16, "samples": 8, "response_tokens": 12, "lr": 1e-2}
    common["model_shape"] = {**SMALL["model_shape"], "hidden": 64, "intermediate": 128, "vocab": 128}
    synced = run(cluster, tmp_path, steps=15, **common)
    rewards = curve(synced.stdout, "reward")
    assert rewards[0] < 0.35, synced.stdout
    assert max(rewards[-3:]) > 0.55
    assert max(curve(synced.stdout, "logprob_gap")) < 1e-3
    control = run(cluster, tmp_path, steps=8, sync_mode="none", **common)
    assert max(curve(control.stdout, "reward")) < 0.35
    assert curve(control.stdout, "logprob_gap")[-1] > 0.1


def test_a_disk_sync_reaches_the_engine_too(cluster: str, tmp_path: Path) -> None:
    done = run(cluster, tmp_path, steps=3, sync_mode="disk", lr=1e-2)
    assert done.returncode == 0, done.stdout
    assert max(curve(done.stdout, "logprob_gap")) < 1e-4


@pytest.mark.e2e
def test_one_failing_rank_ends_the_job_while_another_waits_for_it(cluster: str, tmp_path: Path) -> None:
    shape = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 2048}
    failed = run(
        cluster,
        tmp_path,
        ranks=2,
        prompts=128,
        samples=8,
        response_tokens=16,
        model_shape=shape,
        trainer_budget=[None, "60MiB"],
        logprob_tokens=512,
    )
    assert failed.returncode == 1, failed.stdout
    lines = [line.removeprefix(PREFIX) for line in failed.stdout.splitlines() if line.startswith(PREFIX)]
    records = [msgspec.json.decode(line, type=FailureRecord) for line in lines]
    assert [(record.cause, record.rank, record.phase) for record in records] == [("gpu-oom", 1, "forward")]


@pytest.mark.e2e_long  # in test_ranks.py without Ray
def test_two_ranks_make_the_update_of_one(cluster: str, tmp_path: Path) -> None:
    recorded = str(tmp_path / "rollouts")
    single = run(cluster, tmp_path, steps=3, kl_coef=0.01, record_path=recorded)
    assert single.returncode == 0, single.stdout
    double = run(
        cluster,
        tmp_path,
        steps=3,
        kl_coef=0.01,
        ranks=2,
        engine="replay",
        replay_path=recorded,
        param_offload=True,
        optimizer_offload=True,
        tokens_per_microbatch=30,
    )
    assert double.returncode == 0, double.stdout
    for name in ("grad_norm", "kl"):
        assert curve(double.stdout, name) == pytest.approx(curve(single.stdout, name), rel=1e-3, abs=1e-6)


def test_sigterm_stops_it(cluster: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, SMALL | {"steps": 100000}),
        env=os.environ | {"RAY_ADDRESS": cluster},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("builtin: step 1/"):
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_bad_settings_are_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, {"stepz": 1, "lr": -1}), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert [line.split(":")[1] for line in done.stdout.splitlines()] == [
        " config error lr",
        " config error stepz",
    ]
