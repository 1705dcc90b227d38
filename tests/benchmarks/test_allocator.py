import random

import pytest

from benchmarks.allocator.caching import MIB, CachingAllocator, Event, OutOfMemoryError
from benchmarks.allocator.replay import lengths, loss, pipeline_steps, resident, steps
from benchmarks.allocator.trace import Size, Trace


def test_small_requests_share_a_segment_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.play((Event(0, 100), Event(1, 600)))
    assert allocator.reserved == 2 * MIB
    assert allocator.allocated == 512 + 1024
    allocator.allocate(2, 2 * MIB)  # above 1 MiB and below 10: from a segment of 20
    assert allocator.reserved == 22 * MIB
    allocator.allocate(3, 25 * MIB + 1)
    assert allocator.reserved == 48 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    allocator.play((Event(0, 40 * MIB), Event(1, 60 * MIB), Event(0, -1), Event(1, -1), Event(2, 30 * MIB)))
    assert allocator.reserved == 100 * MIB
    allocator.allocate(3, 60 * MIB)
    assert allocator.reserved == 100 * MIB
    allocator.allocate(4, 10 * MIB)  # what was left of the first block
    assert allocator.reserved == 100 * MIB


def test_a_rest_of_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.play((Event(0, 41 * MIB), Event(0, -1), Event(1, 40 * MIB)))
    allocator.allocate(2, 20 * MIB)
    assert allocator.reserved == (42 + 20) * MIB


def test_unused_segments_are_released_before_a_request_fails() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.play((Event(0, 60 * MIB), Event(0, -1), Event(1, 80 * MIB)))
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(2, 30 * MIB)


def test_a_segment_in_use_keeps_its_rest() -> None:
    """The request is smaller than what is free: fragmentation, which growing segments do not have."""
    events = (Event(0, 60 * MIB), Event(0, -1), Event(1, 20 * MIB), Event(2, 60 * MIB))
    with pytest.raises(OutOfMemoryError):
        CachingAllocator(capacity=100 * MIB).play(events)
    CachingAllocator(capacity=100 * MIB, expandable=True).play(events)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [float("inf"), 200 * MIB])
def test_bytes_are_neither_lost_nor_given_twice(expandable: bool, capacity: float) -> None:
    allocator, draw = CachingAllocator(capacity=capacity, expandable=expandable), random.Random(1)
    living: dict[int, int] = {}
    failures = 0
    for number in range(4000):
        if living and draw.random() < 0.5:
            gone = draw.choice(sorted(living))
            del living[gone]
            allocator.release(gone)
            continue
        size = int(2 ** draw.uniform(5, 26.5))
        try:
            allocator.allocate(number, size)
        except OutOfMemoryError:
            failures += 1
        else:
            living[number] = size
        assert allocator.allocated == sum(-(-each // 512) * 512 for each in living.values())
        assert allocator.allocated <= allocator.reserved <= capacity
    assert bool(failures) is (capacity < float("inf"))
    for number in living:
        allocator.release(number)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0


_KEPT = tuple(Size(n, 0.0, 16_384.0 * (1 + n % 3), ends=False) for n in range(30))
_ENDED = tuple(Size(n, 0.0, 0.0, ends=True) for n in range(30))
_GRADIENT = 100
# A pass keeps some sizes from forward to backward; the first one leaves gradients.
TRACE = Trace(
    (64 * MIB,),
    {
        "scoring": (),
        "training": (Size(_GRADIENT, 512.0 * MIB, 0.0, ends=False), *_KEPT, *_ENDED),
        "forward": _KEPT,
        "backward": _ENDED,
        "update": (Size(_GRADIENT, 0.0, 0.0, ends=True),),
    },
)
_BETWEEN = 1 << 20  # numbers of one pass's tensors
PASS = sum(size.per_token for size in _KEPT)  # bytes per token


def test_a_pass_of_one_size_loses_nothing_and_varied_ones_lose_more_than_growing_segments_do() -> None:
    equal, varied = (
        loss(resident(TRACE), steps(TRACE, lengths(4096, varied=varied))) for varied in (False, True)
    )
    assert equal.needed == pytest.approx(0.0, abs=0.01)
    assert varied.reserved > 0.05
    assert varied.needed_expandable < 0.02


@pytest.mark.parametrize(("stages", "in_flight"), [(1, 1), (2, 2), (4, 4), (8, 6)])
def test_a_first_stage_keeps_a_micro_batch_for_itself_and_one_for_each_later_stage(
    stages: int, in_flight: int
) -> None:
    allocator = CachingAllocator()
    allocator.play(resident(TRACE, gradients=True))
    before = allocator.allocated
    tokens = lengths(1024, varied=False, micro_batches=6)
    allocator.play(pipeline_steps(TRACE, tokens, stages))
    assert allocator.most_allocated - before == in_flight * PASS * 1024
    assert allocator.allocated == before  # every forward pass had its backward


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "in_flight"),
    [(2, 3, 8, 7), (4, 2, 8, 11), (4, 2, 4, 8), (2, 2, 3, 5)],
)
def test_a_stage_of_interleaved_chunks_keeps_those_of_its_warm_up_and_one(
    stages: int, chunks: int, micro_batches: int, in_flight: int
) -> None:
    allocator = CachingAllocator()
    allocator.play(resident(TRACE, gradients=True))
    before = allocator.allocated
    tokens = lengths(1024, varied=False, micro_batches=micro_batches)
    allocator.play(pipeline_steps(TRACE, tokens, stages, chunks))
    assert allocator.most_allocated - before == in_flight * PASS * 1024
    assert allocator.allocated == before


def test_chunks_go_backward_in_the_reverse_order_of_their_forward_passes() -> None:
    chunks = [chunk for chunk, _ in _passes(stages=2, chunks=2, micro_batches=4)]
    assert chunks == [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0]


def _passes(*, stages: int, chunks: int, micro_batches: int) -> list[tuple[int, bool]]:
    """Return the chunk of every pass of a step, and whether it is a forward one."""
    begin = Size(1, 1.0, 0.0, ends=False)
    once = Trace((), {"scoring": (), "forward": (begin,), "backward": (begin._replace(ends=True),)})
    result = [
        (event.tensor, event.size > 0)
        for event in pipeline_steps(once, [[1] * micro_batches], stages, chunks)
    ]
    lowest = min(number for number, _ in result)
    return [((number - lowest) // _BETWEEN % chunks, began) for number, began in result]


def test_gradients_that_stay_are_no_part_of_a_pass() -> None:
    """Their share of a pass would hide what the pass loses: they are four times its size."""
    tokens = lengths(128, varied=True, micro_batches=8)
    result = loss(resident(TRACE, gradients=True), pipeline_steps(TRACE, tokens, 1))
    assert result.reserved > 0.05
