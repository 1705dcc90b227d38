"""What happens to the loop itself: bugs of ours, clocks that are set, users who ask twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from autotune.launchers.base import Exit
from autotune.orchestrator.driver import reconcile
from autotune.orchestrator.driver.signals import ForcedExit, Interrupts
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Action,
    Ended,
    Event,
    Finished,
    Interrupted,
    Progressed,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.history import Folding, fold
from autotune.policies.values.observation import Cancelled, Lost
from tests.orchestrator.driver.test_reconcile import ROOMY, Case, MessageObserver
from tests.orchestrator.scripted import Killed, Script, World, forever, silent, step, tight_memory


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_a_bug_leaves_no_attempt_orphaned(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, World(forever, address=address))
    decide_on = reconcile.decide_on

    def broken(folding: Folding) -> Action:
        if any(isinstance(e, Started) for e in case.history):
            raise ZeroDivisionError("a bug")
        return decide_on(folding)

    monkeypatch.setattr(reconcile, "decide_on", broken)
    with pytest.raises(ZeroDivisionError):
        case.drive()
    life = case.world.lives[1]
    ends = [e for e in case.history if isinstance(e, Ended)]
    if address == "local":
        assert not life.running and isinstance(ends[0].outcome, Lost) and "a bug" in ends[0].outcome.reason
    else:
        assert life.running and life.supervised and not ends
        monkeypatch.undo()
        life.script, life.exit = [step(n) for n in range(1, 5)], Exit(code=0)
        assert case.drive() == TrainingCompleted()
        assert life.starts == 1 and len(case.world.lives) == 1


@pytest.mark.parametrize("hours", [3, -3])
def test_a_wall_clock_that_is_set_ends_nothing(hours: int, tmp_path: Path) -> None:
    text = ROOMY + "recovery: {duration: 30m}\n"
    case = Case(tmp_path, World(tight_memory), text)
    poll_count = 0

    def set_clock(world: World, command: Command) -> tuple[Script, Exit | None]:
        case.clock.set_by += hours * 3600.0
        return tight_memory(world, command)

    case.world.play = set_clock
    sleep = case.clock.sleep

    def slept(seconds: float) -> None:
        nonlocal poll_count
        poll_count += 1
        if poll_count == 2:
            case.clock.set_by += hours * 3600.0
        sleep(seconds)

    case.clock.sleep = slept  # type: ignore[method-assign]
    assert case.drive() == TrainingCompleted()
    assert fold(case.history).elapsed_s < 60
    assert all(0 <= e.seconds < 60 for e in case.history if isinstance(e, Ended))


def test_a_driver_that_was_away_costs_its_run_no_time(tmp_path: Path) -> None:
    case = Case(tmp_path, World(forever, kill_at=30), ROOMY + "recovery: {duration: 30m}\n")
    with pytest.raises(Killed):
        case.drive()
    case.world.kill_at = None
    case.clock.at += 24 * 3600
    life = case.world.lives[1]
    assert life.running
    life.script, life.exit = [step(n) for n in range(1, 5)], Exit(code=0)
    case.drive()
    assert fold(case.history).elapsed_s < 1800


def test_a_second_request_kills_wherever_the_loop_waits(tmp_path: Path) -> None:
    case = Case(tmp_path, World(silent))
    pressed = 0

    def sleep(seconds: float) -> None:
        nonlocal pressed
        case.clock.at += seconds
        if case.world.lives:
            pressed += 1
            case.interrupts.note(signal.SIGINT)

    case.clock.sleep = sleep  # type: ignore[method-assign]
    assert case.drive() == Interrupted(by="SIGINT")
    assert pressed >= 1 and not case.world.lives[1].running
    (ended,) = (e for e in case.history if isinstance(e, Ended))
    assert ended.outcome == Cancelled(by="user")


def test_what_does_not_answer_is_named_and_not_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, World(silent, address="10.0.0.1:6379"))
    warned: list[str] = []

    def interrupted_start(world: World, command: Command) -> tuple[Script, Exit | None]:
        case.interrupts.note(signal.SIGINT)
        case.interrupts.note(signal.SIGINT)
        raise AssertionError("not reached")

    def unreachable(self: object, *, run: str, attempt: int) -> None:
        raise TimeoutError("no answer")

    case.world.play = interrupted_start
    monkeypatch.setattr("tests.orchestrator.scripted.Place.attach", unreachable)
    monkeypatch.setattr(MessageObserver, "warn", lambda _, text: warned.append(text))
    assert case.drive() == Interrupted(by="SIGINT")
    assert warned == [f"attempt #1 may still run; `{case.run.call('stop')}` ends it"]
    assert not [e for e in case.history if isinstance(e, Ended)]


@pytest.mark.parametrize("then", ["stop", "resume"])
def test_an_attempt_that_cannot_be_asked_to_end_is_not_called_stopped(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, World(forever, address="10.0.0.1:6379"))
    case.world.play = lambda w, c: ([step(n, 9) for n in range(1, 9)], None)
    warned: list[str] = []
    monkeypatch.setattr(MessageObserver, "warn", lambda _, text: warned.append(text))

    def interrupt(event: Event) -> None:
        if isinstance(event, Progressed) and not case.interrupts.by:
            case.world.deaf = True
            case.interrupts.note(signal.SIGTERM)

    case.on_event = interrupt
    assert case.drive() == Interrupted(by="SIGTERM")
    life = case.world.lives[1]
    assert life.running and life.supervised
    assert not [e for e in case.history if isinstance(e, (Ended, Finished))]
    message = f"attempt #1 may still run: the head does not answer; `{case.run.call('stop')}` ends it"
    assert warned == [message]

    case.on_event = lambda _: None
    case.world.deaf, case.world.play, case.world.saved = False, tight_memory, 2
    if then == "resume":
        case.interrupts = Interrupts()
        assert case.drive() == TrainingCompleted()
    else:
        assert case.drive() == Interrupted(by="SIGTERM")
        assert isinstance(case.history[-1], Finished)
    assert not life.running
    assert next(e for e in case.history if isinstance(e, Ended)).outcome == Cancelled(by="user")


def test_an_attempt_that_hangs_behind_a_silent_head_is_over_for_its_run(tmp_path: Path) -> None:
    case = Case(
        tmp_path, World(silent, address="10.0.0.1:6379", deaf=True), ROOMY + "recovery: {relaunches: 0}\n"
    )

    def heard(event: Event) -> None:
        if isinstance(event, Ended):
            case.world.deaf = False

    case.on_event = heard
    case.drive()
    ended = next(e for e in case.history if isinstance(e, Ended))
    assert ended.stop_s is None


def test_what_is_shielded_is_finished_before_a_second_request_is_heard() -> None:
    interrupts = Interrupts()
    done = []
    interrupts.note(signal.SIGINT)
    with pytest.raises(ForcedExit), interrupts.cutting():
        with interrupts.shielded():
            interrupts.note(signal.SIGINT)
            done.append("row")
        done.append("never")
    assert done == ["row"]
    interrupts.note(signal.SIGINT)  # nothing is cut outside
    assert interrupts.impatient
