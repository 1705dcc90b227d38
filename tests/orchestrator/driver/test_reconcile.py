"""The loop over a scripted world, with the real policies and the real built-in framework."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import Command, Exit, Observed, Unreachable
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.driver import log_writer, reconcile
from autotune.orchestrator.driver.attempt import POLL_S, WATCH_S
from autotune.orchestrator.driver.context import Observer, RunContext
from autotune.orchestrator.driver.signals import ForcedExit, Interrupts
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory, journal
from autotune.orchestrator.run.lock import TakenOver
from autotune.orchestrator.run.storage import Persistence, Unrecordable
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    FailureSeen,
    Finished,
    GaveUp,
    GoalReached,
    History,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Policy,
    Progressed,
    Started,
    StopRequested,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost
from autotune.policies.values.priors import Factor, Kind, Learned
from tests.orchestrator.driver.test_monitor import sample
from tests.orchestrator.full_disk import FullDisk
from tests.orchestrator.scripted import (
    JOB,
    Attempt,
    Hands,
    Killed,
    Place,
    Script,
    World,
    crowded,
    forever,
    phase,
    reported,
    step,
    tight_memory,
)


class MessageObserver(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)

    warn = say


class Case:
    def __init__(
        self, folder: Path, world: World, text: str = JOB, *, policy: Policy = Policy.LADDER
    ) -> None:
        self.world, self.clock, self.policy = world, Hands(), policy
        self.run = directory.create(folder / "runs", job_text=text)
        self.job = parse(text)
        self.interrupts = Interrupts()
        self.observer: Observer = MessageObserver()
        self.on_event: Callable[[Event], None] = lambda _: None
        self.patience_s = 0.0

    @property
    def messages(self) -> list[str]:
        assert isinstance(self.observer, MessageObserver)
        return self.observer.texts

    def drive(self) -> Verdict:
        place = Place(self.world, self.clock)
        framework = frameworks.find("builtin")
        persist = Persistence(
            self.run.path,
            say=self.observer.say,
            patience_s=self.patience_s,
            monotonic=self.clock.monotonic,
            sleep=self.clock.sleep,
        )
        persist.hurry_s = self.interrupts.patience_s
        with journal.Journal(
            self.run.path,
            tell=self._tell,
            persist=persist,
        ) as book:
            if not book.history():
                cluster = place.cluster()
                profile = framework.profile(self.job, assumed(self.job))
                reconcile.accept(
                    book,
                    run=self.run.id,
                    job=self.job,
                    profile=profile,
                    cluster=cluster,
                    versions={},
                    now=self.clock.now(),
                    policy=self.policy,
                )
            context = RunContext(
                journal=book,
                framework=framework,
                runner=place,
                clock=self.clock,
                folder=self.run,
                job=self.job,
                interrupts=self.interrupts,
                observer=self.observer,
            )
            return reconcile.run(context)

    def _tell(self, event: Event) -> None:
        self.on_event(event)
        self.world.tick()

    @property
    def history(self) -> History:
        return self.run.history()


# The model of the built-in job is known: its device has room by the estimate, whatever the script says.
ROOMY = JOB.replace("trainer_budget: 100MiB", "trainer_budget: 400MiB")
policies = pytest.mark.parametrize("policy", list(Policy))


def kinds(history: History) -> list[str]:
    return [type(event).__name__ for event in history if not isinstance(event, Progressed)]


def test_a_failure_is_detected_stopped_diagnosed_cured_and_the_run_completes(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory))
    assert case.drive() == TrainingCompleted()
    assert kinds(case.history) == [
        "Accepted", "Started", "FailureSeen", "StopRequested", "Ended", "Diagnosed", "Decided",
        "Started", "GoalReached", "Ended", "Finished",
    ]  # fmt: skip
    diagnosed = next(e for e in case.history if isinstance(e, Diagnosed))
    assert (diagnosed.cause, diagnosed.phase, diagnosed.step) == (Cause.GPU_OOM, Phase.BACKWARD, 1)
    first, second = (e for e in case.history if isinstance(e, Started))
    assert (first.resume, second.resume) == (False, True)
    assert first.knobs.tokens_per_microbatch == 4096
    assert second.knobs.tokens_per_microbatch is not None and second.knobs.tokens_per_microbatch <= 2048
    ended = [e for e in case.history if isinstance(e, Ended)]
    assert ended[0].outcome == Cancelled(by="failure") and ended[1].outcome == Completed()
    assert ended[0].stop_s == 0.5 and ended[0].drain_s == 0.2


def test_the_estimate_cures_a_failure_too(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory), ROOMY, policy=Policy.ESTIMATE)
    assert case.drive() == TrainingCompleted()
    assert kinds(case.history)[:8] == [
        "Accepted", "Started", "FailureSeen", "StopRequested", "Ended", "Diagnosed", "Decided", "Started",
    ]  # fmt: skip
    decided = next(e for e in case.history if isinstance(e, Decided))
    assert decided.remedy is not None and decided.remedy.predicted
    started = [e for e in case.history if isinstance(e, Started)]
    assert started[0].knobs.tokens_per_microbatch == 4096
    assert len({e.knobs for e in started}) == len(started)


def test_the_folder_of_an_attempt(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory))
    case.drive()
    attempt = case.run.attempt(1)
    assert sorted(p.name for p in attempt.path.iterdir()) == [
        "command.sh", "diagnosis.json", "outcome.json", "run.log"
    ]  # fmt: skip
    assert all(p.stat().st_mode & 0o077 == 0 for p in case.run.path.rglob("*"))
    assert json.loads((attempt.path / "diagnosis.json").read_text())["cause"] == "gpu-oom"
    outcome = json.loads((attempt.path / "outcome.json").read_text())
    assert outcome["type"] == "ended" and not any(value in (None, "", {}) for value in outcome.values())
    number = next(e for e in case.history if isinstance(e, Diagnosed)).evidence[0].line
    assert "builtin: failure" in attempt.log.read_text().splitlines()[number - 1]


def outline(history: History) -> list[tuple[str, object]]:
    """What a driver that was killed must still arrive at."""
    knobs = [e.knobs.tokens_per_microbatch for e in history if isinstance(e, Started)]
    return [
        ("knobs", list(dict.fromkeys(knobs))),
        ("cause", {e.cause for e in history if isinstance(e, Diagnosed)}),
        ("verdict", history[-1].verdict if isinstance(history[-1], Finished) else None),
    ]


@policies
@pytest.mark.parametrize("orphaned", [False, True], ids=["supervisor lives", "supervisor dies"])
def test_killed_at_any_moment_a_driver_resumes_to_the_same_end(
    tmp_path: Path, orphaned: bool, policy: Policy
) -> None:
    plain = Case(tmp_path / "plain", World(tight_memory), ROOMY, policy=policy)
    plain.drive()
    for moment in range(1, plain.world.ticks + 1, 1 if policy is Policy.LADDER else 5):
        world = World(tight_memory, kill_at=moment)
        case = Case(tmp_path / str(moment), world, ROOMY, policy=policy)
        with pytest.raises(Killed):
            case.drive()
        if orphaned:
            for life in world.lives.values():
                life.supervised = False
        case.drive()
        assert outline(case.history) == outline(plain.history), f"killed at moment {moment}"
        assert not any(life.running for life in world.lives.values())
        steps = [e.step for e in case.history if isinstance(e, Progressed)]
        assert steps == sorted(set(steps)) or orphaned, f"repeated steps at moment {moment}: {steps}"


@pytest.mark.parametrize("cursor", [True, False], ids=["cursor", "killed before it was written"])
def test_a_reattached_attempt_goes_on_without_repeating_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cursor: bool
) -> None:
    monkeypatch.setattr(log_writer, "_CURSOR_EVERY_S", 0.0 if cursor else 3600.0)
    monkeypatch.setattr(log_writer, "_CURSOR_SHARE", math.inf)
    delivered: list[bytes] = []
    poll = Attempt.poll

    def polled(attempt: Attempt) -> Observed:
        observed = poll(attempt)
        delivered.extend(chunk.data for chunk in observed.chunks)
        return observed

    world = World(tight_memory, saved=0)
    text = JOB.replace("4096", "2048")
    case = Case(tmp_path, world, text)
    world.kill_at = 6  # Accepted, Started, before and after the start, what it says first, its first step
    with pytest.raises(Killed):
        case.drive()
    monkeypatch.setattr(Attempt, "poll", polled)
    assert case.drive() == TrainingCompleted()
    assert len(world.commands) == 1
    assert (b"builtin: step 1/4" in b"".join(delivered)) is not cursor
    assert [e.step for e in case.history if isinstance(e, Progressed)] == [1, 2, 3, 4]
    log = case.run.attempt(1).log.read_text()
    assert log.count("builtin: step 1/4") == 1 and log.count("builtin: done") == 1


def test_ctrl_c_stops_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    case = Case(tmp_path, World(forever))
    sleep = case.clock.sleep

    def then_interrupt(seconds: float) -> None:
        sleep(seconds)
        if len(case.history) > 4 and not case.interrupts.by:
            case.interrupts.note(2)

    case.clock.sleep = then_interrupt  # type: ignore[method-assign]
    case.world.play = lambda w, c: ([step(n, 9) for n in range(1, 9)], None)
    assert case.drive() == Interrupted(by="SIGINT")
    assert kinds(case.history)[-3:] == ["StopRequested", "Ended", "Finished"]
    assert next(e for e in case.history if isinstance(e, Ended)).outcome == Cancelled(by="user")
    case.interrupts, case.world.play, case.clock.sleep = Interrupts(), tight_memory, sleep  # type: ignore[method-assign]
    case.world.saved = 2
    case.drive()
    started = [e for e in case.history if isinstance(e, Started)]
    assert started[1].resume and started[1].knobs == started[0].knobs
    assert any(isinstance(e, Decided) and e.reason == "resumed by the user" for e in case.history)


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_a_driver_that_is_killed_while_it_stops_is_resumed_to_the_end(address: str, tmp_path: Path) -> None:
    """As under Slurm: SIGTERM, SIGKILL 30 s later, then `launch --continue` in the requeued job."""
    last_rows = set()
    for moment in range(1, 20):
        case = Case(tmp_path / str(moment), World(forever, address=address))
        sleep = case.clock.sleep

        def then_interrupt(seconds: float, case: Case = case, moment: int = moment) -> None:
            case.clock.at += seconds
            if len(case.history) > 4 and not case.interrupts.by:
                case.interrupts.note(signal.SIGTERM)
                case.world.kill_at = case.world.ticks + moment

        case.clock.sleep = then_interrupt  # type: ignore[method-assign]
        case.world.play = lambda w, c: ([step(n, 9) for n in range(1, 9)], None)
        try:
            case.drive()
        except Killed:
            last_rows.add(kinds(case.history)[-1])
        else:
            break
        for life in case.world.lives.values():
            life.running = life.supervised = life.supervised and address != "local"
        case.interrupts, case.clock.sleep = Interrupts(), sleep  # type: ignore[method-assign]
        case.world.play, case.world.kill_at, case.world.saved = tight_memory, None, 2
        assert case.drive() == TrainingCompleted()
    assert last_rows >= {"StopRequested", "Ended", "Finished"}


def test_stop_ends_what_a_driver_left_that_was_killed_while_it_stopped(tmp_path: Path) -> None:
    case = Case(tmp_path, World(forever, address="10.0.0.1:6379"))
    case.world.play = lambda w, c: ([step(n, 9) for n in range(1, 9)], None)

    def killed(event: Event) -> None:
        if isinstance(event, StopRequested):
            raise Killed
        if isinstance(event, Progressed):
            case.interrupts.note(signal.SIGTERM)

    case.on_event = killed
    with pytest.raises(Killed):
        case.drive()
    case.on_event = lambda _: None  # `autotune stop` drives with the request in place
    assert case.drive() == Interrupted(by="SIGTERM")
    assert kinds(case.history)[-3:] == ["StopRequested", "Ended", "Finished"]
    assert not case.world.lives[1].running


def test_looks_are_rare_and_ctrl_c_is_heard_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, World(forever))
    case.world.play = lambda w, c: ([step(1, 9), "", "", "", "", ""], None)
    looks, slept, poll, sleep = list[float](), list[float](), Attempt.poll, case.clock.sleep

    def polled(attempt: Attempt) -> Observed:
        looks.append(attempt.clock.monotonic())
        return msgspec.structs.replace(poll(attempt), ending=len(looks) == 4)

    def pause(seconds: float) -> None:
        sleep(seconds)
        slept.append(seconds)
        if len(looks) == 6 and not case.interrupts.by:
            case.interrupts.note(signal.SIGINT)
            looks.append(case.clock.monotonic())

    monkeypatch.setattr(Attempt, "poll", polled)
    case.clock.sleep = pause  # type: ignore[method-assign]
    assert case.drive() == Interrupted(by="SIGINT")
    between = [round(later - earlier, 3) for earlier, later in itertools.pairwise(looks)]
    assert between[2:5] == [WATCH_S, POLL_S, WATCH_S]
    assert between[5] == POLL_S and max(slept) <= POLL_S


def test_a_failure_is_diagnosed_before_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory), ROOMY)

    def on_event(event: Event) -> None:
        if isinstance(event, StopRequested) and event.by == "failure" and not case.interrupts.by:
            case.interrupts.note(signal.SIGINT)

    case.on_event = on_event
    assert case.drive() == Interrupted(by="SIGINT")
    case.interrupts, case.on_event = Interrupts(), lambda _: None
    assert isinstance(case.drive(), TrainingCompleted)
    first, second, *_ = (e.knobs for e in case.history if isinstance(e, Started))
    assert second != first


def test_a_remedy_that_follows_a_resume_is_recorded(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory), ROOMY)

    def on_event(event: Event) -> None:
        if isinstance(event, Diagnosed) and not case.interrupts.by:
            case.interrupts.note(signal.SIGINT)

    case.on_event = on_event
    assert case.drive() == Interrupted(by="SIGINT")
    case.interrupts, case.on_event = Interrupts(), lambda _: None
    assert isinstance(case.drive(), TrainingCompleted)
    assert fold(case.history).attempts[1].remedy is not None


def test_advice_before_the_first_launch_is_recorded(tmp_path: Path) -> None:
    text = JOB.replace("trainer_budget: 100MiB", "trainer_budget: 40MiB") + "recovery: {preflight: advise}\n"
    case = Case(tmp_path, World(tight_memory), text, policy=Policy.ESTIMATE)
    case.drive()
    advice, start = case.history[1:3]
    assert isinstance(advice, Decided) and isinstance(start, Started)
    assert advice.remedy is None and "is predicted to fit" in advice.reason
    assert start.knobs == case.history[0].profile.knobs  # type: ignore[union-attr]


def on_a_cluster() -> World:
    def play(_: World, __: Command) -> tuple[Script, Exit | None]:
        return [*(step(n) for n in range(1, 5)), "builtin: done steps=4\n"], Exit(code=0)

    return World(play, address="10.0.0.1:6379")


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_a_driver_that_was_taken_over_leaves_the_attempt_to_the_other(tmp_path: Path, address: str) -> None:
    case = Case(tmp_path, on_a_cluster(), ROOMY)
    case.world.address = address

    def on_event(event: Event) -> None:
        if isinstance(event, Progressed) and event.step == 2:
            with (case.run.path / "events.jsonl").open("ab") as rows:
                rows.write(b'{"type":"driver_began","host":"elsewhere","pid":1,"driver":99}\n')

    case.on_event, case.patience_s = on_event, math.inf
    with pytest.raises(TakenOver, match="taken over"):
        case.drive()
    assert case.world.lives[1].running and case.world.lives[1].supervised
    assert case.messages[-1] == "attempt #1 is left running under its supervisor"


STORAGE_ERRORS = (errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EACCES, errno.ENOSPC)


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
@pytest.mark.parametrize("number", STORAGE_ERRORS, ids=errno.errorcode.get)
def test_storage_that_fails_ends_no_training(
    number: int, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call on a file of the run fails for a while in the middle of a training, then works again."""
    case = Case(tmp_path, on_a_cluster(), ROOMY)
    case.world.address, case.patience_s = address, math.inf
    case.interrupts = Interrupts(case.run.path / "stop")
    storage = FailingStorage(monkeypatch, case.run.path, number)
    case.on_event = lambda event: storage.fail(20) if isinstance(event, Started | Progressed) else None
    assert isinstance(case.drive(), TrainingCompleted)
    assert storage.failed > 80, "the fault was never met"
    assert len(case.world.lives) == 1
    assert [e.step for e in case.history if isinstance(e, Progressed)] == [1, 2, 3, 4]
    assert sum("waiting for the storage" in text for text in case.messages) >= 4


