"""What verl offers of the knobs, within which limits, and why not the rest."""

from __future__ import annotations

from functools import cache

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.data import table
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.frameworks.verl.config import ACTOR, ENV_VARS, MEGATRON, MODEL, ROLLOUT, Config
from autotune.launchers.frameworks.verl.knobs import names, prefill, requests
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import (
    AtLeast,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

_TOKEN_STEP = 64  # a multiple of every size of sequence parallelism in use
_SWITCH = Grid(values=(False, True))
_MEBI = 1 << 20
_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_LARGEST_PREFILL = 8192  # tokens: SGLang 0.5.12 chooses its chunks by card, up to this on 80 GB


@cache
def _never() -> dict[str, dict[str, str]]:
    """Return the knobs that no job of a model engine offers, with the reasons."""
    return table(__package__, "unsupported.yaml", dict[str, str])


def offered(config: Config, shape: Model | None) -> dict[str, Support]:
    """Return the knobs that mean something for a job, under the key that a change writes."""
    result = {
        "memory_fraction": _support(
            config, f"{ROLLOUT}.gpu_memory_utilization", Grid(minimum=0.1, maximum=0.95, multiple=0.01)
        ),
        "concurrency": _support(
            config, f"{ROLLOUT}.max_num_seqs", Grid(minimum=1, maximum=requests(config), multiple=1)
        ),
        "rollout_tensor_parallel": _support(
            config, f"{ROLLOUT}.tensor_model_parallel_size", Grid(values=rollout_sizes(config, shape))
        ),
        "recompute": _support(config, *_recompute(config)),
        "param_offload": _support(
            config, f"{names(config).actor}.param_offload", _SWITCH, phases=_parked(config, Phase.LOG_PROB)
        ),
        "optimizer_offload": _support(
            config, f"{names(config).actor}.optimizer_offload", _SWITCH, phases=_parked(config)
        ),
        "fused_kernels": _support(config, f"{MODEL}.use_fused_kernels", _SWITCH, effect=Effect.NUMERIC),
        "entropy_chunking": _support(
            config,
            f"{ACTOR}.entropy_from_logits_with_chunking",
            _SWITCH,
            phases=() if config.entropy else (Phase.LOG_PROB, Phase.NONE),
        ),
        "sync_buffer": _support(
            config,
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
            Grid(minimum=64 * _MEBI, multiple=_MEBI),
        ),
        "dynamic_batching": _support(
            config,
            f"{ACTOR}.use_dynamic_bsz",
            Grid(values=(True,) if config.dynamic or not _has_budget(config) else (False, True)),
        ),
        "host_allocator": _support(
            config, f"{ENV_VARS}.LD_PRELOAD", Grid(values=("default", *SONAMES)), effect=Effect.EXACT
        ),
        "dataloader_workers": _support(
            config, "data.dataloader_num_workers", Grid(minimum=0, maximum=64, multiple=1)
        ),
        "memory_snapshot": _support(config, "global_profiler.tool", _SWITCH),
    }
    result |= (
        _engine(config) | _passes(config) | (_megatron(config, shape) if config.megatron else _fsdp(config))
    )
    if not config.megatron:
        sizes = sequence_sizes(config, shape)
        result["sequence_parallel"] = _support(config, names(config).sequence, Grid(values=sizes))
    refused = declined(config)
    return {knob: support for knob, support in result.items() if knob not in refused}


def declined(config: Config) -> dict[str, str]:
    """Return the knobs that verl does not offer for a job, each with the reason."""
    own = _never()["megatron"] if config.megatron else _without_megatron(config)
    return {**_never()["any"], **_of_engine(config), **_of_passes(config), **own}


def _of_engine(config: Config) -> dict[str, str]:
    result = {}
    if config.rollout != "vllm":
        result["max_model_len"] = "verl passes it to vLLM only, and SGLang does not plan its pool by it"
    if config.rollout not in ("vllm", "sglang"):
        result["cuda_graphs"] = result["max_batched_tokens"] = (
            f"{config.rollout or 'no engine'} does not take it"
        )
    elif config.rollout == "vllm" and not config.flag(f"{ROLLOUT}.enable_chunked_prefill"):
        result["max_batched_tokens"] = "without chunked prefill verl raises it to the longest sequence"
    return result


def _of_passes(config: Config) -> dict[str, str]:
    result = {}
    if config.dynamic:
        result["microbatch_size"] = "actor.use_dynamic_bsz fills micro-batches up to a number of tokens"
    else:
        for knob in ("tokens_per_microbatch", "logprob_tokens"):
            result[knob] = "micro-batches are counted in sequences while actor.use_dynamic_bsz is off"
        if not config.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu"):
            result["microbatch_size"] = "the job names none"
    if config.flag(f"{ACTOR}.calculate_sum_pi_squared"):
        result["fused_kernels"] = "actor.calculate_sum_pi_squared needs the full logits"
    if not config.flag(f"{MODEL}.use_remove_padding"):
        result["fused_kernels"] = "fused kernels need model.use_remove_padding"
    if config.flag(f"{MODEL}.use_fused_kernels"):
        result["entropy_chunking"] = "fused kernels never hold the full logits"
    return result


def _without_megatron(config: Config) -> dict[str, str]:
    result = dict(_never()["fsdp"])
    if not config.entropy:
        result["entropy_recompute"] = "the update computes no entropy"
    if config.text(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        result["activation_offload"] = f"{ACTOR}.strategy is neither fsdp nor fsdp2"
        result["sharding"] = result["grad_offload"] = result["activation_offload"]
    if config.flag(f"{ACTOR}.fsdp_config.offload_policy"):
        for knob in ("param_offload", "optimizer_offload"):
            result[knob] = "fsdp_config.offload_policy keeps everything in host memory already"
    if not config.flag(f"{MODEL}.use_remove_padding"):
        result["sequence_parallel"] = "Ulysses needs model.use_remove_padding"
    return result


def constraints(config: Config, shape: Model | None) -> tuple[Constraint, ...]:
    """Return what binds the knobs beyond their grids."""
    result: list[Constraint] = []
    lengths = f"data.max_prompt_length + data.max_response_length = {config.longest}"
    result += [
        AtLeast(knob=knob, value=config.longest, why=f"{why}: {lengths}")
        for knob, why in (
            ("tokens_per_microbatch", "a micro-batch holds the longest sequence"),
            ("logprob_tokens", "a scoring pass holds the longest sequence"),
            ("max_model_len", "the engine takes the longest sequence"),
        )
    ]
    if config.rollout == "vllm":
        result.append(
            AtLeast(
                knob="max_batched_tokens",
                value=config.count(f"{ROLLOUT}.max_num_seqs"),
                why="vLLM takes at least one token of each of its max_num_seqs requests",
            )
        )
    split = names(config).sequence
    knob = "context_parallel" if config.megatron else "sequence_parallel"
    model = config.ranks(MEGATRON, "pipeline_model") if config.megatron else 1
    result.append(
        Divides(knob=knob, of=config.world // model or 1, why=f"{split} divides the trainer's GPUs")
    )
    result.append(
        Divides(
            knob="rollout_tensor_parallel",
            of=config.rollout_world,
            why=f"{ROLLOUT}.tensor_model_parallel_size divides the engines' GPUs",
        )
    )
    if shape is not None:
        result.append(
            Divides(knob="rollout_tensor_parallel", of=shape.heads, why="it divides the attention heads")
        )
        if not config.megatron:
            result.append(
                Divides(
                    knob="sequence_parallel",
                    of=shape.heads,
                    why=f"Ulysses divides the model's {shape.heads} attention heads",
                )
            )
    if not config.dynamic and config.mini_batch:
        result.append(
            Divides(
                knob="microbatch_size",
                of=config.mini_batch,
                why=f"it divides the {config.mini_batch} sequences of a mini-batch on one rank",
            )
        )
    return (*result, *_together(config, shape), *_fixed(config))


def rollout_sizes(config: Config, shape: Model | None) -> tuple[int, ...]:
    """Return the legal sizes of the engines' tensor parallelism."""
    others = config.engine_ranks // max(1, config.count(f"{ROLLOUT}.tensor_model_parallel_size"))
    sizes = [n for n in splits.divisors(config.rollout_world) if config.rollout_world % (n * others) == 0]
    return splits.head_sizes(sizes, shape)


def sequence_sizes(config: Config, shape: Model | None) -> tuple[int, ...]:
    """Return the legal sizes of Ulysses: it splits heads and shares key-value heads evenly."""
    return splits.head_sizes(splits.divisors(config.world), shape)


def _together(config: Config, shape: Model | None) -> list[Constraint]:
    if config.megatron:
        why = "its copies overlap only where a part of the optimizer is on the CPU"
        return [
            *splits.together(
                _megatron(config, shape),
                "context_parallel",
                devices=config.world // config.ranks(MEGATRON, "pipeline_model"),
                why=f"tensor x context parallelism divides the trainer's {config.world} GPUs",
            ),
            Requires(
                knob="optimizer_offload_overlap",
                value=True,
                other="optimizer_offload_fraction",
                values=tuple(reversed(_FRACTIONS[1:])),
                why=why,
            ),
        ]
    why = "fsdp_config.offload_policy is FSDP2's"
    result: list[Constraint] = [
        Requires(knob="grad_offload", value=True, other="sharding", values=("fsdp2",), why=why)
    ]
    return result


def _fixed(config: Config) -> list[Constraint]:
    reasons = {
        "dataloader_workers": "the data loader's saved state is of its number of workers and refuses another"
    }
    if config.megatron:
        reasons["tensor_parallel"] = reasons["context_parallel"] = "a checkpoint is of its parallelism"
        reasons["optimizer_offload_fraction"] = "a checkpoint holds the optimizer's state in this layout"
        reasons["optimizer_offload_overlap"] = reasons["optimizer_offload_fraction"]
    else:
        reasons["sharding"] = "FSDP1 and FSDP2 write different checkpoints"
    return [FixedDuringRun(knob=knob, why=why) for knob, why in reasons.items()]


def _engine(config: Config) -> dict[str, Support]:
    vllm = config.rollout == "vllm"
    return {
        "cuda_graphs": _support(
            config, f"{ROLLOUT}.enforce_eager", Grid(values=("full", "limited", "off")), effect=Effect.EXACT
        ),
        "max_batched_tokens": _support(
            config,
            prefill(config),
            Grid(minimum=256, maximum=None if vllm else _LARGEST_PREFILL, multiple=64),
        ),
        "max_model_len": _support(config, f"{ROLLOUT}.max_model_len", Grid(minimum=1, multiple=1)),
    }


def _passes(config: Config) -> dict[str, Support]:
    tokens = Grid(minimum=_TOKEN_STEP, multiple=_TOKEN_STEP)
    # The scoring passes have a budget of their own; a critic's follows the smaller of the two.
    training = tuple(phase for phase in Phase if phase is not Phase.LOG_PROB)
    sizes = tuple(reversed(splits.divisors(config.mini_batch))) if config.mini_batch else (1,)
    return {
        "tokens_per_microbatch": _support(
            config,
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            tokens,
            phases=() if config.critic else training,
        ),
        "logprob_tokens": _support(config, f"{ROLLOUT}.log_prob_max_token_len_per_gpu", tokens),
        "microbatch_size": _support(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu", Grid(values=sizes)),
    }


def _fsdp(config: Config) -> dict[str, Support]:
    return {
        "activation_offload": _support(config, f"{MODEL}.enable_activation_offload", _SWITCH),
        "grad_offload": _support(
            config, f"{ACTOR}.fsdp_config.offload_policy", _SWITCH, effect=Effect.NUMERIC
        ),
        "sharding": _support(config, f"{ACTOR}.strategy", Grid(values=("fsdp", "fsdp2"))),
        "entropy_recompute": _support(config, f"{ACTOR}.entropy_checkpointing", _SWITCH),
    }


def _megatron(config: Config, shape: Model | None) -> dict[str, Support]:
    stage, tensor = (
        config.world // config.ranks(MEGATRON, "pipeline_model"),
        config.ranks(MEGATRON, "tensor_model"),
    )
    groups = splits.divisors(stage)
    tensors = [
        n
        for n in groups
        if stage % (n * config.parallel) == 0
        and (shape is None or (shape.heads % n == 0 and shape.kv_heads % n == 0))
    ]
    contexts = [n for n in groups if stage % (n * tensor) == 0]
    fraction = f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction"
    overlap = f"{ACTOR}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d"
    return {
        "tensor_parallel": _support(
            config, f"{names(config).actor}.tensor_model_parallel_size", Grid(values=tuple(tensors))
        ),
        "context_parallel": _support(config, names(config).sequence, Grid(values=tuple(contexts))),
        "optimizer_offload_fraction": _support(
            config, fraction, Grid(values=_FRACTIONS), effect=Effect.NUMERIC
        ),
        "optimizer_offload_overlap": _support(config, overlap, _SWITCH, effect=Effect.NUMERIC),
    }


def _recompute(config: Config) -> tuple[str, Grid]:
    if config.megatron:
        key = f"{names(config).actor}.override_transformer_config.recompute_granularity"
        return key, Grid(values=("off", "selective", "full"))
    return f"{MODEL}.enable_gradient_checkpointing", Grid(values=("off", "full"))


def _has_budget(config: Config) -> bool:
    """Return whether the token limit that dynamic batching would use holds the longest sequence."""
    return config.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * config.parallel >= config.longest


def _parked(config: Config, *used: Phase) -> tuple[Phase, ...]:
    """Return the phases in which offloaded state is off the card: verl loads it back whole for an update.

    Another model's state stays away meanwhile, so with a critic every phase gains. `used`: phases that
    load it, unless a reference or critic takes its turn there.
    """
    if config.critic:
        return ()
    busy = {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT if used else Phase.OPTIMIZER}
    busy |= set() if config.reference else set(used)
    return tuple(phase for phase in Phase if phase not in busy)


def _support(
    config: Config,
    key: str,
    grid: Grid,
    *,
    effect: Effect = Effect.EXACT,
    phases: tuple[Phase, ...] = (),
) -> Support:
    return Support(setting=config.key(key), grid=grid, effect=effect, phases=phases)
