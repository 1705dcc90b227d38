"""Parallel sizes that have to fit the trainer's devices together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.policies.values.profile import Requires, Support


def together(supported: Mapping[str, Support], context: str, *, devices: int, why: str) -> Iterator[Requires]:
    """Yield for each size of the knob `context` the tensor sizes beside which it splits `devices` evenly.

    The grid of either holds what fits beside the present size of the other: two of them may not fit at once.
    """
    if context not in supported or "tensor_parallel" not in supported:
        return
    tensors = [int(size) for size in supported["tensor_parallel"].grid.values]
    for size in (int(each) for each in supported[context].grid.values):
        fitting = tuple(tensor for tensor in tensors if devices % (tensor * size) == 0)
        if fitting and len(fitting) < len(tensors):
            yield Requires(knob=context, value=size, other="tensor_parallel", values=fitting, why=why)
