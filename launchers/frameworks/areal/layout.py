"""How an AReaL job is spread over its devices and what they hold in each phase."""

from __future__ import annotations

from autotune.launchers.frameworks.areal.backend import Backend
from autotune.launchers.frameworks.areal.engines import Site, samples, updates
from autotune.launchers.frameworks.core.optimizer_state import megatron_state_bytes, torch_state_bytes, width
from autotune.policies.values.architecture.model import Layout

_HALVED = "adam_bf16"
# What FSDP's optimizer of that name is built with (fsdp_engine.py, fsdp_utils/optimizer.py).
_ANY_PRECISION = {"momentum_dtype": "bfloat16", "variance_dtype": "bfloat16", "use_kahan_summation": True}


def resident(site: Site) -> dict[str, tuple[str, ...]]:
    """Return who holds device memory in a phase; AReaL moves models to the host only once all are built."""
    trainer = ("trainer", *(("critic",) if site.critic is not None else ()))
    scoring = (*trainer, "ref") if site.reference else trainer
    training = trainer if site.config.is_on("ref.offload") else scoring
    phases = {
        "init": scoring,
        "log_prob": scoring,
        "forward": training,
        "backward": training,
        "optimizer": training,
        "checkpoint": training,
        "weight_sync": training,
        "rollout": ("rollout",),
        "rollout_init": ("rollout",),
    }
    if site.colocated:
        phases["rollout_init"] = (*scoring, "rollout")
        phases["weight_sync"] = (*training, "rollout")
    return phases


def layout_of(site: Site) -> Layout:
    """Return every size that an estimate of the job's memory needs."""
    config, actor = site.config, site.actor or Backend(engine="fsdp")
    megatron = actor.engine == "megatron"
    compute = width(config.text("actor.dtype"))
    distributed = config.is_on("actor.megatron.ddp.use_distributed_optimizer")
    sharded = actor.data * actor.context
    stored = compute if megatron else width(config.text("actor.optimizer_dtype"))
    lora = config.is_on("actor.use_lora")
    kind = config.text("actor.optimizer.type")
    engine_dtype = config.text(f"{site.engine}.dtype")
    return Layout(
        strategy="megatron" if megatron else "fsdp2",
        ranks=actor.ranks,
        shards=sharded if not megatron or distributed else 1,
        pipeline_parallel=actor.pipeline,
        pipeline_chunks=max(1, config.number("actor.megatron.virtual_pipeline_parallel_size") or 1),
        expert_parallel=actor.expert,
        expert_shards=_expert_shards(actor) if megatron and distributed else 0,
        engine_ranks=site.rollout.ranks if site.rollout is not None else 0,
        parameter_bytes=stored,
        compute_bytes=compute,
        gradient_bytes=_gradient_bytes(site, compute) if megatron else stored,
        reduce_bytes=0 if megatron else width(config.text("actor.grad_reduce_dtype")),
        optimizer_bytes=_optimizer_bytes(site, stored),
        logits_bytes=4,  # every piece of 1024 tokens is computed in fp32
        engine_bytes=width(engine_dtype),
        kv_bytes=1 if config.text("sglang.kv_cache_dtype").startswith("fp8") else width(engine_dtype),
        reference=site.reference,
        reference_bytes=0 if megatron else width(config.text("ref.optimizer_dtype")),
        reference_offload=config.is_on("ref.offload"),
        critic=site.critic is not None,
        critic_offload=config.is_on("critic.offload"),
        lora_rank=(config.number("actor.lora_rank") or 0) if lora else 0,
        entropy=True,
        engine_sleeps=site.colocated,
        optimizer_stays_offloaded=True,
        parameters_stay_offloaded=True,
        tokens_before_split=True,
        padded=False,
        reshards_root=True,
        sequence_parallel=not megatron,
        loss="softmax" if megatron else "pieces",
        selective_share=_selective_share(site),
        logits_share=1.0,
        chunked_head=False,
        per_tensor_optimizer=kind == _HALVED,
        optimizer_temporary_bytes=4 if kind == _HALVED else 0,  # AdamW is the fused one
        loads_whole=actor.engine == "fsdp",
        sync_buckets=2,  # of 1024 MiB: one is sent while the next is filled
        sequences=samples(site),
        mini_batch=-(-samples(site) // updates(site, "actor")),
        prompt_tokens=config.number("train_dataset.max_length") or max(0, site.longest - _answer(site)),
        response_tokens=min(_answer(site), site.longest),
    )


# Operation by operation Archon keeps a layer's input, attention and every second matrix product
# (experimental/models/archon/activation_checkpoint.py): 30 of Qwen3-1.7B's 109 KB per token and layer.
_SAVED_BY_OPERATION = 0.3


def _selective_share(site: Site) -> float:
    """Return what Archon's selective recomputation keeps of a layer; 0 for the other engines."""
    if site.trainer != "archon":
        return 0.0
    option = site.config.text("actor.archon.selective_ac_option")
    every = int(option) if option.isdigit() else 0  # or every so many layers are computed again
    return 1.0 - 1.0 / every if every > 1 else _SAVED_BY_OPERATION


def _expert_shards(actor: Backend) -> int:
    return max(1, actor.ranks // (actor.pipeline * actor.expert))


def _answer(site: Site) -> int:
    return site.config.number("gconfig.max_new_tokens") or 0


def _gradient_bytes(site: Site, compute: int) -> int:
    """Return the bytes of a gradient in Megatron's buffer, where it is also reduced."""
    return 4 if site.config.is_on("actor.megatron.ddp.grad_reduce_in_fp32") else compute


def _optimizer_bytes(site: Site, stored: int) -> int:
    kind, config = site.config.text("actor.optimizer.type"), site.config
    halved = kind == _HALVED
    if site.trainer != "megatron":
        arguments = _ANY_PRECISION if halved else {}
        return torch_state_bytes(kind, parameter_bytes=stored, arguments=arguments)
    place = "actor.megatron."
    moments = (config.text(f"{place}exp_avg_dtype"), config.text(f"{place}exp_avg_sq_dtype"))
    return megatron_state_bytes(
        kind.removesuffix("_bf16"),
        parameter_bytes=stored,
        precise=halved or config.is_on(f"{place}use_precision_aware_optimizer"),
        master=config.text(f"{place}main_params_dtype"),
        moments=("bfloat16", "bfloat16") if halved else moments,
    )
