"""The host area: what it maps, keeps and gives back."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers.builtin.process.host_memory import HostMemory, size_class
from autotune.launchers.builtin.process.records import HostMemoryExhausted

PAGE = 4096
MIB = 1 << 20


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_size_classes_are_whole_pages_in_order_and_waste_little(one: int, two: int) -> None:
    low, high = sorted((one, two))
    assert size_class(low) <= size_class(high)
    assert size_class(high) >= high
    assert size_class(high) % PAGE == 0
    assert size_class(high) - high <= high / 8 + PAGE


def test_there_are_eight_classes_a_doubling() -> None:
    sizes = {size_class(pages * PAGE) for pages in range(1025, 2049)}
    assert len(sizes) == 8


def test_varying_lengths_map_no_more_than_the_longest_needs(tmp_path: Path) -> None:
    """Forty micro-batches as a trainer makes them: blocks in the forward pass, all back in the backward."""
    source = random.Random(0)
    host = HostMemory(tmp_path)
    most = 0
    for _ in range(40):
        tokens = source.randrange(64, 2048)
        blocks = [host.take(tokens * width * 4) for width in (64, 64, 160, 256) for _ in range(4)]
        most = max(most, sum(block.numel() for block in blocks))
        assert host.mapped_bytes <= most
        for block in blocks:
            host.give(block)
    assert host.mapped_bytes <= most


def test_a_freed_block_serves_its_class_again(tmp_path: Path) -> None:
    host = HostMemory(tmp_path)
    first = host.take(MIB - 5)
    address = first.data_ptr()
    host.give(first)
    del first
    assert host.take(MIB - PAGE - 5).data_ptr() == address
    assert host.mapped_bytes == MIB


def test_free_blocks_make_room_before_the_area_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 * MIB
    host = HostMemory(tmp_path)
    monkeypatch.setattr(
        "os.posix_fallocate", lambda _fd, _at, size: refuse() if host.mapped_bytes + size > limit else None
    )
    monkeypatch.setattr("mmap.mmap", lambda _fd, size, **_: bytearray(size))

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    blocks = [host.take(MIB) for _ in range(4)]
    with pytest.raises(HostMemoryExhausted, match="tried to allocate 2097152 bytes beyond 4194304"):
        host.take(2 * MIB)
    for block in blocks[:2]:
        host.give(block)
    assert host.take(2 * MIB).numel() == 2 * MIB
    assert host.mapped_bytes == limit


def test_what_is_never_given_back_is_not_rounded_up(tmp_path: Path) -> None:
    host = HostMemory(tmp_path)
    host.empty_like(torch.empty(17 * PAGE, dtype=torch.uint8))
    assert host.mapped_bytes == 17 * PAGE
