"""The policy's weights on their way to the rollout engines and to disk."""

import io
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors are pickled

from autotune.launchers.builtin.storage.tensor_file import Entry, Raw

_SPELLING = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {spelling: dtype for dtype, spelling in _SPELLING.items()}
Tensors = list[tuple[str, torch.Tensor]]


# Ray copies a larger block with six threads, whose stacks (8 MiB each) the device budget would have to hold.
_BLOCK_BYTES = 512 << 10


class Bucket:
    """Some weights as one flat buffer; it arrives in another process as a list of (name, tensor).

    The buffer travels outside the pickle, so the sender makes no other copy of it.
    """

    def __init__(self, entries: list[Entry], flat: Raw) -> None:
        self._entries = entries
        self._flat = flat

    def __reduce__(self) -> tuple[Any, ...]:
        blocks = [self._flat[at : at + _BLOCK_BYTES] for at in range(0, len(self._flat), _BLOCK_BYTES)]
        return unflatten, (self._entries, blocks)


def unflatten(entries: list[Entry], blocks: list[Raw]) -> Tensors:
    """Return the tensors whose bytes lie one after the other in blocks."""
    memory = torch.from_numpy(np.concatenate(blocks))
    tensors = []
    offset = 0
    for entry in entries:
        part = memory[offset : offset + entry.nbytes]
        tensors.append((entry.name, _as_tensor(entry, part)))
        offset += entry.nbytes
    return tensors


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """Return name, type and shape of a tensor (of the whole one, where this rank has a part)."""
    return Entry(name, _SPELLING[tensor.dtype], tuple(tensor.shape))


def raw(tensor: torch.Tensor) -> Raw:
    """Return the bytes of a tensor; on the CPU without a copy when it is contiguous."""
    block: Raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return block


def buckets(weights: dict[str, torch.nn.Parameter], *, limit_bytes: int) -> list[list[str]]:
    """Return the weights' names in groups of at most `limit_bytes`; a larger tensor stands alone."""
    groups: list[list[str]] = []
    filled = 0
    for name, parameter in weights.items():
        size = entry_of(name, parameter).nbytes
        if groups and filled + size <= limit_bytes:
            groups[-1].append(name)
            filled += size
        else:
            groups.append([name])
            filled = size
    return groups


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole of a parameter; with several ranks all of them must ask at the same time."""
    full = getattr(parameter, "full_tensor", None)
    return parameter.detach() if full is None else full().detach()


def gathered(weights: dict[str, torch.nn.Parameter]) -> Iterator[Raw]:
    """Yield the bytes of each whole weight, one at a time."""
    for parameter in weights.values():
        yield raw(whole(parameter))


def _as_tensor(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the entry's type and shape; it shares the memory of `data` where that is aligned."""
    dtype = _DTYPES[entry.dtype]
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(entry.shape)


def handles_of(tensors: Tensors) -> bytes:
    """Return handles by which another process of the same card maps tensors, which must live until it has.

    CUDA IPC by PyTorch's own reductions, as SGLang's `MultiprocessingSerializer` (srt/utils/common.py,
    0.5.23) writes them; importing SGLang would patch transformers in the trainer.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return buffer.getvalue()
