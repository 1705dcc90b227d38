"""What the console prints of the events of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.console import Console
from autotune.orchestrator.terminal.live_region import heartbeat, live_lines
from autotune.policies.values.events import (
    Ended,
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    Stable,
    Verdict,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import Crashed, Peak

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
        "  These would fit, but they change the training or need more hardware, so",
        "  autotune does not apply them:",
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
        "    step 3/20 ",
        "    ! marginal at step 2",
    ]
    assert str(lines[3].style) == "yellow"
    assert heartbeat(progress, seconds=62.0) == "running for 1m 02s: step 3/20, backward"
    assert heartbeat(Progress(), seconds=1.0) == "running for 1.0s: no step yet"
