"""What the commands say of a verdict: the exit code, and the word in a table."""

from __future__ import annotations

from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.events import (
    GaveUp,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Rehearsed,
    Stable,
    TrainingCompleted,
    Verdict,
)


def exit_code(verdict: Verdict) -> ExitCode:
    """Return the exit code of a verdict."""
    match verdict:
        case TrainingCompleted() | Stable() | Rehearsed():
            return ExitCode.OK
        case GaveUp() | NeedsHuman():
            return ExitCode.NO
        case Infrastructure():
            return ExitCode.INFRASTRUCTURE
        case Interrupted(by=by):
            return ExitCode.INTERRUPTED if by in ("user", "SIGINT") else ExitCode.TERMINATED


def word(verdict: Verdict) -> str:
    """Return the word of a verdict in the table of runs."""
    match verdict:
        case TrainingCompleted():
            return "COMPLETED"
        case Stable():
            return "STABLE"
        case Rehearsed():
            return "REHEARSED"
        case GaveUp():
            return "GAVE UP"
        case NeedsHuman():
            return "FAILED"
        case Infrastructure():
            return "LOST"
        case Interrupted():
            return "STOPPED"
