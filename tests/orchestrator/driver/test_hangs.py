"""When an attempt counts as hung, and how long its steps take where their lines do not say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.policies.values.events import Event, Progressed, StopRequested
from tests.orchestrator.driver.test_monitor import Followed, sample

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
    assert again.see(samples=(sample(1, gpu=1.0),), after=4 * 3600.0) == ()
    (stop,) = again.see(samples=(sample(2, gpu=1.0),), after=5 * 3600.0)
    assert isinstance(stop, StopRequested) and stop.by == "hang"


def test_what_steps_took_that_no_driver_saw_is_not_known(tmp_path: Path) -> None:
    before = Followed(tmp_path, COMMAND)
    known = slow_steps(before, 1, 2)
    assert took(known) == [(1, None), (2, SLOW_S)]
    again = attached(tmp_path, known)
    seen = [*again.see("step 3/400\nstep 4/400\n", behind=True, after=0.2)]
    seen += [*again.see("step 5/400\n", after=0.2), *slow_steps(again, 6, 7)]
    assert took(seen) == [(3, None), (4, None), (5, None), (6, None), (7, SLOW_S)]


def test_steps_that_are_read_together_do_not_take_0_s(tmp_path: Path) -> None:
    followed = Followed(tmp_path, COMMAND)
    followed.see("step 1/400\n", after=1.0)
    assert took(followed.see("step 2/400\nstep 3/400\n", after=1.5)) == [(2, 1.5), (3, None)]
