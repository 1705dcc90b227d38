"""How a verl job is spread, and what holds device memory in which phase."""

from __future__ import annotations

from typing import Literal

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.optimizer_state import (
    megatron_state_bytes,
    megatron_temporary_bytes,
    torch_state_bytes,
    width,
)
from autotune.launchers.frameworks.core.transformer import with_transformer
from autotune.launchers.frameworks.verl.config import ACTOR, FSDP, MEGATRON, MODEL, REF, ROLLOUT, Config
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.failure import Phase

_FP32 = 4
_OPTIMIZER = f"{ACTOR}.optim"


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold device memory in each phase.

    In the synchronous trainer the engine sleeps from the end of generation to the weight sync: weights and
    pool are given back, captured graphs stay. It does not exist yet while the trainer is built.
    """
    # FSDP's reference is in host memory outside its own pass.
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
    """Return how the job is spread over its GPUs and in which precisions."""
    squares = config.flag(f"{ACTOR}.calculate_sum_pi_squared")
    cpu_adam = config.share(f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction") > 0
    ignored = config.flag(f"{FSDP}.offload_policy") and config.text(f"{ACTOR}.strategy") == "fsdp"
    stored = width(config.text(f"{MEGATRON}.dtype" if config.megatron else f"{FSDP}.model_dtype"))
    mixed = config.inside(f"{FSDP}.mixed_precision")
    apart, temporary = _temporaries(config, stored)
    transformer = config.inside(f"{MEGATRON}.override_transformer_config") if config.megatron else {}
    spread = Layout(
        strategy="megatron" if config.megatron else config.text(f"{ACTOR}.strategy"),
        ranks=config.world,
        shards=_shards(config),
        pipeline_parallel=config.ranks(MEGATRON, "pipeline_model") if config.megatron else 1,
        pipeline_chunks=config.ranks(MEGATRON, "virtual_pipeline_model") if config.megatron else 1,
        # The public models that have such layers have one.
        predicting_layers=int(config.megatron and config.flag(f"{MODEL}.mtp.enable")),
        predicting_loss=config.megatron and config.flag(f"{MODEL}.mtp.enable_train"),
        expert_parallel=config.ranks(MEGATRON, "expert_model") if config.megatron else 1,
        expert_tensor_parallel=_expert_tensor(config),
        expert_shards=_expert_shards(config),
        engine_ranks=config.rollout_world,
        parameter_bytes=stored,
        compute_bytes=stored if config.megatron else width(str(mixed.get("param_dtype", "bf16"))),
        gradient_bytes=_gradient_bytes(config, stored) if config.megatron else stored,
        reduce_bytes=0 if config.megatron else width(str(mixed.get("reduce_dtype", "fp32"))),
        optimizer_bytes=_optimizer_bytes(config, stored),
        logits_bytes=4 if config.megatron else 2,  # Megatron's output layer upcasts, FSDP's keeps bf16
        engine_bytes=1 if config.get(f"{ROLLOUT}.quantization") == "fp8" else 2,
        kv_bytes=1
        if config.text(f"{ROLLOUT}.engine_kwargs.{config.engine}.kv_cache_dtype").startswith("fp8")
        else 2,
        reference=config.reference,
        reference_bytes=0 if config.megatron else width(config.text(f"{REF}.fsdp_config.model_dtype")),
        reference_offload=config.reference
        and (not config.megatron or config.flag(f"{ACTOR}.megatron.param_offload")),
        critic=config.critic,
        critic_offload=config.critic
        and config.flag(f"{config.critic_node}.param_offload")
        and config.flag(f"{config.critic_node}.optimizer_offload"),
        lora_rank=config.lora_rank,
        entropy=config.entropy,
        engine_sleeps=config.sleeps,
        # engine_workers.py, update_weights: on after every sync through CUDA IPC, the first one included.
        expandable_segments=config.colocated,
        engine_weights_on_host=config.engine == "sglang" or config.adapters,  # else vLLM's sleep drops them
        # vLLM opens the trainer's one buffer (bucketed_weight_transfer.py), which counts as the engine's.
        sync_buckets=0 if config.colocated and config.engine == "vllm" else 2,
        gathers_whole=config.summons_whole,
        copies_shards=config.copies_shards,
        optimizer_stays_offloaded=config.megatron and cpu_adam,
        grad_offload_takes_all=not config.megatron and not ignored,
        tokens_before_split=True,
        head_apart=True,
        reshard_after_forward=config.megatron or config.flag(f"{FSDP}.reshard_after_forward"),
        reshards_root=True,
        reduces_last=not config.megatron and config.flag(f"{FSDP}.use_no_sync_for_gradient_accumulation"),
        logits_in_place=not (config.entropy or squares),
        per_tensor_optimizer=apart,
        optimizer_temporary_bytes=temporary,
        loss="softmax" if config.megatron or squares else _loss(config),
        compiled_loss=config.flag(f"{FSDP}.use_torch_compile"),
        scaled_logits=config.share(f"{ROLLOUT}.temperature") != 1.0,
        padded=not config.flag(f"{MODEL}.use_remove_padding"),
        sequences=config.sequences,
        mini_batch=config.update,
        prompt_tokens=config.count(f"{ROLLOUT}.prompt_length"),
        response_tokens=config.count(f"{ROLLOUT}.response_length"),
    )
    return with_transformer(spread, transformer.get)


def _loss(config: Config) -> Literal["kernel", "rows"]:
    """Return the loss of FSDP: flash-attention's kernel, or PyTorch's log_softmax where it is not installed.

    A job that pads its passes and chooses another attention is taken to have no flash-attention.
    """
    attention = config.text(f"{MODEL}.override_config.attn_implementation")
    without = attention in ("sdpa", "eager") and not config.flag(f"{MODEL}.use_remove_padding")
    return "rows" if without else "kernel"


def _gradient_bytes(config: Config, stored: int) -> int:
    """Return the bytes of a gradient in Megatron's buffer (megatron/transformer_impl.py)."""
    in_fp32 = config.inside(f"{MEGATRON}.override_ddp_config").get("grad_reduce_in_fp32")
    if in_fp32 is None:
        chosen = config.flag(f"{_OPTIMIZER}.use_precision_aware_optimizer")
        in_fp32 = not (chosen and width(config.text(f"{_OPTIMIZER}.main_grads_dtype")) < _FP32)
    return _FP32 if in_fp32 else stored


