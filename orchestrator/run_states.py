"""The words, metrics, exit codes and notifications of each state of a run."""

from __future__ import annotations

from typing import NamedTuple

from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.events import History, Interrupted, Stable, TrainingCompleted, Verdict
from autotune.policies.values.job import Occasion
from autotune.policies.values.run.state import ENDS, RunState
from autotune.policies.values.run.view import RunView


class Display(NamedTuple):
    """The public words for a state. They are a contract: add, do not rename."""

    word: str  # column STATUS of `autotune status`
    metric: str  # label `state` of the metric `autotune_state`
    report: str = "unfinished"  # `conclusion.status` of a report
    tone: str = "warn"  # good | warn | bad
    exit_code: ExitCode = ExitCode.INFRASTRUCTURE  # of a driver that ends in this state
    occasion: Occasion | None = None  # notification sent when the state begins


_INFRASTRUCTURE = ExitCode.INFRASTRUCTURE
DISPLAYS: dict[RunState, Display] = {
    RunState.NOT_STARTED: Display("NOT STARTED", "starting"),
    RunState.PREPARING: Display("STARTING", "starting"),
    RunState.WAITING: Display("WAITING", "starting"),
    RunState.REHEARSING: Display("REHEARSING", "starting"),
    RunState.STARTING: Display("RUNNING", "starting"),
    RunState.RUNNING: Display("RUNNING", "running"),
    RunState.RECOVERING: Display("RECOVERING", "recovering"),
    RunState.RELAUNCHED: Display("RECOVERING", "running"),
    RunState.STABLE: Display("STABLE", "stable", occasion=Occasion.STABLE),
    RunState.SEARCHING: Display("SEARCHING", "searching"),
    RunState.COMPLETED: Display(
        "COMPLETED", "completed", "completed", "good", ExitCode.OK, Occasion.FINISHED
    ),
    RunState.STOPPED_AT_GOAL: Display("STABLE", "stable", "stable", "good", ExitCode.OK, Occasion.FINISHED),
    RunState.REHEARSED: Display("REHEARSED", "stable", "rehearsed", "good", ExitCode.OK, Occasion.FINISHED),
    RunState.GAVE_UP: Display("GAVE UP", "gave_up", "gave_up", "bad", ExitCode.NO, Occasion.GAVE_UP),
    RunState.FAILED: Display("FAILED", "failed", "needs_human", "bad", ExitCode.NO, Occasion.FAILED),
    RunState.LOST: Display("LOST", "lost", "infrastructure", "bad", _INFRASTRUCTURE, Occasion.INFRASTRUCTURE),
    RunState.STOPPED: Display("STOPPED", "stopped", "interrupted", "warn", ExitCode.TERMINATED),
    RunState.UNATTENDED: Display("INTERRUPTED", "stopped"),
    RunState.UNREADABLE: Display("DAMAGED", "stopped"),
}
METRIC_STATES = tuple(dict.fromkeys(display.metric for display in DISPLAYS.values()))


def display_of(verdict: Verdict) -> Display:
    """Return the display of a run's end.

    A success with less free memory than the goal requires has the tone `warn`. A run that the user stopped or
    interrupted by SIGINT has the exit code of an interrupt, as shells expect.
    """
    display = DISPLAYS[ENDS[type(verdict)]]
    if isinstance(verdict, TrainingCompleted | Stable) and verdict.marginal:
        return display._replace(tone="warn")
    if isinstance(verdict, Interrupted) and verdict.by in ("user", "SIGINT"):
        return display._replace(exit_code=ExitCode.INTERRUPTED)
    return display


def exit_code(verdict: Verdict, history: History) -> ExitCode:
    """Return the exit code of a driver with a verdict and the history of its journal.

    Raises RuntimeError if the verdict is a success but the journal does not end with one.
    """
    code = display_of(verdict).exit_code
    recorded = RunView(history[-1:]).state.is_success
    if code is ExitCode.OK and not recorded:
        raise RuntimeError("a success is not on record")
    return code
