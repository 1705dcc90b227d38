"""How an ms-swift job is spread, and every size that an estimate of its memory needs."""

from __future__ import annotations

from autotune.launchers.frameworks.core.optimizer_state import torch_state_bytes, width, with_zero
from autotune.launchers.frameworks.ms_swift.config import Config
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.profile import Placement

_BUCKET = 200_000_000  # gradients, reduce_bucket_size of the shipped zero1.json and zero2.json
_MASTER_AND_MOMENTS = 12  # bytes per parameter that DeepSpeed keeps in fp32 beside weights of half precision


def placement(config: Config) -> Placement:
    """Return whether vLLM shares the trainer's cards; without it the trainer generates itself."""
    if not config.on("use_vllm") or config.colocated:
        return Placement.COLOCATED
    return Placement.ASYNCHRONOUS if config.on("async_generate") else Placement.SEPARATE


def layout(config: Config) -> Layout:
    """Return every size."""
    ranks, sharded = config.processes, config.is_sharded
    stored = width(str(config.get("torch_dtype") or "bfloat16"))
    batch = config.micro * ranks
    step = batch * config.passes
    masters = bool(config.deepspeed) and stored == 2
    answers, longest = config.count("max_completion_length"), config.longest
    found = Layout(
        strategy="none" if ranks == 1 else "fsdp2" if sharded else "ddp",
        ranks=ranks,
        shards=ranks if sharded else 1,
        engine_ranks=ranks if config.colocated else 0,
        parameter_bytes=stored,
        compute_bytes=stored,
        gradient_bytes=stored,
        optimizer_bytes=_MASTER_AND_MOMENTS
        if masters
        else torch_state_bytes(str(config.get("optim")), parameter_bytes=stored),
        reference=config.scores_a_reference,
        reference_bytes=stored,
        lora_rank=0 if config.trains_all else config.count("lora_rank"),
        entropy=config.on("log_entropy") or config.get("top_entropy_quantile") != 1.0,
        engine_sleeps=config.count("sleep_level") > 0 and config.colocated,
        engine_weights_on_host=config.count("sleep_level") == 1,  # level 2 drops them
        optimizer_stays_offloaded=config.deepspeed.endswith("_offload"),
        parameters_stay_offloaded=config.deepspeed == "zero3_offload",
        padded=not config.on("padding_free"),
        logits_share=answers / longest if longest else 1.0,
        scaled_logits=False,  # the temperature divides them in their place
        per_tensor_optimizer="fused" in str(config.get("optim")),
        sync_buckets=0,
        sequences=step,
        mini_batch=0 if batch * config.accumulation == step else batch * config.accumulation,
        prompt_tokens=config.count("max_length"),
        response_tokens=answers,
    )
    return with_zero(found, config.zero, optimizer=str(config.get("optim")), bucket=_BUCKET)
