"""What the data files name: the jobs in which a row holds, and knobs of more than one flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.launchers.frameworks.core import host_allocators
from autotune.launchers.frameworks.core.engines import (
    LARGEST_LIMITED_BATCH,
    auto_fraction,
    default_graph,
    tier,
)
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.tabular.legacy import Reader, Writer
from autotune.policies.values.knobs import Knobs

_ENVIRONMENT = "train-env-vars"
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GRAPHS, _BACKEND = "sglang-cuda-graph-config", "sglang-cuda-graph-backend-decode"
_NO_ENGINES = ("debug-train-only", "load-debug-rollout-data", "rollout-external-engine-addrs")

# The predicates that the shared rows name; those of one framework stand in its adapter.
WHEN: dict[str, Callable[[Config], bool]] = {
    "optimizer_is_not_adam": lambda config: (
        config.text("optimizer") != "adam" or config.flag("use-stateless-adam")
    ),
    "trainer_sleeps": lambda config: config.sleeps("train"),
    "engine_stays": lambda config: not config.sleeps("rollout"),
    "lacks_a_method": lambda config: (
        not (config.has("recompute-method") and config.has("recompute-num-layers"))
    ),
    "names_a_method": lambda config: config.has("recompute-method"),
    "splits_unevenly": lambda config: config.trainer_gpus % config.split != 0,
    "splits_heads_unevenly": lambda config: config.heads % config.tensor != 0,
    "splits_kv_heads_unevenly": lambda config: config.kv_heads % config.tensor != 0,
    "leaves_engines_unfilled": lambda config: config.engine_gpus % config.engine_size != 0,
    "has_no_engines": lambda config: not config.engine_gpus and not any(map(config.flag, _NO_ENGINES)),
    "wants_more_cards": lambda config: config.wanted > (config.offered or config.wanted),
    "roles_want_more_cards": lambda config: (
        config.has("resource") and config.wanted > (config.offered or config.wanted)
    ),
    "penalises_twice": lambda config: bool(config.share("kl-coef") and config.share("kl-loss-coef")),
    "is_another_trainer": lambda config: config.text("train-backend") != "megatron",
    "transfers": lambda config: config.text("update-weight-transfer-mode") != "broadcast",
    "runs_train_async": lambda config: config.runs("train_async"),
    "relaunches_from_the_reference": lambda config: (
        config.starts_over and config.reference and config.text("megatron-to-hf-mode") != "bridge"
    ),
    "hides_flags": lambda config: any(word.startswith("--") for word in config.job.command),
}


# --------------------------------------------------------------------------- from flags


def _chunk(config: Config) -> int:
    default = tier(config.job.cluster.gpu_memory_bytes or 0).chunk
    written = config.count("sglang-chunked-prefill-size", default)
    return written if written > 0 else config.count("sglang-max-prefill-tokens")


def _fraction(config: Config) -> float:
    return config.share("sglang-mem-fraction-static") or auto_fraction(
        config.job.cluster.gpu_memory_bytes or 0,
        tensor_parallel=config.engine_size,
        chunk=_chunk(config),
        graph=_largest_graph(config) or None,
    )


def _requests(config: Config) -> int:
    limits = ("sglang-server-concurrency", "sglang-max-running-requests")
    return max(1, min(config.most_requests, *map(config.count, limits)))


def _graphs(config: Config) -> str | None:
    if config.has(_GRAPHS):
        return None  # the document overrides every flag of graphs
    backend = config.text(_BACKEND)
    if backend == "disabled" or (config.flag("sglang-disable-cuda-graph") and not backend):
        return "off"
    return (
        "limited"
        if 0 < (_largest_graph(config) or _default_graph(config)) <= LARGEST_LIMITED_BATCH
        else "full"
    )


def _largest_graph(config: Config) -> int:
    """Return the largest batch that the job's flags let the engine capture; 0 if they do not say."""
    return max(_captured(config), default=config.count(config.dialect.graph_limit))