class FailingStorage:
    """While it fails, calls on files and folders below a folder raise an error, so many times."""

    CALLS = ("open", "stat", "write", "fsync", "mkdir", "unlink", "replace", "rename", "scandir", "listdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
        self.left = self.failed = 0
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name), str(folder), number))

    def fail(self, times: int) -> None:
        self.left = times

    def _failing(self, real: Callable[..., object], folder: str, number: int) -> Callable[..., object]:
        def call(*given: Any, **options: Any) -> object:
            on = given[0]
            path = str(Path(f"/proc/self/fd/{on}").readlink()) if isinstance(on, int) else str(on)
            if self.left and path.startswith(folder):
                self.left, self.failed = self.left - 1, self.failed + 1
                raise OSError(number, os.strerror(number), path)
            return real(*given, **options)

        return call


@pytest.mark.parametrize(("address", "trains"), [("local", False), ("10.0.0.1:6379", True)])
def test_ending_the_wait_for_storage_reports_what_still_runs(
    address: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own Ray ends with its driver, a cluster's attempt stays under its supervisor."""
    disk, case = FullDisk(monkeypatch, "events.jsonl"), Case(tmp_path, World(forever, address=address))
    case.patience_s = math.inf

    def on_event(event: Event) -> None:
        if isinstance(event, Progressed):
            disk.full = True
            case.interrupts.note(signal.SIGINT)

    case.on_event = on_event
    with pytest.raises(Unrecordable, match="no space left on device") as raised:
        case.drive()
    assert raised.value.code == ExitCode.INFRASTRUCTURE and "autotune resume" in raised.value.hint
    assert case.world.lives[1].running is trains
    left = [text for text in case.messages if "attempt #1 is left running under its supervisor" in text]
    assert bool(left) is trains and all(f"autotune stop {case.run.id}" in text for text in left)
    disk.full, case.on_event = False, lambda _: None
    case.drive()
    assert len(case.world.lives) == 1 and isinstance(case.history[-1], Finished)


@pytest.mark.parametrize("share", [0.99, 0.5])
def test_a_container_that_is_killed_as_a_whole_ran_out_of_memory(share: float, tmp_path: Path) -> None:
    """Job, supervisor and driver end in the same moment; the host's last samples tell why."""

    def play(_: World, __: Command) -> tuple[Script, Exit | None]:
        full = tuple(sample(1_800_000_000.0 + n, host=share) for n in range(9))
        return [step(1), Observed(samples=full)], None

    case = Case(tmp_path, World(play), ROOMY)
    looks = itertools.count(1)

    def sleep(seconds: float) -> None:
        case.clock.at += seconds
        if next(looks) % 8 == 0:
            raise Killed

    case.clock.sleep = sleep  # type: ignore[method-assign]
    for _ in range(40):
        try:
            case.drive()
            break
        except Killed:
            for life in case.world.lives.values():
                life.supervised = life.running = False
    ended = [e for e in case.history if isinstance(e, Ended)]
    assert len(ended) > 1
    if share < 0.95:
        assert all(isinstance(e.outcome, Lost) for e in ended)
        return
    assert all(e.outcome == Crashed(signal=signal.SIGKILL) for e in ended)
    assert all(e.cause is Cause.HOST_OOM for e in case.history if isinstance(e, Diagnosed))
    assert isinstance(case.history[-1], Finished)
    knobs = [e.knobs for e in case.history if isinstance(e, Started)]
    assert all(before != after for before, after in itertools.pairwise(knobs))


@pytest.mark.parametrize(
    ("script", "least_s"),
    [
        ([step(1), step(2)], WATCH_S),
        ([step(1), Observed(samples=(sample(5.0), sample(45.0)))], 40.0),
        ([Observed(samples=(sample(5.0), sample(9_000_000.0)))], 100.0),  # the node's clock was set
        ([], None),
    ],
    ids=["rows", "samples", "a clock that was set", "no sign"],
)
def test_an_attempt_whose_end_nobody_watched_lasted_at_least_until_its_last_sign(
    script: Script, least_s: float | None, tmp_path: Path
) -> None:
    world = World(lambda _, __: (list(script), None))
    case = Case(tmp_path, world)
    sleep, looks = case.clock.sleep, itertools.count()

    def sleep_or_die(seconds: float) -> None:
        sleep(seconds)
        if next(looks) == 20:
            raise Killed

    case.clock.sleep = sleep_or_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        case.drive()
    case.clock.sleep = sleep  # type: ignore[method-assign]
    started = next(e for e in case.history if isinstance(e, Started))
    world.lives[1].supervised = False
    case.clock.at = seconds_of(started.at) + 100.0
    world.play = tight_memory
    case.drive()
    ended = next(e for e in case.history if isinstance(e, Ended))
    assert ended.unwatched and ended.seconds == (least_s and pytest.approx(least_s, abs=0.01))


def test_an_attempt_that_ended_under_its_supervisor_lasted_as_long_as_that_measured(tmp_path: Path) -> None:
    world = World(lambda _, __: ([step(1)], Exit(code=1, ran_s=7200.0)), address="10.0.0.1:6379")
    case = Case(tmp_path, world)
    case.on_event = lambda event: setattr(
        world, "kill_at", world.ticks + 1 if isinstance(event, Progressed) else None
    )
    with pytest.raises(Killed):
        case.drive()
    case.on_event = lambda _: None
    case.drive()
    ended = next(e for e in case.history if isinstance(e, Ended))
    assert ended.seconds == 7200.0 and not ended.unwatched


def test_an_attempt_that_is_killed_lasted_until_then(tmp_path: Path) -> None:
    case = Case(tmp_path, World(lambda _, __: ([step(1)], None)))
    sleep = case.clock.sleep

    def insist(seconds: float) -> None:
        sleep(seconds)
        if case.clock.at > 1_800_000_060.0:
            raise ForcedExit

    case.clock.sleep = insist  # type: ignore[method-assign]
    assert isinstance(case.drive(), Interrupted)
    ended = next(e for e in case.history if isinstance(e, Ended))
    assert ended.outcome == Cancelled(by="user") and ended.seconds == pytest.approx(60.0, abs=2.0)


def test_an_attempt_that_could_not_be_ended_ends_before_a_resume_starts_another(tmp_path: Path) -> None:
    def play(_: World, __: Command) -> tuple[Script, Exit | None]:
        lost = Observed(lost="the Ray cluster's head has not answered for 300 s")
        return [step(1), lost, *(step(n, 400) for n in range(2, 300))], None

    case = Case(tmp_path, World(play, address="10.0.0.1:6379"), ROOMY)

    def on_event(event: Event) -> None:
        if isinstance(event, Progressed):
            case.world.deaf, case.world.unreachable = True, "cannot connect to the Ray cluster"

    case.on_event = on_event
    assert isinstance(case.drive(), Infrastructure)
    assert case.world.lives[1].running
    case.on_event = lambda _: None
    with pytest.raises(Unreachable):  # nothing starts beside it
        case.drive()
    case.world.deaf, case.world.unreachable = False, ""
    case.interrupts.note(signal.SIGINT)
    case.drive()
    assert not case.world.lives[1].running


def test_ctrl_c_during_a_backoff_ends_the_wait(tmp_path: Path) -> None:
    case = Case(tmp_path, World(lambda w, c: (["hello\n"], Exit(signal=9))))
    sleep = case.clock.sleep

    def then_interrupt(seconds: float) -> None:
        sleep(seconds)
        if isinstance(case.history[-1], Decided):
            case.interrupts.note(15)

    case.clock.sleep = then_interrupt  # type: ignore[method-assign]
    assert case.drive() == Interrupted(by="SIGTERM")
    assert len(case.world.commands) == 1


@policies
def test_held_memory_ends_the_run_instead_of_launching_onto_it(tmp_path: Path, policy: Policy) -> None:
    case = Case(
        tmp_path, World(tight_memory, held="pid 7 (mia) holds 2.10 GiB of GPU 3"), ROOMY, policy=policy
    )
    verdict = case.drive()
    assert isinstance(verdict, Infrastructure) and "pid 7 (mia)" in verdict.reason
    assert len(case.world.commands) == 1


@policies
def test_memory_of_a_card_that_others_hold_after_the_attempt_is_waited_for(
    tmp_path: Path, policy: Policy
) -> None:
    case = Case(tmp_path, World(crowded, occupied=2), ROOMY, policy=policy)
    assert isinstance(case.drive(), TrainingCompleted)
    first, *others = [event.knobs for event in case.history if isinstance(event, Started)]
    assert len(others) == 2 and all(knobs == first for knobs in others)
    assert [e.foreign for e in case.history if isinstance(e, Ended)] == [True, True, False]


@policies
def test_a_node_that_a_drain_cannot_ask_does_not_end_the_run(tmp_path: Path, policy: Policy) -> None:
    case = Case(tmp_path, World(tight_memory, unknown="no answer from gpu-03"), ROOMY, policy=policy)
    assert isinstance(case.drive(), TrainingCompleted)
    assert len(case.world.commands) >= 2
    assert "attempt #1: cannot confirm that all memory was released: no answer from gpu-03" in case.messages


@policies
def test_what_a_runner_notes_is_passed_on(tmp_path: Path, policy: Policy) -> None:
    noted = Observed(notes=("node gpu-03 answers again after 92 s",))
    done = "builtin: done steps=4\n"
    script = [*(step(n) for n in range(1, 5)), noted, done]
    case = Case(tmp_path, World(lambda w, c: (list(script), Exit(code=0))), ROOMY, policy=policy)
    assert isinstance(case.drive(), TrainingCompleted)
    assert case.messages.count("attempt #1: node gpu-03 answers again after 92 s") == 1


@policies
def test_a_resumed_attempt_that_begins_anew_is_an_error(tmp_path: Path, policy: Policy) -> None:
    lost = ([step(1), step(2), Observed(lost="node gone")], None)
    case = Case(
        tmp_path,
        World(lambda w, c: lost if not w.saved else ([step(1), step(2)], None)),
        ROOMY,
        policy=policy,
    )
    verdict = case.drive()
    assert isinstance(verdict, NeedsHuman) and verdict.diagnosis.cause is Cause.CONFIG
    assert verdict.diagnosis.evidence[0].text == (
        "autotune: restarted at step 1 although a checkpoint of step 2 existed"
    )
    assert len(case.world.commands) == 2


@policies
def test_losses_are_retried_with_backoff_out_of_their_own_budget(tmp_path: Path, policy: Policy) -> None:
    case = Case(
        tmp_path,
        World(lambda w, c: ([Observed(lost="node gone")], None)),  # before a step, so nothing is gained
        ROOMY,
        policy=policy,
    )
    begun = case.clock.now()
    verdict = case.drive()
    assert isinstance(verdict, Infrastructure)
    assert len(case.world.commands) == 4  # infrastructure_retries: 3
    assert case.clock.now() - begun >= 30 + 60 + 120
    assert {type(e.outcome) for e in case.history if isinstance(e, Ended)} == {Lost}


def test_a_place_that_cannot_take_the_first_attempt_fails_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, World(tight_memory, unreachable="needs 8 GPUs, 4 are free"))
    with pytest.raises(Failure) as raised:
        case.drive()
    assert raised.value.code == ExitCode.INFRASTRUCTURE and "8 GPUs" in raised.value.message
    assert isinstance(case.history[-1], Finished)


