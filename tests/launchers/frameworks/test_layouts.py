"""Layouts: what frameworks state of them, and that Megatron's sizes mean the same in each."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import fields, replace

from autotune.launchers import frameworks
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.dialects.settings import with_settings
from autotune.policies.estimate.peaks import estimates
from autotune.policies.values.architecture.model import Layout, Model
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


# Where each framework that builds Megatron's configuration has its switches that change a rank's bytes.
_VERL, _SKYRL, _NEMO = "actor_rollout_ref.actor", "trainer.policy.megatron_config", "policy.megatron_cfg"
SWITCHES = {
    "verl": (f"+{_VERL}.megatron.override_ddp_config", f"+{_VERL}.optim.override_optimizer_config"),
    "skyrl": (f"{_SKYRL}.ddp_config", f"{_SKYRL}.optimizer_config_kwargs"),
    "nemo-rl": (f"{_NEMO}.distributed_data_parallel_config", f"{_NEMO}.optimizer"),
}


def _layout(name: str, **switches: bool) -> Layout:
    gradients, optimizer = SWITCHES[name]
    settings = {
        f"{gradients if switch == 'grad_reduce_in_fp32' else optimizer}.{switch}": value
        for switch, value in switches.items()
    }
    return (
        FRAMEWORKS[name].profile(verl_jobs.with_settings(JOBS[name][0], settings), verl_jobs.CLUSTER).layout
    )


@pytest.mark.parametrize("name", SWITCHES)
def test_every_framework_that_configures_megatron_reads_the_same_switches(name: str) -> None:
    assert _layout(name, grad_reduce_in_fp32=True).gradient_bytes == 4
    assert _layout(name, grad_reduce_in_fp32=False).gradient_bytes == 2
    plain = _layout(name, use_precision_aware_optimizer=False)
    assert (plain.optimizer_bytes, plain.masters_beside) == (12, False)
    assert _layout(name, use_precision_aware_optimizer=True).optimizer_bytes < 12
    for precise in (False, True):
        result = _layout(name, optimizer_cpu_offload=True, use_precision_aware_optimizer=precise)
        assert (result.optimizer_bytes, result.masters_beside) == (12, not precise)


# Switches that change what the host holds in the framework, so that they must change the estimate.
HOST_SWITCHES: dict[str, tuple[dict[str, object], ...]] = {
    "verl": (
        {f"{_VERL}.megatron.router_replay.mode": "R3"},
        {f"{_VERL}.checkpoint.save_contents": ["model"]},
        {f"{_VERL}.megatron.param_offload": True},
    ),
    "skyrl": (
        {f"{_SKYRL}.moe_enable_routing_replay": True},
        {f"{_SKYRL}.optimizer_config_kwargs.optimizer_cpu_offload": True},
    ),
    "nemo-rl": ({f"{_NEMO}.optimizer.optimizer_cpu_offload": True},),
    "slime": (
        {"use-rollout-routing-replay": True},
        {"no-save-optim": True},
        {"dist-ckpt-optim-fully-reshardable": True},
        {"optimizer-cpu-offload": True},
    ),
}
_EXPERTS = Model(
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    intermediate=512,
    vocab=32000,
    experts=8,
    experts_per_token=2,
    expert_intermediate=512,
)


def _host(name: str, settings: dict[str, object]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    job, cluster = verl_jobs.with_settings(JOBS[name][0], settings), verl_jobs.CLUSTER
    profile = FRAMEWORKS[name].profile(replace(job, shape=_EXPERTS), cluster)
    return estimates(profile, cluster, _EXPERTS, (profile.knobs,)).host


@pytest.mark.parametrize(
    ("name", "switch"), [(name, switch) for name, switches in HOST_SWITCHES.items() for switch in switches]
)
def test_a_switch_that_changes_host_memory_changes_its_estimate(name: str, switch: dict[str, object]) -> None:
    assert (_host(name, switch) != _host(name, {})).any()


_ACTOR, _ENGINE = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_UNPACKED = {_ACTOR + "use_dynamic_bsz": False, _ACTOR + "ppo_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("of", "times"),
    [
        (nemo_rl_jobs.job(), 2.0),
        (nemo_rl_jobs.job({"policy.logprob_batch_size": 16}), 4.0),
        (skyrl_jobs.job({"trainer.micro_train_batch_size_per_gpu": 2,
                         "trainer.micro_forward_batch_size_per_gpu": 8}), 4.0),
        (verl_jobs.job(**_UNPACKED, **{_ENGINE + "log_prob_micro_batch_size_per_gpu": 16}), 8.0),
        (verl_jobs.job(**_UNPACKED, **{_ENGINE + "log_prob_micro_batch_size_per_gpu": None}), 1.0),
    ],
)  # fmt: skip
def test_scoring_passes_have_the_jobs_own_number_of_sequences(of: Job, times: float) -> None:
    job_profile = frameworks.find(of.framework).profile(of, nemo_rl_jobs.CLUSTER)
    assert job_profile.layout.scored_sequences == times


_MEGATRON = nemo_rl_jobs.JOBS["megatron-sequences"]
_AUX = {"policy.megatron_cfg.moe_router_load_balancing_type": "aux_loss"}
_SPLIT = {"policy.megatron_cfg.sequence_parallel": True}


@pytest.mark.parametrize(
    ("of", "knob", "value"),
    [
        (with_settings(_MEGATRON, _SPLIT), "tensor_parallel", 2),
        (with_settings(_MEGATRON, {**_AUX, "policy.train_micro_batch_size": 2}), "microbatch_size", 2),
        (with_settings(nemo_rl_jobs.JOBS["megatron"],
                       {**_AUX, "policy.sequence_packing.train_mb_tokens": 9000}),
         "tokens_per_microbatch", 9000),
        (skyrl_jobs.job({"trainer.algorithm.use_entropy_loss": True,
                         "trainer.micro_train_batch_size_per_gpu": 2}), "microbatch_size", 2),
        # Its KL loss is averaged over passes.
        (skyrl_jobs.JOBS["megatron-tokens"], "tokens_per_microbatch", 8192),
    ],
)  # fmt: skip
def test_a_size_that_a_job_does_not_offer_counts_in_its_estimate(of: Job, knob: str, value: int) -> None:
    job_profile = frameworks.find(of.framework).profile(of, nemo_rl_jobs.CLUSTER)
    assert knob not in job_profile.supported
    assert getattr(job_profile.knobs, knob) == value


def test_a_framework_states_only_what_differs_from_a_layouts_defaults() -> None:
    defaults = {field.name: field.default for field in fields(Layout)}
    for file in Path(frameworks.__path__[0]).glob("*/*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Layout":
                stated = {key.arg: key.value for key in call.keywords if isinstance(key.value, ast.Constant)}
                same = {name for name, value in stated.items() if name and value.value == defaults[name]}
                assert not same, (file, same)
