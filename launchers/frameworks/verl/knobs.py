"""The neutral knobs in verl's settings, both ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from autotune.launchers.frameworks.core import host_allocators
from autotune.launchers.frameworks.core.cuda_graphs import LARGEST_LIMITED_BATCH, LIMITED_BATCHES
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.frameworks.verl.config import ACTOR, ENV_VARS, MEGATRON, MODEL, REF, ROLLOUT, Config
from autotune.policies.values.knobs import Knobs, changed

SNAPSHOT_TOOL = "torch_memory"
_REQUESTS = 256  # at once where max_num_seqs is null: vLLM's default on cards below 70 GiB (arg_utils.py)
_CPU_ADAM = f"{ACTOR}.optim.override_optimizer_config"
_RECOMPUTE = "override_transformer_config.recompute"
_SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"

Found = dict[str, Any]


class Names(NamedTuple):
    """Keys that differ between the model engines, and the critic's beside the actor's."""

    actor: str
    critic: str
    sequence: str  # of the actor
    critic_sequence: str


def names(config: Config) -> Names:
    """Return the keys of a job's model engine; the critic's node has another name than the actor's."""
    if config.megatron:
        split = "megatron.context_parallel_size"
        return Names(MEGATRON, "critic.megatron", f"{ACTOR}.{split}", f"critic.{split}")
    return Names(
        f"{ACTOR}.fsdp_config",
        "critic.fsdp",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "critic.fsdp.ulysses_sequence_parallel_size",
    )


# --------------------------------------------------------------------------- reading


