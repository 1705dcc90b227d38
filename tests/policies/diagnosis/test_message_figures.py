"""Figures of messages by the order of their fields, whichever allocator prints them."""

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.message_figures import facts_of, fragmented, with_outside
from autotune.policies.diagnosis.scan import scan
from autotune.policies.remedies.step_size import missing_bytes
from autotune.policies.values.diagnosis import Facts

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("message", "requested", "free", "capacity"),
    [
        ("out of memory; requested 1024 MiB, free 512 MiB, total 81920 MiB", 1 * GIB, 512 * MIB, 80 * GIB),
        ("Insufficient memory. Requested: 20.00 GiB, available: 10.00 GiB", 20 * GIB, 10 * GIB, None),
        ("Allocation of size 2147483648 failed: HIP error: hipErrorOutOfMemory", 2 * GIB, None, None),
        ("job killed: vmem 530434129920 exceeded limit 515396075520", None, None, 515396075520),
    ],
)
def test_a_messages_figures_are_read_in_bytes(message, requested, free, capacity):
    facts = facts_of(message)
    assert (facts.requested_bytes, facts.free_bytes, facts.capacity_bytes) == (requested, free, capacity)


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        ("7", 7),
        ("7 B", 7),
        ("7 bytes", 7),
        ("3 KiB", 3 * 1024),
        ("3 MiB", 3 * 1024**2),
        ("3 GiB", 3 * 1024**3),
        ("3 TiB", 3 * 1024**4),
        ("3K", 3 * 1024),
        ("3M", 3 * 1024**2),
        ("3G", 3 * 1024**3),
        ("3T", 3 * 1024**4),
        ("3Ki", 3 * 1024),
        ("3Mi", 3 * 1024**2),
        ("3Gi", 3 * 1024**3),
        ("3Ti", 3 * 1024**4),
        ("3 KB", 3_000),
        ("3 MB", 3_000_000),
        ("3 GB", 3_000_000_000),
        ("3 TB", 3_000_000_000_000),
        ("2.5 GiB", 5 * 1024**3 // 2),
        ("1,536 MiB", 3 * 1024**3 // 2),
    ],
)
def test_every_unit_is_of_its_size(size, size_bytes):
    assert facts_of(f"out of memory; tried to allocate {size}").requested_bytes == size_bytes


@pytest.mark.parametrize(
    ("requested", "idle", "free", "explained"),
    [
        (10, 10, 0, True),
        (10, 9, 0, False),
        (10, 9, 1, True),  # with what is free there would have been enough
        (10, 3, 7, True),
        (10, 2, 8, False),  # a small part of it
        (10, 9, None, False),
        (None, 10, 5, False),
        (10, None, 5, False),
        (0, 10, 5, False),
    ],
)
def test_reserved_pieces_explain_a_failure_that_they_would_have_prevented(requested, idle, free, explained):
    facts = Facts(requested_bytes=requested, reserved_unallocated_bytes=idle, free_bytes=free)
    assert fragmented(facts) is explained


@pytest.mark.parametrize("lacking", ["capacity_bytes", "free_bytes", "allocated_bytes", None])
def test_what_others_hold_of_a_card_follows_from_all_four_figures(lacking):
    sizes = {"capacity_bytes": 80, "free_bytes": 10, "allocated_bytes": 50, "reserved_unallocated_bytes": 5}
    known = Facts(**{name: size for name, size in sizes.items() if name != lacking})
    assert with_outside(known).outside_bytes == (80 - 10 - 50 - 5 if lacking is None else None)


NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.46 GiB. GPU 2 has a total capacity of "
    "47.54 GiB of which 2.91 GiB is free. Process 4410 has 44.60 GiB memory in use. Of the allocated memory "
    "41.02 GiB is allocated by PyTorch, and 412.50 MiB is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 26.00 MiB (GPU 1; 15.75 GiB total capacity; "
    "13.08 GiB already allocated; 87.75 MiB free; 13.44 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize("message", [NEW, OLD])
def test_a_copy_of_a_terminal_may_pad_a_message_anywhere(message):
    whole = facts_of(message)
    assert None not in (whole.requested_bytes, whole.free_bytes, whole.reserved_unallocated_bytes)
    for at in range(message.index("Tried"), len(message)):
        assert facts_of(message[:at] + " " * 30 + message[at:]) == whole, message[:at]


@pytest.mark.parametrize("message", [NEW, OLD])
@pytest.mark.parametrize("prefix", ["", "[rank2]: "])
def test_a_terminal_may_break_a_message_anywhere(message, prefix):
    whole = facts_of(message)
    for at in range(message.index("allocate"), len(message) - 1):
        log = f"{prefix}{message[:at]}\n{message[at:]}\nexit code 1\n"
        assert diagnose(scan([log.encode()])).facts == whole, message[:at]


def test_a_process_with_a_share_of_the_card_has_room_within_its_share():
    # Of torch 2.11 on an H200, after set_per_process_memory_fraction(0.1).
    facts = facts_of(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 139.80 GiB of which 127.29 GiB is free. Including non-PyTorch memory, this process has 12.51 GiB "
        "memory in use. 13.98 GiB allowed; Of the allocated memory 12.00 GiB is allocated by PyTorch, and "
        "64.00 MiB is reserved by PyTorch but unallocated."
    )
    assert facts.capacity_bytes == round(139.80 * GIB)
    assert facts.free_bytes == round(127.29 * GIB)
    assert facts.limit_bytes == facts.allowed_bytes == round(13.98 * GIB)
    assert facts.room_bytes == round(13.98 * GIB) - 12 * GIB - 64 * MIB
    assert not fragmented(facts)
    assert missing_bytes(facts) == 2 * GIB - facts.room_bytes


def test_without_a_share_the_room_is_what_is_free():
    facts = facts_of("GPU 0 has a total capacity of 80.00 GiB of which 2.00 GiB is free.")
    assert (facts.limit_bytes, facts.room_bytes) == (80 * GIB, 2 * GIB)
    whole = facts_of(
        "(GPU 0; 22.20 GiB total capacity; 20.75 GiB already allocated; 5.00 MiB free; "
        "22.20 GiB allowed; 20.86 GiB reserved in total by PyTorch)"
    )
    assert whole.room_bytes == 5 * MIB


@pytest.mark.parametrize(
    "message",
    [
        (
            "where the task (name=f, pid=7) was running was 97.00GB / 100.00GB (0.97), which exceeds the "
            "memory usage threshold of 0.95."
        ),
        f"Memory usage {97 * GIB}B exceeded threshold of {95 * GIB}B (95.0% of {100 * GIB}B limit)",
        (
            f"Node memory usage above threshold, used: {97 * GIB}, threshold_bytes: {95 * GIB}, total bytes: "
            f"{100 * GIB}"
        ),
    ],
)
def test_on_a_node_nothing_is_left_above_what_ray_allows(message):
    facts = facts_of(message)
    assert (facts.capacity_bytes, facts.free_bytes, facts.allowed_bytes) == (100 * GIB, 3 * GIB, 95 * GIB)
    assert facts.room_bytes == 0
