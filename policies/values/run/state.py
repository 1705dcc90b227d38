"""The state of a run: one vocabulary for the terminal, metrics, notifications and reports."""

from __future__ import annotations

from enum import StrEnum

from autotune.policies.values.events import (
    Accepted,
    Decided,
    Edited,
    Ended,
    Event,
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Rehearsed,
    Stable,
    Started,
    TrainingCompleted,
    Verdict,
)


class RunState(StrEnum):
    """What a run does, or how it ended."""

    NOT_STARTED = "not_started"  # no driver has accepted its job
    PREPARING = "preparing"  # a driver is at work and has not accepted the job yet
    WAITING = "waiting"  # for nodes of the cluster, as its driver reports beside the journal
    REHEARSING = "rehearsing"
    STARTING = "starting"  # the first attempt at the training has completed no step
    RUNNING = "running"  # the first attempt completes steps
    RECOVERING = "recovering"  # between attempts, or a later attempt has completed no step
    RELAUNCHED = "relaunched"  # a later attempt completes steps, and the goal is not reached
    STABLE = "stable"  # the goal is reached, and the training continues
    SEARCHING = "searching"
    COMPLETED = "completed"
    STOPPED_AT_GOAL = "stopped_at_goal"
    REHEARSED = "rehearsed"
    GAVE_UP = "gave_up"
    FAILED = "failed"  # the job's own failure
    LOST = "lost"  # the cluster failed
    STOPPED = "stopped"  # by the user
    UNATTENDED = "unattended"  # not over, and no driver is at work
    UNREADABLE = "unreadable"  # its journal cannot be read

    @property
    def is_terminal(self) -> bool:
        """Whether the run is over; `resume` may still continue it."""
        return self in ENDS.values()

    @property
    def is_success(self) -> bool:
        """Whether the run is over and did what the user requested."""
        return self in (RunState.COMPLETED, RunState.STOPPED_AT_GOAL, RunState.REHEARSED)


ENDS: dict[type[Verdict], RunState] = {
    TrainingCompleted: RunState.COMPLETED,
    Stable: RunState.STOPPED_AT_GOAL,
    Rehearsed: RunState.REHEARSED,
    GaveUp: RunState.GAVE_UP,
    NeedsHuman: RunState.FAILED,
    Infrastructure: RunState.LOST,
    Interrupted: RunState.STOPPED,
}


class StateMachine:
    """Follows the state of a run from event to event."""

    def __init__(self) -> None:
        self.state = RunState.NOT_STARTED
        self._trains = self._rehearses = False  # an attempt at the training has started; a rehearsal runs

    def take(self, event: Event) -> None:
        """Update the state with the next event of the history."""
        match event:
            case Progressed():  # first: most rows are steps
                if self.state is RunState.STARTING:
                    self.state = RunState.RUNNING
                elif self.state is RunState.RECOVERING:
                    self.state = RunState.RELAUNCHED
            case Accepted():
                self.state = RunState.STARTING
            case Started():
                self._start(event)
            case GoalReached() if self.state is not RunState.SEARCHING:
                self.state = RunState.STABLE
            case Ended() | Decided() | Edited() if self.state is not RunState.SEARCHING:
                self.state = self._between()
            case Finished(verdict=verdict):
                self.state = ENDS[type(verdict)]
            case _:
                pass

    def _start(self, event: Started) -> None:
        self._rehearses = event.rehearsal is not None
        if event.trial is not None:
            self.state = RunState.SEARCHING
        elif self.state is not RunState.SEARCHING:
            self.state = self._between()
        self._trains = self._trains or event.trains

    def _between(self) -> RunState:
        """Return the state before an attempt completes a step."""
        if self._rehearses:
            return RunState.REHEARSING
        return RunState.RECOVERING if self._trains else RunState.STARTING


def with_driver(state: RunState, *, driven: bool) -> RunState:
    """Return `state` corrected for whether a driver is at work."""
    if state is RunState.NOT_STARTED:
        return RunState.PREPARING if driven else state
    return state if driven or state.is_terminal else RunState.UNATTENDED
