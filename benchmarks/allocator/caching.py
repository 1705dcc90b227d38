"""A model of PyTorch's caching allocator: one device, one stream, sizes in bytes.

Rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.x) with its default settings, and
with `expandable_segments:True`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

MIB = 1 << 20
_LEAST = 512  # every size is a multiple
_SMALL = MIB  # up to here from the small pool
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_OWN_SEGMENT = 10 * MIB  # from here on a request that finds no block gets a segment of its own size
_ROUND = 2 * MIB


class Event(NamedTuple):
    """An allocation of so many bytes, or, where `size` is negative, the end of one."""

    tensor: int
    size: int


class OutOfMemoryError(Exception):
    """A request that no block, and no new segment after all unused ones were released, could satisfy."""


class _Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "mapped", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.free, self.mapped = True, True
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Blocks of one pool; the free ones in order of size and address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        self.order: list[tuple[int, int]] = []
        self.at: dict[int, _Block] = {}
        self.start = _Block(0, 1 << 50)  # of the expandable segment: pages that are not mapped
        self.start.mapped = False

    def add(self, block: _Block) -> None:
        insort(self.order, (block.size, block.address))
        self.at[block.address] = block

    def remove(self, block: _Block) -> None:
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.at[block.address]

    def best(self, size: int) -> _Block | None:
        """Return the smallest free block that holds `size`, the lowest of equal ones."""
        place = bisect_left(self.order, (size, -1))
        return self.at[self.order[place][1]] if place < len(self.order) else None

    def gaps(self, after: _Block | None = None) -> _Block | None:
        """Return the first unmapped block of the expandable segment, or the first from `after` on."""
        block: _Block | None = self.start if after is None else after
        while block is not None and block.mapped:
            block = block.after
        return block


class CachingAllocator:
    """Allocates and frees as the caching allocator does, and counts what it reserves.

    Args:
        capacity: bytes that it may reserve; what exceeds them raises `OutOfMemoryError`.
        expandable: whether segments grow (`expandable_segments:True`).
    """

    def __init__(self, *, capacity: float = float("inf"), expandable: bool = False) -> None:
        self._capacity, self._expandable = capacity, expandable
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next = 0  # address of the next segment
        self._held: dict[int, tuple[_Block, _Pool, int]] = {}
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0

    def play(self, events: Iterable[Event]) -> None:
        """Follow events; raises OutOfMemoryError."""
        for tensor, size in events:
            if size >= 0:
                self.allocate(tensor, size)
            else:
                self.release(tensor)

    def allocate(self, tensor: int, size: int) -> None:
        """Give a tensor its block; raises OutOfMemoryError."""
        if not size:
            return
        size = -(-size // _LEAST) * _LEAST
        pool = self._small if size <= _SMALL else self._large
        block = pool.best(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grown(pool, size) if self._expandable else self._segment(pool, size)
        rest = block.size - size
        if rest >= _LEAST if pool.small or self._expandable else rest > _SMALL:
            self._split(pool, block, size)
        block.free = False
        self._held[tensor] = block, pool, size
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, tensor: int) -> None:
        """Take a tensor's block back and join it with free neighbours."""
        held = self._held.pop(tensor, None)
        if held is None:
            return
        block, pool, size = held
        self.allocated -= size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free and other.mapped:
                pool.remove(other)
                block = _joined(block, other)
        pool.add(block)

    def empty_cache(self) -> None:
        """Release every segment, and every page of an expandable one, that no tensor is in."""
        for pool in (self._small, self._large):
            for block in list(pool.at.values()):
                if self._expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def _segment(self, pool: _Pool, size: int) -> _Block:
        whole = pool.page if size < _OWN_SEGMENT else -(-size // _ROUND) * _ROUND
        if not self._reserve(whole):
            self.empty_cache()
            if not self._reserve(whole):
                raise OutOfMemoryError
        block = _Block(self._next, whole)
        self._next += whole
        return block

    def _split(self, pool: _Pool, block: _Block, size: int) -> None:
        _cut(block, size)
        assert block.after is not None
        pool.add(block.after)

    # ---------------------------------------------------------------- expandable segments: one per pool
    def _grown(self, pool: _Pool, size: int) -> _Block:
        """Return a block at the lowest place where free blocks and unmapped pages hold a request."""
        for again in (True, False):
            block, missing = self._place(pool, size)
            if self._reserve(missing):
                return self._mapped(pool, block, size)
            if again:
                self.empty_cache()
        raise OutOfMemoryError

    def _place(self, pool: _Pool, size: int) -> tuple[_Block, int]:
        """Return where a request would start, and the bytes that have to be mapped for it."""
        gap: _Block | None = pool.gaps()
        while gap is not None:
            first = gap.before if gap.before is not None and gap.before.free else gap
            room, missing, block = 0, 0, first
            while block.free and room < size:
                if not block.mapped:
                    missing += -(-min(block.size, size - room) // pool.page) * pool.page
                room += block.size
                if block.after is None:
                    return first, missing  # behind the last block there is no end
                block = block.after
            if room >= size:
                return first, missing
            gap = pool.gaps(after=block)
        raise AssertionError("a segment ends with unmapped pages")

    def _mapped(self, pool: _Pool, first: _Block, size: int) -> _Block:
        """Make one free block from `first` on that holds a request, whole pages mapped."""
        block = first
        if block.mapped:
            pool.remove(block)
        else:
            _map(pool, block, size)
        while block.size < size:
            after = block.after
            assert after is not None
            if after.mapped:
                pool.remove(after)
            else:
                _map(pool, after, size - block.size)
            _joined(block, after)
        after = block.after
        if after is not None and after.free and after.mapped:  # what is left of a page joins what follows
            pool.remove(after)
            _joined(block, after)
        return block

    def _unmap(self, pool: _Pool, block: _Block) -> None:
        """Give back the whole pages of a free block."""
        start = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if end <= start:
            return
        pool.remove(block)
        self.reserved -= end - start
        if block.address < start:
            _cut(block, start - block.address)
            pool.add(block)
            block = block.after or block
        if block.address + block.size > end:
            _cut(block, end - block.address)
            rest = block.after
            assert rest is not None
            pool.add(rest)
        block.mapped = False
        for other in (block.before, block.after):
            if other is not None and not other.mapped:
                block = _joined(block, other)


def _joined(one: _Block, other: _Block) -> _Block:
    first, second = (one, other) if one.address < other.address else (other, one)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    first.free = True
    return first


def _cut(block: _Block, size: int) -> None:
    rest = _Block(block.address + size, block.size - size)
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size


def _map(pool: _Pool, gap: _Block, size: int) -> None:
    """Map so much of a gap as holds `size`; the rest of it stays unmapped."""
    pages = -(-size // pool.page) * pool.page
    gap.mapped = True
    if pages < gap.size:
        rest = _Block(gap.address + pages, gap.size - pages)
        rest.mapped, rest.before, rest.after = False, gap, gap.after
        if gap.after is not None:
            gap.after.before = rest
        gap.after, gap.size = rest, pages
