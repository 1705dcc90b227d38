"""Activations in host memory between forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotune.launchers.builtin.process.host_memory import HostMemory, shaped

# Small tensors cost more in bookkeeping than they free.
_SMALLEST_BYTES = 16 << 10


class ActivationOffload:
    """Keeps what autograd saves of a module in host memory, except the module's weights.

    Weights are told by the storage that they have when their own module runs: under FSDP2 that is the one
    into which they were gathered, which FSDP frees after the layer and fills again before its backward pass.
    """

    def __init__(self, module: torch.nn.Module, host: HostMemory) -> None:
        self._host = host
        self._weights: set[int] = set()
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._note)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Offload what the module saves in this block."""
        self._weights.clear()  # the storages of a pass that is over may be other tensors' by now
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _note(self, part: torch.nn.Module, _: Any) -> None:
        self._weights.update(_storage(weight) for weight in part.parameters(recurse=False))

    def _pack(self, tensor: torch.Tensor) -> "_Saved | torch.Tensor":
        size = tensor.numel() * tensor.element_size()
        if size < _SMALLEST_BYTES or _storage(tensor) in self._weights:
            return tensor
        block = self._host.take(size)
        shaped(block, tensor).copy_(tensor)
        return _Saved(self._host, block, tensor)

    def _unpack(self, saved: "_Saved | torch.Tensor") -> torch.Tensor:
        return saved.restored() if isinstance(saved, _Saved) else saved


class _Saved:
    """One saved tensor's bytes; the block returns to the area with the last reference to this."""

    def __init__(self, host: HostMemory, block: torch.Tensor, tensor: torch.Tensor) -> None:
        self._host = host
        self._block = block
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def restored(self) -> torch.Tensor:
        """Return a copy on the device."""
        result = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return result.copy_(shaped(self._block, result))

    def __del__(self) -> None:
        self._host.give(self._block)


def _storage(tensor: torch.Tensor) -> int:
    """Return what stays the same about a tensor's storage while its memory is freed and allocated again."""
    return int(tensor.untyped_storage()._cdata)
