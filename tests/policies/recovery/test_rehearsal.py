"""What follows in the rehearsal before a training, where the model is known and where it is not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.rehearsal import passed
from autotune.policies.values.events import (
    Accepted,
    Action,
    Await,
    Decided,
    Edited,
    Ended,
    Event,
    Finish,
    GaveUp,
    Infrastructure,
    Launch,
    NeedsHuman,
    Progressed,
    Rehearsed,
    Started,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold, rehearsal_of
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Crashed
from autotune.policies.values.rehearsing import Part, Rehearsal
from tests.policies.jobs import GIB, KNOBS, LAYOUT, accepted, fails, profile
from tests.policies.recovery.test_worst_case import BY_ROWS, ROWS

FULL = fails(Phase.BACKWARD, requested=3 * GIB, free=2 * GIB)
DONE = Ended(outcome=Completed())


def start(*, known: bool = True, relaunches: int = 20, **fields: Any) -> Accepted:
    first = accepted(recovery=Recovery(preflight=Preflight.OFF, relaunches=relaunches))
    rehearsal = Rehearsal(**{"forces": True, "reloads": False, "steps": 400, **fields})
    job = first.job if known else replace(first.job, shape=None)
    return replace(first, job=job, rehearsal=rehearsal)


def begun(knobs: Knobs = KNOBS, *, longest: bool = True, part: Part | None = Part.WORST) -> Started:
    return Started(knobs=knobs, rehearsal=part, longest=longest)


def steps(*numbers: int) -> list[Event]:
    return [Progressed(step=n, of=400, seconds=100.0) for n in numbers]


def launch(*events: Event) -> Launch:
    action = decide(events)
    assert isinstance(action, Launch), action
    return action


def part_of(action: Action) -> tuple[Part | None, bool]:
    assert isinstance(action, Launch), action
    return action.rehearsal, action.longest


@pytest.mark.parametrize("forces", [True, False])
def test_a_run_starts_with_the_longest_answers_that_the_framework_can_force(forces: bool):
    first = launch(start(forces=forces))
    assert (first.rehearsal, first.longest, first.knobs) == (Part.WORST, forces, KNOBS)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.BACKWARD])
def test_what_fails_at_full_length_goes_on_with_the_jobs_own_and_keeps_the_cure_ready(
    known: bool, phase: Phase
):
    failed = fails(phase, requested=3 * GIB, free=2 * GIB)
    after = launch(start(known=known), begun(), *failed)
    assert (after.rehearsal, after.longest, after.knobs) == (Part.WORST, False, KNOBS)
    assert after.remedy is None
    assert f"{phase.value} fails with every answer at full length" in after.reason
    assert "kept ready: " in after.reason


@pytest.mark.parametrize("known", [True, False])
def test_a_failure_that_does_not_follow_the_lengths_is_cured_at_full_length(known: bool):
    for phase in (Phase.OPTIMIZER, Phase.WEIGHT_SYNC):
        after = launch(
            start(known=known), begun(), *fails(phase, requested=3 * GIB, free=2 * GIB, phase_shown=True)
        )
        assert part_of(after) == (Part.WORST, True)
        assert after.remedy is not None and after.knobs != KNOBS


def test_a_failure_with_the_jobs_own_lengths_is_cured():
    after = launch(start(), begun(), *FULL, begun(longest=False), *FULL)
    assert part_of(after) == (Part.WORST, False)
    assert after.remedy is not None and after.knobs != KNOBS


def test_without_a_remedy_left_a_failure_at_full_length_still_tries_the_jobs_own_lengths():
    after = launch(start(known=False, relaunches=0), begun(), *FULL)
    assert (part_of(after), after.knobs) == ((Part.WORST, False), KNOBS)
    assert "kept ready" not in after.reason


def test_memory_that_is_still_held_comes_before_any_further_rehearsal():
    held = Ended(outcome=Crashed(exit_code=1), held="GPU 0: 12 GiB by pid 4711")
    action = decide((start(), begun(), held, FULL[1]))
    assert isinstance(action, Finish) and isinstance(action.verdict, Infrastructure)


def test_a_failed_attempt_is_not_answered_before_it_is_diagnosed():
    assert decide((start(), begun(), FULL[0])) == Await()


@pytest.mark.parametrize("forces", [True, False])
def test_a_job_that_the_user_changed_is_rehearsed_anew(forces: bool):
    first = start(forces=forces)
    smaller = replace(KNOBS, concurrency=128)
    edited = Edited(job=first.job, profile=profile(smaller), cluster=first.cluster, knobs=True)
    after = launch(first, begun(longest=False), *FULL, edited)
    assert (part_of(after), after.knobs) == ((Part.WORST, forces), smaller)


# --------------------------------------------------------------- lengths that the job is likely to meet


def by_rows(mean: float, steps: int = 400) -> Accepted:
    """Return the start of a job whose passes hold so many rows, whatever their lengths."""
    layout = replace(LAYOUT, ranks=8, shards=8, mini_batch=256, prompt_mean=200.0, response_mean=mean)
    return replace(start(steps=steps), profile=profile(ROWS, layout=layout, supported=BY_ROWS))


FAR = fails(Phase.BACKWARD, requested=10 * GIB, free=2 * GIB)
OWN = (begun(ROWS), *FAR, begun(ROWS, longest=False), *steps(1), DONE)


def test_full_length_is_cured_where_the_training_is_likely_to_meet_it():
    after = launch(by_rows(2000.0), *OWN)
    assert part_of(after) == (Part.WORST, True)
    assert after.knobs != ROWS and "% chance in 400 steps; " in after.reason
    assert after.remedy is not None and after.remedy.reason == after.reason
    # The cure fails at full length too. The lengths are known by now, and the next cure follows at once.
    story = (*OWN, Decided(remedy=after.remedy), begun(after.knobs), *FAR)
    again = launch(by_rows(2000.0), *story)
    assert part_of(again) == (Part.WORST, True)
    assert again.knobs not in (ROWS, after.knobs)


@pytest.mark.parametrize(("mean", "steps"), [(2000.0, 1), (600.0, 400)])
def test_full_length_that_the_training_hardly_meets_is_not_cured(mean: float, steps: int):
    after = launch(by_rows(mean, steps), *OWN)
    assert after.rehearsal is None and after.knobs == ROWS


def test_steps_at_full_length_tell_nothing_of_the_jobs_own():
    after = launch(by_rows(4000.0), begun(ROWS), *steps(1), *FAR)
    assert (part_of(after), after.knobs) == ((Part.WORST, False), ROWS)


def test_where_nothing_tells_the_chance_full_length_is_not_cured():
    own = [begun(longest=False), *steps(1, 2, 3), DONE]
    story = [start(known=False), begun(), *FULL, *own]
    after = launch(*story)
    assert after.rehearsal is None and after.knobs == KNOBS
    # Nor after the user asked for another rehearsal at full length.
    again = launch(*story, begun(), *FULL)
    assert (part_of(again), again.knobs) == ((Part.WORST, False), KNOBS)


# ------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize("longest", [True, False])
def test_a_rehearsal_goes_on_from_its_checkpoint_and_then_comes_the_training(longest: bool):
    first = start(reloads=True, forces=longest)
    reload = launch(first, begun(longest=longest), *steps(1, 2, 3), DONE)
    assert (part_of(reload), reload.knobs) == ((Part.RELOAD, longest), KNOBS)
    over = (begun(longest=longest, part=Part.RELOAD), *steps(4), DONE)
    after = launch(first, begun(longest=longest), *steps(1, 2, 3), DONE, *over)
    assert (after.rehearsal, after.longest, after.reason) == (
        None,
        False,
        "the rehearsal passed in attempt #2; the training starts",
    )


def test_a_failure_of_the_reload_is_cured_in_the_reload():
    first = start(known=False, reloads=True, forces=False)
    story = (first, begun(longest=False), *steps(1, 2, 3), DONE, begun(longest=False, part=Part.RELOAD))
    after = launch(*story, *fails(Phase.WEIGHT_SYNC, requested=3 * GIB, free=2 * GIB))
    assert part_of(after) == (Part.RELOAD, False) and after.knobs != KNOBS


@pytest.mark.parametrize("cured", [True, False])
def test_a_rehearsal_alone_ends_with_whether_it_had_to_change_the_job(cured: bool):
    knobs = replace(KNOBS, tokens_per_microbatch=8192) if cured else KNOBS
    done = decide((start(only=True), begun(knobs), *steps(1, 2, 3), DONE))
    assert done == Finish(verdict=Rehearsed(cured=cured))


@pytest.mark.parametrize(
    ("events", "through"),
    [((), False), ((begun(),), False), ((begun(), FULL[0]), False), ((begun(), DONE), True)],
)
def test_a_rehearsal_is_through_once_it_completed(events: tuple[Event, ...], *, through: bool):
    rehearsed = rehearsal_of((accepted(), *events)).attempts
    run = fold((accepted(),))
    assert passed(replace(run, rehearsed=rehearsed)) == (rehearsed[-1] if through else None)
    assert passed(run) is None


@pytest.mark.parametrize("verdict", [GaveUp, NeedsHuman])
def test_a_rehearsal_that_ends_without_a_cure_keeps_no_training_from_its_start(verdict: type):
    cause = Cause.GPU_OOM if verdict is GaveUp else Cause.CODE
    failed = fails(Phase.OPTIMIZER, cause=cause)
    begins = decide((start(known=False, relaunches=0), begun(), *failed))
    assert isinstance(begins, Launch) and begins.rehearsal is None and begins.knobs == KNOBS
    alone = decide((start(known=False, relaunches=0, only=True), begun(), *failed))
    assert isinstance(alone, Finish) and isinstance(alone.verdict, verdict)
