"""How an AReaL job is spread over its devices and what they hold in each phase."""

from __future__ import annotations

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.config import Config
from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.optimizer_state import (
    megatron_state_bytes,
    megatron_temporary_bytes,
    torch_state_bytes,
    width,
)
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.policies.values.architecture.model import Layout

_HALVED = "adam_bf16"
# What FSDP's optimizer of that name is built with (fsdp_engine.py, fsdp_utils/optimizer.py).
_ANY_PRECISION = {"momentum_dtype": "bfloat16", "variance_dtype": "bfloat16", "use_kahan_summation": True}


def split_sizes(config: Config, role: str, dimension: str) -> tuple[int, ...]:
    """Return the legal sizes of the dimension `tensor` or `context` of a role's backend.

    Tensor parallelism stays inside a node; the heads of a tensor part are split once more by the sequence.
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
    """Return who holds device memory in a phase; AReaL moves models to the host only once all are built."""
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
    """Return every size that an estimate of the job's memory needs."""
    actor = config.actor or Backend(engine="fsdp")
    megatron = actor.engine == "megatron"
    compute = width(config.text("actor.dtype"))
    distributed = config.flag("actor.megatron.ddp.use_distributed_optimizer")
    sharded = actor.data * actor.context
    stored = compute if megatron else width(config.text("actor.optimizer_dtype"))
    lora = config.flag("actor.use_lora")
    kind = config.text("actor.optimizer.type")
    engine_dtype = config.text(f"{config.engine}.dtype")
    return Layout(
        strategy="megatron" if megatron else "fsdp2",
        ranks=actor.ranks,
        shards=sharded if not megatron or distributed else 1,
        pipeline_parallel=actor.pipeline,
        pipeline_chunks=max(1, config.number("actor.megatron.virtual_pipeline_parallel_size") or 1),
        expert_parallel=actor.expert,
        expert_shards=_expert_shards(actor) if megatron and distributed else 0,
        engine_ranks=config.rollout.ranks if config.rollout is not None else 0,
        parameter_bytes=stored,
        compute_bytes=compute,
        gradient_bytes=_gradient_bytes(config, compute) if megatron else stored,
        reduce_bytes=0 if megatron else width(config.text("actor.grad_reduce_dtype")),
        optimizer_bytes=_optimizer_bytes(config, stored),
        logits_bytes=4,  # every piece of 1024 tokens is computed in fp32
        engine_bytes=width(engine_dtype),
        kv_bytes=1 if config.text("sglang.kv_cache_dtype").startswith("fp8") else width(engine_dtype),
        reference=config.scores_reference,
        reference_bytes=0 if megatron else width(config.text("ref.optimizer_dtype")),
        reference_offload=config.flag("ref.offload"),
        critic=config.critic is not None,
        critic_offload=config.flag("critic.offload"),
        lora_rank=(config.number("actor.lora_rank") or 0) if lora else 0,
        entropy=True,
        engine_sleeps=config.colocated,
        optimizer_stays_offloaded=True,
        parameters_stay_offloaded=True,
        tokens_before_split=True,
        padded=False,
        reshards_root=True,
        sequence_parallel=not megatron,
        loss="softmax" if megatron else "pieces",
        selective_share=_selective_share(config),
        logits_share=1.0,
        chunked_head=False,
        per_tensor_optimizer=kind == _HALVED and not megatron,
        optimizer_temporary_bytes=_temporary_bytes(config, compute),
        loads_whole=actor.engine == "fsdp",
        sync_buckets=2,  # of 1024 MiB: one is sent while the next is filled
        sequences=config.samples,
        mini_batch=-(-config.samples // config.updates("actor")),
        prompt_tokens=config.number("train_dataset.max_length") or max(0, config.longest - _answer(config)),
        response_tokens=min(_answer(config), config.longest),
    )


# Operation by operation Archon keeps a layer's input, attention and every second matrix product
# (experimental/models/archon/activation_checkpoint.py): 30 of Qwen3-1.7B's 109 KB per token and layer.
_SAVED_BY_OPERATION = 0.3


def _selective_share(config: Config) -> float:
    """Return what Archon's selective recomputation keeps of a layer; 0 for the other engines."""
    if config.trainer != "archon":
        return 0.0
    option = config.text("actor.archon.selective_ac_option")
    every = int(option) if option.isdigit() else 0  # or every so many layers are computed again
    return 1.0 - 1.0 / every if every > 1 else _SAVED_BY_OPERATION


def _expert_shards(actor: Backend) -> int:
    return max(1, actor.ranks // (actor.pipeline * actor.expert))


def _answer(config: Config) -> int:
    return config.number("gconfig.max_new_tokens") or 0


def _gradient_bytes(config: Config, compute: int) -> int:
    """Return the bytes of a gradient in Megatron's buffer, where it is also reduced."""
    return 4 if config.flag("actor.megatron.ddp.grad_reduce_in_fp32") else compute


def _temporary_bytes(config: Config, compute: int) -> int:
    if config.trainer == "megatron":
        return megatron_temporary_bytes(_gradient_bytes(config, compute), precise=_precise(config))
    return 4 if config.text("actor.optimizer.type") == _HALVED else 0  # AdamW is the fused one


def _precise(config: Config) -> bool:
    halved = config.text("actor.optimizer.type") == _HALVED
    return halved or config.flag("actor.megatron.use_precision_aware_optimizer")


def _optimizer_bytes(config: Config, stored: int) -> int:
    kind = config.text("actor.optimizer.type")
    halved = kind == _HALVED
    if config.trainer != "megatron":
        arguments = _ANY_PRECISION if halved else {}
        return torch_state_bytes(kind, parameter_bytes=stored, arguments=arguments)
    place = "actor.megatron."
    moments = (config.text(f"{place}exp_avg_dtype"), config.text(f"{place}exp_avg_sq_dtype"))
    return megatron_state_bytes(
        kind.removesuffix("_bf16"),
        parameter_bytes=stored,
        precise=_precise(config),
        master=config.text(f"{place}main_params_dtype"),
        moments=("bfloat16", "bfloat16") if halved else moments,
    )
