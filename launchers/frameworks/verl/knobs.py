"""Reads and writes the knobs of verl that involve several settings."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import host_allocators, transformer
from autotune.launchers.frameworks.core.engines import LARGEST_LIMITED_BATCH, LIMITED_BATCHES
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.frameworks.core.splits import divisors
from autotune.launchers.frameworks.verl.config import ACTOR, CRITIC_UPDATE, REF, ROLLOUT, TRANSFORMER, Config
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import Knobs

_CRITIC_TRANSFORMER = "critic.megatron.override_transformer_config"
SNAPSHOT_TOOL = "torch_memory"
LD_PRELOAD = "ray_kwargs.ray_init.runtime_env.env_vars.LD_PRELOAD"
# Concurrent requests if max_num_seqs is null (vLLM, engine/arg_utils.py, get_batch_defaults): more on GPUs of
# at least 70 GiB other than A100. For an unnamed GPU the smaller number counts.
_REQUESTS, _REQUESTS_OF_LARGE, _LARGE_BYTES = 256, 1024, 70 << 30
_CPU_ADAM = f"{ACTOR}.optim.override_optimizer_config"
_TRAINING = f"{ACTOR}.ppo_max_token_len_per_gpu"
_CRITIC_VALUES = "critic.forward_max_token_len_per_gpu"  # of the older workers; it follows that of the update
_BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
_SCORING = "log_prob_max_token_len_per_gpu"

Found = dict[str, Any]


def requests(config: Config) -> int | None:
    """Return the requests of one step per engine; None if there are other requests."""
    validates = config.flag("trainer.val_before_train") or config.count("trainer.test_freq") > 0
    if validates or config.text("trainer.v1.trainer_mode") != "sync" or not config.sequences:
        return None
    replicas = max(1, config.rollout_world // config.engine_ranks)
    return max(1, -(-config.sequences // replicas))


def critic_tokens(config: Config) -> int:
    """Return the critic's tokens per micro-batch; its trainer has one limit for values and update."""
    return config.count(config.critic_tokens_key) * max(1, config.count(config.critic_split_key))


def scored(config: Config, name: str) -> list[str]:
    """Return a setting of log-prob computation: the actor's and, if one is loaded, the reference's."""
    return [f"{node}.{name}" for node in (ROLLOUT, *([REF] if config.reference else []))]


def concurrency(config: Config) -> int:
    """Return the concurrent requests of an engine; validation sends all its prompts at once."""
    card = config.cluster
    is_large = (card.gpu_memory_bytes or 0) >= _LARGE_BYTES and card.gpu and "a100" not in card.gpu.lower()
    most = config.most_requests or (_REQUESTS_OF_LARGE if is_large else _REQUESTS)
    asked = requests(config)
    return most if asked is None else min(most, asked)


def sends_single_tensors(config: Config) -> bool:
    """Return whether a weight sync has no buckets; in the release with their older name only SGLang's has."""
    return config.engine == "vllm" and config.named(_BUCKET) != _BUCKET


def sync_buffer(config: Config) -> int:
    """Return the bytes of a weight-sync bucket; 0 if there is none."""
    return 0 if sends_single_tensors(config) else config.count(_BUCKET) << 20


def host_allocator(config: Config) -> str:
    """Return the workers' host memory allocator."""
    return host_allocators.preloaded(config.text(LD_PRELOAD))


def _graph_sizes(config: Config) -> str:
    if config.engine == "sglang":
        return f"{ROLLOUT}.engine_kwargs.sglang.cuda_graph_max_bs"
    return f"{ROLLOUT}.cudagraph_capture_sizes"


def cuda_graphs(config: Config) -> str:
    """Return the mode of CUDA graphs."""
    if config.flag(f"{ROLLOUT}.enforce_eager"):
        return "off"
    return "full" if config.get(_graph_sizes(config)) is None else "limited"


