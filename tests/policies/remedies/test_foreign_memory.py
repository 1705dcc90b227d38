"""Memory that others hold on a card changes nothing of the job; what it may hold itself is not theirs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import calibrated
from autotune.policies.recovery.decide import decide
from autotune.policies.remedies.foreign_memory import without_foreign
from autotune.policies.values.diagnosis import Facts, Line
from autotune.policies.values.events import (
    Decided,
    Ended,
    Event,
    Finish,
    Infrastructure,
    Launch,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import fold
from autotune.policies.values.observation import Lost
from tests.policies.jobs import CLUSTER, GIB, KNOBS, LAYOUT, MODEL, accepted, fails, profile

LINE = "Process 4242 has 60.00 GiB memory in use. Of the allocated memory 17.00 GiB is allocated by PyTorch"


def story(*, outside: int, steps: int = 3, phase: Phase = Phase.BACKWARD, requested: int = 2, ranks=()):
    ended, row = fails(phase, requested=requested * GIB, free=GIB)
    facts = Facts(
        requested_bytes=requested * GIB,
        free_bytes=GIB,
        capacity_bytes=CLUSTER.gpu_memory_bytes,
        outside_bytes=outside * GIB,
    )
    evidence = (Line(line=1, text=LINE, rule="torch-cuda-oom"),)
    row = replace(row, facts=facts, evidence=evidence, rank=3, other_ranks=ranks)
    return [*(Progressed(step=n) for n in range(1, steps + 1)), ended, row]


def test_others_are_waited_for_and_named():
    launch = decide((accepted(), Started(knobs=KNOBS), *story(outside=60)))
    assert isinstance(launch, Launch) and launch.remedy is None
    assert launch.knobs == KNOBS and launch.not_before_s == 600.0
    assert "card of rank 3 are held by others (process 4242: 60.00 GiB), and no other rank" in launch.reason


def test_what_others_hold_is_no_need_of_the_job():
    begun, held = (accepted(), Started(knobs=KNOBS)), story(outside=60)
    lost = [*held[:-2], Ended(outcome=Lost(reason="node gone"))]
    after, otherwise = (without_foreign(fold((*begun, *rows))) for rows in (held, lost))
    believed = calibrated(after, MODEL).belief.mean
    assert believed == pytest.approx(calibrated(otherwise, MODEL).belief.mean)
    assert believed != pytest.approx(calibrated(fold((*begun, *held)), MODEL).belief.mean)


def test_others_that_stay_end_the_run_and_are_named():
    history = [accepted(), Started(knobs=KNOBS), *story(outside=60)]
    for _ in range(18):  # three hours, one for each retry
        action = decide(tuple(history))
        assert isinstance(action, Launch) and action.knobs == KNOBS
        history += [Decided(reason=action.reason), Started(knobs=KNOBS), *story(outside=60, steps=0)]
    end = decide(tuple(history))
    assert isinstance(end, Finish) and isinstance(end.verdict, Infrastructure)
    assert "process 4242" in end.verdict.reason and "free them" in end.verdict.reason


@pytest.mark.parametrize(
    "own",
    [
        {"outside": 20},  # contexts and what an engine keeps asleep
        {"outside": 60, "phase": Phase.WEIGHT_SYNC},  # the engine that wakes beside the trainer
        {"outside": 79, "phase": Phase.INIT},  # no earlier attempt started with these settings
        {"outside": 60, "steps": 0},  # nothing shows that the settings ever held
        {"outside": 30, "requested": 29},  # without the others it would not fit either
    ],
)
def test_what_may_be_the_jobs_own_is_cured(own: dict[str, int]):
    launch = decide((accepted(), Started(knobs=KNOBS), *story(**own)))
    assert isinstance(launch, Launch) and launch.knobs != KNOBS


@pytest.mark.parametrize(
    ("share", "steps", "waits"),
    [
        (0.85, 100, True),  # awake the engine would hold 60 GiB of a card, which has less beside the trainer
        (0.85, 3, False),  # few steps say little of how much the trainer needs
        (0.7, 100, False),  # the engine may be what holds it
    ],
)
def test_an_engine_that_would_have_no_room_awake_holds_nothing_of_what_others_do(share, steps, waits):
    unknown = profile(replace(KNOBS, memory_fraction=share), layout=replace(LAYOUT, engine_sleeps=False))
    history = [accepted(unknown), Started(knobs=unknown.knobs), *story(outside=58, steps=steps)]
    for _ in range(3):
        launch = decide(tuple(history))
        assert isinstance(launch, Launch) and (launch.knobs == unknown.knobs) is waits
        history += [Decided(reason=launch.reason), Started(knobs=launch.knobs), *story(outside=58, steps=0)]


def on_cards_of_others(*rows: Event) -> list[Event]:
    """Return the rows as if memory of a card was still in use when no process of the attempt was left."""
    held = "a: GPU 0 has 40.0 GiB more in use than before: pid 7 (python) of mia holds 40.0 GiB"
    return [replace(row, held=held, foreign=True) if isinstance(row, Ended) else row for row in rows]


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.WEIGHT_SYNC, Phase.BACKWARD])
def test_memory_of_a_card_that_stays_in_use_is_waited_for_whatever_part_of_the_job_failed(phase: Phase):
    history = [accepted(), Started(knobs=KNOBS), *on_cards_of_others(*story(outside=20, phase=phase))]
    for _ in range(5):
        launch = decide(tuple(history))
        assert isinstance(launch, Launch) and launch.knobs == KNOBS and launch.not_before_s == 600.0
        assert "pid 7 (python) of mia holds 40.0 GiB" in launch.reason
        history += [Decided(reason=launch.reason), Started(knobs=KNOBS)]
        history += story(outside=20, steps=0, phase=Phase.ROLLOUT_INIT)


def test_what_fails_after_new_steps_is_judged_anew():
    history = [accepted(), Started(knobs=KNOBS), *on_cards_of_others(*story(outside=20))]
    history += [Decided(reason=decide(tuple(history)).reason), Started(knobs=KNOBS)]
    launch = decide((*history, *story(outside=20, steps=3)))
    assert isinstance(launch, Launch) and launch.knobs != KNOBS


def test_settings_that_never_held_do_not_wait_for_others():
    history = (accepted(), Started(knobs=KNOBS), *on_cards_of_others(*story(outside=20, steps=0)))
    end = decide(history)
    assert isinstance(end, Finish) and isinstance(end.verdict, Infrastructure)
    assert "pid 7 (python) of mia" in end.verdict.reason


@pytest.mark.parametrize(
    ("outside", "waits"),
    [
        (79, True),
        (60, False),  # the engine of the job may hold so much: it is awake until the start is over
    ],
)
def test_others_are_waited_for_at_a_start_with_settings_that_held(outside: int, waits: bool):
    history = [accepted(), Started(knobs=KNOBS), *story(outside=60)]
    history += [Decided(reason=decide(tuple(history)).reason), Started(knobs=KNOBS)]
    history += story(outside=outside, steps=0, phase=Phase.INIT)
    launch = decide(tuple(history))
    assert isinstance(launch, Launch) and (launch.knobs == KNOBS) is waits


def test_a_card_that_every_rank_lacks_is_not_said_to_be_one():
    launch = decide((accepted(), Started(knobs=KNOBS), *story(outside=60, ranks=(0, 1))))
    assert isinstance(launch, Launch) and "no other rank" not in launch.reason
