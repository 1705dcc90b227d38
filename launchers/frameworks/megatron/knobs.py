"""What the data files name: the jobs in which a row holds, and knobs of more than one flag."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from autotune.launchers.frameworks.core import host_allocators
from autotune.launchers.frameworks.core.cuda_graphs import LARGEST_LIMITED_BATCH
from autotune.launchers.frameworks.core.sglang_defaults import auto_fraction, tier
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.tabular.rows import Reader, Writer
from autotune.policies.values.knobs import Knobs

_ENVIRONMENT = "train-env-vars"
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_ENGINES = ("debug-train-only", "load-debug-rollout-data", "rollout-external-engine-addrs")
_OFFLOADED = "optimizer-cpu-offload"
_PRECISE = "use-precision-aware-optimizer"

# The predicates that the shared rows name; those of one framework stand in its adapter.
WHEN: dict[str, Callable[[Config], bool]] = {
    "packs_by_tokens": lambda config: config.dynamic,
    "counts_sequences": lambda config: not config.dynamic,
    "pads": lambda config: config.text("qkv-format") == "bshd",
    "packs_what_is_padded": lambda config: config.dynamic and config.text("qkv-format") == "bshd",
    "packs_without_a_budget": lambda config: config.dynamic and not config.budget,
    "optimizer_is_not_adam": lambda config: (
        config.text("optimizer") != "adam" or config.flag("use-stateless-adam")
    ),
    "offloads_imprecisely": lambda config: config.flag(_OFFLOADED) and not config.flag(_PRECISE),
    "overlaps_nothing": lambda config: (
        config.flag("overlap-cpu-optimizer-d2h-h2d") and not config.flag(_OFFLOADED)
    ),
    "devices_are_apart": lambda config: not config.colocated,
    "trains_a_critic": lambda config: config.critic,
    "trainer_sleeps": lambda config: config.sleeps("train"),
    "trainer_stays": lambda config: not config.sleeps("train"),
    "engine_stays": lambda config: config.colocated and not config.sleeps("rollout"),
    "recomputes_without_a_method": lambda config: (
        config.text("recompute-granularity") == "full"
        and not (config.has("recompute-method") and config.has("recompute-num-layers"))
    ),
    "selects_with_a_method": lambda config: (
        config.text("recompute-granularity") == "selective" and config.has("recompute-method")
    ),
    "splits_unevenly": lambda config: config.trainer_gpus % config.split != 0,
    "splits_heads_unevenly": lambda config: config.heads % config.tensor != 0,
    "splits_kv_heads_unevenly": lambda config: config.kv_heads % config.tensor != 0,
    "leaves_engines_unfilled": lambda config: config.engine_gpus % config.engine_size != 0,
    "has_no_engines": lambda config: not config.engine_gpus and not any(map(config.flag, _NO_ENGINES)),
    "wants_more_cards": lambda config: not config.has("resource") and _is_short(config),
    "roles_want_more_cards": lambda config: config.has("resource") and _is_short(config),
    "has_no_end": lambda config: not config.has("num-rollout") and not config.has("num-epoch"),
    "penalises_twice": lambda config: bool(config.share("kl-coef") and config.share("kl-loss-coef")),
    "syncs_to_no_folder": lambda config: (
        config.text("update-weight-transport") == "disk" and not config.has("update-weight-disk-dir")
    ),
    "records_no_steps": lambda config: (
        config.text("memory-recorder") == "memray" and not config.has("memory-snapshot-num-steps")
    ),
    "is_another_trainer": lambda config: config.text("train-backend") != "megatron",
    "transfers_to_itself": lambda config: (
        config.text("update-weight-transfer-mode") != "broadcast" and config.flag("colocate")
    ),
    "is_apart_and_shared": lambda config: (
        config.flag("fully-async") and config.flag("colocate") and "hybrid" not in config.dialect.names
    ),
    "shares_in_train_async": lambda config: config.flag("colocate") and config.runs("train_async"),
    "never_saves": lambda config: not config.saves,
    "saves_apart": lambda config: config.saves and not config.continues,
    "starts_from_others": lambda config: config.saves and bool(config.start) and not config.job.resume,
    "relaunches_from_the_model": lambda config: _relaunches(config, bridge=True),
    "relaunches_from_the_reference": lambda config: config.reference and _relaunches(config, bridge=False),
    "saves_in_the_background": lambda config: config.saves and config.flag("async-save"),
    "saves_no_optimizer": lambda config: config.saves and config.flag("no-save-optim"),
    "hides_flags": lambda config: any(word.startswith("--") for word in config.job.command),
    "balances_by_work": lambda config: config.flag("balance-by-flops"),
    "bounds_no_sequence": lambda config: config.longest is None,
}


def _is_short(config: Config) -> bool:
    return config.offered is not None and config.wanted > config.offered


def _relaunches(config: Config, *, bridge: bool) -> bool:
    is_bridge = config.text("megatron-to-hf-mode") == "bridge"
    return WHEN["starts_from_others"](config) and is_bridge is bridge


# --------------------------------------------------------------------------- from flags


def _chunk(config: Config) -> int:
    default = tier(config.job.cluster.gpu_memory_bytes or 0).chunk
    written = config.flags.count("sglang-chunked-prefill-size", default)
    return written if written > 0 else config.count("sglang-max-prefill-tokens")


def _fraction(config: Config) -> float:
    return config.share("sglang-mem-fraction-static") or auto_fraction(
        config.job.cluster.gpu_memory_bytes or 0,
        tensor_parallel=config.engine_size,
        chunk=_chunk(config),
        graph=config.count(config.dialect.graph_limit) or None,
    )


def _requests(config: Config) -> int:
    limits = ("sglang-server-concurrency", "sglang-max-running-requests")
    return max(1, min(config.most_requests, *map(config.count, limits)))


def _graphs(config: Config) -> str:
    if config.flag("sglang-disable-cuda-graph"):
        return "off"
    return "limited" if _small_graphs(config) else "full"


def _small_graphs(config: Config) -> int:
    limit = config.count(config.dialect.graph_limit)
    return limit if 0 < limit <= LARGEST_LIMITED_BATCH else 0


def _recompute(config: Config) -> str:
    granularity = config.text("recompute-granularity")
    if not granularity:
        return "selective" if config.flag("recompute-activations") else "off"
    if granularity == "full" and config.text("recompute-method") == "block":
        # In `block` the number counts the recomputed layers of a stage: below all of them something is left.
        layers = config.layers // config.pipeline
        return "full" if not layers or config.count("recompute-num-layers") >= layers else "selective"
    return granularity


def _allocator(config: Config) -> str:
    environment = config.flags.document(_ENVIRONMENT)
    said = any("expandable_segments:True" in str(environment.get(name, "")) for name in _ALLOCATORS)
    own = config.dialect.expandable.items()
    return "expandable" if said or all(str(environment.get(k, "")) == v for k, v in own) else "default"


READERS: dict[str, Reader] = {
    "requests": _requests,
    "fraction": _fraction,
    "engine_size": lambda config: config.engine_size,
    "graphs": _graphs,
    "chunk": _chunk,
    "budget": lambda config: (config.budget or None) if config.dynamic else None,
    "sequences": lambda config: None if config.dynamic else config.count("micro-batch-size"),
    "recompute": _recompute,
    "sleeps": lambda config: config.sleeps("train"),
    "context": lambda config: config.context,
    "tensor": lambda config: config.tensor,
    "chunks": lambda config: max(0, config.count("log-probs-chunk-size")) or None,
    "host_allocator": lambda config: host_allocators.preloaded(
        str(config.flags.document(_ENVIRONMENT).get("LD_PRELOAD", ""))
    ),
    "allocator": _allocator,
    "profiles": lambda config: all(map(config.flag, config.dialect.profile_flags)),
}


# --------------------------------------------------------------------------- back to flags

Found = dict[str, Any]


def _write_requests(config: Config, _: Knobs, after: Knobs) -> Found:
    value, client = after.concurrency or 0, "sglang-server-concurrency"
    return {"sglang-max-running-requests": value, **({client: value} if value > config.count(client) else {})}


def _write_graphs(config: Config, _: Knobs, after: Knobs) -> Found:
    off, limit, small = "sglang-disable-cuda-graph", config.dialect.graph_limit, _small_graphs(config)
    if after.cuda_graphs == "full":
        return {off: False, **({limit: None} if small else {})}
    return {off: False, limit: small or LARGEST_LIMITED_BATCH} if after.cuda_graphs == "limited" else {off: True}


def _write_tokens(config: Config, _: Knobs, after: Knobs) -> Found:
    switch = {} if config.dynamic else {"use-dynamic-batch-size": True}
    return {"max-tokens-per-gpu": after.tokens_per_microbatch, **switch}


def _write_packing(config: Config, _: Knobs, after: Knobs) -> Found:
    tokens = config.budget or config.count("micro-batch-size") * config.floor
    packs = bool(after.dynamic_batching)
    return {"use-dynamic-batch-size": packs, "max-tokens-per-gpu": tokens if packs else None}


def _write_recompute(config: Config, _: Knobs, after: Knobs) -> Found:
    kinds = ("granularity", "method", "num-layers", "modules")
    off: Found = {"recompute-activations": False, **dict.fromkeys(f"recompute-{kind}" for kind in kinds)}
    match after.recompute:
        case "full":
            full = {"recompute-method": "uniform", "recompute-num-layers": 1}
            return off | {"recompute-granularity": "full"} | full
        case "selective":
            modules = config.flags.given.get("recompute-modules")
            return off | {"recompute-granularity": "selective", "recompute-modules": modules}
        case _:
            return off | {"distribute-saved-activations": False}


def _write_optimizer(_: Config, __: Knobs, after: Knobs) -> Found:
    if not after.optimizer_offload:
        return {_OFFLOADED: False, "overlap-cpu-optimizer-d2h-h2d": False}
    return {_OFFLOADED: True, _PRECISE: True}  # Megatron's hybrid optimizer lives in the second one's code


def _write_tensor(_: Config, __: Knobs, after: Knobs) -> Found:
    # Megatron turns sequence parallelism off by itself without tensor parallelism.
    sequence = {"sequence-parallel": True} if (after.tensor_parallel or 0) > 1 else {}
    return {"tensor-model-parallel-size": after.tensor_parallel, **sequence}


def _environment(config: Config, changes: Mapping[str, str | None]) -> Found:
    """Return the trainer's variables with changes, of which None takes one away."""
    present = config.flags.given.get(_ENVIRONMENT)
    merged = {**config.flags.document(_ENVIRONMENT), **changes}
    kept = {name: value for name, value in merged.items() if value is not None}
    if not kept and present is None:
        return {}
    return {_ENVIRONMENT: json.dumps(kept) if isinstance(present, str) or present is None else kept}


