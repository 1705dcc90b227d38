"""A trainer's steps replayed through the caching allocator: what is reserved, and the least card."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.allocator.caching import CachingAllocator, Event, OutOfMemoryError
from benchmarks.allocator.trace import Trace

_STEPS, _MICRO_BATCHES = 3, 4
_SPREAD = 0.5  # standard deviation of the logarithm of a micro-batch's tokens
_EXACT = 1.004  # of the least card
_TENSORS = 1 << 20  # numbers of one part's tensors
_SHORT = 64  # tokens


class Loss(NamedTuple):
    """Bytes beyond what is allocated at most, as shares of what a pass adds to the resident state."""

    reserved: float  # on a card that is large enough
    needed: float  # of the least card, where unused segments are released before a request fails
    reserved_expandable: float
    needed_expandable: float


def lengths(
    longest: int, *, varied: bool, micro_batches: int = _MICRO_BATCHES, seed: int = 3
) -> list[list[int]]:
    """Return the tokens of each micro-batch of some steps; the last one is the longest."""
    draw = random.Random(seed)

    def tokens() -> int:
        return int(longest * min(1.0, math.exp(draw.gauss(-_SPREAD, _SPREAD)))) if varied else longest

    steps = [[tokens() for _ in range(micro_batches)] for _ in range(_STEPS)]
    steps[-1][-1] = longest
    return steps


def resident(trace: Trace, *, gradients: bool = False) -> Iterator[Event]:
    """Yield the allocations of what stays: parameters, optimizer state, on request gradients."""
    yield from (Event(number, size) for number, size in enumerate(trace.resident))
    if gradients:
        yield from trace.events("training", _SHORT, _TENSORS)  # it makes them


def steps(trace: Trace, tokens: Sequence[Sequence[int]]) -> Iterator[Event]:
    """Yield the events of whole steps: scoring of all micro-batches, their training, the update."""
    first = 2 * _TENSORS
    for step in tokens:
        for count in step:
            yield from trace.events("scoring", count, first)
            first += _TENSORS
        own = first
        for number, count in enumerate(step):
            for part in ("forward", "backward") if number else ("training",):
                yield from trace.events(part, count, first)
            first += _TENSORS
        yield from trace.events("update", 0, own)  # it ends the gradients that the first pass made


def pipeline_steps(
    trace: Trace, tokens: Sequence[Sequence[int]], stages: int, chunks: int = 1
) -> Iterator[Event]:
    """Yield the events of whole steps of a pipeline's first stage, whose gradients are resident.

    The order is that of Megatron's schedules (pipeline_parallel/schedules.py): forward passes to fill the
    stages, then one forward and one backward pass in turn. Where the stage is cut into interleaved chunks,
    the trace is of one of them, each takes as many micro-batches in a row as there are stages, and backward
    goes through the chunks from the last to the first. The optimizer's step, which works in buffers that are
    resident, is left out.
    """
    first = 2 * _TENSORS
    group = stages if chunks > 1 else 1
    ahead = 2 * (stages - 1) + (chunks - 1) * group if chunks > 1 else stages - 1
    for step in tokens:
        for count in step:
            for _ in range(chunks):
                yield from trace.events("scoring", count, first)
                first += _TENSORS
        order = [
            (number, chunk)
            for begin in range(0, len(step), group)
            for chunk in range(chunks)
            for number in range(begin, min(begin + group, len(step)))
        ]
        for place in range(len(order) + ahead):
            if place < len(order):
                number, chunk = order[place]
                yield from trace.events("forward", step[number], first + (number * chunks + chunk) * _TENSORS)
            if ahead <= place:
                number, chunk = order[place - ahead]
                own = first + (number * chunks + chunks - 1 - chunk) * _TENSORS
                yield from trace.events("backward", step[number], own)
        first += len(step) * chunks * _TENSORS


def loss(kept: Iterable[Event], played: Iterable[Event]) -> Loss:
    """Return what the allocator cannot use of a trainer's steps beside what is resident."""
    state, events = tuple(kept), tuple(played)
    shares: list[float] = []
    for expandable in (False, True):
        free = CachingAllocator(expandable=expandable)
        free.play(state)
        before = free.allocated
        free.play(events)
        added = free.most_allocated - before
        least = _least((*state, *events), free, expandable=expandable)
        shares += [(size - free.most_allocated) / added for size in (free.most_reserved, least)]
    return Loss(*shares)


def _least(events: Sequence[Event], free: CachingAllocator, *, expandable: bool) -> float:
    """Return the bytes of the least card on which the events can be played."""
    fails, holds = float(free.most_allocated), float(free.most_reserved)
    while holds > fails * _EXACT:
        middle = (fails + holds) / 2
        try:
            CachingAllocator(capacity=middle, expandable=expandable).play(events)
        except OutOfMemoryError:
            fails = middle
        else:
            holds = middle
    return holds
