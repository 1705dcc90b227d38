"""The knobs, both ways: from flags, and back as the smallest change of flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, TypeAlias

from autotune.launchers.frameworks.core import host_allocators
from autotune.launchers.frameworks.core.cuda_graphs import LARGEST_LIMITED_BATCH
from autotune.launchers.frameworks.core.sglang_defaults import auto_fraction, tier
from autotune.launchers.frameworks.dialects.flags import Flags, flags_of, spelled
from autotune.launchers.frameworks.megatron.job import Dialect, Shape, shape_of
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.value import Value

SERVER_CONCURRENCY = 512  # --sglang-server-concurrency, requests that the client keeps at one engine
SYNC_BUFFER = 512 << 20  # --update-weight-buffer-size
MARGIN = 1 << 30  # --train-memory-margin-bytes
_ENVIRONMENT = "train-env-vars"
_PACKED = ("tokens_per_microbatch", "logprob_tokens")  # of no use without dynamic batching
_COUNTED = ("microbatch_size",)  # of no use with it


class Context(Value, frozen=True, kw_only=True):
    """What a flag's value depends on besides its knob."""

    flags: Flags
    shape: Shape
    dialect: Dialect
    folder: str  # for files that a remedy makes the job write


# --------------------------------------------------------------------------- from flags


def knobs_of(flags: Flags, shape: Shape, dialect: Dialect, *, gpu_memory_bytes: int) -> Knobs:
    """Return the job's knobs, with the framework's defaults filled in."""
    budget = (flags.count("max-tokens-per-gpu") or None) if shape.dynamic else None
    chunk = _chunk(flags, gpu_memory_bytes)
    fraction = flags.number("sglang-mem-fraction-static") or auto_fraction(
        gpu_memory_bytes,
        tensor_parallel=shape.engine_size,
        chunk=chunk,
        graph=flags.count(dialect.graph_limit) or None,
    )
    environment = flags.document(_ENVIRONMENT)
    return Knobs(
        concurrency=_concurrency(flags, shape),
        memory_fraction=fraction,
        rollout_tensor_parallel=shape.engine_size,
        cuda_graphs=_graphs(flags, dialect),
        max_batched_tokens=chunk,
        tokens_per_microbatch=budget,
        microbatch_size=None if shape.dynamic else flags.count("micro-batch-size", 1),
        dynamic_batching=shape.dynamic,
        recompute=_recompute(flags, shape),
        param_offload=shape.offload_train,
        optimizer_offload=flags.on("optimizer-cpu-offload"),
        optimizer_offload_fraction=flags.number("optimizer-offload-fraction", 1.0),
        optimizer_offload_overlap=flags.on("overlap-cpu-optimizer-d2h-h2d"),
        context_parallel=shape.context,
        tensor_parallel=shape.tensor,
        loss_recompute=flags.on("recompute-loss-function"),
        logprob_tokens=(flags.count("log-probs-max-tokens-per-gpu") or budget)
        if dialect.logprob_budget and shape.dynamic
        else None,
        logprob_chunk=flags.count("log-probs-chunk-size")
        if flags.count("log-probs-chunk-size") > 0
        else None,
        sync_mode="disk"
        if dialect.disk_sync == "flag" and flags.text("update-weight-transport") == "disk"
        else "memory",
        sync_buffer=flags.count("update-weight-buffer-size", SYNC_BUFFER),
        host_allocator=host_allocators.preloaded(str(environment.get("LD_PRELOAD", ""))),
        weights_backup=not (dialect.weights_backup and flags.on(dialect.weights_backup)),
        dataloader_workers=flags.count(dialect.worker_pool) or None,
        allocator="expandable" if _is_expandable(environment, dialect) else "default",
        memory_margin=flags.count("train-memory-margin-bytes", MARGIN) if dialect.memory_margin else None,
        memory_snapshot=flags.on("record-memory-history"),
        nccl_memory_check=flags.on("enable-cuda-memory-check") if dialect.nccl_check == "flag" else None,
        memory_profile=all(flags.on(name) for name in dialect.profile_flags),
    )


def most_concurrent(shape: Shape) -> int:
    """Return the requests of one rollout that fall to one engine."""
    return (
        max(1, ceil(shape.prompts * shape.samples / shape.engines)) if shape.prompts else SERVER_CONCURRENCY
    )


def _concurrency(flags: Flags, shape: Shape) -> int:
    limits = (
        flags.count("sglang-server-concurrency", SERVER_CONCURRENCY),
        flags.count("sglang-max-running-requests", SERVER_CONCURRENCY),
        most_concurrent(shape),
    )
    return max(1, min(limits))


