"""`recovery.allow` and `recovery.deny` hold wherever knobs come to change."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.next_remedy import next_remedy
from autotune.policies.recovery.upgrade import offer
from autotune.policies.remedies.allow_deny import denial, legal
from autotune.policies.remedies.catalogue import MOVES, SAVING
from autotune.policies.search.space import neighbours, space
from autotune.policies.values.events import GoalReached, Launch, Policy, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Recovery, Search
from autotune.policies.values.knobs import changed
from autotune.policies.values.remedy import Effect
from tests.policies.jobs import GIB, KNOBS, accepted, fails, peaks

DENIABLE = sorted({*SAVING, *SAVING.values(), *MOVES, Effect.NUMERIC.value})


def permitted(recovery, before, after) -> bool:
    job = accepted()
    return not denial(recovery, job.profile, before, after)


def test_a_remedys_name_excludes_its_changes_in_one_direction():
    job = accepted()
    less, more = (replace(KNOBS, memory_fraction=value) for value in (0.5, 0.9))
    deny = Recovery(deny=("reduce_mem_fraction",))
    assert denial(deny, job.profile, KNOBS, less) == "reduce_mem_fraction"
    assert denial(deny, job.profile, KNOBS, more) == ""
    assert denial(Recovery(deny=("memory_fraction",)), job.profile, KNOBS, more) == "memory_fraction"


@given(deny=st.lists(st.sampled_from(DENIABLE), min_size=1, max_size=4).map(tuple))
@settings(deadline=None, max_examples=10)  # each decides ten times
def test_nothing_that_is_denied_is_launched_climbed_to_or_searched(deny):
    recovery = Recovery(deny=deny, climb=True)
    for policy in Policy:
        start = replace(accepted(recovery=recovery), policy=policy)
        action = decide((start,))
        assert isinstance(action, Launch) and permitted(recovery, KNOBS, action.knobs)
        for phase, cause in ((Phase.BACKWARD, Cause.GPU_OOM), (Phase.ROLLOUT, Cause.GPU_OOM)):
            failed = (start, Started(knobs=KNOBS), *fails(phase, cause=cause, requested=8 * GIB, free=GIB))
            remedy = next_remedy(fold(failed))
            if remedy is not None:
                assert not set(deny) & {remedy.name, *remedy.changes}
                assert permitted(recovery, KNOBS, remedy.apply(KNOBS))
        idle = [Progressed(step=n, peaks=peaks(backward=20 * GIB, rollout=30 * GIB)) for n in range(1, 6)]
        goal = GoalReached(step=5, marginal=False, headroom=0.6)
        faster = offer(fold((start, Started(knobs=KNOBS), *idle, goal)))
        if faster is not None:
            assert permitted(recovery, KNOBS, faster.apply(KNOBS))


@pytest.mark.parametrize("deny", DENIABLE)
def test_a_search_does_not_vary_what_is_denied(deny):
    start = accepted(recovery=Recovery(deny=(deny,)))
    job = replace(start.job, search=Search())
    dimensions = space(job, start.profile, KNOBS)
    assert dimensions
    for knobs in neighbours(start.profile, KNOBS, KNOBS, dimensions, recovery=job.recovery):
        assert permitted(job.recovery, KNOBS, knobs), changed(KNOBS, knobs)
        assert legal(start.profile, job.recovery, KNOBS, knobs, started=False)


def test_without_the_list_the_same_search_varies_it():
    start = accepted()
    knobs = {d.knob for d in space(start.job, start.profile, KNOBS)}
    assert {"memory_fraction", "tokens_per_microbatch"} <= knobs
