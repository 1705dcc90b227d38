"""Figures of messages by the order of their fields, whichever allocator prints them."""

import pytest

from autotune.policies.diagnosis.message_figures import facts_of

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
    found = facts_of(message)
    assert (found.requested_bytes, found.free_bytes, found.capacity_bytes) == (requested, free, capacity)
