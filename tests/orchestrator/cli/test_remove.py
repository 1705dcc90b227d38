"""`remove` deletes runs that are over, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import encode
from autotune.orchestrator.run.lock import Lock
from autotune.policies.values.events import Ended, Event, Finished, Interrupted, Started
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled
from tests.orchestrator.cli.terminal import call
from tests.orchestrator.scripted import JOB
from tests.policies.jobs import accepted

NOW = "2026-11-28T12:00:00+00:00"
LONG_AGO = "2020-01-01T12:00:00+00:00"
GONE = Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2)
HELD = Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2, held="pid 7")


def made(root: Path, *, at: str = LONG_AGO, end: Event = GONE) -> directory.RunFolder:
    run = directory.create(root, job_text=JOB)
    rows = (
        accepted(),
        Started(attempt=1, knobs=Knobs()),
        end,
        Finished(attempt=1, verdict=Interrupted(by="SIGTERM")),
    )
    lines = [encode(replace(row, at=at)) for row in rows]
    (run.path / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return run


def test_runs_that_ended_long_ago_are_removed(tmp_path: Path) -> None:
    old, new = made(tmp_path), made(tmp_path, at=NOW)
    held, damaged = made(tmp_path, end=HELD), made(tmp_path)
    (damaged.path / "events.jsonl").write_text("what\n")
    result = call("remove", "--older-than", "5d", "--yes", "--runs-dir", str(tmp_path))
    assert result.code == 0 and result.err == f"removed {old.path}\n"
    assert {each.name for each in tmp_path.iterdir()} == {new.id, held.id, damaged.id}


@pytest.mark.parametrize("what", ["driven", "held", "checkpoints", "no question"])
def test_what_may_be_needed_stays(what: str, tmp_path: Path) -> None:
    run = made(tmp_path, end=HELD if what == "held" else GONE)
    lock = Lock(run.path) if what == "driven" else None
    if what == "checkpoints":
        (run.path / "checkpoints").mkdir()
    yes = () if what == "no question" else ("--yes",)
    result = call("remove", run.id, *yes, "--runs-dir", str(tmp_path))
    if lock is not None:
        lock.release()
    reasons = {
        "driven": "is running run",
        "held": "may be left\nhint: `autotune stop",
        "checkpoints": "holds folders that autotune did not make: checkpoints",
        "no question": "nothing was removed\nhint: --yes",
    }
    assert reasons[what] in result.err and run.history()
