"""Several trials at once: what one of them waits for holds up no other."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from autotune.orchestrator.driver.blocking_calls import ThreadedInvoke, here
from autotune.policies.values.events import Ended, Interrupted, Result, Stable
from autotune.policies.values.observation import Cancelled
from tests.orchestrator.scripted import World, forever
from tests.orchestrator.search.test_scheduler import JOB, Night, formula

_LONG_S = 10.0
TWO = JOB.replace("confirm: 1,", "confirm: 0, parallel: 2,")


def in_turns(waiting: list[Generator[None, None, bool]]) -> list[bool]:
    overdue: list[bool] = []
    while waiting:
        for one in list(waiting):
            try:
                next(one)
            except StopIteration as over:
                overdue.append(over.value)
                waiting.remove(one)
    return overdue


def test_calls_are_made_beside_and_their_results_and_failures_come_back() -> None:
    beside, met = ThreadedInvoke(at_once=2), threading.Barrier(2, timeout=_LONG_S)
    waiting = [beside(lambda: met.wait() >= 0) for _ in range(2)]
    assert in_turns(waiting) == [True, True]

    def fail() -> None:
        raise ValueError("as told")

    with pytest.raises(ValueError, match="as told"):
        list(beside(fail))
    with pytest.raises(ValueError, match="as told"):
        list(here(fail))
    beside.finish()


def test_a_trial_that_takes_long_to_end_holds_up_no_other(tmp_path: Path) -> None:
    other_ended = threading.Event()
    waited: list[bool] = []

    def drained(attempt: int) -> None:
        if attempt == 2:
            waited.append(other_ended.wait(_LONG_S))
        elif attempt > 2:
            other_ended.set()

    world = World(formula, at_once=2)
    world.draining = drained
    night = Night(tmp_path, world, TWO)
    assert night.drive() == Stable()
    assert waited == [True]
    assert {2, 3} <= {r.attempt for r in night.results if r.result is Result.FITS or r.reason}


def test_all_trials_are_stopped_at_the_same_time(tmp_path: Path) -> None:
    world = World(formula, at_once=2)
    night = Night(tmp_path, world, TWO)
    both = threading.Barrier(2, timeout=_LONG_S)

    def endless(world: World, command: object):
        if len(world.commands) == 2:
            night.interrupts.note(2)
        return forever(world, command) if world.commands else formula(world, command)

    def drained(attempt: int) -> None:
        if attempt > 1:
            both.wait()

    world.play, world.draining = endless, drained
    assert night.drive() == Interrupted(by="SIGINT")
    stopped = [e for e in night.history if isinstance(e, Ended) and e.attempt > 1]
    assert [e.outcome for e in stopped] == [Cancelled(by="user")] * 2
