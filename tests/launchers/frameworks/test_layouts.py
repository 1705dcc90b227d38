"""Layouts: what frameworks state of them, and that Megatron's sizes mean the same in each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from msgspec.structs import fields

from autotune.launchers import frameworks
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Job
from tests.launchers.frameworks import megatron_jobs, nemo_rl_jobs, skyrl_jobs, verl_jobs

_SIZES = {"tensor": 2, "pipeline": 2, "expert": 2}


def _named(prefix: str, name: str) -> dict[str, int]:
    return {f"{prefix}{name.format(kind=kind)}": size for kind, size in _SIZES.items()}


JOBS: dict[str, tuple[Job, str]] = {  # each with the setting of the experts' tensor parallelism
    "verl": (
        verl_jobs.with_settings(
            verl_jobs.JOBS["megatron"],
            _named("actor_rollout_ref.actor.megatron.", "{kind}_model_parallel_size"),
        ),
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size",
    ),
    "skyrl": (
        skyrl_jobs.job(
            {
                "trainer.strategy": "megatron",
                **_named("trainer.policy.megatron_config.", "{kind}_model_parallel_size"),
            }
        ),
        "trainer.policy.megatron_config.expert_tensor_parallel_size",
    ),
    "nemo-rl": (
        nemo_rl_jobs.job(
            {
                "policy.dtensor_cfg.enabled": False,
                "policy.megatron_cfg.enabled": True,
                **_named("policy.megatron_cfg.", "{kind}_model_parallel_size"),
            }
        ),
        "policy.megatron_cfg.expert_tensor_parallel_size",
    ),
    "slime": (
        Job(
            name="j",
            framework="slime",
            settings=megatron_jobs.COLOCATED | _named("", "{kind}-model-parallel-size"),
        ),
        "expert-tensor-parallel-size",
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("experts", "shards"), [(1, 2), (2, 1)])
def test_experts_take_their_ranks_from_data_parallelism(name: str, experts: int, shards: int) -> None:
    job, setting = JOBS[name]
    layout = (
        FRAMEWORKS[name].profile(verl_jobs.with_settings(job, {setting: experts}), verl_jobs.CLUSTER).layout
    )
    assert (layout.strategy, layout.ranks, layout.shards) == ("megatron", 8, 2)
    assert (layout.pipeline_parallel, layout.expert_parallel) == (2, 2)
    assert (layout.expert_tensor_parallel, layout.expert_shards) == (experts, shards)


@pytest.mark.parametrize("name", ["verl", "skyrl", "slime"])  # NeMo-RL's own default is 1
def test_experts_are_split_by_tensor_parallelism_where_a_job_does_not_say(name: str) -> None:
    layout = FRAMEWORKS[name].profile(JOBS[name][0], verl_jobs.CLUSTER).layout
    assert (layout.expert_tensor_parallel, layout.expert_shards) == (2, 1)


def test_a_framework_states_only_what_differs_from_a_layouts_defaults() -> None:
    defaults = {field.name: field.default for field in fields(Layout)}
    for file in Path(frameworks.__path__[0]).glob("*/*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Layout":
                stated = {key.arg: key.value for key in call.keywords if isinstance(key.value, ast.Constant)}
                same = {name for name, value in stated.items() if name and value.value == defaults[name]}
                assert not same, (file, same)
