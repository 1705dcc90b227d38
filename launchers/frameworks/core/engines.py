"""Inference engines: limited CUDA graphs, and SGLang's defaults by the GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The batch sizes that stay captured with limited CUDA graphs; recommended by verl's guide.
LIMITED_BATCHES = (1, 2, 4, 8, 16, 32)
LARGEST_LIMITED_BATCH = LIMITED_BATCHES[-1]  # SGLang captures up to 512 on large cards

_MIB = 1 << 20
_LARGE_MIB = 60 * 1024  # larger GPUs reserve at least 10 GiB
_UNKNOWN_FRACTION = 0.88


class Tier(NamedTuple):
    """SGLang's defaults for GPUs up to a memory size (`handle_gpu_memory_settings`), per release."""

    below_mib: int | None  # None: any size; the first tier is for a GPU of unknown size
    chunk: int  # tokens of a prefill batch
    graph: int  # largest batch captured
    graph_tp4: int  # ... with tensor parallelism of 4 and more

    def captured(self, *, tensor_parallel: int) -> int:
        """Return the largest batch size that an engine captures by default."""
        return self.graph_tp4 if tensor_parallel >= 4 else self.graph


def tier(tiers: Sequence[Tier], gpu_memory_bytes: int) -> Tier:
    """Return the defaults for a GPU; 0 bytes means an unknown size."""
    return next(each for each in tiers if each.below_mib is None or gpu_memory_bytes / _MIB < each.below_mib)


def auto_fraction(gpu_memory_bytes: int, *, tensor_parallel: int, chunk: int, captured: int) -> float:
    """Return SGLang's own default of mem_fraction_static, rounded down to two digits."""
    if gpu_memory_bytes <= 0:
        return _UNKNOWN_FRACTION
    card = gpu_memory_bytes / _MIB
    reserved = 512 + 1.5 * max(chunk, 2048) + 2 * captured + tensor_parallel / 8 * 1024
    if card > _LARGE_MIB:
        reserved = max(reserved, 10 * 1024)
    return max(0.05, int((card - reserved) / card * 100) / 100)
