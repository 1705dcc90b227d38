"""`autotune status`: what is left of a run, and a table that is watched where it cannot be redrawn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from autotune.orchestrator.cli import status
from autotune.orchestrator.cli.shared import run_status
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.cli.shared.run_status import AttemptStatus, RunReader, RunStatus, TrialStatus
from autotune.orchestrator.cli.status import table
from autotune.orchestrator.run import summary
from autotune.orchestrator.run.directory import RunFolder
from autotune.orchestrator.run.journal import Tail, encode
from autotune.orchestrator.run.lock import STALE_S, Watch
from autotune.policies.forecast.time_left import TimeLeft, Until
from autotune.policies.values.events import Decided, Started
from autotune.policies.values.history import RESUMED
from autotune.policies.values.knobs import Knobs
from benchmarks.status import write_run

ATTEMPT = AttemptStatus(attempt=1, change="as written", seconds=62.0, status="RUNNING step 3/20")
UNWATCHED = AttemptStatus(attempt=2, change="as written", seconds=62.0, status="lost", unwatched=True)
NO_SIGN = AttemptStatus(attempt=3, change="as written", seconds=None, status="lost", unwatched=True)
RUN = RunStatus(run="7c1e", name="story", status="RUNNING", running=True, attempts=(ATTEMPT,))


def test_one_run_says_how_long_is_left_and_how_long_its_steps_took() -> None:
    run = replace(RUN, left=TimeLeft(least_s=532.0, most_s=671.0), step_s=(10.0, 20.0))
    assert (
        "  8m to 12m left   15s a step   step times ▅█" in table([run], now=0.0, attempts=True).splitlines()
    )
    assert "left" not in table([RUN], now=0.0, attempts=True)
    goal = replace(run, left=TimeLeft(least_s=532.0, most_s=671.0, until=Until.GOAL), step_s=())
    assert "  8m to 12m left to the goal" in table([goal], now=0.0, attempts=True).splitlines()
    trial = TrialStatus(trial=4, change="concurrency 64 → 32", seconds=9.0, status="RUNNING")
    search = replace(run, left=TimeLeft(least_s=0.0, most_s=7512.0), step_s=(), trials=(trial,))
    lines = table([search], now=0.0, attempts=True).splitlines()
    assert "  at most 2h 10m left" in lines and lines[-1].startswith("  trial 4  concurrency 64 → 32")


def test_a_table_of_runs_fits_80_columns() -> None:
    long = replace(
        RUN, name="qwen3-8b-grpo", framework="openrlhf", cluster="64×H100-80GB", status="RECOVERING"
    )
    text = table(
        [replace(long, submitted="2026-11-28T12:00:00Z", total_s=8040.0)], now=0.0, attempts=False, width=80
    )
    head, row = text.splitlines()
    assert head.split()[:2] == ["RUN", "NAME"] and head.split()[-1] == "STATUS" and row.endswith("RECOVERING")
    assert max(map(len, (head, row))) <= 80
    change = "concurrency 4 → 16, tokens_per_microbatch 32 → 384, recompute full → off"
    fits = "confirm: fits   1,240 tok/s ±13%   92.5% free"
    trial = TrialStatus(trial=1, change=change, seconds=26.0, status=fits)
    searched = table([replace(RUN, trials=(trial,))], now=0.0, attempts=True, width=80)
    assert max(map(len, searched.splitlines())) <= 80


def test_a_running_run_shows_its_step_and_the_time_left_where_there_is_room() -> None:
    run = replace(RUN, framework="verl", cluster="8×H100-80GB", submitted="2026-11-28T12:00:00Z")
    run = replace(run, left=TimeLeft(least_s=532.0, most_s=671.0))
    for width in (None, 80):
        text = table([run], now=0.0, attempts=False, width=width)
        assert text.endswith("RUNNING step 3/20, 8m to 12m left")
        assert width is None or max(map(len, text.splitlines())) <= width
    narrow = table([replace(run, name="a-name-of-24-characters-")], now=0.0, attempts=False, width=70)
    assert narrow.endswith("RUNNING step 3/20") and max(map(len, narrow.splitlines())) <= 70


def test_the_time_of_an_attempt_that_nobody_watched_to_its_end_is_at_least_what_was_seen() -> None:
    run = replace(RUN, attempts=(ATTEMPT, UNWATCHED, NO_SIGN), running_s=124.0)
    first, *below = table([run], now=0.0, attempts=True).splitlines()[1:]
    assert "at least 2m 04s" in first
    times = [line.split("as written")[1].strip().split("  ")[0] for line in below]
    assert times == ["1m 02s", "at least 1m 02s", "unknown time"]


def test_a_watched_table_in_a_file_is_printed_when_there_is_news_and_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = replace(ATTEMPT, attempt=2, status="RUNNING")
    items = [
        RUN,
        replace(RUN, attempts=(replace(ATTEMPT, status="RUNNING step 4/20", seconds=64.0),), total_s=64.0),
        replace(RUN, attempts=(replace(ATTEMPT, status="✗ gpu-oom in backward"), second)),
        replace(RUN, attempts=(replace(ATTEMPT, status="✗ gpu-oom in backward"), second), total_s=99.0),
        replace(RUN, status="COMPLETED", running=False),
    ]
    looks: Iterator[RunStatus] = iter(items)
    times = iter([0.0, 2.0, 4.0, 70.0, 72.0])
    monkeypatch.setattr(status.directory, "find", lambda *_: RunFolder(Path("runs/7c1e")))
    monkeypatch.setattr(status.RunReader, "look", lambda *_, **__: next(looks))
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: next(times), sleep=lambda _: None))
    status.print_status(Options(runs_dir=Path("runs")), prefix="7c1e", watch=True)
    printed = capsys.readouterr().out
    assert printed.count("#ATTEMPTS") == 4 and "step 4/20" not in printed
    assert next(looks, None) is None and "\x1b" not in printed


def finished_run(path: Path) -> RunFolder:
    write_run(path, steps=30)
    return RunFolder(path)


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Count how often a journal is decoded."""
    reads: list[Path] = []
    new = Tail.update
    monkeypatch.setattr(Tail, "update", lambda self: (reads.append(self.path), new(self))[1])
    return reads


