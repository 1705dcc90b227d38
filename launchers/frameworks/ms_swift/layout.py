"""The layout of an ms-swift job for its memory estimate."""

from __future__ import annotations

from autotune.launchers.frameworks.core.optimizer_state import torch_state_bytes, width, with_zero
from autotune.launchers.frameworks.hugging_face.layout import layout as shared
from autotune.launchers.frameworks.hugging_face.layout import trained_bytes
from autotune.launchers.frameworks.ms_swift.config import Config
from autotune.policies.values.architecture.model import Layout

_ZERO_3 = 3
_BUCKET = 200_000_000  # gradients, reduce_bucket_size of the shipped configurations below zero3.json
_MASTER_AND_MOMENTS = 12  # bytes per parameter that DeepSpeed keeps in fp32 beside weights of half precision


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    stored = width(str(config.get("torch_dtype") or "bfloat16"))
    masters = bool(config.deepspeed) and stored == 2
    trained = trained_bytes(config, stored, mixed=stored == 2, adapters=not config.trains_all)
    moments = torch_state_bytes(str(config.get("optim")), parameter_bytes=trained)
    answers, longest = config.count("max_completion_length"), config.longest
    result = shared(
        config,
        stored=stored,
        trained=trained,
        compute_bytes=stored,
        optimizer_bytes=_MASTER_AND_MOMENTS if masters else moments,
        reference=bool(config.get("beta")) and config.trains_all,  # with adapters, the model without them
        lora_rank=0 if config.trains_all else config.count("lora_rank"),
        entropy=config.on("log_entropy") or config.get("top_entropy_quantile") != 1.0,
        engine_sleeps=config.count("sleep_level") > 0 and config.colocated,
        engine_weights_on_host=config.count("sleep_level") < 2,  # level 2 drops them
        optimizer_stays_offloaded=config.deepspeed.endswith("_offload"),
        parameters_stay_offloaded=config.deepspeed == "zero3_offload",
        padded=not config.on("padding_free"),
        logits_share=answers / longest if longest else 1.0,
        scaled_logits=False,  # the temperature divides them in place
        prompt_tokens=config.count("max_length"),
    )
    return with_zero(result, config.zero, optimizer=str(config.get("optim")), bucket=_bucket(config))


def _bucket(config: Config) -> int:
    """Return the gradients per reduce bucket; zero3.json leaves their number to transformers."""
    shape = config.job.shape
    return shape.hidden**2 if config.zero == _ZERO_3 and shape is not None else _BUCKET
