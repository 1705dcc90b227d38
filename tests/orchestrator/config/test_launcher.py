"""What the files of accelerate and DeepSpeed say of a trainer, where they are here and where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from autotune.launchers import frameworks
from autotune.orchestrator.config.referenced_files import with_launcher
from autotune.policies.values.job import Cluster, ClusterSpec, Job, Launcher
from autotune.policies.values.profile import Profile

_STAGE_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}
_ON_HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}


_CARDS = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)


def profile(job: Job) -> Profile:
    return frameworks.find(job.framework).profile(job, _CARDS)


def job(folder: Path, framework: str = "trl", **settings: Any) -> Job:
    return Job(
        name="a",
        framework=framework,
        command=("torchrun", "grpo.py") if framework == "trl" else (),
        settings=settings,
        workdir=str(folder),
        cluster=ClusterSpec(nodes=1, gpus_per_node=8),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_STAGE_3, Launcher(sharding="zero3", is_json=True)),
        (
            {"zero_optimization": _ON_HOST},
            Launcher(sharding="zero3", optimizer_on_host=True, parameters_on_host=True, is_json=True),
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}, "num_processes": 3},
            Launcher(sharding="zero2", processes=3),
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
            Launcher(sharding="fsdp2", parameters_on_host=True),
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}},
            Launcher(sharding="multi_gpu"),
        ),
        ({"distributed_type": "MULTI_GPU", "num_processes": 4}, Launcher(sharding="multi_gpu", processes=4)),
    ],
)
def test_a_file_that_is_here_is_read(content: dict[str, Any], expected: Launcher, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(content))
    for key in ("deepspeed", "config_file", "accelerate_config"):
        result = with_launcher(job(tmp_path, **{key: "f.yaml"}))
        assert result.launcher == msgspec.structs.replace(expected, source="f.yaml")
        assert not result.notes


def test_the_file_of_a_command_and_the_one_that_another_names_are_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_STAGE_3))
    accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({**accelerate, "num_processes": 7}))
    words = ("accelerate", "launch", "--config_file", "a.yaml")
    own = Job(name="a", framework="command", command=words, workdir=str(tmp_path))
    launcher = with_launcher(own).launcher
    assert (launcher.sharding, launcher.processes, launcher.is_json) == ("zero3", 7, True)


@pytest.mark.parametrize(
    ("name", "sharding", "words"),
    [
        ("recipes/zero3.yaml", "zero3", "its name says zero3"),
        ("ds_z3.json", "", "one whole copy per process"),
        ("fsdp2.yaml", "fsdp2", "its name says fsdp2"),
    ],
)
def test_a_file_that_is_not_here_is_an_assumption_that_is_named(
    name: str, sharding: str, words: str, tmp_path: Path
) -> None:
    result = with_launcher(job(tmp_path, config_file=name))
    assert result.launcher == Launcher(sharding=sharding, source=name, is_assumed=True)
    assert result.notes == (f"the layout of the trainer is assumed, {words}: `{name}` cannot be read here",)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_broken_file_is_an_assumption_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text(text)
    assert with_launcher(job(tmp_path, deepspeed="zero2.json")).launcher.is_assumed


@pytest.mark.parametrize("key", ["deepspeed", "config_file"])
def test_the_trainer_is_sharded_as_the_file_says(key: str, tmp_path: Path) -> None:
    content = _STAGE_3 if key == "deepspeed" else {"distributed_type": "FSDP"}
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(content))
    assert profile(with_launcher(job(tmp_path, **{key: "f.yaml"}))).layout.shards == 8
    assert profile(with_launcher(job(tmp_path))).layout.shards == 1


def test_ms_swift_reads_the_stage_of_a_file_of_the_user_s(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_STAGE_3))
    own = msgspec.structs.replace(job(tmp_path, "ms-swift", deepspeed="ds.json"), env={"NPROC_PER_NODE": "8"})
    assert profile(with_launcher(own)).layout.shards == 8
    assert profile(own).layout.shards == 1


def test_no_flag_of_accelerate_is_turned_beside_deepspeed_s_own_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(_STAGE_3))
    (tmp_path / "a.yaml").write_text("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}")
    own, accelerate = (
        profile(with_launcher(job(tmp_path, **{key: file}))).unsupported
        for key, file in (("deepspeed", "ds.json"), ("config_file", "a.yaml"))
    )
    reason = "the DeepSpeed file that the job names decides it"
    assert own["param_offload"] == reason
    assert accelerate.get("param_offload") != reason


def test_an_engine_with_a_card_of_its_own_shares_none_with_the_trainer(tmp_path: Path) -> None:
    assert profile(job(tmp_path, use_vllm=True)).layout.engine_ranks == 8
    assert profile(job(tmp_path, use_vllm=True, vllm_device="auto")).layout.engine_ranks == 0
