"""When an attempt counts as hung, and how long its steps take where their lines do not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.orchestrator import messages
from autotune.policies.values.events import Event, Progressed, StopRequested
from autotune.policies.values.observation import Hung
from tests.orchestrator.driver.test_monitor import Followed, sample
from tests.orchestrator.scripted import JOB, step

HOUR_S = 3600.0
SLOW_S = 2700.0
COMMAND = "name: q\nframework: command\ncommand: [python, train.py]\n"  # its step lines have no seconds


def took(events: tuple[Event, ...] | list[Event]) -> list[tuple[int, float | None]]:
    return [(event.step, event.seconds) for event in events if isinstance(event, Progressed)]


def slow_steps(followed: Followed, first: int, last: int) -> tuple[Event, ...]:
    """Complete steps of 45 minutes, each seen as it is told."""
    return tuple(e for n in range(first, last + 1) for e in followed.see(f"step {n}/400\n", after=SLOW_S))


def attached(folder: Path, known: tuple[Event, ...]) -> Followed:
    followed = Followed(folder, COMMAND, known=known)
    while not followed.watch.files.caught_up:
        assert followed.watch.catch_up(now=followed.now) == ()
    return followed


@pytest.mark.parametrize("missed", ["", "step 6/400\nstep 7/400\n"])
def test_a_driver_that_attaches_knows_how_long_steps_take(missed: str, tmp_path: Path) -> None:
    """The steps before it come all at once, but the journal says what they took."""
    before = Followed(tmp_path, COMMAND)
    again = attached(tmp_path, slow_steps(before, 1, 5))
    again.see(missed, after=1.0)
    assert again.see("hello\n", after=7 * HOUR_S) == ()
    (stop,) = again.see("hello\n", after=0.5 * HOUR_S)
    assert isinstance(stop, StopRequested) and stop.by == "hang"


def test_what_steps_took_that_no_driver_saw_is_not_known(tmp_path: Path) -> None:
    before = Followed(tmp_path, COMMAND)
    known = slow_steps(before, 1, 2)
    assert took(known) == [(1, None), (2, SLOW_S)]
    again = attached(tmp_path, known)
    new_events = [*again.see("step 3/400\nstep 4/400\n", behind=True, after=0.2)]
    new_events += [*again.see("step 5/400\n", after=0.2), *slow_steps(again, 6, 7)]
    assert took(new_events) == [(3, None), (4, None), (5, None), (6, None), (7, SLOW_S)]


def test_steps_that_are_read_together_do_not_take_0_s(tmp_path: Path) -> None:
    followed = Followed(tmp_path, COMMAND)
    followed.see("step 1/400\n", after=1.0)
    assert took(followed.see("step 2/400\nstep 3/400\n", after=1.5)) == [(2, 1.5), (3, None)]


def hours_until_stopped(
    followed: Followed, *, line: str = "", busy: tuple[bool, ...] = (True,), **load: float
) -> float:
    """Return after how many hours without a step a job is stopped that works in the minutes of `busy`."""
    begun = followed.now
    for minute in range(30 * 60):
        works = load if busy[minute % len(busy)] else {}
        stop = followed.see(line, after=60.0, samples=(sample(60.0 * minute, **works),))
        if stop:
            assert [e.by for e in stop if isinstance(e, StopRequested)] == ["hang"]
            return (followed.now - begun) / HOUR_S
    return float("inf")


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("load", [{"gpu": 1.0}, {"cpu": 1.0}])
@pytest.mark.parametrize("silence", ["auto", "20m"])
def test_a_long_validation_is_no_hang(
    silence: str, load: dict[str, float], steps: int, tmp_path: Path
) -> None:
    followed = Followed(tmp_path, JOB + f"recovery: {{silence: {silence}}}\n")
    followed.see(*[step(n, 9) for n in range(1, steps + 1)])
    assert hours_until_stopped(followed, **load) == pytest.approx(8.0)
    ended = followed.watch.outcome(None, lost="", stopped_by="hang")
    assert messages.outcome(ended) == "hung: no training step for 28800 s"


@pytest.mark.parametrize(("written", "hours"), [("90m", 1.5), ("off", float("inf"))])
def test_the_job_says_how_long_it_may_go_without_a_step(written: str, hours: float, tmp_path: Path) -> None:
    """A rank that waits in a collective shows full use of its card; only missing steps tell."""
    followed = Followed(tmp_path, JOB + f"recovery: {{stall: {written}}}\n")
    followed.see(step(1, 9))
    assert hours_until_stopped(followed, gpu=1.0) == hours


@pytest.mark.parametrize(
    ("recovery", "steps", "hours"),
    [
        ("{}", 0, 2.0),
        ("{}", 1, 1.0),
        ("{silence: 10m}", 0, 2.0),
        ("{silence: 10m}", 1, 40 / 60),
        ("{silence: 3h}", 1, 12.0),
        ("{stall: 5h}", 1, 5.0),
    ],
)
def test_a_job_that_only_talks_is_stopped_sooner(
    recovery: str, steps: int, hours: float, tmp_path: Path
) -> None:
    followed = Followed(tmp_path, JOB + f"recovery: {recovery}\n")
    followed.see(*[step(n, 9) for n in range(1, steps + 1)])
    assert hours_until_stopped(followed, line="waiting for rollouts\n") == pytest.approx(hours)


def test_moments_of_work_do_not_hide_that_a_job_only_talks(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    followed.see(step(1, 9))
    busy = (True, False, False, False)
    assert hours_until_stopped(followed, line="again\n", busy=busy, cpu=1.0) == pytest.approx(4 / 3, abs=0.1)


def test_a_step_begins_the_count_anew(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    for number in range(1, 5):
        assert followed.see("waiting\n", after=50 * 60.0, samples=(sample(number),)) == ()
        followed.see(step(number, 9), samples=(sample(number),), after=60.0)
    assert isinstance(followed.watch.outcome(None, lost="", stopped_by="hang"), Hung)