def write_cuda_graphs(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of a mode of CUDA graphs."""
    result: Found = {f"{ROLLOUT}.enforce_eager": after.cuda_graphs == "off"}
    if after.cuda_graphs != "off":
        sizes = LARGEST_LIMITED_BATCH if config.engine == "sglang" else list(LIMITED_BATCHES)
        result[_graph_sizes(config)] = sizes if after.cuda_graphs == "limited" else None
    return result


def recompute(config: Config) -> str:
    """Return the mode of recomputation with Megatron, the weaker of actor and critic."""
    modes = [transformer.recompute(config.inside(node).get, config.shape) for node in _transformers(config)]
    return min(modes, key=KNOB_TABLE["recompute"].modes.index)


def write_recompute(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of a mode of recomputation with Megatron."""
    modules = transformer.modules(config.field, config.shape)
    fields = transformer.recomputing(before.recompute, after.recompute, modules)
    return {f"{node}.{name}": value for node in _transformers(config) for name, value in fields.items()}


def write_activations(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of activation offload with Megatron."""
    fields: Found = {"fine_grained_activation_offloading": bool(after.activation_offload)}
    variable: Found = {}
    if after.activation_offload:
        modules = transformer.offloaded(config.field, config.shape, tensor=after.tensor_parallel or 1)
        fields["offload_modules"] = list(modules)
        variable = {f"ray_kwargs.ray_init.runtime_env.env_vars.{transformer.OFFLOAD_VARIABLE}": "1"}
    return {
        f"{node}.{name}": value for node in _transformers(config) for name, value in fields.items()
    } | variable


def _transformers(config: Config) -> tuple[str, ...]:
    return (TRANSFORMER, _CRITIC_TRANSFORMER) if config.critic else (TRANSFORMER,)


def write_engine_sleep(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of engine sleep; vLLM has a second switch, which is on by default."""
    result: Found = {f"{ROLLOUT}.free_cache_engine": after.engine_sleep}
    mode = f"{ROLLOUT}.enable_sleep_mode"
    if after.engine_sleep and config.engine == "vllm" and not config.flag(mode):
        result[mode] = True
    return result


def write_host_allocator(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the workers' LD_PRELOAD with another allocator."""
    own = SONAMES.get(str(after.host_allocator), "")
    others = (
        each for each in config.text(LD_PRELOAD).split(":") if host_allocators.preloaded(each) == "default"
    )
    return {LD_PRELOAD: ":".join(each for each in (own, *others) if each)}


def write_cpu_adam(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of Megatron's CPU optimizer, which are valid only together."""
    fraction = after.optimizer_offload_fraction or 0.0
    return {
        f"{_CPU_ADAM}.optimizer_cpu_offload": fraction > 0,
        f"{_CPU_ADAM}.optimizer_offload_fraction": fraction,
        f"{_CPU_ADAM}.use_precision_aware_optimizer": fraction > 0,
        f"{_CPU_ADAM}.overlap_cpu_optimizer_d2h_h2d": bool(after.optimizer_offload_overlap),
    }


def snapshot(config: Config) -> bool:
    """Return whether memory snapshots are recorded."""
    return config.text("global_profiler.tool") == SNAPSHOT_TOOL and config.flag(f"{ACTOR}.profiler.enable")


def write_snapshot(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the settings of memory snapshots."""
    wanted = bool(after.memory_snapshot)
    switches = (f"{ACTOR}.profiler.enable", f"{ACTOR}.profiler.all_ranks")
    return {"global_profiler.tool": SNAPSHOT_TOOL if wanted else None, **dict.fromkeys(switches, wanted)}


def write_passes(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the micro-batch sizes of actor, reference and critic, under the keys that verl reads."""
    split = after.sequence_parallel or after.context_parallel or 1
    result: Found = {f"{ACTOR}.use_dynamic_bsz": after.dynamic_batching}
    if split != config.parallel:
        result[config.split_key] = split
        if config.critic:
            result[config.critic_split_key] = split
    if after.dynamic_batching:
        result |= _tokens(config, before, after, split)
    elif after.microbatch_size and after.microbatch_size != before.microbatch_size:
        result[f"{ACTOR}.ppo_micro_batch_size_per_gpu"] = after.microbatch_size
        share = after.microbatch_size / (before.microbatch_size or after.microbatch_size)
        for key in scored(config, "log_prob_micro_batch_size_per_gpu"):
            if size := config.count(key):
                result[key] = max((n for n in divisors(size) if n <= size * share), default=1)
    if config.critic:
        result |= _critic_tokens(config, before, after, split)
    ranks = config.data_parallel * config.parallel // split
    return dict(_of_all(config, key, size, ranks) for key, size in result.items())


def _of_all(config: Config, key: str, size: Any, ranks: int) -> tuple[str, Any]:
    """Return a micro-batch size under the name that the job uses: per GPU, or over all GPUs."""
    return (key.removesuffix("_per_gpu"), size * ranks) if config.counts_all(key) else (key, size)


def _tokens(config: Config, before: Knobs, after: Knobs, split: int) -> Found:
    """Return the token limits per GPU; verl multiplies them by the ranks that share a sequence."""
    tokens = after.tokens_per_microbatch or config.count(_TRAINING) * split
    scoring = after.logprob_tokens or tokens
    limits = {_TRAINING: tokens, f"{ROLLOUT}.{_SCORING}": scoring}
    if config.reference:
        own = config.count(f"{REF}.{_SCORING}") * config.parallel
        share = scoring / before.logprob_tokens if before.logprob_tokens else 1.0
        limits[f"{REF}.{_SCORING}"] = max(config.longest, round(own * share)) if share < 1 else own
    return {key: -(-limit // split) for key, limit in limits.items()}


def _critic_tokens(config: Config, before: Knobs, after: Knobs, split: int) -> Found:
    """Return the critic's token budget, reduced by the same factor as the actor's or the log-prob budget."""
    sizes = ("tokens_per_microbatch", "logprob_tokens", "microbatch_size")
    pairs = [(getattr(before, knob), getattr(after, knob)) for knob in sizes]
    share = min((new / old for old, new in pairs if old and new), default=1.0)
    own = critic_tokens(config)
    if split == config.parallel:
        split = max(1, config.count(config.critic_split_key))
    tokens = own if share >= 1 else min(own, max(config.longest, int(own * share)))
    limit = -(-tokens // split)
    also = [] if config.flag("trainer.use_v1") else [CRITIC_UPDATE]
    also += [key for key in (_CRITIC_VALUES,) if config.older_workers and config.has(key)]
    return {key: min(config.count(key), limit) for key in also} | {config.critic_tokens_key: limit}
