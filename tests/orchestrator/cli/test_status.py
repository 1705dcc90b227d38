"""`autotune status`: what is left of a run, and a table that is watched where it cannot be redrawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from autotune.orchestrator.cli import status
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.cli.status import AttemptStatus, RunStatus, TrialStatus, table
from autotune.policies.forecast.time_left import TimeLeft, Until

ATTEMPT = AttemptStatus(attempt=1, change="as written", seconds=62.0, status="RUNNING step 3/20")
RUN = RunStatus(run="7c1e", name="story", status="RUNNING", running=True, attempts=(ATTEMPT,))


def test_one_run_says_how_long_is_left_and_how_long_its_steps_took() -> None:
    run = replace(RUN, left=TimeLeft(least_s=532.0, most_s=671.0), step_s=(10.0, 20.0))
    assert "  8m to 12m left   15s a step ▅█" in table([run], now=0.0, attempts=True).splitlines()
    assert "left" not in table([RUN], now=0.0, attempts=True)
    goal = replace(run, left=TimeLeft(least_s=532.0, most_s=671.0, until=Until.GOAL), step_s=())
    assert "  8m to 12m left to the goal" in table([goal], now=0.0, attempts=True).splitlines()
    trial = TrialStatus(trial=4, change="concurrency 64 → 32", seconds=9.0, status="RUNNING")
    search = replace(run, left=TimeLeft(least_s=0.0, most_s=7512.0), step_s=(), trials=(trial,))
    lines = table([search], now=0.0, attempts=True).splitlines()
    assert "  at most 2h 10m left" in lines and lines[-1].startswith("  trial 4  concurrency 64 → 32")


def test_a_watched_table_in_a_file_is_printed_when_there_is_news_and_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = replace(ATTEMPT, attempt=2, status="RUNNING")
    seen = [
        RUN,
        replace(RUN, attempts=(replace(ATTEMPT, status="RUNNING step 4/20", seconds=64.0),), total_s=64.0),
        replace(RUN, attempts=(replace(ATTEMPT, status="✗ gpu-oom in backward"), second)),
        replace(RUN, attempts=(replace(ATTEMPT, status="✗ gpu-oom in backward"), second), total_s=99.0),
        replace(RUN, status="COMPLETED", running=False),
    ]
    looks: Iterator[RunStatus] = iter(seen)
    times = iter([0.0, 2.0, 4.0, 70.0, 72.0])
    monkeypatch.setattr(status.directory, "find", lambda *_: SimpleNamespace())
    monkeypatch.setattr(status, "standing", lambda *_, **__: next(looks))
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: next(times), sleep=lambda _: None))
    status.print_status(Options(runs_dir=Path("runs")), prefix="7c1e", watch=True)
    printed = capsys.readouterr().out
    assert printed.count("#ATTEMPTS") == 4 and "step 4/20" not in printed
    assert next(looks, None) is None and "\x1b" not in printed