def _optimizer_bytes(config: Config, stored: int) -> int:
    arguments = config.inside(f"{_OPTIMIZER}.override_optimizer_config")
    kind = config.text(f"{_OPTIMIZER}.optimizer")
    if not config.megatron:
        return torch_state_bytes(kind, parameter_bytes=stored, arguments=arguments)

    def chosen(name: str) -> str:
        return str(_chosen(config, name) or "fp32")

    return megatron_state_bytes(
        str(arguments.get("optimizer") or kind),
        parameter_bytes=stored,
        precise=_precise(config),
        on_host=arguments.get("optimizer_cpu_offload") is True,
        master=chosen("main_params_dtype"),
        moments=(chosen("exp_avg_dtype"), chosen("exp_avg_sq_dtype")),
    )


def _chosen(config: Config, name: str) -> object:
    arguments = config.inside(f"{_OPTIMIZER}.override_optimizer_config")
    return arguments.get(name) or config.get(f"{_OPTIMIZER}.{name}")


def _precise(config: Config) -> bool:
    # In fp16 verl switches it on by itself, with everything in fp32 (megatron/optimizer.py).
    bf16 = config.text(f"{MEGATRON}.dtype") in ("bf16", "bfloat16")
    return bf16 and str(_chosen(config, "use_precision_aware_optimizer")) == "True"


def _temporaries(config: Config, width: int) -> tuple[bool, int]:
    """Return whether AdamW takes one tensor after the other, and its temporaries in bytes per parameter.

    They have the type of the parameters: one where it takes all at once, none if one kernel does it all.
    """
    if config.megatron:
        return False, megatron_temporary_bytes(_gradient_bytes(config, width), precise=_precise(config))
    options = f"{ACTOR}.optim.override_optimizer_config"
    if config.flag(f"{options}.fused"):
        return False, 0
    return (True, 2 * width) if config.get(f"{options}.foreach") is False else (False, width)


def _expert_tensor(config: Config) -> int:
    """Return over how many ranks one expert is split; Megatron's default is its tensor parallelism."""
    if not config.megatron:
        return 1
    own = config.count(f"{MEGATRON}.expert_tensor_parallel_size")
    return own or config.ranks(MEGATRON, "tensor_model")


def _expert_shards(config: Config) -> int:
    if not config.megatron or not config.flag(f"{ACTOR}.megatron.use_distributed_optimizer"):
        return 0
    others = config.ranks(MEGATRON, "expert_model", "pipeline_model")
    return max(1, config.world // (_expert_tensor(config) * others))


def _shards(config: Config) -> int:
    if config.megatron:
        if not config.flag(f"{ACTOR}.megatron.use_distributed_optimizer"):
            return 1
        return config.data_parallel * config.parallel
    size = config.count(f"{FSDP}.fsdp_size")
    return size if 0 < size < config.world else config.world
