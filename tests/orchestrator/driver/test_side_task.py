"""Work beside a run: one limit for all of it, and no fault of it reaches the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.orchestrator.driver import side_task
from autotune.orchestrator.driver.side_task import SideTask, SideTasks
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from autotune.orchestrator.run.lock import owner
from autotune.policies.values.events import Decided, Event
from autotune.policies.values.job import Job


class Busy(SideTask):
    """Never finishes, and notes what it is asked."""

    label = "busy"

    def __init__(
        self, run: directory.RunFolder, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        super().__init__(run, say=say, warn=warn)
        self.asked: list[str] = []

    def begin(self, job: Job) -> None:
        self.asked.append(f"begin {job.name}")
        raise ZeroDivisionError("a bug")

    def take(self, event: Event) -> None:
        self.asked.append(f"take {event.attempt}")

    def failed(self, reason: str) -> None:
        self.asked.append(f"failed: {reason}")

    @property
    def pending(self) -> bool:
        return True

    def settle(self) -> None:
        self.asked.append("settle" if owner(self.run.path) else "settle without the lock")
        raise Failure("the disk is full")


@pytest.fixture
def folder(tmp_path: Path) -> directory.RunFolder:
    return directory.create(tmp_path / "runs", job_text="name: j\n")


@pytest.mark.parametrize(
    "error",
    [
        None,
        Failure("cannot reach Ray"),
        Failure("a wrong option", code=ExitCode.USAGE),
        ZeroDivisionError("a bug of the driver"),
    ],
)
def test_every_task_is_asked_and_the_end_waits_once_for_all(
    folder: directory.RunFolder, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(side_task, "LIMIT_S", 0.4)
    waited: list[float] = []
    monkeypatch.setattr(side_task.time, "sleep", lambda seconds: (waited.append(seconds), sleep(seconds)))
    warnings: list[str] = []
    tasks = [Busy(folder, say=lambda _: None, warn=warnings.append) for _ in range(3)]
    beside = SideTasks(*tasks)
    displayed_events: list[Event] = []

    def drive() -> None:
        interrupts = Interrupts()
        with (
            beside.outlasting(interrupts),
            Journal(folder.path, tell=beside.after(displayed_events.append)) as journal,
            beside.at_work(journal),
        ):
            beside.begin(Job(name="j", framework="command"))
            journal.append(Decided(attempt=7))
            if error is not None:
                raise error

    if error is None:
        drive()
    else:
        with pytest.raises(type(error)):
            drive()
    reasons = {
        "cannot reach Ray": ["failed: cannot reach Ray"],
        "a bug of the driver": ["failed: autotune failed: ZeroDivisionError: a bug of the driver"],
    }
    failed = reasons.get(str(error), [])
    for task in tasks:
        assert task.asked == ["begin j", "take 7", *failed, "settle without the lock"]
    assert len(displayed_events) == 1
    assert sum(waited) < 2 * 0.4, "the limit is for all of them together"
    own = ["busy: ZeroDivisionError: a bug; the run is unaffected"] * 3
    assert warnings == [*own, *["busy: the disk is full; the run is unaffected"] * 3]


def test_an_impatient_user_is_not_kept_waiting(folder: directory.RunFolder) -> None:
    hurried = Interrupts()
    hurried.impatient = True
    task = Busy(folder, say=lambda _: None, warn=lambda _: None)
    beside = SideTasks(task)
    with beside.outlasting(hurried), Journal(folder.path) as journal, beside.at_work(journal):
        pass
    assert task.asked == ["settle without the lock"]


sleep = time.sleep