def _captured(config: Config) -> list[int]:
    """Return the batch sizes to capture, where the job lists them: SGLang does not read a limit then."""
    sizes = config.get(_listed(config))
    words = sizes if isinstance(sizes, list) else [] if sizes is None else [sizes]
    return [int(word) for word in words if str(word).isdecimal()]


def _listed(config: Config) -> str:
    return config.dialect.graph_limit.replace("-max-bs", "-bs")


def _default_graph(config: Config) -> int:
    """Return the largest batch that SGLang captures by itself; 0 if the card is unknown."""
    memory = config.job.cluster.gpu_memory_bytes
    return default_graph(memory, tensor_parallel=config.engine_size) if memory else 0


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
    environment = config.document(_ENVIRONMENT)
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
        str(config.document(_ENVIRONMENT).get("LD_PRELOAD", ""))
    ),
    "allocator": _allocator,
}


# --------------------------------------------------------------------------- back to flags

Found = dict[str, Any]


def _write_requests(config: Config, _: Knobs, after: Knobs) -> Found:
    value, client = after.concurrency or 0, "sglang-server-concurrency"
    return {"sglang-max-running-requests": value, **({client: value} if value > config.count(client) else {})}


def _write_graphs(config: Config, _: Knobs, after: Knobs) -> Found:
    off, listed, limit = "sglang-disable-cuda-graph", _listed(config), config.dialect.graph_limit
    chosen = {_BACKEND: None if config.text(_BACKEND) == "disabled" else config.get(_BACKEND)}
    if after.cuda_graphs == "off":
        return {off: True, **({_BACKEND: "disabled"} if config.has(_BACKEND) else {})}
    sizes, largest = _captured(config), _largest_graph(config)
    if after.cuda_graphs == "full":
        small = 0 < largest <= LARGEST_LIMITED_BATCH
        return {off: False, **chosen, **({listed: None, limit: None} if small else {})}
    if sizes:
        kept = [size for size in sizes if size <= LARGEST_LIMITED_BATCH] or [min(sizes)]
        return {off: False, **chosen, listed: kept}
    return {
        off: False,
        **chosen,
        limit: min(largest or _default_graph(config) or LARGEST_LIMITED_BATCH, LARGEST_LIMITED_BATCH),
    }


def _write_tokens(config: Config, _: Knobs, after: Knobs) -> Found:
    switch = {} if config.dynamic else {"use-dynamic-batch-size": True}
    return {"max-tokens-per-gpu": after.tokens_per_microbatch, **switch}


def _write_packing(config: Config, _: Knobs, after: Knobs) -> Found:
    tokens = config.budget or config.count("micro-batch-size") * config.floor
    packs = bool(after.dynamic_batching)
    return {"use-dynamic-batch-size": packs, "max-tokens-per-gpu": tokens if packs else None}


def _write_tensor(_: Config, __: Knobs, after: Knobs) -> Found:
    # Megatron turns sequence parallelism off by itself without tensor parallelism.
    sequence = {"sequence-parallel": True} if (after.tensor_parallel or 0) > 1 else {}
    return {"tensor-model-parallel-size": after.tensor_parallel, **sequence}


def _write_preload(config: Config, _: Knobs, after: Knobs) -> Found:
    own = {"LD_PRELOAD": host_allocators.SONAMES.get(str(after.host_allocator))}
    return config.with_entries(_ENVIRONMENT, own)


def _write_allocator(config: Config, _: Knobs, after: Knobs) -> Found:
    own = config.dialect.expandable
    changes = own if after.allocator == "expandable" else dict.fromkeys((*_ALLOCATORS, *own))
    return config.with_entries(_ENVIRONMENT, changes)


WRITERS: dict[str, Writer] = {
    "requests": _write_requests,
    "graphs": _write_graphs,
    "tokens": _write_tokens,
    "packing": _write_packing,
    "tensor": _write_tensor,
    "preload": _write_preload,
    "allocator": _write_allocator,
}
