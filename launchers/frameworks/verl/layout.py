"""The layout of a verl job, and which components hold GPU memory in which phase."""

from __future__ import annotations

from typing import Any, Literal

from autotune.launchers.frameworks.core import residency, transformer
from autotune.launchers.frameworks.core.optimizer_state import megatron_bytes, torch_state_bytes, width
from autotune.launchers.frameworks.verl.config import (
    ACTOR,
    FSDP,
    MEGATRON,
    MODEL,
    POOL,
    REF,
    ROLLOUT,
    Config,
)
from autotune.launchers.frameworks.verl.knobs import scored
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.failure import Phase

_FP32 = 4
_REPLAY = ("megatron.router_replay", "router_replay")  # by release
_OPTIMIZER = f"{ACTOR}.optim"
_STATE_TYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold GPU memory, by phase.

    In the synchronous trainer the engine sleeps from the end of generation to the weight sync: it releases
    weights and KV pool but not captured graphs. It does not exist yet while the trainer is built.
    """
    # FSDP's reference is offloaded except while it computes log-probs.
    trainers = residency.models(reference=config.reference and config.megatron, critic=config.critic)
    scored = residency.models(reference=config.reference, critic=config.critic)
    awake = (residency.ROLLOUT,) if config.colocated and not config.sleeps else ()
    return residency.resident(
        (*trainers, *awake),
        init=trainers,
        log_prob=(*scored, *awake),
        rollout=(*(trainers if config.colocated else ()), residency.ROLLOUT),
        weight_sync=(*trainers, residency.ROLLOUT),
        further=(Phase.COMM,),
    )


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    squares = config.flag(f"{ACTOR}.calculate_sum_pi_squared")
    result = Layout(
        **(_megatron(config) if config.megatron else _fsdp(config, squares=squares)),
        engine_ranks=config.rollout_world,
        engine_bytes=1 if config.get(f"{ROLLOUT}.quantization") == "fp8" else 2,
        kv_bytes=1
        if config.text(f"{ROLLOUT}.engine_kwargs.{config.engine}.kv_cache_dtype").startswith("fp8")
        else 2,
        pool_bytes=config.count(POOL),
        reference=config.reference,
        reference_offload=config.reference
        and (not config.megatron or config.flag(f"{ACTOR}.megatron.param_offload")),
        critic=config.critic,
        critic_offload=config.critic
        and config.flag(f"{config.critic_node}.param_offload")
        and config.flag(f"{config.critic_node}.optimizer_offload"),
        critic_follows=not config.swaps_optimizer,  # a knob is on where actor and critic both have it
        lora_rank=config.lora_rank,
        entropy=config.entropy,
        engine_sleeps=config.sleeps,
        # engine_workers.py, update_weights: resident after every sync through CUDA IPC, including the first.
        expandable_segments=config.colocated,
        wakes_whole=config.wakes_whole,
        engine_weights_on_host=config.engine == "sglang" or config.adapters,  # else vLLM's sleep drops them
        # vLLM opens the trainer's one buffer (bucketed_weight_transfer.py), which counts as the engine's.
        sync_buckets=0 if config.colocated and config.engine == "vllm" else 2,
        gathers_whole=config.summons_whole,
        copies_shards=config.copies_shards,
        tokens_before_split=True,
        head_apart=True,
        reshards_root=True,
        logits_in_place=not (config.entropy or squares),
        scaled_logits=config.share(f"{ROLLOUT}.temperature") != 1.0,
        padded=not config.flag(f"{MODEL}.use_remove_padding"),
        padded_to_limit=not config.flag(f"{MODEL}.use_remove_padding"),
        scored_sequences=_scored_sequences(config),
        sequences=config.sequences,
        mini_batch=config.update,
        pinned="buffers" if config.megatron else "tensors",
        routing="parts" if any(config.text(f"{ACTOR}.{place}.mode") == "R3" for place in _REPLAY) else "",
        # Models with tied weights are not built on the meta device (fsdp/transformer_impl.py, _build_module).
        loads="ranks" if config.shape is not None and config.shape.tied and not config.megatron else "",
        saves_optimizer="optimizer" in str(config.get(f"{ACTOR}.checkpoint.save_contents") or "optimizer"),
        prompt_tokens=config.count(f"{ROLLOUT}.prompt_length"),
        response_tokens=config.count(f"{ROLLOUT}.response_length"),
    )
    return transformer.with_transformer(result, config.field, config.shape if config.megatron else None)


def _scored_sequences(config: Config) -> float:
    largest = max(config.count(key) for key in scored(config, "log_prob_micro_batch_size_per_gpu"))
    trained = config.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    return largest / trained if trained and largest else 1.0


def _megatron(config: Config) -> dict[str, Any]:
    arguments = config.inside(f"{_OPTIMIZER}.override_optimizer_config")
    stored = width(config.text(f"{MEGATRON}.dtype"))
    named = {name: str(_chosen(config, name) or "fp32") for name in _STATE_TYPES}
    return {
        **transformer.spread(
            ranks=config.world,
            tensor=config.ranks(MEGATRON, "tensor_model"),
            pipeline=config.ranks(MEGATRON, "pipeline_model"),
            chunks=config.ranks(MEGATRON, "virtual_pipeline_model"),
            expert=config.ranks(MEGATRON, "expert_model"),
            expert_tensor=config.splits_experts,
            distributed=config.flag(f"{MEGATRON}.use_distributed_optimizer"),
        ),
        **megatron_bytes(
            str(arguments.get("optimizer") or config.text(f"{_OPTIMIZER}.optimizer")),
            parameter_bytes=stored,
            gradient_bytes=_gradient_bytes(config, stored),
            precise=_precise(config),
            on_host=arguments.get("optimizer_cpu_offload") is True,
            master=named["main_params_dtype"],
            moments=(named["exp_avg_dtype"], named["exp_avg_sq_dtype"]),
        ),
        "compute_bytes": stored,
        # Public models with such layers have one.
        "predicting_layers": int(config.flag(f"{MODEL}.mtp.enable")),
        "predicting_loss": config.flag(f"{MODEL}.mtp.enable_train"),
        "optimizer_stays_offloaded": config.swaps_optimizer
        or config.share(f"{_OPTIMIZER}.override_optimizer_config.optimizer_offload_fraction") > 0,
        "optimizer_passes_through": config.swaps_optimizer,
    }


def _fsdp(config: Config, *, squares: bool) -> dict[str, Any]:
    strategy = config.text(f"{ACTOR}.strategy")
    stored = width(config.text(f"{FSDP}.model_dtype"))
    mixed = config.inside(f"{FSDP}.mixed_precision")
    arguments = config.inside(f"{_OPTIMIZER}.override_optimizer_config")
    kind = config.text(f"{_OPTIMIZER}.optimizer")
    each, temporary = _temporaries(config, stored)
    return {
        "strategy": strategy,
        "ranks": config.world,
        "shards": config.shard_group,
        "parameter_bytes": stored,
        "compute_bytes": width(str(mixed.get("param_dtype", "bf16"))),
        "gradient_bytes": stored,
        "reduce_bytes": width(str(mixed.get("reduce_dtype", "fp32"))),
        "reference_bytes": width(config.text(f"{REF}.fsdp_config.model_dtype")),
        "optimizer_bytes": torch_state_bytes(kind, parameter_bytes=stored, arguments=arguments),
        "per_tensor_optimizer": each,
        "optimizer_temporary_bytes": temporary,
        "logits_bytes": 2,  # its output layer keeps bf16
        "loss": "softmax" if squares else _loss(config),
        # Padded passes never call the compiled entropy (fsdp/transformer_impl.py, prepare_model_outputs).
        "compiled_loss": config.flag(f"{FSDP}.use_torch_compile")
        and config.flag(f"{MODEL}.use_remove_padding"),
        "grad_offload_takes_all": not (config.flag(f"{FSDP}.offload_policy") and strategy == "fsdp"),
        "reshard_after_forward": config.flag(f"{FSDP}.reshard_after_forward"),
        "reduces_last": config.flag(f"{FSDP}.use_no_sync_for_gradient_accumulation"),
    }


def _loss(config: Config) -> Literal["kernel", "rows"]:
    """Return FSDP's loss: flash-attention's kernel, or PyTorch's log_softmax without flash-attention.

    A job that pads micro-batches and chooses another attention is assumed to have no flash-attention.
    """
    attention = config.text(f"{MODEL}.override_config.attn_implementation")
    without = attention in ("sdpa", "eager") and not config.flag(f"{MODEL}.use_remove_padding")
    return "rows" if without else "kernel"


def _gradient_bytes(config: Config, stored: int) -> int:
    """Return the bytes per gradient in Megatron's buffer (megatron/transformer_impl.py)."""
    in_fp32 = config.inside(f"{MEGATRON}.override_ddp_config").get("grad_reduce_in_fp32")
    if in_fp32 is None:
        chosen = config.flag(f"{_OPTIMIZER}.use_precision_aware_optimizer")
        in_fp32 = not (chosen and width(config.text(f"{_OPTIMIZER}.main_grads_dtype")) < _FP32)
    return _FP32 if in_fp32 else stored


def _chosen(config: Config, name: str) -> object:
    arguments = config.inside(f"{_OPTIMIZER}.override_optimizer_config")
    return arguments.get(name) or config.get(f"{_OPTIMIZER}.{name}")


def _precise(config: Config) -> bool:
    # In fp16 verl switches it on by itself, with everything in fp32 (megatron/optimizer.py).
    bf16 = config.text(f"{MEGATRON}.dtype") in ("bf16", "bfloat16")
    return bf16 and str(_chosen(config, "use_precision_aware_optimizer")) == "True"


def _temporaries(config: Config, width: int) -> tuple[bool, int]:
    """Return whether AdamW updates one tensor at a time, and its temporaries in bytes per parameter.

    These have the parameters' dtype: one if all tensors are updated at once, none with the fused kernel.
    """
    options = f"{ACTOR}.optim.override_optimizer_config"
    if config.flag(f"{options}.fused"):
        return False, 0
    return (True, 2 * width) if config.get(f"{options}.foreach") is False else (False, width)
