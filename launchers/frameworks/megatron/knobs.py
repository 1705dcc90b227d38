"""Reads and writes the knobs of slime, Relax and miles that involve several flags."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import host_allocators, transformer
from autotune.launchers.frameworks.core.engines import (
    LARGEST_LIMITED_BATCH,
    auto_fraction,
)
from autotune.launchers.frameworks.megatron.config import Config
from autotune.policies.values.knobs import Knobs

_ENVIRONMENT = "train-env-vars"
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_GRAPHS, _BACKEND = "sglang-cuda-graph-config", "sglang-cuda-graph-backend-decode"

# --------------------------------------------------------------------------- from flags


def chunk(config: Config) -> int:
    """Return the tokens of a prefill batch: the flag, or SGLang's default for the GPU."""
    written = config.count("sglang-chunked-prefill-size", config.engine_defaults.chunk)
    return written if written > 0 else config.count("sglang-max-prefill-tokens")


def fraction(config: Config) -> float:
    """Return the engine's static memory fraction: the flag, or SGLang's default for the GPU."""
    return config.share("sglang-mem-fraction-static") or auto_fraction(
        config.job.cluster.gpu_memory_bytes or 0,
        tensor_parallel=config.engine_size,
        chunk=chunk(config),
        captured=_largest_graph(config) or _captured_by_itself(config),
    )


def requests(config: Config) -> int:
    """Return the concurrent requests of an engine."""
    client, engine = map(config.count, ("sglang-server-concurrency", "sglang-max-running-requests"))
    return max(1, min(config.most_requests, client, engine or client))  # SGLang has no limit by default


def graphs(config: Config) -> str | None:
    """Return the mode of CUDA graphs; None if an SGLang config file sets them."""
    if config.has(_GRAPHS):
        return None  # the config file overrides all flags of graphs
    backend = config.text(_BACKEND)
    if backend == "disabled" or (config.flag("sglang-disable-cuda-graph") and not backend):
        return "off"
    return (
        "limited"
        if 0 < (_largest_graph(config) or _default_graph(config)) <= LARGEST_LIMITED_BATCH
        else "full"
    )


def _largest_graph(config: Config) -> int:
    """Return the largest batch size that the flags let the engine capture; 0 if they set none."""
    return max(_captured(config), default=config.count(config.dialect.graph_limit))


def _captured(config: Config) -> list[int]:
    """Return the batch sizes to capture if the job lists them; SGLang then ignores a limit."""
    sizes = config.get(_listed(config))
    words = sizes if isinstance(sizes, list) else [] if sizes is None else [sizes]
    return [int(word) for word in words if str(word).isdecimal()]


def _listed(config: Config) -> str:
    return config.dialect.graph_limit.replace("-max-bs", "-bs")


def _captured_by_itself(config: Config) -> int:
    return config.engine_defaults.captured(tensor_parallel=config.engine_size)


def _default_graph(config: Config) -> int:
    """Return the largest batch size that SGLang captures by default; 0 if the GPU is unknown."""
    return _captured_by_itself(config) if config.job.cluster.gpu_memory_bytes else 0


def recompute(config: Config) -> str:
    """Return the mode of recomputation."""
    granularity = config.text("recompute-granularity")
    if not granularity:
        return "selective" if config.flag("recompute-activations") else "off"
    if granularity == "full" and config.text("recompute-method") == "block":
        # With `block`, the number of recomputed layers per stage; fewer than all leave some to recompute.
        layers = config.layers // config.pipeline
        return "full" if not layers or config.count("recompute-num-layers") >= layers else "selective"
    return transformer.recompute(config.field, config.job.shape)


def host_allocator(config: Config) -> str:
    """Return the trainer's host memory allocator."""
    return host_allocators.preloaded(str(config.document(_ENVIRONMENT).get("LD_PRELOAD", "")))


def allocator(config: Config) -> str:
    """Return the trainer's device memory allocator settings."""
    environment = config.document(_ENVIRONMENT)
    is_on = any("expandable_segments:True" in str(environment.get(name, "")) for name in _ALLOCATORS)
    own = config.dialect.expandable.items()
    return "expandable" if is_on or all(str(environment.get(k, "")) == v for k, v in own) else "default"


# --------------------------------------------------------------------------- back to flags

Found = dict[str, Any]


def write_requests(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags of the engine's request limit, and of the client's if that is larger."""
    value, client = after.concurrency or 0, "sglang-server-concurrency"
    return {"sglang-max-running-requests": value, **({client: value} if value > config.count(client) else {})}


def write_graphs(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags of a mode of CUDA graphs, in the job's spelling."""
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


def write_tokens(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags of a token budget."""
    switch = {} if config.dynamic else {"use-dynamic-batch-size": True}
    return {"max-tokens-per-gpu": after.tokens_per_microbatch, **switch}


def write_packing(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags of micro-batches packed to a token budget, or counted in sequences."""
    tokens = config.budget or config.count("micro-batch-size") * config.longest_per_gpu
    packs = bool(after.dynamic_batching)
    return {"use-dynamic-batch-size": packs, "max-tokens-per-gpu": tokens if packs else None}


def write_recompute(config: Config, before: Knobs, after: Knobs) -> Found:
    """Return the flags of a mode of recomputation."""
    modules = transformer.modules(config.field, config.job.shape)
    fields = transformer.recomputing(before.recompute, after.recompute, modules)
    unread: Found = {"recompute-modules": None} if after.recompute in ("off", "full") else {}
    unread |= {"distribute-saved-activations": False} if after.recompute != "full" else {}
    written = {name.replace("_", "-"): value for name, value in fields.items()}
    return {"recompute-activations": False, **written, **unread}


def write_activations(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags that offload activations, and the environment variable that they require."""
    if not after.activation_offload:
        return {"fine-grained-activation-offloading": False}
    modules = transformer.offloaded(config.field, config.job.shape, tensor=after.tensor_parallel or 1)
    environment = config.with_entries(_ENVIRONMENT, {transformer.OFFLOAD_VARIABLE: "1"})
    return {"fine-grained-activation-offloading": True, "offload-modules": list(modules), **environment}


def write_tensor(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the flags of a tensor-parallel size."""
    # Megatron disables sequence parallelism itself without tensor parallelism.
    sequence = {"sequence-parallel": True} if (after.tensor_parallel or 0) > 1 else {}
    # Sequence parallelism already splits saved activations; Megatron refuses both, and splitting over one
    # rank.
    saved = "distribute-saved-activations"
    return {
        "tensor-model-parallel-size": after.tensor_parallel,
        **sequence,
        **({saved: False} if config.flag(saved) else {}),
    }


def write_preload(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the trainer's environment with another host memory allocator."""
    own = {"LD_PRELOAD": host_allocators.SONAMES.get(str(after.host_allocator))}
    return config.with_entries(_ENVIRONMENT, own)


def write_allocator(config: Config, _: Knobs, after: Knobs) -> Found:
    """Return the trainer's environment with other device allocator settings."""
    own = config.dialect.expandable
    changes = own if after.allocator == "expandable" else dict.fromkeys((*_ALLOCATORS, *own))
    return config.with_entries(_ENVIRONMENT, changes)
