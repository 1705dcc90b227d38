"""The policy's weights on their way to the rollout engines and to disk, and a rank's part of a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from autotune.launchers.builtin.process.host_memory import local
from autotune.launchers.builtin.storage.tensor_file import Entry, Raw, write
from autotune.launchers.builtin.trainer.optimizer import Adam

# Weights and moments; the count of updates; the state of a generator.
_SPELLING = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}
_DTYPES = {spelling: dtype for dtype, spelling in _SPELLING.items()}
Tensors = list[tuple[str, torch.Tensor]]
Weights = Mapping[str, torch.nn.Parameter]


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


def buckets(weights: Weights, *, limit_bytes: int) -> list[list[str]]:
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


def gathered(weights: Weights) -> Iterator[Raw]:
    """Yield the bytes of each whole weight, one at a time."""
    for parameter in weights.values():
        yield raw(whole(parameter))


def _as_tensor(entry: Entry, data: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the entry's type and shape; it shares the memory of `data` where that is aligned."""
    dtype = _DTYPES[entry.dtype]
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(entry.shape)


def save(path: Path, weights: Weights, adam: Adam, *, on_gpu: bool) -> None:
    """Write the rank's weights, moments and generators, one tensor at a time."""
    tensors = _state(weights, adam, on_gpu=on_gpu)
    entries = [entry_of(name, tensor) for name, tensor in tensors.items()]
    write(path, entries, (raw(tensor) for tensor in tensors.values()))


def restore(path: Path, weights: Weights, adam: Adam, *, on_gpu: bool) -> None:
    """Read what `save` wrote into the rank's own memory."""
    # As numpy arrays: for torch safetensors maps a file privately, and a budget would count all of it.
    with safe_open(path, framework="numpy") as file:
        if any(name.startswith("first/") for name in file.keys()):  # noqa: SIM118 - no mapping
            adam.ensure_state()
        state = _state(weights, adam, on_gpu=on_gpu)
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(file.get_tensor(name)))
    adam.steps = int(state["optimizer_steps"].item())
    torch.set_rng_state(state["rng"])
    if on_gpu:
        torch.cuda.set_rng_state(state["rng_cuda"])


def _state(weights: Weights, adam: Adam, *, on_gpu: bool) -> dict[str, torch.Tensor]:
    """Return the tensors by name; weights and moments share their memory."""
    tensors = {f"weight/{name}": local(weight) for name, weight in weights.items()}
    for name, moments in adam.moments.items():
        tensors[f"first/{name}"] = moments.first
        tensors[f"second/{name}"] = moments.second
    tensors["optimizer_steps"] = torch.tensor([adam.steps])
    tensors["rng"] = torch.get_rng_state()
    if on_gpu:
        tensors["rng_cuda"] = torch.cuda.get_rng_state()
    return tensors
