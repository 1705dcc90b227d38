"""`plan --against`: what another release changes, by the facts on record of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.orchestrator.cli.terminal import Seen, call

SETTINGS = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "data.train_batch_size": 256,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
}


def job(folder: Path, **more: Any) -> str:
    document = {
        "name": "grpo",
        "framework": "verl",
        "framework_version": "0.9.1",
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "H100-80GB"},
        "settings": SETTINGS | more,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    return str(folder / "job.yaml")


def against(release: str, folder: Path, **more: Any) -> Any:
    result = call("plan", job(folder, **more), "--against", release, "--json")
    assert result.code == 0, result.err
    return msgspec.json.decode(result.out)


def test_a_default_that_changed_is_named_with_both_values_and_moves_the_peak(tmp_path: Path) -> None:
    document = against("verl==0.8.0", tmp_path)
    assert (document["now"], document["against"], document["stands_in"]) == ("0.9.1", "0.8.0", "")
    assert document["defaults"]["actor_rollout_ref.rollout.max_num_seqs"] == [256, 1024]
    assert document["knobs"]["concurrency"] == [256, 1024]
    peaks = {phase["phase"]: phase for phase in document["phases"]}
    assert peaks["rollout_init"]["against_bytes"] > peaks["rollout_init"]["now_bytes"]


def test_a_setting_that_the_job_writes_is_no_default_that_changed(tmp_path: Path) -> None:
    document = against("verl==0.8.0", tmp_path, **{"actor_rollout_ref.rollout.max_num_seqs": 512})
    assert "actor_rollout_ref.rollout.max_num_seqs" not in document["defaults"]
    assert "concurrency" not in document["knobs"]


def test_a_setting_that_the_other_release_lacks_is_named(tmp_path: Path) -> None:
    name = "actor_rollout_ref.actor.calculate_sum_pi_squared"
    document = against("verl==0.7.0", tmp_path, **{name: True})
    assert document["lacking"] == [name]
    assert against("verl==0.9.1", tmp_path, **{name: True})["lacking"] == []


def test_the_same_release_differs_in_nothing(tmp_path: Path) -> None:
    result = call("plan", job(tmp_path), "--against", "verl==0.9.1")
    assert result.code == 0 and "nothing that autotune knows differs" in result.out


@pytest.mark.parametrize("release", ["torch==2.9", "verl", "verl==", "verl==new", "sglang==0.5.5", "==1"])
def test_what_is_no_release_of_the_job_is_one_error(tmp_path: Path, release: str) -> None:
    result: Seen = call("plan", job(tmp_path), "--against", release)
    assert result.code == 2 and not result.out
    assert "not a release of the job's verl or vllm" in result.err and "such as verl==0.9.1" in result.err


def test_an_engine_of_another_release_is_compared_by_its_own_facts(tmp_path: Path) -> None:
    document = against("vllm==0.8.5", tmp_path)
    assert document["package"] == "vllm" and document["against"] == "0.8.5" and document["now"]
