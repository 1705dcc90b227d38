"""Settings of how a trainer is spread and of what its layers keep, which only some jobs have."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.policies.estimate.stages import with_stages
from autotune.policies.remedies.legality import objections
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import FixedDuringRun

from . import areal_jobs, megatron_jobs, nemo_rl_jobs, skyrl_jobs, verl_jobs

_VERL, _SKYRL = "actor_rollout_ref.actor.fsdp_config", "trainer.policy.fsdp_config"
KEPT: dict[str, tuple[Job, dict[str, Any]]] = {
    "verl": (verl_jobs.JOBS["groups"], {f"{_VERL}.reshard_after_forward": True}),
    "skyrl": (skyrl_jobs.JOBS["groups"], {f"{_SKYRL}.reshard_after_forward": True}),
    "areal": (areal_jobs.JOBS["kept"], {"actor.archon.reshard_after_forward_policy": "always"}),
}
GROUPED: dict[str, tuple[Job, str]] = {
    "verl": (verl_jobs.JOBS["groups"], f"{_VERL}.fsdp_size"),
    "skyrl": (skyrl_jobs.JOBS["groups"], f"{_SKYRL}.fsdp_size"),
}


def written(of: Job, **knobs: Any) -> dict[str, Any]:
    """Return the settings of knobs, by their names without prefixes."""
    settings = FRAMEWORKS[of.framework].settings(of, Knobs(**knobs))
    return {name.lstrip("+"): value for name, value in settings.items()}


@pytest.mark.parametrize("name", KEPT)
def test_gathered_weights_that_stay_after_forward_can_be_freed_and_nobody_keeps_them(name: str) -> None:
    of, settings = KEPT[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.reshard_after_forward is profile.layout.reshard_after_forward is False
    assert written(of, reshard_after_forward=True) == settings
    assert profile.supported["reshard_after_forward"].grid.values == (True,)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_ranks_that_holds_a_copy_of_the_state_can_be_larger_before_a_checkpoint(name: str) -> None:
    of, setting = GROUPED[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.shard_group == profile.layout.shards == 2
    assert written(of, shard_group=4) == {setting: 4}
    assert "shard_group" in {each.knob for each in profile.constraints if isinstance(each, FixedDuringRun)}


MOE = replace(
    nemo_rl_jobs.SHAPE,
    experts=128,
    experts_per_token=8,
    expert_intermediate=768,
    kv_lora_rank=512,
    dense_layers=0,
)
_TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"
_CFG = "policy.megatron_cfg"
_SLIME = {**megatron_jobs.COLOCATED, "recompute-granularity": "selective", "moe-grouped-gemm": True}
# Jobs with selective recomputation -> what the names of its fields begin with.
SELECTIVE: dict[str, tuple[Job, str]] = {
    "verl": (
        verl_jobs.job(MOE, model_engine="megatron", **{f"{_TRANSFORMER}.recompute_granularity": "selective"}),
        f"{_TRANSFORMER}.",
    ),
    "slime": (replace(megatron_jobs.job(megatron_jobs.SLIME, _SLIME), shape=MOE), ""),
    "nemo-rl": (
        nemo_rl_jobs.job(
            {
                f"{_CFG}.enabled": True,
                "policy.dtensor_cfg.enabled": False,
                f"{_CFG}.activation_checkpointing": True,
                f"{_CFG}.recompute_granularity": "selective",
            },
            shape=MOE,
        ),
        f"{_CFG}.",
    ),
    "areal": (
        replace(
            areal_jobs.JOBS["megatron"],
            settings={
                "actor.gradient_checkpointing": True,
                "actor.megatron.recompute_granularity": "selective",
            },
            shape=MOE,
        ),
        "actor.megatron.",
    ),
}


def _in_place(of: Job, **settings: Any) -> Job:
    return replace(of, settings={**of.settings, **settings})


@pytest.mark.parametrize("name", SELECTIVE)
def test_megatron_computes_the_modules_of_the_model_again_between_attention_and_whole_layers(
    name: str,
) -> None:
    of, place = SELECTIVE[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.recompute == "selective"
    assert profile.supported["recompute"].grid.values == ("off", "selective", "modules", "full")
    settings = FRAMEWORKS[name].settings(of, Knobs(recompute="modules"))
    fields = {key.lstrip("+").removeprefix(place).replace("-", "_"): value for key, value in settings.items()}
    assert set(fields["recompute_modules"]) >= {"moe_act", "layernorm", "mla_up_proj"}
    after = FRAMEWORKS[name].profile(_in_place(of, **settings), verl_jobs.CLUSTER)
    assert after.knobs.recompute == "modules"
    assert after.layout.more_modules == tuple(fields["recompute_modules"])
    back = FRAMEWORKS[name].settings(_in_place(of, **settings), Knobs(recompute="selective"))
    assert FRAMEWORKS[name].profile(
        _in_place(of, **{**settings, **back}), verl_jobs.CLUSTER
    ).knobs.recompute == ("selective")


def test_megatrons_activations_wait_in_host_memory_where_the_variable_of_transformer_engine_is_set() -> None:
    of, _ = SELECTIVE["slime"]
    plain = FRAMEWORKS["slime"].profile(of, verl_jobs.CLUSTER)
    assert "NVTE_CPU_OFFLOAD_V1" in plain.unsupported["activation_offload"]
    of = replace(of, env={"NVTE_CPU_OFFLOAD_V1": "1"})
    profile = FRAMEWORKS["slime"].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.activation_offload is False
    assert profile.layout.offload_modules == ("core_attn", "attn_proj", "moe_act", "expert_fc1")
    settings = written(of, activation_offload=True)
    # Beside tensor parallelism the experts' first product is left alone.
    assert settings["offload-modules"] == ["core_attn", "attn_proj", "moe_act"]
    assert settings["fine-grained-activation-offloading"] is True
    assert "NVTE_CPU_OFFLOAD_V1" in settings["train-env-vars"]
    assert FRAMEWORKS["slime"].profile(_in_place(of, **settings), verl_jobs.CLUSTER).knobs.activation_offload
    whole = profile.knobs, replace(profile.knobs, recompute="full", activation_offload=True)
    assert any("recomputed as a whole" in each for each in objections(profile, *whole, started=False))


def test_verls_megatron_offloads_activations_where_the_job_names_the_field() -> None:
    field = f"{_TRANSFORMER}.fine_grained_activation_offloading"
    of, _ = SELECTIVE["verl"]
    assert "Megatron-Core" in verl_jobs.profile(of).unsupported["activation_offload"]
    settings = written(_in_place(of, **{f"+{field}": False}), activation_offload=True)
    assert settings[field] is True and "core_attn" in settings[f"{_TRANSFORMER}.offload_modules"]
    assert settings["ray_kwargs.ray_init.runtime_env.env_vars.NVTE_CPU_OFFLOAD_V1"] == "1"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("verl", "actor_rollout_ref.actor.megatron.expert_model_parallel_size"),
        ("slime", "expert-model-parallel-size"),
        ("nemo-rl", "policy.megatron_cfg.expert_model_parallel_size"),
    ],
)
def test_experts_are_spread_wider_before_a_checkpoint_exists(name: str, setting: str) -> None:
    of, _ = SELECTIVE[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.expert_parallel == profile.layout.expert_parallel
    sizes = profile.supported["expert_parallel"].grid.values
    largest = max(size for size in sizes if isinstance(size, int))
    assert largest > 1 and all(128 % size == 0 for size in sizes if isinstance(size, int))
    assert written(of, expert_parallel=largest) == {setting: largest}
    assert FRAMEWORKS[name].profile(
        _in_place(of, **{setting: largest}), verl_jobs.CLUSTER
    ).layout.expert_shards < (profile.layout.expert_shards)
    assert "expert_parallel" in {
        each.knob for each in profile.constraints if isinstance(each, FixedDuringRun)
    }
    dense = FRAMEWORKS[name].profile(replace(of, shape=nemo_rl_jobs.SHAPE), verl_jobs.CLUSTER)
    assert dense.unsupported["expert_parallel"] == "the model has no experts"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("verl", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"),
        ("slime", "pipeline-model-parallel-size"),
        ("nemo-rl", f"{_CFG}.pipeline_model_parallel_size"),
    ],
)
def test_layers_are_split_into_more_stages_before_a_checkpoint_exists(name: str, setting: str) -> None:
    of, place = SELECTIVE[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    present, *_, most = profile.supported["pipeline_parallel"].grid.values
    assert profile.knobs.pipeline_parallel == profile.layout.pipeline_parallel == present == 1
    assert isinstance(most, int) and MOE.layers % most == 0
    assert written(of, pipeline_parallel=most) == {setting: most}
    after = FRAMEWORKS[name].profile(_in_place(of, **{setting: most}), verl_jobs.CLUSTER)
    assert after.layout == with_stages(profile.layout, most)
    assert "pipeline_parallel" in {
        each.knob for each in profile.constraints if isinstance(each, FixedDuringRun)
    }
    uneven = "decoder-first-pipeline-num-layers" if name == "slime" else "num_layers_in_first_pipeline_stage"
    own = FRAMEWORKS[name].profile(_in_place(of, **{f"{place}{uneven}": 4}), verl_jobs.CLUSTER)
    assert own.unsupported["pipeline_parallel"] == "the job writes which layers each stage has"


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (
            replace(
                SELECTIVE["nemo-rl"][0],
                settings={
                    **SELECTIVE["nemo-rl"][0].settings,
                    "policy.sequence_packing.enabled": False,
                    "policy.dynamic_batching.enabled": True,
                },
            ),
            "policy.dynamic_batching is for one stage alone",
        ),
        (
            replace(
                megatron_jobs.job(
                    megatron_jobs.MILES, {**_SLIME, "lora-rank": 8, "colocate": False, "rollout-num-gpus": 8}
                ),
                shape=MOE,
            ),
            "miles sends adapters to engines on GPUs of their own from one stage",
        ),
    ],
)
def test_frameworks_that_refuse_a_pipeline_are_not_offered_one(of: Job, why: str) -> None:
    assert FRAMEWORKS[of.framework].profile(of, verl_jobs.CLUSTER).unsupported["pipeline_parallel"] == why