def _chunk(flags: Flags, gpu_memory_bytes: int) -> int:
    written = flags.count("sglang-chunked-prefill-size", tier(gpu_memory_bytes).chunk)
    return written if written > 0 else flags.count("sglang-max-prefill-tokens", 16384)


def _graphs(flags: Flags, dialect: Dialect) -> str:
    if flags.on("sglang-disable-cuda-graph"):
        return "off"
    limit = flags.count(dialect.graph_limit)
    return "limited" if 0 < limit <= LARGEST_LIMITED_BATCH else "full"


def _recompute(flags: Flags, shape: Shape) -> str:
    granularity = flags.text("recompute-granularity")
    if not granularity:
        return "selective" if flags.on("recompute-activations") else "off"
    if granularity == "full" and flags.text("recompute-method") == "block":
        # In `block` the number counts the recomputed layers of a stage: below all of them something is left.
        layers = shape.layers // shape.pipeline
        done = flags.count("recompute-num-layers")
        return "full" if not layers or done >= layers else "selective"
    return granularity


def _is_expandable(environment: Mapping[str, Any], dialect: Dialect) -> bool:
    options = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if any("expandable_segments:True" in str(environment.get(name, "")) for name in options):
        return True
    return all(str(environment.get(name, "")) == value for name, value in dialect.expandable.items())


# --------------------------------------------------------------------------- back to flags

Writer: TypeAlias = Callable[[Any, Context], dict[str, Any]]


def settings_of(job: Job, wanted: Knobs, dialect: Dialect, *, folder: str) -> dict[str, Any]:
    """Return the smallest change of the job's flags that makes it use `wanted`.

    Both ways know the card from the job alone: a default that followed a measured one would be written down
    here as if it had changed.
    """
    result: dict[str, Any] = {}
    done: set[str] = set()
    idle = _PACKED if wanted.dynamic_batching is False else _COUNTED if wanted.dynamic_batching else ()
    while True:  # one flag's default may follow another, such as the scoring budget the training budget
        changes = spelled(job.settings, result, negatable=dialect.negatable)
        flags = flags_of({**job.settings, **changes}, negatable=dialect.negatable)
        shape = shape_of(job, flags, dialect)
        present = knobs_of(flags, shape, dialect, gpu_memory_bytes=job.cluster.gpu_memory_bytes or 0)
        name = next(
            (
                knob
                for knob in KNOBS
                if knob in WRITERS
                and knob not in done
                and knob not in idle
                and getattr(wanted, knob) not in (None, getattr(present, knob))
            ),
            None,
        )
        if name is None:
            return changes
        done.add(name)
        context = Context(flags=flags, shape=shape, dialect=dialect, folder=folder)
        result |= WRITERS[name](getattr(wanted, name), context)


def _plain(flag: str) -> Writer:
    return lambda value, context: {flag: value}


def _write_concurrency(value: int, context: Context) -> dict[str, Any]:
    client = context.flags.count("sglang-server-concurrency", SERVER_CONCURRENCY)
    raised = {"sglang-server-concurrency": value} if value > client else {}
    return {"sglang-max-running-requests": value, **raised}


def _write_graphs(value: str, context: Context) -> dict[str, Any]:
    limit = context.dialect.graph_limit
    captured = context.flags.count(limit)
    small = captured if 0 < captured <= LARGEST_LIMITED_BATCH else None
    if value == "full":
        return {"sglang-disable-cuda-graph": False, **({limit: None} if small else {})}
    if value == "limited":
        return {"sglang-disable-cuda-graph": False, limit: small or LARGEST_LIMITED_BATCH}
    return {"sglang-disable-cuda-graph": True}


def _write_tokens(value: int, context: Context) -> dict[str, Any]:
    switch = {} if context.shape.dynamic else {"use-dynamic-batch-size": True}
    return {"max-tokens-per-gpu": value, **switch}


def _write_dynamic(value: bool, context: Context) -> dict[str, Any]:
    if not value:
        return {"use-dynamic-batch-size": False, "max-tokens-per-gpu": None}
    samples = context.flags.count("micro-batch-size", 1)
    tokens = context.flags.count("max-tokens-per-gpu") or samples * context.shape.floor
    return {"use-dynamic-batch-size": True, "max-tokens-per-gpu": tokens}