def read(config: Config) -> Knobs:
    """Return the knobs that a job uses, verl's defaults filled in.

    Token budgets are those of one micro-batch over all ranks that share its sequences: verl multiplies its
    limit per GPU by the size of sequence parallelism, so this is what a pass really takes.
    """
    megatron = config.megatron
    fraction = config.share(f"{_CPU_ADAM}.optimizer_offload_fraction")
    return Knobs(
        concurrency=concurrency(config),
        memory_fraction=config.share(f"{ROLLOUT}.gpu_memory_utilization"),
        rollout_tensor_parallel=config.count(f"{ROLLOUT}.tensor_model_parallel_size"),
        cuda_graphs=_graphs(config),
        max_batched_tokens=config.count(prefill(config)) or None,
        max_model_len=config.count(f"{ROLLOUT}.max_model_len") or None,
        tokens_per_microbatch=config.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * config.parallel
        if config.dynamic
        else None,
        microbatch_size=None
        if config.dynamic
        else config.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or None,
        dynamic_batching=config.dynamic,
        recompute=_recompute(config),
        activation_offload=None if megatron else _all(config, "model.enable_activation_offload"),
        param_offload=_all(config, "param_offload"),
        grad_offload=None if megatron else _all(config, "offload_policy"),
        optimizer_offload=_all(config, "optimizer_offload"),
        optimizer_offload_fraction=fraction if megatron else None,
        optimizer_offload_overlap=config.flag(f"{_CPU_ADAM}.overlap_cpu_optimizer_d2h_h2d")
        if megatron
        else None,
        sequence_parallel=None if megatron else config.parallel,
        context_parallel=config.parallel if megatron else None,
        tensor_parallel=config.count(f"{ACTOR}.megatron.tensor_model_parallel_size") if megatron else None,
        sharding=None if megatron else config.text(f"{ACTOR}.strategy"),
        fused_kernels=config.flag(f"{MODEL}.use_fused_kernels"),
        logprob_tokens=config.count(f"{ROLLOUT}.log_prob_max_token_len_per_gpu") * config.parallel
        if config.dynamic
        else None,
        entropy_chunking=config.flag(f"{ACTOR}.entropy_from_logits_with_chunking"),
        entropy_recompute=None if megatron else config.flag(f"{ACTOR}.entropy_checkpointing"),
        sync_buffer=config.count(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes") << 20,
        host_allocator=host_allocators.preloaded(config.text(f"{ENV_VARS}.LD_PRELOAD")),
        dataloader_workers=config.count("data.dataloader_num_workers"),
        memory_snapshot=config.text("global_profiler.tool") == SNAPSHOT_TOOL
        and config.flag(f"{ACTOR}.profiler.enable"),
    )


def prefill(config: Config) -> str:
    """Return the key of the tokens that the engine prefills at once."""
    vllm = config.rollout == "vllm"
    return f"{ROLLOUT}.max_num_batched_tokens" if vllm else f"{_SGLANG}.chunked_prefill_size"


def concurrency(config: Config) -> int:
    """Return the requests that an engine works on at once; validation sends all its prompts together."""
    most = config.count(f"{ROLLOUT}.max_num_seqs") or _REQUESTS
    asked = requests(config)
    return most if asked is None else min(most, asked)


def requests(config: Config) -> int | None:
    """Return the requests of one step that reach an engine; None where other requests come beside them."""
    validates = config.flag("trainer.val_before_train") or config.count("trainer.test_freq") > 0
    if validates or config.text("trainer.v1.trainer_mode") != "sync" or not config.sequences:
        return None
    return max(1, -(-config.sequences // config.replicas))


def critic_tokens(config: Config) -> int:
    """Return the tokens of a micro-batch of the critic: its trainer reads one limit for values and update."""
    key = "critic.ppo_infer_max_token_len_per_gpu"
    return config.count(key) * max(1, config.count(names(config).critic_sequence))


def _graphs(config: Config) -> str:
    if config.flag(f"{ROLLOUT}.enforce_eager"):
        return "off"
    key = (
        f"{_SGLANG}.cuda_graph_max_bs" if config.rollout == "sglang" else f"{ROLLOUT}.cudagraph_capture_sizes"
    )
    return "full" if config.get(key) is None else "limited"


def _recompute(config: Config) -> str:
    if not config.megatron:
        return "full" if _all(config, "model.enable_gradient_checkpointing") else "off"
    modes = [config.text(f"{node}.{_RECOMPUTE}_granularity") or "off" for node in _nodes(config)]
    return min(modes, key=("off", "selective", "full").index)


def _all(config: Config, name: str) -> bool:
    """Return whether the actor does it, and the critic where there is one."""
    return all(config.flag(key) for key in _both(config, name))


def _both(config: Config, name: str) -> tuple[str, ...]:
    """Return the key of the actor and, where one is trained, the critic's."""
    if name.startswith("model."):
        pair = (f"actor_rollout_ref.{name}", f"critic.{name}")
    else:
        pair = (f"{names(config).actor}.{name}", f"{names(config).critic}.{name}")
    return pair if config.critic else pair[:1]


def _nodes(config: Config) -> tuple[str, ...]:
    own = names(config)
    return (own.actor, *config.of_critic(own.critic))


# --------------------------------------------------------------------------- writing


def write(config: Config, knobs: Knobs) -> Found:
    """Return the settings, in the job's own spelling, that make it use `knobs`; None leaves a knob alone."""
    before = read(config)
    wanted = {name: getattr(knobs, name) for name in Knobs.__struct_fields__}
    after = msgspec.structs.replace(before, **{k: v for k, v in wanted.items() if v is not None})
    names_changed = frozenset(changed(before, after))
    result: Found = {}
    for knob in names_changed & _SINGLE.keys():
        key, value = _SINGLE[knob](config, getattr(after, knob))
        result[key] = value
    for knob in names_changed & _EACH.keys():
        result |= dict.fromkeys(_both(config, _EACH[knob]), getattr(after, knob))
    if "recompute" in names_changed:
        result |= _write_recompute(config, str(after.recompute))
    if "cuda_graphs" in names_changed:
        result |= _write_graphs(config, str(after.cuda_graphs))
    if names_changed & {"optimizer_offload_fraction", "optimizer_offload_overlap"}:
        result |= _write_cpu_adam(after)
    if "sharding" in names_changed:
        result |= dict.fromkeys([f"{ACTOR}.strategy", *config.of_critic("critic.strategy")], after.sharding)
    if "memory_snapshot" in names_changed:
        result |= _write_snapshot(bool(after.memory_snapshot))
    if names_changed & _SIZES:
        result |= _write_sizes(config, before, after)
    return {config.key(key): value for key, value in sorted(result.items()) if _differs(config, result, key)}


def _differs(config: Config, found: Found, key: str) -> bool:
    """Return whether the job with everything else found would not have this value by itself."""
    followed = config.followed(key)
    present = found.get(followed, config.get(key)) if followed else config.get(key)
    value = found[key]
    return present != value or isinstance(present, bool) != isinstance(value, bool)


def _set(key: str) -> Callable[[Config, Any], tuple[str, Any]]:
    return lambda config, value: (key, value)


def _write_allocator(config: Config, value: Any) -> tuple[str, Any]:
    key = f"{ENV_VARS}.LD_PRELOAD"
    others = [
        each for each in config.text(key).split(":") if each and host_allocators.preloaded(each) == "default"
    ]
    return key, ":".join([*([SONAMES[value]] if value in SONAMES else []), *others])


_SINGLE: dict[str, Callable[[Config, Any], tuple[str, Any]]] = {
    "concurrency": _set(f"{ROLLOUT}.max_num_seqs"),
    "memory_fraction": _set(f"{ROLLOUT}.gpu_memory_utilization"),
    "rollout_tensor_parallel": _set(f"{ROLLOUT}.tensor_model_parallel_size"),
    "max_batched_tokens": lambda config, value: (prefill(config), value),
    "max_model_len": _set(f"{ROLLOUT}.max_model_len"),
    "dynamic_batching": _set(f"{ACTOR}.use_dynamic_bsz"),
    "fused_kernels": _set(f"{MODEL}.use_fused_kernels"),
    "entropy_chunking": _set(f"{ACTOR}.entropy_from_logits_with_chunking"),
    "entropy_recompute": _set(f"{ACTOR}.entropy_checkpointing"),
    "sync_buffer": lambda config, value: (
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        value >> 20,
    ),
    "host_allocator": _write_allocator,
    "dataloader_workers": _set("data.dataloader_num_workers"),
}
# Done by the actor and by the critic, each under its own node.
_EACH = {
    "activation_offload": "model.enable_activation_offload",
    "param_offload": "param_offload",
    "grad_offload": "offload_policy",
    "optimizer_offload": "optimizer_offload",
    "tensor_parallel": "tensor_model_parallel_size",
}
_SIZES = {
    "tokens_per_microbatch",
    "logprob_tokens",
    "microbatch_size",
    "dynamic_batching",
    "sequence_parallel",
    "context_parallel",
}


def _write_recompute(config: Config, mode: str) -> Found:
    if not config.megatron:
        return dict.fromkeys(_both(config, "model.enable_gradient_checkpointing"), mode == "full")
    result: Found = {}
    for node in _nodes(config):
        result[f"{node}.{_RECOMPUTE}_granularity"] = None if mode == "off" else mode
        result[f"{node}.{_RECOMPUTE}_method"] = "uniform" if mode == "full" else None
        result[f"{node}.{_RECOMPUTE}_num_layers"] = 1 if mode == "full" else None
    return result


def _write_graphs(config: Config, mode: str) -> Found:
    result: Found = {f"{ROLLOUT}.enforce_eager": mode == "off"}
    if mode != "off" and config.rollout == "sglang":
        result[f"{_SGLANG}.cuda_graph_max_bs"] = LARGEST_LIMITED_BATCH if mode == "limited" else None
    elif mode != "off":
        result[f"{ROLLOUT}.cudagraph_capture_sizes"] = list(LIMITED_BATCHES) if mode == "limited" else None
    return result


def _write_cpu_adam(after: Knobs) -> Found:
    """Return the group that Megatron takes only together."""
    fraction = after.optimizer_offload_fraction or 0.0
    return {
        f"{_CPU_ADAM}.optimizer_cpu_offload": fraction > 0,
        f"{_CPU_ADAM}.optimizer_offload_fraction": fraction,
        f"{_CPU_ADAM}.use_precision_aware_optimizer": fraction > 0,
        f"{_CPU_ADAM}.overlap_cpu_optimizer_d2h_h2d": bool(after.optimizer_offload_overlap),
    }


def _write_snapshot(wanted: bool) -> Found:
    return {
        "global_profiler.tool": SNAPSHOT_TOOL if wanted else None,
        f"{ACTOR}.profiler.enable": wanted,
        f"{ACTOR}.profiler.all_ranks": wanted,
    }


def _write_sizes(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the budgets of actor, reference and critic, each under the key that verl reads for it."""
    split = after.sequence_parallel or after.context_parallel or 1
    result: Found = {}
    if split != config.parallel:
        result |= dict.fromkeys(
            [names(config).sequence, *config.of_critic(names(config).critic_sequence)], split
        )
    if after.dynamic_batching:
        result |= _write_tokens(config, before, after, split)
    elif after.microbatch_size and after.microbatch_size != before.microbatch_size:
        result[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] = after.microbatch_size
        share = after.microbatch_size / (before.microbatch_size or after.microbatch_size)
        scored = [ROLLOUT, *([REF] if config.reference else [])]
        for key in (f"{node}.log_prob_micro_batch_size_per_gpu" for node in scored):
            if config.count(key):
                result[key] = _divisor(config.count(key), share)
    if config.critic:
        result |= _write_critic(config, before, after, split)
    return result


def _write_tokens(config: Config, before: Knobs, after: Knobs, split: int) -> Found:
    actor, scoring = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
    tokens = after.tokens_per_microbatch or config.count(actor) * split
    scored = after.logprob_tokens or tokens
    limit = {actor: -(-tokens // split), scoring: -(-scored // split)}
    if config.reference:
        reference = f"{REF}.log_prob_max_token_len_per_gpu"
        own = config.count(reference) * config.parallel
        share = scored / before.logprob_tokens if before.logprob_tokens else 1.0
        limit[reference] = -(-(max(config.longest, round(own * share)) if share < 1 else own) // split)
    return limit


def _write_critic(config: Config, before: Knobs, after: Knobs, split: int) -> Found:
    """Return the critic's budget, cut as much as the actor's or the scoring budget is."""
    pairs = [
        (getattr(before, knob), getattr(after, knob))
        for knob in ("tokens_per_microbatch", "logprob_tokens", "microbatch_size")
    ]
    share = min((new / old for old, new in pairs if old and new), default=1.0)
    own = critic_tokens(config)
    if split == config.parallel:
        split = max(1, config.count(names(config).critic_sequence))
    tokens = own if share >= 1 else min(own, max(config.longest, math.floor(own * share)))
    result = {"critic.ppo_infer_max_token_len_per_gpu": -(-tokens // split)}
    if not config.flag("trainer.use_v1"):
        training = "critic.ppo_max_token_len_per_gpu"
        result[training] = min(config.count(training), -(-tokens // split))
    return result


def _divisor(number: int, share: float) -> int:
    """Return the largest divisor of `number` that is at most `share` of it."""
    return max((n for n in range(1, number + 1) if number % n == 0 and n <= number * share), default=1)