def test_a_job_that_gives_no_sign_of_life_hangs(tmp_path: Path) -> None:
    text = JOB + "recovery: {silence: 60s, relaunches: 3}\n"
    case = Case(tmp_path, World(lambda w, c: ([] if w.saved else [step(1)], None)), text)
    verdict = case.drive()
    assert isinstance(verdict, NeedsHuman) and verdict.diagnosis.cause is Cause.HANG
    ended = [e for e in case.history if isinstance(e, Ended)]
    assert all(isinstance(e.outcome, Hung) and 60 <= e.outcome.silent_s < 75 for e in ended)
    assert [e.by for e in case.history if isinstance(e, StopRequested)] == ["hang"] * len(ended)


def test_a_crash_without_memory_failure_is_the_users(tmp_path: Path) -> None:
    lines = (
        "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'reward'\n"
    )
    case = Case(tmp_path, World(lambda w, c: ([lines], Exit(code=1))))
    verdict = case.drive()
    assert isinstance(verdict, NeedsHuman) and not verdict.diagnosis.cause.is_oom
    assert len(case.world.commands) == 1


def test_exit_code_zero_before_the_last_step_is_no_success(tmp_path: Path) -> None:
    case = Case(tmp_path, World(lambda w, c: ([step(1), step(2)], Exit(code=0))))
    assert not isinstance(case.drive(), TrainingCompleted)


