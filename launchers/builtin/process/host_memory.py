"""Host memory: shared file mappings that a device budget does not count.

`module.to("cpu")` and torch's `save_on_cpu` are no substitute: without a card the CPU's memory is the device.
"""

import mmap
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from autotune.launchers.builtin.process.records import HostMemoryExhausted

# Small tensors cost more in bookkeeping than they free.
_SMALLEST_OFFLOAD_BYTES = 16 << 10


class HostMemory:
    """An area of host memory in a folder; every mapping's file is unlinked at creation.

    SIGKILL therefore leaves nothing behind. Space is allocated before it is mapped, so that exhaustion is an
    error here and not a SIGBUS at the first touch. Freed blocks are kept for the next request of their size.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.mapped_bytes = 0

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised host tensor of the same shape and type, which is never reused."""
        block = self.take(tensor.numel() * tensor.element_size())
        return _shaped(block, tensor)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a block of bytes, or raise HostMemoryExhausted."""
        rounded = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        if self._free[rounded]:
            return self._free[rounded].pop()
        try:
            return self._map(rounded)
        except HostMemoryExhausted:
            self._free.clear()
            return self._map(rounded)

    def give(self, block: torch.Tensor) -> None:
        """Take a block back that nothing refers to any more."""
        self._free[block.numel()].append(block)

    def _map(self, size_bytes: int) -> torch.Tensor:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                mapping = mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            problem = HostMemoryExhausted(
                error.errno,
                f"cannot allocate host memory in {self._folder}: tried to allocate {size_bytes} bytes "
                f"beyond {self.mapped_bytes} ({error.strerror})",
            )
            raise problem from error
        self.mapped_bytes += size_bytes
        return torch.frombuffer(mapping, dtype=torch.uint8)


class ActivationOffload:
    """Keeps what autograd saves in host memory between forward and backward."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host

    @contextmanager
    def saving(self, *, resident: frozenset[int]) -> Iterator[None]:
        """Offload what the block saves, except storages at the addresses `resident` (the parameters)."""

        def pack(tensor: torch.Tensor) -> "_Saved | torch.Tensor":
            size = tensor.numel() * tensor.element_size()
            if size < _SMALLEST_OFFLOAD_BYTES or tensor.untyped_storage().data_ptr() in resident:
                return tensor
            block = self._host.take(size)
            _shaped(block, tensor).copy_(tensor)
            return _Saved(self._host, block, tensor)

        def unpack(saved: "_Saved | torch.Tensor") -> torch.Tensor:
            return saved.restored() if isinstance(saved, _Saved) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Saved:
    """One saved tensor's bytes; the block returns to the area with the last reference to this."""

    def __init__(self, host: HostMemory, block: torch.Tensor, tensor: torch.Tensor) -> None:
        self._host = host
        self._block = block
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def restored(self) -> torch.Tensor:
        """Return a copy on the device."""
        result = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return result.copy_(_shaped(self._block, result))

    def __del__(self) -> None:
        self._host.give(self._block)


class _Place(NamedTuple):
    host: torch.Tensor
    device: torch.device


class Parking:
    """A module's parameters, in device memory while in use and in host memory otherwise."""

    def __init__(self, module: torch.nn.Module, host: HostMemory) -> None:
        self._module = module
        self._places = {
            id(parameter): _Place(host.empty_like(local(parameter)), local(parameter).device)
            for parameter in module.parameters()
        }
        self._parked = False

    def park(self, *, changed: bool) -> None:
        """Free the device memory; `changed` says that the host's copy is out of date."""

        def to_host(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
            if changed:
                place.host.copy_(local(tensor))
            return place.host

        if not self._parked:
            self._replace(to_host)

    def fetch(self) -> None:
        """Bring the parameters back to the device."""
        if self._parked:
            self._replace(
                lambda _, place: torch.empty_like(place.host, device=place.device).copy_(place.host)
            )

    def _replace(self, moved: Callable[[torch.Tensor, _Place], torch.Tensor]) -> None:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            place = self._places.get(id(tensor))
            return tensor if place is None else _like(tensor, moved(tensor, place))

        # The one entry that FSDP2 follows too: it re-points its own views of the shards.
        with torch.no_grad():
            self._module._apply(move)  # type: ignore[no-untyped-call]
        self._parked = not self._parked


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without gradient."""
    inner = getattr(tensor, "_local_tensor", None)
    return (tensor if inner is None else inner).detach()


def _like(tensor: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "_local_tensor"):
        return replacement
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    # Not from_local, which copies what is in host memory back to the mesh's cards.
    return DTensor(replacement, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _shaped(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return block[:size].view(like.dtype).view(like.shape)
