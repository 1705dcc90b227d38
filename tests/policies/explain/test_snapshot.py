"""A snapshot's peak, failure, sites, phases and holes, against an allocator that knows them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.policies.explain.snapshot import summarised
from autotune.policies.values.failure import Phase
from tests.policies.snapshots import AUTOGRAD, FORWARD, LOAD, MIB, OPTIMIZER, Allocator


def test_the_first_failed_request_shows_who_held_the_memory():
    allocator = Allocator(200 * MIB)
    allocator.alloc(60 * MIB, LOAD)
    allocator.alloc(80 * MIB, FORWARD)
    gone = allocator.alloc(20 * MIB, OPTIMIZER)
    assert allocator.alloc(64 * MIB, AUTOGRAD) is None
    allocator.free(gone)
    allocator.alloc(10 * MIB, LOAD)
    (device,) = summarised(allocator.snapshot()).devices
    assert (device.moment, device.requested_bytes) == ("oom", 64 * MIB)
    assert (device.allocated_bytes, device.reserved_bytes) == (160 * MIB, 160 * MIB)
    assert device.device_free_bytes == 40 * MIB
    assert not device.fragmented
    assert [(site.place, site.phase, site.size_bytes) for site in device.sites] == [
        ("/app/models/attention.py:88 forward", Phase.FORWARD, 80 * MIB),
        ("/app/load.py:12 weights", Phase.NONE, 60 * MIB),
        ("/app/train.py:44 update", Phase.OPTIMIZER, 20 * MIB),
    ]
    assert device.phases == {"forward": 80 * MIB, "none": 60 * MIB, "optimizer": 20 * MIB}


def test_holes_that_together_would_do_are_fragmentation():
    allocator = Allocator(100 * MIB)
    blocks = [allocator.alloc(5 * MIB, FORWARD) for _ in range(20)]
    for address in blocks[::2]:
        allocator.free(address)
    assert allocator.alloc(30 * MIB, AUTOGRAD) is None
    (device,) = summarised(allocator.snapshot()).devices
    assert device.fragmented
    assert (device.largest_free_bytes, device.free_pieces) == (5 * MIB, 10)
    assert device.unallocated_bytes == 50 * MIB


def test_what_runs_in_autograds_own_thread_is_backward():
    allocator = Allocator(100 * MIB)
    allocator.alloc(30 * MIB, AUTOGRAD)
    (device,) = summarised(allocator.snapshot()).devices
    assert [site.phase for site in device.sites] == [Phase.BACKWARD]


def test_without_records_the_state_is_told():
    allocator = Allocator(100 * MIB, history=0)
    allocator.alloc(30 * MIB, LOAD)
    allocator.free(allocator.alloc(12 * MIB, LOAD))
    (device,) = summarised(allocator.snapshot()).devices
    assert (device.moment, device.allocated_bytes, device.reserved_bytes) == ("state", 30 * MIB, 42 * MIB)
    assert (device.largest_free_bytes, device.events) == (12 * MIB, 0)


def test_categories_of_the_profiler_and_labels_of_the_program_are_summed():
    allocator = Allocator(100 * MIB)
    allocator.alloc(30 * MIB, LOAD, category="parameter")
    allocator.alloc(12 * MIB, LOAD, user_metadata="kv cache")
    (device,) = summarised(allocator.snapshot()).devices
    assert device.labels == {"parameter": 30 * MIB, "kv cache": 12 * MIB}


def test_devices_are_told_apart():
    first, second = Allocator(100 * MIB), Allocator(100 * MIB, device=3)
    first.alloc(20 * MIB, LOAD)
    second.alloc(40 * MIB, FORWARD)
    one, two = first.snapshot(), second.snapshot()
    both = {
        "segments": one["segments"] + two["segments"],
        "device_traces": [one["device_traces"][0], *two["device_traces"][1:]],
    }
    assert [(d.device, d.allocated_bytes) for d in summarised(both).devices] == [(0, 20 * MIB), (3, 40 * MIB)]


def test_blocks_of_old_versions_keep_their_frames_in_a_history():
    old = [
        {
            "device": 0, "address": 1024, "total_size": 2 * MIB, "stream": 0, "segment_type": "small",
            "blocks": [
                {"size": 1024, "state": "active_allocated",
                 "history": [{"addr": 1024, "real_size": 1000, "frames": LOAD}]},
                {"size": 2 * MIB - 1024, "state": "inactive"},
            ],
        }
    ]  # fmt: skip
    (device,) = summarised(old).devices
    assert device.sites[0].place == "/app/load.py:12 weights"
    assert device.largest_free_bytes == 2 * MIB - 1024


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 120), st.integers(5, 400))
def test_a_ring_that_forgot_its_beginning_gives_the_same_peak(seed: int, steps: int, kept: int):
    chance = random.Random(seed)
    allocator = Allocator(1 << 40)
    held: list[int] = []
    totals = [0]
    for _ in range(steps):
        if held and chance.random() < 0.45:
            allocator.free(held.pop(chance.randrange(len(held))), waits=False)
        else:
            held.append(allocator.alloc(chance.randrange(1, 30 * MIB), chance.choice([LOAD, FORWARD])))
        if chance.random() < 0.05:
            allocator.empty_cache()
        totals.extend([allocator.allocated()] * (len(allocator.events) - len(totals) + 1))
    allocator.history = kept
    (device,) = summarised(allocator.snapshot()).devices
    recorded = min(kept, len(allocator.events))
    assert device.peak_bytes == max(totals[len(allocator.events) - recorded :])
    assert device.allocated_bytes == (device.peak_bytes if device.moment == "peak" else allocator.allocated())
    assert device.reserved_bytes >= device.allocated_bytes
    assert device.reserved_bytes - device.allocated_bytes >= device.largest_free_bytes


@pytest.mark.parametrize(
    "raw",
    [
        None, 3, "x", {}, {"a": 1}, {"segments": 3}, {"segments": [{"total_size": -1, "blocks": []}]},
        {"segments": [{"total_size": 1 << 70, "blocks": []}]}, {"device_traces": [[{"action": 3}]]},
        [1, 2], {"segments": [], "device_traces": [{}]},
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused(raw: object):
    with pytest.raises(ValueError, match="no snapshot"):
        summarised(raw)


JUNK = st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.floats() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot", "user_defined", "x",
)  # fmt: skip
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"action": st.sampled_from(ACTIONS)},
        optional={
            "addr": st.integers(0, 5000),
            "size": st.integers(0, 3000),
            "frames": JUNK,
            "category": JUNK,
            "device_free": st.integers(0, 99),
            "user_metadata": JUNK,
        },
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=4), JUNK)
def test_impossible_histories_crash_nothing(events, segments, settings_):
    raw = {
        "segments": [
            {
                "address": at,
                "total_size": size,
                "blocks": [{"address": at, "size": size, "state": "inactive"}],
            }
            for at, size in segments
        ],
        "device_traces": [events],
        "allocator_settings": settings_,
    }
    for device in summarised(raw).devices:
        assert device.peak_bytes >= 0 <= device.reserved_bytes


@given(JUNK)
def test_junk_is_refused_or_told(raw):
    for value in (raw, {"segments": raw}, {"device_traces": raw}):
        try:
            summarised(value)
        except ValueError:
            continue
