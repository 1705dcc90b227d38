"""The layout of an AReaL job, and which components hold GPU memory in which phase."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.config import Config
from autotune.launchers.frameworks.core import residency, transformer
from autotune.launchers.frameworks.core.optimizer_state import megatron_bytes, torch_state_bytes, width
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.policies.values.architecture.model import Layout

_HALVED = "adam_bf16"
# Arguments of FSDP's optimizer of that name (fsdp_engine.py, fsdp_utils/optimizer.py).
_ANY_PRECISION = {"momentum_dtype": "bfloat16", "variance_dtype": "bfloat16", "use_kahan_summation": True}


def split_sizes(config: Config, role: str, dimension: str) -> tuple[int, ...]:
    """Return the legal sizes of the dimension `tensor` or `context` of a role's backend.

    Tensor parallelism stays inside a node; context parallelism divides the heads of a tensor-parallel rank.
    """
    backend, shape = config.rollout if role == "rollout" else config.actor, config.job.shape
    if backend is None or shape is None or backend.experts_text:
        return ()
    if dimension == "context" and config.trainer == "fsdp" and config.flag("actor.enable_tree_training"):
        return ()
    tensor = dimension == "tensor"
    other = backend.context if tensor else backend.tensor
    free = backend.ranks // (backend.pipeline * other)
    most = (config.number("cluster.n_gpus_per_node") or free) if tensor else free
    return tuple(
        size
        for size in head_sizes(divisors(free), shape)
        if size <= most and (tensor or (shape.heads // size) % other == 0)
    )


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold GPU memory, by phase; AReaL offloads models only after building all."""
    critic = config.critic is not None
    scoring = residency.models(critic=critic, reference=config.scores_reference)
    training = residency.models(critic=critic) if config.flag("ref.offload") else scoring
    rollout = (residency.ROLLOUT,)
    return residency.resident(
        training,
        init=scoring,
        log_prob=scoring,
        rollout=rollout,
        rollout_init=scoring + rollout if config.colocated else rollout,
        weight_sync=training + rollout if config.colocated else training,
    )


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    actor = config.actor or Backend(engine="fsdp")
    megatron, compute = actor.engine == "megatron", width(config.text("actor.dtype"))
    engine_dtype = config.text(f"{config.engine}.dtype")
    result = Layout(
        **(_megatron(config, actor, compute) if megatron else _fsdp(config, actor)),
        engine_ranks=config.rollout.ranks if config.rollout is not None else 0,
        compute_bytes=compute,
        engine_bytes=width(engine_dtype),
        kv_bytes=1 if config.text("sglang.kv_cache_dtype").startswith("fp8") else width(engine_dtype),
        reference=config.scores_reference,
        reference_offload=config.flag("ref.offload"),
        critic=config.critic is not None,
        critic_offload=config.flag("critic.offload"),
        lora_rank=(config.number("actor.lora_rank") or 0) if config.flag("actor.use_lora") else 0,
        entropy=True,
        engine_sleeps=config.colocated,
        optimizer_stays_offloaded=True,
        parameters_stay_offloaded=True,
        pinned="" if actor.engine == "megatron" else "tensors",  # CPUOffloadPolicy() (fsdp_engine.py)
        tokens_before_split=True,
        reshards_root=True,
        **_selective(config),
        loads_whole=actor.engine == "fsdp",
        sequences=config.samples,
        mini_batch=-(-config.samples // config.updates("actor")),
        prompt_tokens=config.number("train_dataset.max_length") or max(0, config.longest - _answer(config)),
        response_tokens=min(_answer(config), config.longest),
    )
    return transformer.with_transformer(result, config.field, config.job.shape) if megatron else result


def _selective(config: Config) -> dict[str, Any]:
    """Return the fields of Layout for Archon's selective recomputation.

    It keeps every n-th layer, or in each layer attention and every second matrix product
    (experimental/models/archon/activation_checkpoint.py).
    """
    if config.trainer != "archon":
        return {}
    option = config.text("actor.archon.selective_ac_option")
    every = int(option) if option.isdigit() else 0
    return {"selective_share": 1.0 - 1.0 / every} if every > 1 else {"selective_operations": True}


def _answer(config: Config) -> int:
    return config.number("gconfig.max_new_tokens") or 0


def _fsdp(config: Config, actor: Backend) -> dict[str, Any]:
    kind, stored = config.text("actor.optimizer.type"), width(config.text("actor.optimizer_dtype"))
    halved = kind == _HALVED
    arguments = _ANY_PRECISION if halved else {}
    return {
        "strategy": "fsdp2",
        "ranks": actor.ranks,
        "shards": actor.data * actor.context,
        "pipeline_parallel": actor.pipeline,
        "expert_parallel": actor.expert,
        "parameter_bytes": stored,
        "gradient_bytes": stored,
        "reduce_bytes": width(config.text("actor.grad_reduce_dtype")),
        "reshard_after_forward": config.reshards,
        "reference_bytes": width(config.text("ref.optimizer_dtype")),
        "optimizer_bytes": torch_state_bytes(kind, parameter_bytes=stored, arguments=arguments),
        "per_tensor_optimizer": halved,
        "optimizer_temporary_bytes": 4 if halved else 0,  # AdamW is the fused one
        "loss": "pieces",  # of 1024 tokens
    }


def _megatron(config: Config, actor: Backend, compute: int) -> dict[str, Any]:
    kind, place = config.text("actor.optimizer.type"), "actor.megatron."
    halved = kind == _HALVED
    moments = (config.text(f"{place}exp_avg_dtype"), config.text(f"{place}exp_avg_sq_dtype"))
    return transformer.spread(
        ranks=actor.ranks,
        tensor=actor.tensor,
        pipeline=actor.pipeline,
        chunks=max(1, config.number(f"{place}virtual_pipeline_parallel_size") or 1),
        expert=actor.expert,
        expert_tensor=1,
        distributed=config.flag(f"{place}ddp.use_distributed_optimizer"),
    ) | megatron_bytes(
        kind.removesuffix("_bf16"),
        parameter_bytes=compute,
        gradient_bytes=4 if config.flag(f"{place}ddp.grad_reduce_in_fp32") else compute,
        precise=halved or config.flag(f"{place}use_precision_aware_optimizer"),
        master=config.text(f"{place}main_params_dtype"),
        moments=("bfloat16", "bfloat16") if halved else moments,
    )
