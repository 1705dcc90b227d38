"""How each end of a run is shown: one row per kind of verdict."""

from __future__ import annotations

from typing import NamedTuple

from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.events import (
    Finished,
    GaveUp,
    History,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Rehearsed,
    Stable,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.job import Occasion


class Shown(NamedTuple):
    """What a verdict is to a shell, a person and a dashboard."""

    exit_code: ExitCode
    word: str  # in the table of runs
    tone: str  # good | warn | bad
    state: str  # of the figure `autotune_state`
    occasion: Occasion | None  # that is notified of; None: the user ended the run


SHOWN: dict[type[Verdict], Shown] = {
    TrainingCompleted: Shown(ExitCode.OK, "COMPLETED", "good", "completed", Occasion.FINISHED),
    Stable: Shown(ExitCode.OK, "STABLE", "good", "stable", Occasion.FINISHED),
    Rehearsed: Shown(ExitCode.OK, "REHEARSED", "good", "stable", Occasion.FINISHED),
    GaveUp: Shown(ExitCode.NO, "GAVE UP", "bad", "gave_up", Occasion.GAVE_UP),
    NeedsHuman: Shown(ExitCode.NO, "FAILED", "bad", "failed", Occasion.FAILED),
    Infrastructure: Shown(ExitCode.INFRASTRUCTURE, "LOST", "bad", "lost", Occasion.INFRASTRUCTURE),
    Interrupted: Shown(ExitCode.TERMINATED, "STOPPED", "warn", "stopped", None),
}


def shown(verdict: Verdict) -> Shown:
    """Return how a verdict is shown.

    A success with less free memory than the goal asks for has the tone `warn`. A run that the user stopped or
    interrupted by SIGINT has the exit code of an interrupt, as shells expect.
    """
    row = SHOWN[type(verdict)]
    if isinstance(verdict, TrainingCompleted | Stable) and verdict.marginal:
        return row._replace(tone="warn")
    if isinstance(verdict, Interrupted) and verdict.by in ("user", "SIGINT"):
        return row._replace(exit_code=ExitCode.INTERRUPTED)
    return row


def exit_code(verdict: Verdict, history: History) -> ExitCode:
    """Return the exit code of a driver whose journal ends as `history` does.

    Raises RuntimeError where the verdict is a success that the journal does not end with.
    """
    code = shown(verdict).exit_code
    last = history[-1] if history else None
    recorded = isinstance(last, Finished) and shown(last.verdict).exit_code is ExitCode.OK
    if code is ExitCode.OK and not recorded:
        raise RuntimeError("a success is not on record")
    return code
