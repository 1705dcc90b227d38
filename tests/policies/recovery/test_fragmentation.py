"""Memory that the allocator reserved and nothing uses: the free cure first, alone or with another."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.remedies.step_size import needed_bytes
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Launch, Policy, Started
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Grid, Support
from tests.policies.jobs import CLUSTER, GIB, KNOBS, SUPPORTED, accepted, fails, profile

ALLOCATOR = {"allocator": "expandable"}
OFFERED = SUPPORTED | {"allocator": Support(setting="env", grid=Grid(values=("default", "expandable")))}


def cure(
    *,
    idle: float,
    requested: float,
    free: float,
    policy: Policy,
    knobs: Knobs = KNOBS,
    deny: tuple[str, ...] = (),
) -> dict:
    start = accepted(
        profile(replace(knobs, allocator="default"), supported=OFFERED),
        recovery=Recovery(preflight=Preflight.OFF, deny=deny),
    )
    start = replace(start, policy=policy)
    ended, row = fails(Phase.BACKWARD, requested=int(requested * GIB), free=int(free * GIB), phase_shown=True)
    facts = replace(row.facts, reserved_unallocated_bytes=int(idle * GIB))
    row = replace(row, facts=facts, fragmentation=True)
    action = decide((start, Started(knobs=start.profile.knobs), ended, row))
    assert isinstance(action, Launch) and action.remedy is not None
    return action.remedy.changes


@pytest.mark.parametrize("policy", Policy)
def test_the_allocator_goes_alone_where_what_it_returns_covers_the_request(policy: Policy):
    assert cure(idle=30, requested=2, free=1, policy=policy) == ALLOCATOR


@pytest.mark.parametrize("policy", Policy)
def test_the_allocator_goes_with_a_cure_where_it_returns_no_more_than_a_pass_loses(policy: Policy):
    changes = cure(idle=1.85, requested=0.22, free=0.1, policy=policy)
    assert changes.items() > ALLOCATOR.items()
    assert "tokens_per_microbatch" in changes


def test_the_allocator_goes_with_a_cure_where_the_estimate_expects_too_much_even_so():
    wide = replace(KNOBS, tokens_per_microbatch=65_536)
    changes = cure(idle=4, requested=2, free=1, policy=Policy.ESTIMATE, knobs=wide)
    assert changes.items() > ALLOCATOR.items()


@pytest.mark.parametrize("policy", Policy)
def test_an_allocator_that_the_job_denies_stays(policy: Policy):
    changes = cure(idle=30, requested=2, free=1, policy=policy, deny=("expandable_segments",))
    assert changes and "allocator" not in changes


def test_what_is_stranded_is_no_need():
    facts = Facts(
        requested_bytes=2 * GIB,
        free_bytes=GIB,
        capacity_bytes=CLUSTER.gpu_memory_bytes,
        reserved_unallocated_bytes=30 * GIB,
    )
    assert needed_bytes(facts) == CLUSTER.gpu_memory_bytes - GIB - 30 * GIB + 2 * GIB
