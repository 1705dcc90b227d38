"""Replays the events of a memory snapshot up to its first failure or its peak."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_ROUNDED_TO = (
    512  # bytes: torch's allocator returns multiples (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
)
_MAPS, _UNMAPS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_ACTIVE, _WAITING = "active_allocated", "active_awaiting_free"


class Block(msgspec.Struct, gc=False):
    """A block of a segment in a snapshot."""

    size: _Count
    state: str
    address: _Count | None = None
    requested_size: _Count | None = None
    frames: Any = None
    history: Any = None  # contains the frames in torch before 2.1


class Segment(msgspec.Struct, gc=False):
    """Memory that the allocator got from the driver in one call."""

    total_size: _Count
    blocks: list[Block]
    address: _Count | None = None
    device: int = 0


class TraceEvent(msgspec.Struct, gc=False):
    """One action of the allocator."""

    action: str
    size: _Count = 0
    addr: _Count | None = None
    device_free: _Count | None = None
    frames: Any = None
    category: Any = None
    user_metadata: Any = None


class Allocation(NamedTuple):
    """Memory in use, and the stack that allocated it."""

    size_bytes: int
    frames: Any
    label: str  # the program's own label, if any


class Moment(NamedTuple):
    """The state of the allocator at one point of its history."""

    kind: str  # oom | peak | state
    alive: tuple[Allocation, ...]
    peak_bytes: int
    reserved_bytes: int
    free: tuple[int, ...]  # bytes of each free chunk of the reserved memory
    failed: TraceEvent | None


def moment_of(events: Sequence[TraceEvent], segments: Iterable[Segment]) -> Moment:
    """Return the state at the first failure, else at the peak; without recorded allocations, at the end."""
    segments = tuple(segments)
    final, waiting = _final(segments)
    if not any(event.action == "alloc" for event in events):
        return _state(final, segments, next((e for e in events if e.action == "oom"), None))
    start = _at_start(events, final)
    totals = enumerate([sum(one.size_bytes for one in start.values()), *_replay(events, dict(start), {})], -1)
    at, peak_bytes = max(totals, key=lambda each: each[1])  # the first of equal peaks
    failed = next((index for index, event in enumerate(events) if event.action == "oom"), None)
    moment = at if failed is None else failed
    alive, pending = dict(start), dict[int, int]()
    for _ in _replay(events[: moment + 1], alive, pending):
        pass
    reserved = _reserved(events[moment + 1 :], segments)
    occupied = [(address, one.size_bytes) for address, one in alive.items()]
    occupied += pending.items()
    if moment == len(events) - 1:
        occupied += waiting.items()
    return Moment(
        kind="peak" if failed is None else "oom",
        alive=tuple(alive.values()),
        peak_bytes=peak_bytes,
        reserved_bytes=sum(end - begin for begin, end in reserved),
        free=tuple(_gaps(reserved, occupied)),
        failed=None if failed is None else events[failed],
    )


def _final(segments: Iterable[Segment]) -> tuple[dict[int, Allocation], dict[int, int]]:
    """Return the allocations in use, and the bytes that wait for another stream, at the end by address."""
    used: dict[int, Allocation] = {}
    waiting: dict[int, int] = {}
    unplaced = -1
    for segment in segments:
        offset = segment.address
        for block in segment.blocks:
            address = block.address if block.address is not None else offset
            if address is None:
                address, unplaced = unplaced, unplaced - 1
            if block.state == _ACTIVE:
                size = block.requested_size if block.requested_size is not None else block.size
                used[address] = Allocation(size, _frames_of(block), "")
            elif block.state == _WAITING:
                waiting[address] = block.size
            offset = None if offset is None else offset + block.size
    return used, waiting


def _frames_of(block: Block) -> Any:
    if block.frames is None and isinstance(block.history, list) and block.history:
        first = block.history[0]
        return first.get("frames") if isinstance(first, dict) else None
    return block.frames


def _state(final: dict[int, Allocation], segments: Iterable[Segment], failed: TraceEvent | None) -> Moment:
    free = [b.size for s in segments for b in s.blocks if b.state not in (_ACTIVE, _WAITING)]
    return Moment(
        kind="state" if failed is None else "oom",
        alive=tuple(final.values()),
        peak_bytes=sum(one.size_bytes for one in final.values()),
        reserved_bytes=sum(segment.total_size for segment in segments),
        free=tuple(free),
        failed=failed,
    )


def _at_start(events: Iterable[TraceEvent], final: dict[int, Allocation]) -> dict[int, Allocation]:
    """Return the allocations in use before the first event: the history is a ring buffer that overwrites."""
    start: dict[int, Allocation] = {}
    visited: set[int] = set()
    for event in events:
        if event.addr is None:
            continue
        if event.action == "free_requested" and event.addr not in visited:
            start[event.addr] = _allocation(event)
        if event.action in ("alloc", "free_requested"):
            visited.add(event.addr)
    start.update((address, one) for address, one in final.items() if address not in visited)
    return start


def _replay(
    events: Iterable[TraceEvent], alive: dict[int, Allocation], pending: dict[int, int]
) -> Iterator[int]:
    """Yield the bytes in use after each event; updates `alive` and `pending`, which waits for a stream."""
    total = sum(one.size_bytes for one in alive.values())
    for event in events:
        if event.addr is not None and event.action == "alloc":
            before = alive.get(event.addr)
            total += event.size - (0 if before is None else before.size_bytes)
            alive[event.addr] = _allocation(event)
            pending.pop(event.addr, None)
        elif event.addr is not None and event.action == "free_requested":
            gone = alive.pop(event.addr, None)
            total -= 0 if gone is None else gone.size_bytes
            pending[event.addr] = event.size if gone is None else gone.size_bytes
        elif event.addr is not None and event.action == "free_completed":
            pending.pop(event.addr, None)
        yield total


def _allocation(event: TraceEvent) -> Allocation:
    label = event.category if isinstance(event.category, str) else event.user_metadata
    return Allocation(event.size, event.frames, label[:80] if isinstance(label, str) else "")


def _reserved(later: Sequence[TraceEvent], segments: Iterable[Segment]) -> list[tuple[int, int]]:
    """Return the address ranges reserved before the `later` events, by undoing these from the last one."""
    held = {s.address: s.address + s.total_size for s in segments if s.address is not None and s.total_size}
    for event in reversed(later):
        if event.addr is None or not event.size:
            continue
        if event.action in _UNMAPS:
            held[event.addr] = event.addr + event.size
        elif event.action in _MAPS:
            _cut(held, event.addr, event.addr + event.size)
    return _merged(held.items())


def _cut(held: dict[int, int], begin: int, end: int) -> None:
    whole = held.pop(begin, None)
    if whole is None:
        # Part of a longer range: a snapshot shows the mapped memory of an expandable segment as one.
        first = next((at for at, until in held.items() if at < begin < until), None)
        if first is None:
            return
        whole = held[first]
        held[first] = begin
    if whole > end:
        held[end] = whole


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _gaps(reserved: Sequence[tuple[int, int]], occupied: Iterable[tuple[int, int]]) -> Iterable[int]:
    """Yield the bytes of each free chunk of the reserved ranges."""
    begins = [begin for begin, _ in reserved]
    inside: list[list[tuple[int, int]]] = [[] for _ in reserved]
    for address, size in occupied:
        index = bisect_right(begins, address) - 1
        if index >= 0 and address < reserved[index][1]:
            inside[index].append((address, address + -(-max(size, 1) // _ROUNDED_TO) * _ROUNDED_TO))
    for (begin, end), blocks in zip(reserved, inside, strict=True):
        at = begin
        for first, last in sorted(blocks):
            if first > at:
                yield first - at
            at = max(at, last)
        if end > at:
            yield end - at
