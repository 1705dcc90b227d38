"""Host memory: shared file mappings that a device budget does not count, and what waits in them.

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
from typing import Any, NamedTuple

import torch

from autotune.launchers.builtin.process.records import HostMemoryExhausted

# Sizes between a power of two and the next: as many as PyTorch's `roundup_power2_divisions:8`. Sequences of
# varying lengths then share their blocks, and a block is at most a ninth larger than what was asked for.
_CLASSES_PER_DOUBLING = 8
# Smaller activations cost more in bookkeeping than they free.
_SMALLEST_BYTES = 16 << 10


class HostMemory:
    """An area of host memory in a folder; every mapping's file is unlinked at creation.

    SIGKILL therefore leaves nothing behind. Space is allocated before it is mapped, so that exhaustion is an
    error here and not a SIGBUS at the first touch. Freed blocks are kept for the next request of their size
    class, but no more than were once in use at the same time: what it maps never exceeds what was needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0
        self._needed_bytes = 0  # the most that was in use at the same time
        self.mapped_bytes = 0

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised host tensor of the same shape and type, which is never reused."""
        return shaped(self._mapped(_whole_pages(tensor.numel() * tensor.element_size())), tensor)

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a block of at least so many bytes, or raise HostMemoryExhausted."""
        rounded = size_class(size_bytes)
        if self._free[rounded]:
            self._free_bytes -= rounded
            self._note()
            return self._free[rounded].pop()
        return self._mapped(rounded)

    def give(self, block: torch.Tensor) -> None:
        """Take a block back that nothing refers to any more."""
        self._free[block.numel()].append(block)
        self._free_bytes += block.numel()

    def _mapped(self, size_bytes: int) -> torch.Tensor:
        used = self.mapped_bytes - self._free_bytes
        self._unmap(beyond=max(self._needed_bytes - size_bytes, used))
        try:
            block = self._map(size_bytes)
        except HostMemoryExhausted:
            self._unmap(beyond=used)
            block = self._map(size_bytes)
        self._note()
        return block

    def _note(self) -> None:
        self._needed_bytes = max(self._needed_bytes, self.mapped_bytes - self._free_bytes)

    def _unmap(self, *, beyond: int) -> None:
        """Give the largest free blocks back to the machine until at most so many bytes are mapped."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.mapped_bytes > beyond:
                self._free[size].pop()
                self._free_bytes -= size
                self.mapped_bytes -= size

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


def size_class(size_bytes: int) -> int:
    """Return the size of the block that serves a request: whole pages, in eight sizes a doubling."""
    pages = _whole_pages(size_bytes) // mmap.PAGESIZE
    step = 1 << max(0, pages.bit_length() - _CLASSES_PER_DOUBLING.bit_length())
    return -(-pages // step) * step * mmap.PAGESIZE


def _whole_pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class _Place(NamedTuple):
    host: torch.Tensor
    device: torch.device


class Parking:
    """A module's parameters, in device memory while in use and in host memory otherwise.

    Without a module or host memory there is nothing to move.
    """

    def __init__(self, module: torch.nn.Module | None, host: HostMemory | None) -> None:
        self._module = module
        self._places = {
            id(parameter): _Place(host.empty_like(local(parameter)), local(parameter).device)
            for parameter in (module.parameters() if module is not None else ())
            if host is not None
        }
        self._parked = False

    def park(self, *, changed: bool) -> None:
        """Free the device memory; `changed` says that the host's copy is out of date."""

        def to_host(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
            if changed:
                place.host.copy_(local(tensor))
            return place.host

        if self._places and not self._parked:
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

        assert self._module is not None
        # The one entry that FSDP2 follows too: it re-points its own views of the shards.
        with torch.no_grad():
            self._module._apply(move)  # type: ignore[no-untyped-call]
        self._parked = not self._parked


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without gradient."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def _like(tensor: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "to_local"):
        return replacement
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    # Private names: the public from_local copies what is in host memory back to the mesh's cards.
    return DTensor(replacement, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shaped(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the first bytes of a block as a tensor of the shape and type of `like`."""
    size = like.numel() * like.element_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return block[:size].view(like.dtype).view(like.shape)


class ActivationOffload:
    """Keeps what autograd saves of a module in host memory, except the module's weights.

    It recognises a weight by its storage when the weight's own module runs: under FSDP2 that is the one into
    which it was gathered, which FSDP frees after the layer and fills again before its backward pass.
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
