"""The layout of a SkyRL job, and which components hold GPU memory in which phase."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import residency, transformer
from autotune.launchers.frameworks.core.optimizer_state import megatron_bytes, width
from autotune.launchers.frameworks.skyrl import config as key
from autotune.launchers.frameworks.skyrl.config import CPU_ADAM, ENGINE, POLICY, POOL, Config
from autotune.policies.values.architecture.model import Layout


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold GPU memory, by phase.

    Colocated, the engines sleep while the trainer works, and the trainer is offloaded while they generate,
    except FSDP's optimizer without `offload_after_step`. Reference and critic are on the GPU only while they
    run.
    """
    trainer, rollout = residency.models(), (residency.ROLLOUT,)
    away = (
        config.megatron
        or config.flag(f"{POLICY}.fsdp_config.cpu_offload")
        or config.flag(f"{POLICY}.optimizer_config.offload_after_step")
    )
    return residency.resident(
        residency.models(critic=config.critic),
        log_prob=residency.models(critic=config.critic, reference=config.reference),
        rollout=rollout if away or not config.colocated else trainer + rollout,
        weight_sync=trainer + rollout if config.colocated else trainer,
    )


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    megatron = config.megatron
    on_host = config.flag(f"{CPU_ADAM}.optimizer_cpu_offload")
    sequences = config.count("trainer.train_batch_size") * config.samples
    trainer: dict[str, Any] = {  # its mixed precision keeps fp32 parameters
        "strategy": "fsdp2",
        "ranks": config.world,
        "shards": config.shard_group,
        "reshard_after_forward": config.get(f"{POLICY}.fsdp_config.reshard_after_forward") is not False,
    }
    if megatron:
        trainer = transformer.spread(
            ranks=config.world,
            tensor=config.ranks("tensor_model"),
            pipeline=config.ranks("pipeline_model"),
            expert=config.ranks("expert_model"),
            expert_tensor=config.splits_experts,
        )
        precise = config.flag(f"{CPU_ADAM}.use_precision_aware_optimizer")
        in_fp32 = config.flag(f"{POLICY}.megatron_config.ddp_config.grad_reduce_in_fp32")
        gradients = 4 if in_fp32 else 2
        trainer |= megatron_bytes("adam", gradient_bytes=gradients, precise=precise, on_host=on_host)
    result = Layout(
        **trainer,
        engine_ranks=config.engine_world,
        engine_bytes=width(config.text(f"{ENGINE}.model_dtype")),
        kv_bytes=width(config.text(f"{ENGINE}.model_dtype")),
        reference=config.reference,
        reference_offload=config.colocated,
        critic=config.critic,
        critic_offload=config.critic and config.colocated,
        pool_bytes=config.count(POOL),
        keeps_hybrids=config.keeps_hybrids,
        lora_rank=config.lora_rank,
        entropy=True,
        engine_sleeps=config.colocated,
        engine_weights_on_host=config.lora_rank > 0,
        expandable_segments=config.flag("trainer.use_expandable_segments"),
        # Weights leave the card by no setting, and Megatron's optimizer with them (fsdp_strategy.py and
        # megatron_strategy.py, offload_to_cpu).
        weights_sleep=config.colocated,
        trainer_sleeps=config.colocated and not megatron,
        optimizer_stays_offloaded=on_host,
        parameters_stay_offloaded=not megatron,
        tokens_before_split=True,
        pinned="buffers" if megatron else "tensors",
        routing="parts" if config.flag(f"{POLICY}.megatron_config.moe_enable_routing_replay") else "",
        loss="softmax" if megatron else "pieces",
        compiled_loss=False,
        padded=not config.flag("trainer.remove_microbatch_padding"),
        scored_sequences=config.count(key.SCORE_SIZE) / max(1, config.count(key.TRAIN_SIZE)),
        sequences=sequences,
        mini_batch=min(config.count("trainer.policy_mini_batch_size") * config.samples, sequences),
        prompt_tokens=config.longest - config.answer,
        response_tokens=config.answer,
    )
    return transformer.with_transformer(result, config.field, config.shape) if megatron else result
