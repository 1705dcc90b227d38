"""A run for display: its state and its attempts, built in one pass and extended event by event.

`history.fold` gives the attempts as decisions need them. This view keeps them as they were launched: a cure
in place does not split an attempt, and rehearsals and trials stay among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Decided,
    Diagnosed,
    Edited,
    Ended,
    Event,
    FailureSeen,
    Finished,
    Foreseen,
    GoalReached,
    Progressed,
    Started,
    StopRequested,
    Tried,
    Verdict,
)
from autotune.policies.values.history import seconds_between
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed
from autotune.policies.values.run.state import RunState, StateMachine


@dataclass
class AttemptView:
    """One launch and its outcome."""

    started: Started
    place: int  # index of that row in the history
    before: Knobs  # with which the previous attempt ended; for a trial: the job's own
    knobs: Knobs  # with which it continues after its cures in place
    decided: Decided | None = None  # that led to it
    started_s: float = 0.0  # seconds in which drivers were at work on the run before it started
    steps: list[Progressed] = field(default_factory=list)
    stepped_s: list[float] = field(default_factory=list)  # the same until the end of each step
    failures: list[FailureSeen] = field(default_factory=list)
    forecasts: dict[str, Foreseen] = field(default_factory=dict)  # the latest of each memory
    cures: list[CuredInPlace] = field(default_factory=list)
    goal: GoalReached | None = None  # the latest
    stop: StopRequested | None = None  # the first
    ended: Ended | None = None
    diagnosed: Diagnosed | None = None  # the first
    diagnosed_place: int = 0  # index of that row in the history
    next: Decided | None = None  # the latest decision after it

    @property
    def number(self) -> int:
        """The number of the attempt, from 1."""
        return self.started.attempt

    @property
    def last(self) -> Progressed | None:
        """The latest completed step."""
        return self.steps[-1] if self.steps else None

    @property
    def step(self) -> int | None:
        """The number of the latest completed step."""
        return self.steps[-1].step if self.steps else None

    @property
    def saved(self) -> int | None:
        """The furthest step after which it wrote a checkpoint; None if it wrote none."""
        result = [row.saved for row in (*self.steps, self.ended) if row is not None]
        return max((step for step in result if step is not None), default=None)

    @property
    def proven(self) -> bool:
        """Whether it reached the goal, and did not run out of memory later, or completed the training."""
        if self.goal is not None:
            return self.diagnosed is None or not self.diagnosed.cause.is_memory
        outcome = self.ended.outcome if self.ended is not None else None
        return isinstance(outcome, Completed) or outcome == Cancelled(by="goal")


class RunView:
    """The view of a run, built from its history so far."""

    def __init__(self, history: Iterable[Event] = ()) -> None:
        """Build the view of `history`; `take` extends it."""
        self.first: Accepted | None = None
        self.accepted: Accepted | None = None  # with the user's edits of the job
        self.attempts: dict[int, AttemptView] = {}  # by number, in the order of their starts
        self.tried: list[Tried] = []
        self.trial_rows: dict[int, Started | Tried] = {}  # trial -> its latest row
        self.edits: list[Edited] = []
        self.goals: list[GoalReached] = []
        self.last: Event | None = None
        self.count = 0  # events
        self.driven_s = 0.0  # in which drivers were at work; by the rows' times if they do not record it
        self.step: Progressed | None = None  # the latest of any attempt
        self._machine = StateMachine()
        self._decided: Decided | None = None  # since the last attempt started or ended
        self.knobs = Knobs()  # the current ones of the last attempt that is no trial, or the job's
        for event in history:
            self.take(event)

    # ------------------------------------------------------------------ queries

    @property
    def state(self) -> RunState:
        """The state of the run, assuming that its driver is at work."""
        return self._machine.state

    @property
    def finished(self) -> Finished | None:
        """The row that ended the run; None if it was resumed since or has not ended."""
        return self.last if isinstance(self.last, Finished) else None

    @property
    def verdict(self) -> Verdict | None:
        """How the run ended; None if it was resumed since or has not ended."""
        return self.last.verdict if isinstance(self.last, Finished) else None

    @property
    def launched(self) -> tuple[AttemptView, ...]:
        """The attempts that are no trials of a search."""
        return tuple(each for each in self.attempts.values() if each.started.trial is None)

    @property
    def trials(self) -> tuple[AttemptView, ...]:
        """The attempts that are trials of a search."""
        return tuple(each for each in self.attempts.values() if each.started.trial is not None)

    @property
    def training(self) -> tuple[AttemptView, ...]:
        """The attempts at the training itself: no trials, no rehearsals."""
        return tuple(each for each in self.attempts.values() if each.started.trains)

    @property
    def unended(self) -> tuple[int, ...]:
        """The numbers of the attempts that have no end on record."""
        return tuple(number for number, attempt in self.attempts.items() if attempt.ended is None)

    @property
    def last_number(self) -> int:
        """The highest number of an attempt; 0 if none has started."""
        return max(self.attempts, default=0)

    @property
    def latest(self) -> AttemptView | None:
        """The attempt that started last."""
        return next(reversed(self.attempts.values()), None)

    # ------------------------------------------------------------------ updates

    def take(self, event: Event) -> None:  # noqa: C901 - one branch per kind of event
        """Extend the view by the next event of the history."""
        self._machine.take(event)
        self.driven_s += _passed_s(self.last, event)
        place, self.last = self.count, event
        self.count += 1
        attempt = self.attempts.get(event.attempt)
        match event:
            case Progressed():  # first: most rows are steps
                self.step = event
                if attempt is not None:
                    attempt.steps.append(event)
                    attempt.stepped_s.append(self.driven_s)
            case Accepted():
                self.first = self.accepted = event
                self.knobs = event.profile.knobs
            case Started():
                self._start(event, place)
            case Edited():
                self.edits.append(event)
                if self.accepted is not None:
                    self.accepted = event.apply(self.accepted)
            case Decided():
                self._decided = event
                if attempt is not None:
                    attempt.next = event
            case Tried():
                self.tried.append(event)
                self.trial_rows[event.trial] = event
            case GoalReached():
                self.goals.append(event)
                if attempt is not None:
                    attempt.goal = event
            case Ended():
                self._decided = None
                if attempt is not None and attempt.ended is None:
                    attempt.ended = event
            case Diagnosed():
                if attempt is not None and attempt.diagnosed is None:
                    attempt.diagnosed, attempt.diagnosed_place = event, place
            case FailureSeen():
                if attempt is not None:
                    attempt.failures.append(event)
            case Foreseen():
                if attempt is not None:
                    attempt.forecasts[event.memory] = event
            case CuredInPlace():
                if attempt is not None:
                    self._cure(attempt, event)
            case StopRequested():
                if attempt is not None:
                    attempt.stop = attempt.stop or event
            case Finished():
                pass

    def _start(self, event: Started, place: int) -> None:
        own = self.accepted.profile.knobs if self.accepted is not None else event.knobs
        self.attempts[event.attempt] = AttemptView(
            started=event,
            place=place,
            before=own if event.trial is not None else self.knobs,
            knobs=event.knobs,
            decided=self._decided,
            started_s=self.driven_s,
        )
        self._decided = None
        if event.trial is None:
            self.knobs = event.knobs
        else:
            self.trial_rows[event.trial] = event

    def _cure(self, attempt: AttemptView, event: CuredInPlace) -> None:
        attempt.cures.append(event)
        attempt.knobs = event.apply(attempt.knobs)
        if attempt.started.trial is None:
            self.knobs = attempt.knobs


def _passed_s(before: Event | None, event: Event) -> float:
    if event.after_s is not None:
        return event.after_s
    return max(0.0, seconds_between(before.at, event.at)) if before is not None else 0.0
