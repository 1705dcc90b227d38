"""The layout of a TRL job for its memory estimate."""

from __future__ import annotations

from autotune.launchers.frameworks.core.optimizer_state import torch_state_bytes, with_zero
from autotune.launchers.frameworks.hugging_face.layout import layout as shared
from autotune.launchers.frameworks.hugging_face.layout import trained_bytes
from autotune.launchers.frameworks.trl.config import Config
from autotune.policies.values.architecture.model import Layout

_FP32 = 4
_TILE = 4096, 32768  # tokens and vocabulary entries per tile, trl/kernels/chunked_logprob.py


def tile(config: Config) -> int:
    """Return the tokens whose full logits are as large as a tile of the fused head."""
    tokens, words = _TILE
    shape = config.job.shape
    return tokens * words // max(words, shape.vocab if shape is not None else 0)


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    width = 2 if "16" in str(config.get("dtype")) else 4
    half = width == 2 or not config.on("use_cpu")
    trained = trained_bytes(config, width, mixed=not config.on("use_cpu"), adapters=config.on("use_peft"))
    result = shared(
        config,
        stored=width,
        trained=trained,
        compute_bytes=2 if half else 4,
        # FSDP and DeepSpeed cast their weights themselves.
        autocast=half and width == _FP32 and not config.is_sharded,
        autocast_head=not config.has_head,
        optimizer_bytes=torch_state_bytes(str(config.get("optim")), parameter_bytes=trained),
        reference=bool(config.get("beta")) and not config.on("use_peft"),
        lora_rank=config.count("lora_r") if config.on("use_peft") else 0,
        entropy=not config.has_head,  # the fused head computes it in the same tiles
        engine_sleeps=config.on("vllm_enable_sleep_mode"),
        optimizer_stays_offloaded=config.job.launcher.optimizer_on_host,
        # torch's CPUOffload and CPUOffloadPolicy
        parameters_stay_offloaded=config.is_fsdp or config.job.launcher.parameters_on_host,
        engine_weights_on_host=False,  # they are synced again when it wakes
        padded=True,
        chunked_head=config.has_head,
        sends_tensors=True,
    )
    # accelerate's own configurations name no bucket: DeepSpeed's default (accelerate, DeepSpeedPlugin).
    return with_zero(result, config.zero, optimizer=str(config.get("optim")))