def test_the_goal_can_end_the_run(tmp_path: Path) -> None:
    case = Case(tmp_path, World(forever), JOB.replace("goal: {steps: 3}", "goal: {steps: 3, then: stop}"))
    verdict = case.drive()
    assert type(verdict).__name__ == "Stable"
    goal = next(e for e in case.history if isinstance(e, GoalReached))
    assert (goal.step, goal.marginal, goal.headroom) == (3, False, 0.5)


def test_a_tight_phase_makes_the_milestone_marginal(tmp_path: Path) -> None:
    script = [*(step(n, used=97 << 20) for n in range(1, 5)), "builtin: done steps=4\n"]
    case = Case(tmp_path, World(lambda w, c: (script, Exit(code=0))))
    assert case.drive() == TrainingCompleted(marginal=True)


@policies
def test_nothing_left_to_try_gives_up(tmp_path: Path, policy: Policy) -> None:
    def never_fits(_: World, __: object) -> tuple[list[str | Observed], Exit]:
        return [phase("rollout", 1), reported("backward", 1)], Exit(code=1)

    case = Case(tmp_path, World(never_fits), ROOMY, policy=policy)
    verdict = case.drive()
    assert isinstance(verdict, GaveUp) and verdict.reason
    observed = [e.knobs for e in case.history if isinstance(e, Started)]
    assert len(observed) == len(set(map(str, observed))), "a configuration was tried twice"


