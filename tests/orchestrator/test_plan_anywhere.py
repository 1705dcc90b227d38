"""`plan` for cards and files that are not here, and for a model alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autotune.orchestrator.cli import main
from autotune.orchestrator.config.cards import CARDS, find_card, parse_gpus
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.errors import Complaint, JobErrors
from autotune.orchestrator.starting_job import Start, Wish
from autotune.policies.estimate.constants import DEFAULT_CARD, card, has_speed

_JOB = """\
name: away
framework: slime
workdir: /nowhere/slime
cluster: {gpu: h100, gpus_per_node: 8}
settings:
  hf-checkpoint: /nowhere/Qwen3-4B
  num-rollout: 100
  rollout-batch-size: 8
  rollout-max-response-len: 2048
  actor-num-gpus-per-node: 8
  colocate: true
  use-dynamic-batch-size: true
  max-tokens-per-gpu: 8192
"""


@pytest.mark.parametrize(
    ("written", "name", "nodes", "per_node"),
    [
        ("8xH100", "H100-80GB", 1, 8),
        ("2x8xH100-80GB", "H100-80GB", 2, 8),
        ("4 x a100-40gb", "A100-40GB", 1, 4),
        ("NVIDIA H200", "H200", None, None),
        ("1×rtx 4090", "RTX-4090", 1, 1),
        ("8xMI300X", "MI300X", 1, 8),
        ("AMD Instinct MI355X", "MI355X", None, None),
        ("2x8x910B", "Ascend-910B", 2, 8),
        ("16xAscend 910C", "Ascend-910C", 1, 16),
        ("8x910B4", "Ascend-910B-32GB", 1, 8),
        ("4xIntel Max 1550", "Max-1550", 1, 4),
        ("8xgaudi3", "Gaudi3", 1, 8),
    ],
)
def test_cards_as_people_write_them(written: str, name: str, nodes: int | None, per_node: int | None) -> None:
    result = parse_gpus(written)
    assert (result.card.name, result.nodes, result.per_node) == (name, nodes, per_node)


@pytest.mark.parametrize("written", ["8xH9000", "0xH100", "x", "8x"])
def test_unknown_cards_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="GPU"):
        parse_gpus(written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("H100x8", "`H100x8`: write the count first, `8xH100`"),
        ("a100-40gb:4", "`a100-40gb:4`: write the count first, `4xa100-40gb`"),
        ("8", "`8` names no GPU (forms: `8xH100`, `2x8xH100-80GB`)"),
    ],
)
def test_what_is_written_another_way_is_told_apart_from_an_unknown_card(written: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_gpus(written)


def test_only_an_unknown_card_needs_its_memory() -> None:
    for written, hinted in (("8xH999", True), ("H100x8", False), ("0xH100", False)):
        arguments = ["plan", "--model", "Qwen/Qwen2.5-7B", "--framework", "verl", "--gpus", written]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert ("gpu_memory" in result.stderr) is hinted


@pytest.mark.parametrize("known", CARDS, ids=lambda known: known.name)
def test_every_card_has_a_speed_and_one_meaning(known: object) -> None:
    assert known in CARDS
    row = next(each for each in CARDS if each is known)
    huawei_or_max = ("Ascend-910B", "Ascend-910B-32GB", "Ascend-910C", "Max-1550", "Max-1100")  # publish none
    assert has_speed(row.device) is (row.name not in huawei_or_max)
    assert (card(row.device) is DEFAULT_CARD) is (row.name in huawei_or_max)
    assert all(find_card(name) == row for name in (row.name, row.device, *row.also))


def test_no_path_of_the_cluster_has_to_exist(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(_JOB)
    result = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml")])
    assert result.exit_code == 0, result.stderr
    assert "NVIDIA H100 80GB HBM3" in result.stdout
    assert "`workdir`: no such folder here" in " ".join(result.stdout.split())
    assert "rollout" in result.stdout and "fits" in result.stdout
    with pytest.raises(Exception, match="no such folder"):
        parse(_JOB)


def test_other_cards_for_the_same_job(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(_JOB)
    result = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--gpus", "8xA10G"])
    assert "8 × NVIDIA A10G" in result.stdout
    assert CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--gpus", "8xZ1"]).exit_code == 2


@pytest.mark.parametrize("gpus", ["8xMI300X", "8xAscend-910B", "8xMax-1550", "8xGaudi3"])
def test_other_makers_get_no_setting_of_the_cuda_allocator(tmp_path: Path, gpus: str) -> None:
    job = _JOB.replace("colocate: true", "colocate: false\n  rollout-num-gpus: 4")
    job = job.replace("per-node: 8", "per-node: 4")
    (tmp_path / "job.yaml").write_text(job)

    def plan(on: str) -> dict[str, Any]:
        result = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml"), "--gpus", on, "--json"])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    nvidia, other = plan("8xH100"), plan(gpus)
    assert "allocator" not in nvidia["unsupported"]
    assert other["unsupported"]["allocator"]
    assert not any("NVML" in warning for warning in nvidia["warnings"])
    assert any("a launch finds NVIDIA GPUs only" in warning for warning in other["warnings"])
    unknown = any("speed" in warning for warning in other["warnings"])
    assert unknown is (gpus in ("8xAscend-910B", "8xMax-1550"))


@pytest.mark.parametrize("card_name", ["MI300X", "Ascend-910B"])
def test_a_step_time_is_given_only_for_a_card_whose_speed_is_on_record(card_name: str) -> None:
    arguments = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--framework", "verl"]
    result = CliRunner().invoke(main, [*arguments, "--gpus", f"8x{card_name}"])
    assert result.exit_code == 0, result.stderr
    assert ("s a step" in result.stderr) is (card_name == "MI300X")
    reasons = re.findall(
        r"# (?:was \S+:|by default) (?:it may not fit|steps would take \d+ % longer)", result.stdout
    )
    assert bool(reasons) is (card_name == "MI300X")
    assert ("no step time is predicted" in result.stderr) is (card_name == "Ascend-910B")
    answer = json.loads(CliRunner().invoke(main, [*arguments, "--gpus", f"8x{card_name}", "--json"]).stdout)
    assert (answer["step_s"] is None) is (card_name == "Ascend-910B")


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("verl", "Qwen/Qwen2.5-7B-Instruct"),
        ("slime", "Qwen/Qwen2.5-7B-Instruct"),
        ("slime", "Qwen/Qwen3-30B-A3B"),  # only with its experts spread over the GPUs
        ("areal", "Qwen/Qwen2.5-7B-Instruct"),
        ("miles", "Qwen/Qwen2.5-7B-Instruct"),
        ("relax", "Qwen/Qwen2.5-7B-Instruct"),
        ("openrlhf", "Qwen/Qwen2.5-7B-Instruct"),
        ("skyrl", "Qwen/Qwen2.5-7B-Instruct"),
        ("nemo-rl", "Qwen/Qwen2.5-7B-Instruct"),
        ("trl", "Qwen/Qwen2.5-7B-Instruct"),
        ("ms-swift", "Qwen/Qwen2.5-7B-Instruct"),
    ],
)
def test_a_model_alone_becomes_a_job_that_fits(framework: str, model: str, tmp_path: Path) -> None:
    words = ["plan", "--model", model, "--gpus", "8xH100", "--framework", framework]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    (tmp_path / "job.yaml").write_text(result.stdout)
    planned = CliRunner().invoke(main, ["plan", str(tmp_path / "job.yaml")])
    assert planned.exit_code == 0, planned.stderr
    assert "overflows" not in planned.stdout
    assert "first attempt: as written" in planned.stdout
    output = CliRunner().invoke(main, ["launch", "-n", str(tmp_path / "job.yaml")])
    assert output.exit_code == 0, output.stderr


def test_a_model_with_experts_is_trained_by_megatron_where_that_fits() -> None:
    words = ["plan", "--model", "Qwen/Qwen3-30B-A3B", "--framework", "verl", "--gpus"]
    many = CliRunner().invoke(main, [*words, "4x8xH100"]).stdout
    assert "  model_engine: megatron\n" in many
    assert "  actor_rollout_ref.actor.megatron.expert_model_parallel_size: 8\n" in many
    assert "megatron" not in CliRunner().invoke(main, [*words, "8xH100"]).stdout  # FSDP alone fits


def test_a_framework_without_a_start_names_those_that_have_one() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "8xH100", "--framework", "builtin"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert (
        "only for verl, areal, relax, slime, miles, openrlhf, skyrl, nemo-rl, trl, ms-swift\n"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("framework", "gpus", "wording"),
    [
        ("trl", "2x8xH100", "its jobs run on one node\nhint: --gpus 8xH100-80GB\n"),
        ("ms-swift", "2x8xH100", "its jobs run on one node\nhint: --gpus 8xH100-80GB\n"),
        ("areal", "1xH100", "GPUs of their own\nhint: --gpus 2xH100-80GB\n"),
    ],
)
def test_gpus_that_a_framework_cannot_use_are_refused(framework: str, gpus: str, wording: str) -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", gpus, "--framework", framework]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert result.stderr.endswith(wording)


def test_no_configuration_fits() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-72B-Instruct", "--gpus", "1xL4"]
    assert CliRunner().invoke(main, words).exit_code == 1


def test_another_framework_that_fits_is_named() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "1xL40S", "--framework"]
    verl, slime = (CliRunner().invoke(main, [*words, framework]) for framework in ("verl", "slime"))
    assert (verl.exit_code, slime.exit_code) == (0, 1)
    assert "use --framework verl, which fits" in slime.stderr


def test_a_job_that_keeps_its_state_in_host_memory_tells_how_much_a_node_needs() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "1xL40S", "--framework", "verl"]
    output, read = CliRunner().invoke(main, words), CliRunner().invoke(main, [*words, "--json"])
    assert "fsdp_config.offload_policy: true" in output.stdout
    needed = json.loads(read.stdout)["host_bytes"] / (1 << 30)
    assert needed > 7.6 * 1e9 * (4 + 4 + 8) / (1 << 30)  # fp32 weights and gradients, two moments
    assert f"# needs {needed:.2f} GiB of host memory per node" in output.stderr


def test_an_odd_number_of_gpus_is_no_reason_to_refuse_what_nobody_wrote() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "3xH100", "--framework", "verl"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr


def test_a_framework_whose_job_would_be_refused_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_slime(wish: Wish) -> Start | None:
        if wish.framework == "verl":
            raise JobErrors((Complaint(message="2 does not divide 5 GPUs", file="this model"),))
        return None

    monkeypatch.setattr("autotune.orchestrator.starting_job.starting_job", only_slime)
    words = ["plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "5xL4", "--framework", "slime"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "hint: 64 x L4 do not hold it either; larger GPUs" in result.stderr


def test_a_misspelt_model_names_the_nearest_one() -> None:
    result = CliRunner().invoke(main, ["plan", "--model", "Qwen/Qwen3-8", "--gpus", "8xH100"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "hint: did you mean `Qwen/Qwen3-8B`? Otherwise pass the path of its folder or its config.json"
    )
    unlike = CliRunner().invoke(main, ["plan", "--model", "mine/of-my-own", "--gpus", "8xH100"])
    assert unlike.stderr.splitlines()[-1].endswith("; or pass the path of its config.json")


@pytest.mark.parametrize(("gpus", "noted"), [("32xH100", True), ("4x8xH100", False), ("16xH100", False)])
def test_more_gpus_than_a_node_has_are_taken_for_one_node_with_a_note(gpus: str, noted: bool) -> None:
    result = CliRunner().invoke(main, ["plan", "--model", "Qwen/Qwen2.5-0.5B", "--gpus", gpus])
    assert result.exit_code == 0
    note = "note: planned for one node of 32 GPUs; for nodes of 8 write --gpus 4x8xH100-80GB"
    assert (note in result.stderr.splitlines()) == noted


@pytest.mark.parametrize("gpus", ["3xH100", "6xH100", "3x8xH100", "5x8xH100"])
def test_every_gpu_gets_the_same_number_of_samples(gpus: str) -> None:
    result = CliRunner().invoke(main, ["plan", "--model", "Qwen/Qwen2.5-0.5B", "--gpus", gpus])
    assert result.exit_code == 0, result.stderr
    settings = yaml.safe_load(result.stdout)["settings"]
    batch, mini = settings["data.train_batch_size"], settings["actor_rollout_ref.actor.ppo_mini_batch_size"]
    count = settings["trainer.nnodes"] * settings["trainer.n_gpus_per_node"]
    assert [size * settings["actor_rollout_ref.rollout.n"] % count for size in (batch, mini)] == [0, 0]
    assert f"note: {batch} prompts a step instead of 256, the same number on every GPU" in result.stderr


def test_a_batch_that_does_not_spread_evenly_is_refused_with_one_that_does() -> None:
    words = ["plan", "--model", "Qwen/Qwen2.5-0.5B", "--gpus", "3x8xH100", "--batch", "128"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: --batch 128: its samples cannot be spread evenly over the GPUs",
        "hint: --batch 129 can",
    ]
