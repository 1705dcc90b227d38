"""The layout of a TRL or ms-swift job, as far as both derive it alike from the settings."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.hugging_face.settings import TrainerSettings
from autotune.policies.values.architecture.model import Layout

_FP32 = 4


def trained_bytes(config: TrainerSettings, stored: int, *, mixed: bool, adapters: bool) -> int:
    """Return the bytes of a trained weight that is loaded in `stored` bytes.

    With `mixed` precision accelerate keeps FSDP's trained weights in fp32 (fsdp_utils.py,
    fsdp2_prepare_model); with adapters the base model stays as stored.
    """
    return _FP32 if config.is_fsdp and mixed and not adapters else stored


def layout(config: TrainerSettings, *, stored: int, trained: int, **own: Any) -> Layout:
    """Return the layout; `stored`: bytes of a loaded weight, `trained`: of a trained one.

    `own`: fields in which the framework differs.
    """
    ranks, sharded = config.processes, config.is_sharded
    batch = config.micro * ranks
    step = batch * config.passes
    return Layout(
        strategy="none" if ranks == 1 else "fsdp2" if sharded else "ddp",
        ranks=ranks,
        shards=ranks if sharded else 1,
        engine_ranks=ranks if config.colocated else 0,
        parameter_bytes=trained,
        gradient_bytes=trained,
        reference_bytes=stored,
        per_tensor_optimizer="fused" in str(config.get("optim")),
        sync_buckets=0,
        pinned="tensors" if config.is_fsdp else "",  # accelerate's CPUOffloadPolicy()
        staged="whole",  # safetensors are gathered on rank 0
        # transformers 5 fills the model with zeros in every rank but the first (modeling_utils.py,
        # _move_missing_keys_from_meta_to_device); DeepSpeed's stage 3 parts it as it is built.
        loads="ranks" if config.is_fsdp else "",
        sequences=step,
        mini_batch=0 if batch * config.accumulation == step else batch * config.accumulation,
        response_tokens=config.count("max_completion_length"),
        **own,
    )
