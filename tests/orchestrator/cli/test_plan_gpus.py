"""The number of GPUs is one fact: `plan --gpus` reaches the framework's own sizes, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.orchestrator.cli import main

CONFIGS = Path(__file__).parents[3] / "configs"
SIZED = {
    "verl": "verl-grpo-qwen2.5-7b.yaml",
    "slime": "slime-colocated.yaml",
    "miles": "miles-colocated.yaml",
    "openrlhf": "openrlhf-hybrid.yaml",
    "skyrl": "skyrl-gsm8k.yaml",
    "nemo-rl": "nemo-rl-math.yaml",
    "trl": "trl-grpo.yaml",
    "ms-swift": "ms-swift-grpo.yaml",
}


def planned(file: Path, gpus: str) -> Any:
    return CliRunner().invoke(main, ["plan", str(file), "--gpus", gpus, "--json"])


@pytest.mark.parametrize("name", SIZED)
def test_fewer_gpus_hold_more_each_wherever_anything_is_sharded(name: str) -> None:
    tables = []
    for gpus in ("8xH100", "4xH100"):
        result = planned(CONFIGS / SIZED[name], gpus)
        assert result.exit_code == 0, result.stderr
        tables.append(json.loads(result.stdout))
    whole, half = tables
    assert any("planned for 1 x 4 GPUs: " in line for line in half["warnings"])
    assert not any("planned for" in line for line in whole["warnings"])
    peaks = [{each["phase"]: each["total_bytes"] for each in table["phases"]} for table in tables]
    assert peaks[1]["train"] > peaks[0]["train"]


@pytest.mark.parametrize(
    ("file", "gpus"),
    [
        ("verl-grpo-qwen2.5-7b.yaml", "3xH100"),
        ("skyrl-gsm8k.yaml", "3xH100"),
        ("nemo-rl-math.yaml", "3xH100"),
        ("slime-colocated.yaml", "3xH100"),
        ("openrlhf-hybrid.yaml", "3xH100"),
        ("slime-async.yaml", "4xH100"),
        ("areal-gsm8k.yaml", "4xH100"),
        ("ms-swift-grpo.yaml", "2x8xH100"),
    ],
)
def test_gpus_without_a_known_layout_are_refused(file: str, gpus: str) -> None:
    result = planned(CONFIGS / file, gpus)
    assert result.exit_code == 2
    assert "GPUs: " in result.stderr
    assert "hint" in result.stderr or "does not divide" in result.stderr
    assert json.loads(result.stdout)["exit_code"] == 2


def test_a_batch_that_does_not_divide_the_gpus_is_refused(tmp_path: Path) -> None:
    text = (CONFIGS / "verl-grpo-qwen2.5-7b.yaml").read_text()
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 1"))
    assert planned(file, "8xH100").exit_code == 0
    result = planned(file, "3xH100")
    assert result.exit_code == 2 and "no layout of this job is known for 3" in result.stderr


@pytest.mark.parametrize("words", [["plan"], ["launch", "-n"], ["doctor"]])
@pytest.mark.parametrize("name", ["verl", "openrlhf", "trl"])
def test_a_job_that_asks_for_more_gpus_than_its_cluster_has_is_an_error(
    name: str, words: list[str], tmp_path: Path
) -> None:
    text = (CONFIGS / SIZED[name]).read_text()
    assert "gpus_per_node: 8" in text
    file = tmp_path / "job.yaml"
    before, cluster, after = text.partition("cluster: {")
    file.write_text(before + cluster + after.replace("gpus_per_node: 8", "gpus_per_node: 4", 1))
    result = CliRunner().invoke(main, [*words, str(file)])
    assert result.exit_code == 2
    assert "the job's settings ask for 8 GPUs, `cluster` has 4" in result.output


def test_an_engine_s_defaults_are_those_of_the_card_that_is_named() -> None:
    by_name = json.loads(planned(CONFIGS / "slime-colocated.yaml", "8xH100").stdout)
    by_size = CliRunner().invoke(main, ["plan", str(CONFIGS / "slime-colocated.yaml"), "--json"])
    knobs = [
        {row["knob"]: row["value"] for row in table["knobs"]}
        for table in (by_name, json.loads(by_size.stdout))
    ]
    assert knobs[0]["max_batched_tokens"] == knobs[1]["max_batched_tokens"] == 8192


def test_a_default_of_a_framework_is_no_number_of_gpus_that_the_job_asks_for() -> None:
    case = CONFIGS.parent / "benchmarks" / "published" / "cases" / "areal-1.5b-ppo-8xh800" / "job.yaml"
    result = CliRunner().invoke(main, ["plan", str(case)])  # AReaL's own cluster.n_nodes is 32
    assert result.exit_code == 0, result.stderr


_OVERFLOWS = """
name: large
framework: verl
framework_version: 0.9.1
workdir: {folder}
cluster: {{address: auto, nodes: 1, gpus_per_node: 8, gpu: H100-80GB}}
model: {{layers: 28, hidden: 3584, heads: 28, kv_heads: 4, intermediate: 18944, vocab: 152064}}
lengths: {{prompt: 500, response: 3500}}
settings:
  algorithm.adv_estimator: grpo
  actor_rollout_ref.rollout.name: vllm
  actor_rollout_ref.rollout.n: 8
  actor_rollout_ref.rollout.gpu_memory_utilization: 0.6
  actor_rollout_ref.actor.use_dynamic_bsz: true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu: 262144
  data.max_prompt_length: 1024
  data.max_response_length: 4096
