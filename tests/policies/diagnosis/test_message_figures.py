"""Figures of messages by the order of their fields, whichever allocator prints them."""

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.message_figures import facts_of
from autotune.policies.diagnosis.scan import scan

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
