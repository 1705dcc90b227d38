"""The state of a run and the view of it, after each row of a history."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Decided,
    Diagnosed,
    Edited,
    Ended,
    Event,
    Finished,
    GaveUp,
    GoalReached,
    Interrupted,
    Progressed,
    Purpose,
    Result,
    Stable,
    Started,
    Tried,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import RESUMED
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Crashed
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.run.state import RunState, with_driver
from autotune.policies.values.run.view import RunView

CLUSTER = Cluster(address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=1 << 30)
PROFILE = Profile(framework="builtin", knobs=Knobs(microbatch_size=8), supported={})
ACCEPTED = Accepted(run="7c1e", job=Job(name="j", framework="builtin"), profile=PROFILE, cluster=CLUSTER)
START = Started(attempt=1, knobs=PROFILE.knobs)
CRASH = Ended(attempt=1, outcome=Crashed(exit_code=1))
GOAL = GoalReached(attempt=2, step=2, marginal=False, headroom=0.25)
HALF = Remedy(name="halve", changes={"microbatch_size": 4}, frees="memory", reason="smaller")

Course = list[tuple[Event, RunState]]
RECOVERY: Course = [
    (ACCEPTED, RunState.STARTING),
    (Decided(remedy=HALF), RunState.STARTING),
    (START, RunState.STARTING),
    (Progressed(attempt=1, step=1), RunState.RUNNING),
    (CRASH, RunState.RECOVERING),
    (Diagnosed(attempt=1, cause=Cause.GPU_OOM, phase=Phase.BACKWARD), RunState.RECOVERING),
    (Decided(attempt=1, remedy=HALF), RunState.RECOVERING),
    (Started(attempt=2, knobs=Knobs(microbatch_size=4)), RunState.RECOVERING),
    (Progressed(attempt=2, step=2), RunState.RELAUNCHED),
    (GOAL, RunState.STABLE),
    (Progressed(attempt=2, step=3), RunState.STABLE),
    (Ended(attempt=2, outcome=Cancelled(by="goal")), RunState.RECOVERING),
    (Finished(verdict=Stable()), RunState.STOPPED_AT_GOAL),
]
SEARCH: Course = [
    (ACCEPTED, RunState.STARTING),
    (START, RunState.STARTING),
    (replace(GOAL, attempt=1), RunState.STABLE),
    (Ended(attempt=1, outcome=Completed()), RunState.RECOVERING),
    (replace(START, attempt=2, trial=0), RunState.SEARCHING),
    (Progressed(attempt=2, step=1), RunState.SEARCHING),
    (Ended(attempt=2, outcome=Completed()), RunState.SEARCHING),
    (Finished(verdict=Interrupted(by="user")), RunState.STOPPED),
    (Decided(reason=RESUMED), RunState.RECOVERING),
    (replace(START, attempt=3, trial=1), RunState.SEARCHING),
]
REHEARSAL: Course = [
    (ACCEPTED, RunState.STARTING),
    (replace(START, rehearsal=Part.WORST), RunState.REHEARSING),
    (Progressed(attempt=1, step=1), RunState.REHEARSING),
    (CRASH, RunState.REHEARSING),
    (Decided(attempt=1, remedy=HALF), RunState.REHEARSING),
    (replace(START, attempt=2), RunState.STARTING),
    (Progressed(attempt=2, step=1), RunState.RUNNING),
    (Finished(verdict=GaveUp(reason="x")), RunState.GAVE_UP),
    (Edited(job=ACCEPTED.job, profile=PROFILE, cluster=CLUSTER), RunState.RECOVERING),
]


@pytest.mark.parametrize("course", [RECOVERY, SEARCH, REHEARSAL])
def test_the_state_follows_the_history(course: Course) -> None:
    view = RunView()
    for event, state in course:
        view.take(event)
        assert view.state is state, event
        assert with_driver(view.state, driven=False) is (state if state.is_terminal else RunState.UNATTENDED)


def test_a_run_that_is_not_accepted_has_a_driver_or_none() -> None:
    assert with_driver(RunView().state, driven=True) is RunState.PREPARING
    assert with_driver(RunView().state, driven=False) is RunState.NOT_STARTED


def test_an_attempt_has_what_led_to_it_what_became_of_it_and_what_followed() -> None:
    view = RunView(event for event, _ in RECOVERY)
    first, second = view.launched
    assert (first.number, first.place, first.step, first.diagnosed_place) == (1, 2, 1, 5)
    assert first.decided == RECOVERY[1][0] and first.next == RECOVERY[6][0] == second.decided
    assert first.ended == CRASH and not first.proven
    assert second.goal == GOAL and second.proven and second.step == 3
    assert (second.before, second.knobs) == (PROFILE.knobs, Knobs(microbatch_size=4))
    assert view.verdict == Stable() and view.latest is second and view.count == len(RECOVERY)


def test_a_cure_in_place_changes_the_settings_that_the_next_attempt_is_compared_with() -> None:
    cure = CuredInPlace(
        attempt=1,
        cause=Cause.GPU_OOM,
        phase=Phase.BACKWARD,
        step=3,
        knob="microbatch_size",
        before=8,
        after=2,
    )
    view = RunView((ACCEPTED, START, cure, CRASH, replace(START, attempt=2)))
    first, second = view.training
    assert first.started.knobs.microbatch_size == 8 and first.knobs.microbatch_size == 2
    assert second.before.microbatch_size == 2 and first.cures == [cure]


def test_trials_and_rehearsals_stand_apart() -> None:
    tried = Tried(trial=0, knobs=Knobs(), purpose=Purpose.PROBE, result=Result.FITS)
    rehearsal, trial = replace(START, rehearsal=Part.WORST), replace(START, attempt=3, trial=0)
    view = RunView((ACCEPTED, rehearsal, replace(START, attempt=2), trial, tried))
    assert [each.number for each in view.launched] == [1, 2]
    assert [each.number for each in view.training] == [2]
    assert [each.number for each in view.trials] == [3]
    assert view.tried == [tried]


def test_an_edit_changes_the_job_and_a_resumed_run_has_no_verdict() -> None:
    edit = Edited(job=replace(ACCEPTED.job, name="k"), profile=PROFILE, cluster=CLUSTER)
    view = RunView((ACCEPTED, START, CRASH, Finished(verdict=GaveUp(reason="x")), edit))
    assert view.accepted is not None and view.accepted.job.name == "k"
    assert view.first == ACCEPTED and view.verdict is None and view.edits == [edit]
