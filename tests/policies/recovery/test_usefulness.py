"""Which remedies of the ladder free some of the memory that ran out, by the estimate."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.by_estimate import usefulness
from autotune.policies.values.events import Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.remedy import Remedy
from tests.policies.jobs import GIB, KNOBS, accepted, fails, profile

MOVED = replace(KNOBS, optimizer_offload=True)
WAITING = replace(KNOBS, activation_offload=True)
SMALLER = {"tokens_per_microbatch": 8192}


def useful(changes, *, knobs=KNOBS, written=None, model=True, **failure):
    """Return whether changes may free some of what ran out in a job `written` with other settings or not."""
    start = accepted(profile(written or knobs))
    start = start if model else replace(start, job=replace(start.job, shape=None))
    run = fold((start, Started(knobs=knobs), *fails(**failure)))
    diagnosis = run.attempts[-1].diagnosis
    assert diagnosis is not None
    return usefulness(run, diagnosis)(Remedy(name="any", changes=changes, reason="a test"))


HOST = {"cause": Cause.HOST_OOM, "phase": Phase.BACKWARD}


@pytest.mark.parametrize(
    ("changes", "of", "helps"),
    [
        ({"optimizer_offload": False}, {"knobs": MOVED, **HOST, "phase": Phase.OPTIMIZER}, True),
        (SMALLER, {"knobs": MOVED, **HOST, "phase": Phase.OPTIMIZER}, False),
        # A micro-batch that is computed on the host uses its memory, which no estimate knows.
        (SMALLER, HOST, False),
        (SMALLER, {**HOST, "requested": GIB}, True),
        (SMALLER, {**HOST, "requested": GIB, "knobs": MOVED}, False),
        # Offloading that a relaunch added is undone, although it holds nothing in this phase.
        ({"activation_offload": False}, {"knobs": WAITING, **HOST, "phase": Phase.INIT}, False),
        (
            {"activation_offload": False},
            {"knobs": WAITING, "written": KNOBS, **HOST, "phase": Phase.INIT},
            True,
        ),
        # Of what no estimate knows, nothing is excluded.
        ({"host_allocator": "jemalloc"}, HOST, True),
        ({"host_allocator": "jemalloc", **SMALLER}, HOST, True),
        (SMALLER, {**HOST, "model": False}, True),
    ],
)
def test_what_may_free_a_full_host(changes, of, helps):
    assert useful(changes, **of) is helps


@pytest.mark.parametrize(
    ("changes", "helps"),
    [
        (SMALLER, True),
        ({"concurrency": 32}, False),
        ({"concurrency": 32, **SMALLER}, True),
    ],
)
def test_what_may_free_a_full_device(changes, helps):
    assert useful(changes, phase=Phase.BACKWARD) is helps
    assert useful(changes, phase=Phase.BACKWARD, model=False)