"""


def printed(*words: str) -> str:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_launch_n_prints_the_first_command_of_plan(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(_OVERFLOWS.format(folder=tmp_path))
    plan = json.loads(printed("plan", "--json", str(file)))
    command = json.loads(printed("launch", "-n", "--json", str(file)))
    assert plan["first"] and plan["rests_on"] == [] and plan["facts"][0]["origin"] == "exact"
    planned = [word.replace("-plan", "-dry-run") for word in plan["command"]]
    assert [word for word in command["argv"] if "=" in word] == [word for word in planned if "=" in word]


def test_what_a_prediction_rests_on_is_said_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = _OVERFLOWS.format(folder=tmp_path).replace("0.9.1", "0.2.0.dev")
    file.write_text(text)
    plan = json.loads(printed("plan", "--json", str(file)))
    assert plan["first"] == {} and [fact["name"] for fact in plan["rests_on"]] == ["release"]
    page = " ".join(printed("plan", str(file)).split())
    assert "the prediction rests on an assumption: verl 0.2.0.dev uses memory as 0.2.0.post2 does" in page
    assert "first attempt: as written: " in page


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("", ["microbatch_size"]),
        ("framework_version: 1.16.0", []),
        ("framework_version: 0.9.0", []),
    ],
)
def test_a_remedy_that_awaits_the_release_is_named(line: str, needed: list[str], tmp_path: Path) -> None:
    file, python = tmp_path / "job.yaml", tmp_path / "bin" / "python"  # none is there, with no TRL
    file.write_text(
        f"name: j\nframework: trl\npython: {python}\nworkdir: {tmp_path}\n{line}\n"
        "cluster: {nodes: 1, gpus_per_node: 8, gpu: H100}\n"
        "settings: {model_name_or_path: Qwen/Qwen2.5-7B, dataset_name: a/b, output_dir: out, zero_stage: 3}\n"
    )
    plan = json.loads(printed("plan", "--json", str(file)))
    assert plan["needs_release"] == needed
    assert ("(set framework_version): microbatch_size" in printed("plan", str(file))) == bool(needed)


def test_several_clusters_are_judged_side_by_side() -> None:
    file, clusters = str(CONFIGS / "verl-grpo-qwen2.5-7b.yaml"), "2xH100,3xH100,8xH100"
    small, odd, large = printed("plan", file, "--gpus", clusters).splitlines()
    assert small.startswith("2xH100  overflows in rollout by 13.6 GiB: 117%")
    assert odd.startswith("3xH100  not possible: 1 x 3 GPUs: the settings ask for 8 GPUs")
    assert large.startswith("8xH100  fits: tightest is rollout, 77%")
    rows = json.loads(printed("plan", file, "--gpus", clusters, "--json"))["clusters"]
    assert [row["plan"] is None for row in rows] == [False, True, False]
    assert rows[2]["verdict"] in large and rows[1]["refused"] in odd


def test_a_plan_takes_knobs_and_settings_as_launch_does() -> None:
    file, setting = (
        str(CONFIGS / "verl-grpo-qwen2.5-7b.yaml"),
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    call = ("--gpus", "8xH100", "--set", f"{setting}=0.9", "--set", "tokens_per_microbatch=8192")
    plan = json.loads(printed("plan", file, *call, "--json"))
    knobs = {row["knob"]: row["value"] for row in plan["knobs"]}
    assert knobs["tokens_per_microbatch"] == 8192 and plan["first"]["memory_fraction"][0] == 0.9
    assert f"{setting}=0.9" in printed("launch", "-n", file, *call[2:])
    end = printed("plan", file, *call).splitlines()[-1]
    assert end.endswith(f"autotune launch {file} --set {setting}=0.9 --set tokens_per_microbatch=8192")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=many", "must be a number, not 'many'"),
        ("tokens_per_microbach=1", "did you mean `tokens_per_microbatch`?"),
        ("memory_fraction", "an override is written knob=value"),
    ],
)
def test_a_wrong_change_of_a_plan_is_refused(change: str, problem: str) -> None:
    result = CliRunner().invoke(main, ["plan", str(CONFIGS / "verl-grpo-qwen2.5-7b.yaml"), "--set", change])
    assert result.exit_code == 2 and problem in result.stderr and result.stdout == ""
