"""How often a job saves that leaves it to us."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.checkpoint_interval import steps_between, with_saves
from autotune.policies.recovery.outlook import outlook
from autotune.policies.values.events import SURE, Foreseen, History, Progressed
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Recovery
from tests.policies.jobs import KNOBS, accepted

ACCEPTED = accepted()
UNKNOWN = accepted(model=None)


def after(*seconds: float | None) -> History:
    return (UNKNOWN, *(Progressed(attempt=1, step=n, seconds=s) for n, s in enumerate(seconds, start=1)))


@pytest.mark.parametrize(
    ("history", "steps"),
    [
        ((UNKNOWN,), 10),
        (after(None, None), 10),
        (after(400.0, 30.0, 30.0, 31.0), 40),
        (after(120.0), 10),
        (after(300.0, 310.0), 10),  # ten steps are rarer than twenty minutes
        (after(*[300.0] * 30, *[6.0] * 20), 200),  # the latest count
    ],
)
def test_ten_steps_or_twenty_minutes(history: History, steps: int) -> None:
    assert steps_between(history, KNOBS) == steps


def test_predicted_steps_may_take_twice_as_long() -> None:
    layout = replace(ACCEPTED.profile.layout, sequences=8)
    short = replace(ACCEPTED, profile=replace(ACCEPTED.profile, layout=layout))
    view = outlook(fold((short,)))
    assert view is not None
    predicted_s = float(view.estimates((KNOBS,)).step_s[0])
    assert steps_between((short,), KNOBS) == math.ceil(600 / predicted_s) > 10
    as_predicted = (short, Progressed(attempt=1, step=1, seconds=predicted_s))
    assert steps_between(as_predicted, KNOBS) == math.ceil(1200 / predicted_s)


def test_what_the_job_says_counts() -> None:
    job = replace(UNKNOWN.job, recovery=Recovery(save_every=3))
    assert with_saves(job, after(1.0), KNOBS) == job
    assert with_saves(UNKNOWN.job, after(1.0), KNOBS).recovery.save_every == 1200


def ahead(step: int | None, *, phase: Phase = Phase.BACKWARD, chance: float = SURE, **how: bool) -> Foreseen:
    return Foreseen(cause=Cause.GPU_OOM, phase=phase, seen_at=200, step=step, since=3, chance=chance, **how)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ((), 1200),
        ((ahead(323),), 40),  # an eighth of the steps in which it grows
        ((ahead(323, chance=0.89),), 1200),
        ((ahead(323, lengths=True),), 1200),  # no restart shortens a response
        ((ahead(323, holds=False),), 1200),
        ((ahead(13),), 1),
        ((ahead(3),), 1200),
        ((ahead(2),), 1200),
        ((ahead(None),), 1200),
        ((ahead(323), ahead(323, phase=Phase.ROLLOUT, holds=False)), 40),
        ((ahead(323), ahead(323, holds=False)), 1200),
        ((ahead(163, phase=Phase.ROLLOUT), ahead(323), ahead(323, holds=False)), 20),
        ((ahead(323), *after(1.0)[1:]), 40),
    ],
)
def test_a_memory_that_is_to_run_out_is_saved_before(rows: History, steps: int) -> None:
    assert with_saves(UNKNOWN.job, (*after(1.0), *rows), KNOBS).recovery.save_every == steps
