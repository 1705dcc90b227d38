"""Inference engines: limited CUDA graphs, and SGLang's defaults by the GPU's memory."""

from __future__ import annotations

from typing import NamedTuple

# The batch sizes that an engine still captures where its CUDA graphs are limited, by verl's guide.
LIMITED_BATCHES = (1, 2, 4, 8, 16, 32)
LARGEST_LIMITED_BATCH = LIMITED_BATCHES[-1]  # SGLang captures up to 512 on large cards

_MIB = 1 << 20
_LARGE_MIB = 60 * 1024  # cards from here on reserve at least 10 GiB
_UNKNOWN_FRACTION = 0.88


class Tier(NamedTuple):
    """Defaults up to a size of the card."""

    below_mib: float
    chunk: int  # tokens of a prefill batch
    graph: int  # largest batch captured
    graph_tp4: int  # ... with tensor parallelism of 4 and more


# sglang/srt/server_args.py, _handle_gpu_memory_settings: the same in 0.5.9 and 0.5.15.post1.
_TIERS = (
    Tier(20 * 1024, 2048, 8, 8),
    Tier(35 * 1024, 2048, 24, 80),
    Tier(60 * 1024, 4096, 32, 160),
    Tier(160 * 1024, 8192, 256, 512),
    Tier(float("inf"), 16384, 512, 512),
)
_UNKNOWN = Tier(float("inf"), 4096, 160, 160)


def tier(gpu_memory_bytes: int) -> Tier:
    """Return the defaults for a card; 0 bytes: its size is not known."""
    if gpu_memory_bytes <= 0:
        return _UNKNOWN
    return next(each for each in _TIERS if gpu_memory_bytes / _MIB < each.below_mib)


def default_graph(gpu_memory_bytes: int, *, tensor_parallel: int) -> int:
    """Return the largest batch that an engine captures by itself."""
    own = tier(gpu_memory_bytes)
    return own.graph_tp4 if tensor_parallel >= 4 else own.graph


def auto_fraction(
    gpu_memory_bytes: int, *, tensor_parallel: int, chunk: int, graph: int | None = None
) -> float:
    """Return the static share that an engine gives itself, to two digits downwards."""
    if gpu_memory_bytes <= 0:
        return _UNKNOWN_FRACTION
    card = gpu_memory_bytes / _MIB
    captured = default_graph(gpu_memory_bytes, tensor_parallel=tensor_parallel) if graph is None else graph
    reserved = 512 + 1.5 * max(chunk, 2048) + 2 * captured + tensor_parallel / 8 * 1024
    if card > _LARGE_MIB:
        reserved = max(reserved, 10 * 1024)
    return max(0.05, int((card - reserved) / card * 100) / 100)
