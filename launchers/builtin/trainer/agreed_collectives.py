"""FSDP's collectives, each preceded by an agreement of the ranks that all of them take part."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

Agreed = Callable[[int], AbstractContextManager[None]]
_SEGMENTS_BYTES = 4 << 20  # gloo's rings send at most 1 MiB at a time, and hold two segments each way

Work = distributed.Work | None
# Their names since torch 2.13, and before.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def install(policy: torch.nn.Module, agreed: Agreed) -> None:
    """Run every collective of a policy within `agreed`, a block that raises where it must not start.

    `agreed` takes the bytes of host memory that the transport allocates for the collective.
    """
    for part in policy.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(_AllGather(agreed))
            part.set_custom_reduce_scatter(_ReduceScatter(agreed))


class _Buffers:
    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> Work:
        with self._agreed(_scratch_bytes(output_tensor)):
            work: Work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _ReduceScatter(_Buffers, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work:
        with self._agreed(_scratch_bytes(input_tensor)):
            work: Work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def _scratch_bytes(tensor: torch.Tensor) -> int:
    """Return what gloo allocates for a collective: a copy, and segments; NCCL's buffers are its own."""
    return tensor.numel() * tensor.element_size() + _SEGMENTS_BYTES if tensor.device.type == "cpu" else 0