def test_a_full_disk_pauses_the_log_and_not_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, case, observer = (
        FullDisk(monkeypatch, "run.log"),
        Case(tmp_path, World(tight_memory)),
        MessageObserver(),
    )
    case.observer, disk.full = observer, True
    assert case.drive() == TrainingCompleted()
    assert len(observer.texts) == 2 and all(
        "no space left on device; logs and samples pause" in t for t in observer.texts
    )
    assert {"Diagnosed", "GoalReached"} <= set(kinds(case.history))


def test_what_earlier_jobs_taught_is_recorded_with_the_run(tmp_path: Path) -> None:
    run = directory.create(tmp_path / "runs", job_text=JOB)
    job, framework = parse(JOB), frameworks.find("builtin")
    cluster, asked = Place(World(tight_memory), Hands()).cluster(), list[Kind]()

    def recall(kind: Kind) -> Learned:
        asked.append(kind)
        return Learned(kind=kind, factors={"train.activations": Factor(mean=1.2, error=0.02)}, runs=3)

    with journal.Journal(run.path) as book:
        reconcile.accept(
            book,
            run=run.id,
            job=job,
            profile=framework.profile(job, cluster),
            cluster=cluster,
            versions={"builtin": "1"},
            now=0.0,
            recall=recall,
        )
        (accepted,) = book.history()
    assert isinstance(accepted, Accepted) and accepted.learned == recall(asked[0])
    assert asked[0].framework.startswith("builtin/") and asked[0].version == "1"


