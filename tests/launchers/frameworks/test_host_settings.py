"""Settings against host memory that only some jobs have: asynchronous saves, processed images, adapters."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

from . import areal_jobs, megatron_jobs, nemo_rl_jobs, skyrl_jobs, verl_jobs

_VERL_SAVE = "actor_rollout_ref.actor.checkpoint.async_save"
_SKYRL_SAVE = "trainer.policy.megatron_config.async_dist_ckpt_save"
_MEGATRON = replace(areal_jobs.JOBS["megatron"], settings={"actor.megatron.async_save": True})
SAVES: dict[str, tuple[Job, str]] = {
    "verl": (verl_jobs.job(model_engine="megatron", **{_VERL_SAVE: True}), _VERL_SAVE),
    "slime": (
        megatron_jobs.job(megatron_jobs.SLIME, {**megatron_jobs.COLOCATED, "async-save": True}),
        "async-save",
    ),
    "skyrl": (skyrl_jobs.job({"trainer.strategy": "megatron", _SKYRL_SAVE: True}), _SKYRL_SAVE),
    "areal": (_MEGATRON, "actor.megatron.async_save"),
}
_SHAPE = replace(skyrl_jobs.SHAPE, tower=676_000_000)
IMAGES: dict[str, tuple[Job, str]] = {
    "verl": (verl_jobs.job(_SHAPE), "actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb"),
    "skyrl": (
        skyrl_jobs.job(shape=_SHAPE),
        "generator.inference_engine.engine_init_kwargs.mm_processor_cache_gb",
    ),
    "nemo-rl": (nemo_rl_jobs.job(shape=_SHAPE), "policy.generation.vllm_kwargs.mm_processor_cache_gb"),
}


def written(of: Job, **knobs: Any) -> dict[str, Any]:
    """Return the settings of knobs, by their names without prefixes."""
    settings = FRAMEWORKS[of.framework].settings(of, Knobs(**knobs))
    return {name.lstrip("+"): value for name, value in settings.items()}


@pytest.mark.parametrize("name", SAVES)
def test_an_asynchronous_save_can_be_made_synchronous(name: str) -> None:
    of, setting = SAVES[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.async_save is True and "async_save" in profile.supported
    assert written(of, async_save=False) == {setting: False}
    assert profile.supported["async_save"].grid.values == (False,)  # nobody is to turn it on


@pytest.mark.parametrize("name", IMAGES)
def test_the_cache_of_images_is_a_setting_of_models_that_take_them(name: str) -> None:
    of, setting = IMAGES[name]
    profile = FRAMEWORKS[name].profile(of, verl_jobs.CLUSTER)
    assert profile.knobs.multimodal_cache == 4 << 30  # vLLM's default
    assert written(of, multimodal_cache=1 << 30) == {setting: 1}
    text = FRAMEWORKS[name].profile(replace(of, shape=replace(_SHAPE, tower=0)), verl_jobs.CLUSTER)
    assert "anything but text" in text.unsupported["multimodal_cache"]


def test_adapters_are_sent_layer_by_layer_where_a_sync_gathered_the_whole_model() -> None:
    of = verl_jobs.JOBS["lora"]
    profile = verl_jobs.profile(of)
    assert profile.layout.gathers_whole and profile.knobs.layered_sync is False
    rollout = "actor_rollout_ref.rollout"
    settings = {f"{rollout}.layered_summon": True, f"{rollout}.load_format": "safetensors"}
    assert written(of, layered_sync=True) == settings
    assert not verl_jobs.profile(verl_jobs.with_settings(of, settings)).layout.gathers_whole
    assert "layered_sync" in verl_jobs.profile(verl_jobs.JOBS["fsdp"]).unsupported
