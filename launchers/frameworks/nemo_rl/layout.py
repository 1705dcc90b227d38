"""The layout of a NeMo-RL job, and which components hold GPU memory in which phase."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import residency, transformer
from autotune.launchers.frameworks.core.optimizer_state import megatron_bytes, torch_state_bytes, width
from autotune.launchers.frameworks.nemo_rl.config import (
    DTENSOR,
    GENERATION,
    MEGATRON,
    POOL,
    SCORE_SIZE,
    TRAIN_SIZE,
    Config,
)
from autotune.policies.values.architecture.model import Layout


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold GPU memory, by phase.

    Colocated, the engines sleep while the trainer works, and the trainer is offloaded while they generate.
    The reference's weights replace the policy's while it computes log-probs (use_reference_model of the
    workers).
    """
    trainer, rollout = residency.models(), (residency.ROLLOUT,)
    synced = trainer + rollout if config.colocated else trainer
    return residency.resident(trainer, rollout=rollout, weight_sync=synced)


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    megatron = config.megatron
    optimizer = f"{MEGATRON}.optimizer"
    on_host = megatron and config.flag(f"{optimizer}.optimizer_cpu_offload")
    precise = config.flag(f"{optimizer}.use_precision_aware_optimizer")
    engine = "sglang_cfg.dtype" if config.engine == "sglang" else "vllm_cfg.precision"
    precision = config.text(f"{GENERATION}.{engine}")
    # By default prompt and response share policy.max_total_sequence_length freely.
    prompt = max(config.longest - config.count(f"{GENERATION}.max_new_tokens"), config.longest // 8)
    name = config.text("policy.optimizer.name").rpartition(".")[2] or "AdamW"
    trainer: dict[str, Any] = {  # the workers load fp32 and shard it
        "strategy": "fsdp2",
        "ranks": config.world,
        "shards": config.world // config.ranks("tensor"),
        "optimizer_bytes": torch_state_bytes(name, parameter_bytes=4),
    }
    if megatron:
        trainer = transformer.spread(
            ranks=config.world,
            tensor=config.ranks("tensor"),
            pipeline=config.ranks("pipeline"),
            expert=config.ranks("expert"),
            expert_tensor=config.splits_experts,
        )
        kind = config.text(f"{optimizer}.optimizer") or "adam"
        in_fp32 = config.flag(f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32")
        gradients = 4 if in_fp32 else 2  # its weights are bf16
        trainer |= megatron_bytes(kind, gradient_bytes=gradients, precise=precise, on_host=on_host)
        deferred = config.flag(f"{MEGATRON}.defer_fp32_logits")  # the model's output stays bf16
        trainer |= {"loss": "logprob", "logits_bytes": 2 if deferred else 4}
    result = Layout(
        **trainer,
        engine_ranks=config.engine_world,
        engine_bytes=width(precision),
        kv_bytes=width(precision),
        pool_bytes=config.count(POOL),
        reference=config.share("loss_fn.reference_policy_kl_penalty") > 0,
        reference_offload=True,
        lora_rank=config.lora_rank,
        engine_sleeps=config.colocated,
        engine_weights_on_host=False,
        weights_sleep=config.colocated,
        # The workers move the optimizer's state, where only the precision-aware one has its copy of
        # the weights (megatron_policy_worker.py, move_optimizer; Megatron's distrib_optimizer.py).
        masters_stay=config.colocated and megatron and not precise,
        sequence_parallel=config.flag(f"{DTENSOR}.sequence_parallel"),
        optimizer_stays_offloaded=on_host,
        parameters_stay_offloaded=not megatron,
        tokens_before_split=True,
        pinned="buffers" if megatron else "",
        padded=not config.packed.endswith("sequence_packing"),
        scored_sequences=config.count(SCORE_SIZE) / max(1, config.count(TRAIN_SIZE)),
        sequences=config.sequences,
        mini_batch=min(config.count("policy.train_global_batch_size"), config.sequences),
        prompt_tokens=prompt,
        response_tokens=config.longest - prompt,
    )
    return transformer.with_transformer(result, config.field, config.shape) if megatron else result