def _write_preload(config: Config, _: Knobs, after: Knobs) -> Found:
    return _environment(config, {"LD_PRELOAD": host_allocators.SONAMES.get(str(after.host_allocator))})


def _write_allocator(config: Config, _: Knobs, after: Knobs) -> Found:
    own = config.dialect.expandable
    return _environment(config, own if after.allocator == "expandable" else dict.fromkeys((*_ALLOCATORS, *own)))


def _write_snapshot(config: Config, _: Knobs, after: Knobs) -> Found:
    if not after.memory_snapshot:
        return {"record-memory-history": False}
    folder = config.text("memory-snapshot-dir") or f"{config.root}/memory-snapshots"
    return {"record-memory-history": True, "memory-snapshot-dir": folder}


def _write_profile(config: Config, _: Knobs, after: Knobs) -> Found:
    folder = config.dialect.profile_folder
    own = after.memory_profile and folder and not config.has(folder)
    place = {folder: f"{config.root}/profiles"} if own else {}
    return dict.fromkeys(config.dialect.profile_flags, after.memory_profile) | place


WRITERS: dict[str, Writer] = {
    "requests": _write_requests,
    "graphs": _write_graphs,
    "tokens": _write_tokens,
    "packing": _write_packing,
    "recompute": _write_recompute,
    "optimizer": _write_optimizer,
    "tensor": _write_tensor,
    "preload": _write_preload,
    "allocator": _write_allocator,
    "snapshot": _write_snapshot,
    "profile": _write_profile,
}