def test_a_finished_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "7c1e")
    reads = reads_of(monkeypatch)
    first = RunReader(run).look(now=0.0)
    assert (first.status, first.attempts[0].status, first.total_s) == ("COMPLETED", "training complete", 30.0)
    reader = RunReader(run)  # as another command
    assert reader.look(now=9.0) == first == reader.look(now=99.0) and len(reads) == 1
    assert RunReader(run, keeps=False).look(now=0.0) == first, "what is kept is what the journal says"


def test_a_run_that_goes_on_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "7c1e")
    reader = RunReader(run)
    reader.look(now=0.0)
    rows = (Decided(attempt=1, reason=RESUMED), Started(attempt=2, knobs=Knobs(), at="2027-01-16T00:00:00Z"))
    with (run.path / "events.jsonl").open("ab") as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    result = reader.look(now=0.0)
    assert (result.status, len(result.attempts)) == ("INTERRUPTED", 2)
    assert result == RunReader(run).look(now=0.0) == RunReader(run, keeps=False).look(now=0.0)


def test_a_run_is_not_said_to_be_interrupted_where_its_driver_cannot_be_asked_for(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "7c1e")
    rows = (Decided(attempt=1, reason=RESUMED), Started(attempt=2, knobs=Knobs(), at="2027-01-16T00:00:00Z"))
    with (run.path / "events.jsonl").open("ab") as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    left = RunReader(run, keeps=False).look(now=0.0)
    assert (left.status, left.attempts[1].status, left.attempts[1].unwatched) == (
        "INTERRUPTED",
        "UNWATCHED",
        True,
    )
    (run.path / "drivers").touch()  # a folder that cannot be listed
    result = RunReader(run, keeps=False).look(now=0.0)
    assert result.status == "RECOVERING" and result.running and result.attempts[1].status == "RUNNING"
    assert result.driver == "whether one is at work cannot be read"


def test_a_driver_of_another_host_is_named_with_its_heartbeat_and_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at = finished_run(tmp_path / "7c1e"), [0.0]
    rows = (Decided(attempt=1, reason=RESUMED), Started(attempt=2, knobs=Knobs(), at="2027-01-16T00:00:00Z"))
    with (run.path / "events.jsonl").open("ab") as file:
        file.writelines(encode(row) + b"\n" for row in rows)
    (run.path / "drivers").mkdir()
    claim = run.path / "drivers" / "1"
    claim.write_bytes(b'{"host":"gpu-03","pid":7,"boot_id":"b"}')
    os.utime(claim, (1_800_000_000, 1_800_000_000))
    monkeypatch.setattr(run_status, "Watch", lambda path: Watch(path, monotonic=lambda: at[0]))
    reader = RunReader(run)
    result = reader.look(now=0.0)
    assert result.running and result.driver.startswith(
        "pid 7 on gpu-03, last heartbeat 2027-01-15T08:00:00.000Z"
    )
    assert "  driver: pid 7 on gpu-03" in table([result], now=0.0, attempts=True)
    at[0] = STALE_S
    result = reader.look(now=0.0)
    assert (result.running, result.driver, result.status) == (False, "", "INTERRUPTED")


def test_a_copied_run_is_listed_under_its_own_id(tmp_path: Path) -> None:
    original = finished_run(tmp_path / "7c1e")
    result = RunReader(original).look(now=0.0)
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(original.path, copy.path)  # with the times of its files
    assert RunReader(copy).look(now=0.0) == replace(result, run="copy")


@pytest.mark.parametrize("name", ["events.jsonl", "drivers/1", "waiting.json"])
def test_a_pipe_in_the_folder_of_a_run_does_not_keep_the_table_waiting(tmp_path: Path, name: str) -> None:
    run = finished_run(tmp_path / "7c1e")
    (run.path / "drivers").mkdir(exist_ok=True)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    assert RunReader(run).look(now=0.0).run == "7c1e"


def test_a_summary_of_another_run_is_not_believed(tmp_path: Path) -> None:
    run, other = finished_run(tmp_path / "7c1e"), RunFolder(tmp_path / "beef")
    write_run(other.path, steps=20)
    RunReader(other).look(now=0.0)
    (other.path / summary.NAME).rename(run.path / summary.NAME)
    result = RunReader(run).look(now=0.0)
    assert (result.run, result.total_s) == ("7c1e", 30.0)


def test_damage_behind_a_summary_is_reported_and_nothing_is_kept_of_it(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "7c1e")
    RunReader(run).look(now=0.0)
    path = run.path / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b"step", b"st\x00p", 1))
    (run.path / summary.NAME).unlink()
    assert [RunReader(run).look(now=0.0).status for _ in range(2)] == ["DAMAGED", "DAMAGED"]
    assert not (run.path / summary.NAME).exists()
