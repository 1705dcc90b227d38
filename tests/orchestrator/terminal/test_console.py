"""What the console prints of the events of a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from autotune.orchestrator.terminal.console import Console
from autotune.policies.values.events import (
    Ended,
    Finished,
    GaveUp,
    Infrastructure,
    Interrupted,
    Stable,
    Verdict,
)
from autotune.policies.values.evidence import Crashed

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
