"""What the console prints of the events of a run."""

from __future__ import annotations

import io
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune.orchestrator import messages
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal import live_view
from autotune.orchestrator.terminal.console import Console
from autotune.orchestrator.terminal.live_view import heartbeat, live_lines
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Ended,
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Stable,
    Started,
    Verdict,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Goal, Search
from autotune.policies.values.observation import Crashed, GpuMemory, Peak, Sample
from tests.policies.stories import KNOBS, accepted

AT = "2026-01-01T00:00:00Z"
FAILED = Finished(verdict=GaveUp(reason="nothing left", would_help=("LoRA",)), at=AT)


def printed(*verdicts: Verdict, quiet: bool) -> str:
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path("runs"), quiet=quiet)
    console.print_event(Ended(attempt=1, outcome=Crashed(exit_code=1), seconds=3.0, at=AT))
    for verdict in verdicts:
        console.print_event(Finished(verdict=verdict, at=AT))
    return stream.getvalue()


def test_a_quiet_console_prints_errors_only() -> None:
    assert printed(FAILED.verdict, quiet=True).splitlines() == [
        "x gave up after 0 attempts: nothing left",
        "  These would help; autotune leaves them to you:",
        "    LoRA",
    ]
    assert "cluster lost" in printed(Infrastructure(reason="cluster lost"), quiet=True)
    assert printed(Stable(), Interrupted(by="SIGTERM"), quiet=True) == ""
    assert "exited with code 1 (3.0s)" in printed(quiet=False)


@pytest.mark.parametrize("quiet", [True, False])
def test_events_of_an_earlier_driver_are_not_printed_again(quiet: bool) -> None:
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path("runs"), quiet=quiet)
    console.replay((FAILED,))
    assert stream.getvalue() == ""
    console.print_event(FAILED)
    assert "gave up" in stream.getvalue()


def test_the_live_region_has_title_phases_and_goal() -> None:
    progress = Progress(
        phase=Phase.BACKWARD,
        step=3,
        of=20,
        peaks={"rollout": Peak(used_bytes=1 << 30, capacity_bytes=2 << 30)},
    )
    goal = GoalReached(attempt=1, step=2, headroom=0.5, marginal=True, at=AT)
    lines = live_lines(progress, title="#1  as written", seconds=62.0, goal=goal, width=60)
    assert [line.plain for line in lines] == [
        "#1  as written" + "1m 02s".rjust(46),
        "    rollout ✓ 1.00 GiB   backward …",
        "    step 3/20 ████░░░░░░░░░░░░░░░░░░░░ 15%",
        "    ! marginal at step 2",
    ]
    assert str(lines[3].style) == "yellow"
    fast = replace(progress, tokens_per_second=1638.0)
    lines = live_lines(fast, title="#1", seconds=1.0, goal=None, width=80, step_s=(10.0,))
    assert lines[2].plain.endswith("15%   10s a step   1,638 tok/s")
    assert heartbeat(progress, seconds=62.0) == "running for 1m 02s: step 3/20, backward"
    assert heartbeat(Progress(), seconds=1.0) == "running for 1.0s: no step yet"
    samples = {node: sample(node, used) for node, used in (("a", 60), ("b", 70))}
    far = Progress(step=3, of=20, samples=samples)
    assert heartbeat(far, seconds=62.0, left="about 9m left") == (
        "running for 1m 02s: step 3/20, GPU 0 of b 70.00 GiB of 80.00 GiB, "
        "host of a 200.00 GiB of 900.00 GiB, about 9m left"
    )


def sample(node: str, used_gib: int) -> Sample:
    card = GpuMemory(index=0, used_bytes=used_gib << 30, total_bytes=80 << 30, ours_bytes=0, of_attempt=True)
    return Sample(at=0.0, node=node, host_used_bytes=200 << 30, host_total_bytes=900 << 30, gpus=(card,))


def test_the_live_region_has_six_lines_at_most_and_the_time_at_any_width() -> None:
    progress = Progress(
        phase=Phase.BACKWARD, step=3, of=20, samples={str(node): sample(str(node), node) for node in range(9)}
    )
    goal = GoalReached(attempt=1, step=2, headroom=0.5, marginal=False, at=AT)
    for width in (30, 80, 200):
        lines = live_lines(
            progress,
            title=f"#1  {'memory_fraction 0.8 → 0.64, ' * 9}",
            seconds=62.0,
            goal=goal,
            width=width,
            step_s=[10.0, 20.0],
            left="9m to 11m left",
        )
        assert len(lines) == 6
        assert lines[0].plain.endswith("1m 02s") and len(lines[0].plain) <= width
    assert lines[2].plain == "    step 3/20 ████░░░░░░░░░░░░░░░░░░░░ 15%   9m to 11m left   15s a step"
    assert lines[4].plain.startswith("    GPU 0 of 8") and lines[5].plain.startswith("    host of")