def _write_recompute(value: str, context: Context) -> dict[str, Any]:
    off: dict[str, Any] = {
        "recompute-activations": False,
        "recompute-granularity": None,
        "recompute-method": None,
        "recompute-num-layers": None,
        "recompute-modules": None,
    }
    match value:
        case "full":
            full = {"recompute-method": "uniform", "recompute-num-layers": 1}
            return off | {"recompute-granularity": "full"} | full
        case "selective":
            modules = context.flags.given.get("recompute-modules")
            return off | {"recompute-granularity": "selective", "recompute-modules": modules}
        case _:
            return off | {"distribute-saved-activations": False}


def _write_optimizer_offload(value: bool, context: Context) -> dict[str, Any]:
    if not value:
        return {"optimizer-cpu-offload": False, "overlap-cpu-optimizer-d2h-h2d": False}
    # Megatron asserts the second flag: its hybrid optimizer lives in that one's code.
    return {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}


def _write_tensor_parallel(value: int, context: Context) -> dict[str, Any]:
    # Megatron turns sequence parallelism off by itself without tensor parallelism.
    sequence = {"sequence-parallel": True} if value > 1 else {}
    return {"tensor-model-parallel-size": value, **sequence}


def _write_sync_mode(value: str, context: Context) -> dict[str, Any]:
    if value != "disk":
        return {"update-weight-transport": "nccl"}
    folder = context.flags.text("update-weight-disk-dir") or f"{context.folder}/weight-sync"
    return {"update-weight-transport": "disk", "update-weight-disk-dir": folder}


def _environment(context: Context, changes: Mapping[str, str | None]) -> dict[str, Any]:
    present = context.flags.given.get(_ENVIRONMENT)
    merged = {**context.flags.document(_ENVIRONMENT), **changes}
    kept = {name: value for name, value in merged.items() if value is not None}
    if not kept and present is None:
        return {}
    return {_ENVIRONMENT: json.dumps(kept) if isinstance(present, str) or present is None else kept}


def _write_host_allocator(value: str, context: Context) -> dict[str, Any]:
    return _environment(context, {"LD_PRELOAD": host_allocators.SONAMES.get(value)})


def _write_allocator(value: str, context: Context) -> dict[str, Any]:
    if value == "expandable":
        return _environment(context, context.dialect.expandable)
    plain = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", *context.dialect.expandable))
    return _environment(context, plain)


def _write_snapshot(value: bool, context: Context) -> dict[str, Any]:
    if not value:
        return {"record-memory-history": False}
    folder = context.flags.text("memory-snapshot-dir") or f"{context.folder}/memory-snapshots"
    return {"record-memory-history": True, "memory-snapshot-dir": folder}


def _write_profile(value: bool, context: Context) -> dict[str, Any]:
    result: dict[str, Any] = dict.fromkeys(context.dialect.profile_flags, value)
    folder = context.dialect.profile_folder
    if value and folder and not context.flags.has(folder):
        result[folder] = f"{context.folder}/profiles"
    return result


WRITERS: dict[str, Writer] = {
    "concurrency": _write_concurrency,
    "memory_fraction": _plain("sglang-mem-fraction-static"),
    "rollout_tensor_parallel": _plain("rollout-num-gpus-per-engine"),
    "cuda_graphs": _write_graphs,
    "max_batched_tokens": _plain("sglang-chunked-prefill-size"),
    "tokens_per_microbatch": _write_tokens,
    "microbatch_size": _plain("micro-batch-size"),
    "dynamic_batching": _write_dynamic,
    "recompute": _write_recompute,
    "param_offload": _plain("offload-train"),
    "optimizer_offload": _write_optimizer_offload,
    "optimizer_offload_fraction": _plain("optimizer-offload-fraction"),
    "optimizer_offload_overlap": _plain("overlap-cpu-optimizer-d2h-h2d"),
    "context_parallel": _plain("context-parallel-size"),
    "tensor_parallel": _write_tensor_parallel,
    "loss_recompute": _plain("recompute-loss-function"),
    "logprob_tokens": _plain("log-probs-max-tokens-per-gpu"),
    "logprob_chunk": _plain("log-probs-chunk-size"),
    "sync_mode": _write_sync_mode,
    "sync_buffer": _plain("update-weight-buffer-size"),
    "host_allocator": _write_host_allocator,
    "weights_backup": lambda value, context: {context.dialect.weights_backup: not value},
    "dataloader_workers": lambda value, context: {context.dialect.worker_pool: value},
    "allocator": _write_allocator,
    "memory_margin": _plain("train-memory-margin-bytes"),
    "memory_snapshot": _write_snapshot,
    "nccl_memory_check": _plain("enable-cuda-memory-check"),
    "memory_profile": _write_profile,
}
