"""Parallel sizes that have to fit the trainer's devices together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.profile import Requires, Support


def sizes(present: int, devices: int) -> tuple[int, ...]:
    """Return the present parallel size and the powers of two that divide `devices` (0 counts as 1)."""
    powers = (1 << power for power in range(max(1, devices).bit_length()))
    return tuple(sorted({present, *(size for size in powers if devices == 0 or devices % size == 0)}))


def together(supported: Mapping[str, Support], context: str, *, devices: int, why: str) -> Iterator[Requires]:
    """Yield, for each size of the knob `context`, the tensor-parallel sizes with which it divides `devices`.

    Each grid holds the sizes that fit the present size of the other; two new sizes may not fit together.
    """
    if context not in supported or "tensor_parallel" not in supported:
        return
    tensors = [int(size) for size in supported["tensor_parallel"].grid.values]
    for size in (int(each) for each in supported[context].grid.values):
        fitting = tuple(tensor for tensor in tensors if devices % (tensor * size) == 0)
        if fitting and len(fitting) < len(tensors):
            yield Requires(knob=context, value=size, other="tensor_parallel", values=fitting, why=why)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def head_sizes(sizes: Iterable[int], shape: Model | None) -> tuple[int, ...]:
    """Return the sizes that split a model's heads, and share its key-value heads, evenly."""
    if shape is None:
        return tuple(sizes)
    kv = shape.kv_heads
    return tuple(n for n in sizes if shape.heads % n == 0 and (kv % n == 0 or n % kv == 0))


def wider(present: int, devices: int) -> tuple[int, ...]:
    """Return the group sizes that divide the devices, from the present one upwards."""
    return tuple(size for size in divisors(devices) if size >= present)