def test_the_hours_until_a_run_is_resumed_are_not_of_its_duration(tmp_path: Path) -> None:
    text = JOB + "recovery: {duration: 30m, infrastructure_retries: 0}\n"
    case = Case(tmp_path, World(lambda w, c: ([step(1), Observed(lost="node gone")], None)), text)
    assert isinstance(case.drive(), Infrastructure)
    case.clock.at += 8 * 3600
    case.world.play, case.world.saved = tight_memory, 1
    assert case.drive() == TrainingCompleted()
    assert fold(case.history).elapsed_s < 1800
    assert any(isinstance(e, Diagnosed) for e in case.history)


def test_the_recorded_job_shows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    text = JOB.replace("4096", "2048") + "env: {HF_TOKEN: {env: HF_TOKEN}, TOKENIZERS_PARALLELISM: false}\n"
    case = Case(tmp_path, World(tight_memory), text)
    case.drive()
    accepted = case.history[0]
    assert isinstance(accepted, Accepted)
    assert accepted.job.env == {"HF_TOKEN": "${HF_TOKEN:?}", "TOKENIZERS_PARALLELISM": "false"}
    assert case.world.commands[0].env["HF_TOKEN"] == "hf_abc"
    files = [p for p in case.run.path.rglob("*") if p.is_file()]
    assert not [p for p in files if "hf_abc" in p.read_text()]
    assert isinstance(case.history[1], Started) and not any(isinstance(e, FailureSeen) for e in case.history)