class Screen(io.StringIO):
    """A terminal of 80 columns."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def searching(stream: io.StringIO, *, parallel: int) -> Console:
    console = Console(stream, runs_dir=Path("runs"), color="never", width=80, now=lambda: 1_767_225_700.0)
    job = replace(accepted().job, search=Search(trials=9, parallel=parallel))
    console.print_event(replace(accepted(), job=job, mode="search", at=AT))
    for attempt in range(1, parallel + 1):
        knobs = replace(KNOBS, concurrency=attempt)
        console.print_event(Started(attempt=attempt, trial=attempt + 1, knobs=knobs, at=AT))
    return console


@pytest.mark.parametrize("parallel", [2, 9])
def test_every_running_trial_is_displayed(parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Screen()
    console = searching(stream, parallel=parallel)
    running = {attempt: Progress(step=attempt, of=20) for attempt in range(1, parallel + 1)}
    console.watch(running, now=1_767_225_662.0)  # a minute and two seconds after AT
    lines = [line for line in stream.getvalue().splitlines() if "trial" in line or "left" in line]
    assert "at most 8h 00m left" in lines[0] and lines[0].rstrip().endswith("1m 02s")
    for attempt in range(1, min(parallel, 4) + 1):
        assert f"#{attempt} trial {attempt + 1}  concurrency 64 → {attempt}" in lines[attempt]
        assert f"step {attempt}/20" in lines[attempt] and len(lines[attempt]) <= 80
    assert len(lines) == (3 if parallel == 2 else 6)
    if parallel == 9:
        assert lines[5].split() == [
            "and",
            "5",
            "more:",
            "#5",
            "trial",
            "6",
            "#6",
            "trial",
            "7",
            "#7",
            "trial",
            "8",
            "#8",
            "trial",
            "9",
            "#9",
            "trial",
            "10",
        ]
    console.close()


def test_a_plain_log_tells_of_every_running_trial_once_a_minute() -> None:
    stream = io.StringIO()
    console = searching(stream, parallel=2)
    running = {1: Progress(step=3, of=20), 2: Progress()}
    console.watch(running, now=1_767_225_700.0 + 30.0)
    console.watch(running, now=1_767_225_700.0 + 61.0)
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .endswith("Z 2 trials running: #1 step 3/20, #2 no step yet; at most 8h 00m left")
    )
    assert stream.getvalue().count("trials running") == 1


def test_steps_in_a_plain_log_say_how_long_is_left() -> None:
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path("runs"), verbose=True)
    console.print_event(replace(accepted(goal=Goal(steps=99)), at=AT))
    console.print_event(Started(attempt=1, knobs=KNOBS, at=AT))
    for step in range(1, 8):
        after = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=10 * step)
        console.print_event(
            Progressed(attempt=1, step=step, of=99, seconds=10.0, at=after.isoformat(), after_s=10.0)
        )
    lines = stream.getvalue().splitlines()
    assert lines[-5].endswith("#1 step 3/99 in 10s") and "left" not in lines[-5]
    assert lines[-1].endswith("#1 step 7/99 in 10s, 12m to 19m left")


def test_events_are_printed_without_an_estimate_of_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(live_view, "time_left", broken)
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path("runs"))
    console.print_event(replace(accepted(), at=AT))
    console.print_event(Started(attempt=1, knobs=KNOBS, at=AT))
    console.watch({1: Progress()}, now=1_767_225_662.0)
    console.print_event(FAILED)
    assert "started: as written" in stream.getvalue() and "gave up" in stream.getvalue()


@pytest.mark.parametrize(
    ("folder", "option"),
    [("runs", ""), ("/data/my runs", " --runs-dir '/data/my runs'"), ("r", " --runs-dir r")],
)
def test_printed_commands_find_the_run_in_its_folder(folder: str, option: str) -> None:
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path(folder))
    console.print_event(replace(accepted(), run="7c1e", at=AT))
    console.print_event(Finished(verdict=Infrastructure(reason="cluster lost"), at=AT))
    stable = f"{folder}/7c1e/stable.yaml"
    console.summary([], stable=stable)
    reuse = next(line for line in stream.getvalue().splitlines() if line.startswith("  reuse "))
    assert shlex.split(reuse) == ["reuse", "autotune", "launch", stable]
    assert f"`autotune resume 7c1e{option}` continues the run" in stream.getvalue()
    assert f"  report    autotune report 7c1e --open{option}\n" in stream.getvalue()


def test_a_job_that_fails_at_once_without_gpus_names_the_reason_and_what_to_do() -> None:
    stream = io.StringIO()
    console = Console(stream, runs_dir=Path("runs"))
    event = replace(accepted(), at=AT)
    without = replace(event.cluster, address="local", gpus_per_node=0, gpu_memory_bytes=0)
    console.print_event(replace(event, job=replace(event.job, framework="verl"), cluster=without))
    crashed = Diagnosis(cause=Cause.UNKNOWN, reason="exited with code 1")
    console.print_event(Finished(verdict=NeedsHuman(diagnosis=crashed), at=AT))
    lines = stream.getvalue().splitlines()
    lacks = "this machine has no GPU, and verl usually trains on GPUs"
    assert f"warning: {lacks}" in lines and f"  {lacks}" in lines
    assert lines[-1].startswith("  hint: name one with GPUs")


def test_a_goal_lists_the_peaks_that_have_a_limit() -> None:
    unlimited, limited = (Peak(used_bytes=70 << 20, capacity_bytes=size << 20) for size in (0, 80))
    reached = GoalReached(
        attempt=1, step=3, marginal=False, headroom=0.125, peaks={"rollout": unlimited, "optimizer": limited}
    )
    assert messages.goal(reached) == "✓ stable at step 3   train 70.0 MiB   12.5% free"
    assert "rollout 70.0 MiB" in messages.goal(replace(reached, peaks={"rollout": unlimited}))
