"""The history as attempts: the settings, last step and outcome of each."""

from __future__ import annotations

from datetime import datetime
from typing import assert_never

import msgspec

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    SURE,
    Accepted,
    CuredInPlace,
    Decided,
    Diagnosed,
    Edited,
    Ended,
    FailureSeen,
    Finished,
    Foreseen,
    GoalReached,
    History,
    Progressed,
    Started,
    StopRequested,
    Tried,
    Verdict,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.observation import Cancelled, Lost
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.value import Value

RESUMED = "resumed by the user"  # the reason of the `Decided` row that says that the user goes on
FORECAST = "forecast"  # who stopped an attempt before the failure that was expected of it


class Attempt(Value, frozen=True, kw_only=True):
    """One launch and what became of it."""

    number: int
    knobs: Knobs
    remedy: Remedy | None = None  # that led to it
    step: int | None = None  # last completed
    new_step: bool = False  # completed a step that no attempt before it had
    stopping: str = ""  # by whom a stop was requested
    failure: FailureSeen | None = None
    foreseen: tuple[Foreseen, ...] = ()  # what is expected of each memory, as it was said last
    goal: GoalReached | None = None
    ended: Ended | None = None
    diagnosis: Diagnosis | None = None
    progress: tuple[Progressed, ...] = ()  # its completed steps
    resumed: bool = False  # the user asked to go on after it
    renewed: int = 0  # how often the user had asked to go on before it: budgets count anew
    continued: bool = False  # it loads the optimizer state that an attempt before it saved
    cured: bool = False  # the job itself went on with other knobs, which are an attempt of their own here
    rehearsal: Part | None = None
    longest: bool = False  # a rehearsal whose answers were made as long as the job allows

    @property
    def infrastructure(self) -> bool:
        """Whether the cluster ended it, as far as is known."""
        if self.diagnosis is not None:
            return self.diagnosis.cause is Cause.INFRASTRUCTURE
        return self.ended is not None and isinstance(self.ended.outcome, Lost)

    @property
    def out_of_memory(self) -> bool:
        """Whether its configuration failed for want of a memory."""
        return self.diagnosis is not None and self.diagnosis.cause.is_memory

    @property
    def loading(self) -> bool:
        """Whether it failed while loading a checkpoint, which gives no information about its steps."""
        return self.diagnosis is not None and self.diagnosis.phase is Phase.RESUME

    @property
    def imminent(self) -> Foreseen | None:
        """The first failure that is surely expected; what a cache may have filled is none."""
        due = [
            each
            for each in self.foreseen
            if each.holds and not each.upper_bound and each.step is not None and each.chance >= SURE
        ]
        return min(due, key=lambda each: each.step or 0, default=None)

    @property
    def foregone(self) -> bool:
        """Whether it was stopped in good health, before the failure that was expected of it."""
        return self.ended is not None and self.ended.outcome == Cancelled(by=FORECAST)

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return (
            self.ended is not None
            and isinstance(self.ended.outcome, Cancelled)
            and self.ended.outcome.by == "user"
        )


class Refused(Value, frozen=True, kw_only=True):
    """The change of an attempt that the job refused."""

    number: int  # of the attempt
    changes: dict[str, tuple[Setting, Setting]]  # value before and after by knob
    error: str  # its decisive line
    renewed: int = 0  # as of its attempt


class Run(Value, frozen=True, kw_only=True):
    """A history, folded."""

    accepted: Accepted
    attempts: tuple[Attempt, ...] = ()
    finished: Verdict | None = None  # unless resumed since
    elapsed_s: float = 0.0  # in which attempts ran or a relaunch was waited for
    renewed: int = 0
    edited: bool = False  # the user changed knobs, and nothing has run with them yet
    refused: tuple[Refused, ...] = ()  # changes; their attempts are not among `attempts`
    rehearsed: tuple[Attempt, ...] = ()  # before the training, and not among `attempts`
    saved: bool = False  # a checkpoint of attempts before an edit of the training, which are not among them

    @property
    def best_step(self) -> int | None:
        """The furthest completed step of all attempts."""
        return max((a.step for a in self.attempts if a.step is not None), default=None)

    @property
    def since_resumed(self) -> tuple[Attempt, ...]:
        """The attempts that count against the budgets."""
        return tuple(a for a in self.attempts if a.renewed == self.renewed)


def fold(history: History, *, trials: bool = False) -> Run:
    """Return the history as attempts; raises ValueError if it does not start with Accepted.

    With `trials` those of a search are there too, as far as they show the worst case: where the longest
    sequences were forced, attempts on the job's own lengths are left out. Rehearsals stand apart.
    """
    run = _folded(history, left_out=_left_out(history, trials=trials))
    if run.accepted.rehearsal is None or any(isinstance(e, Edited) and e.forgets for e in history):
        return run
    return msgspec.structs.replace(run, rehearsed=rehearsal_of(history).attempts)


def rehearsal_of(history: History) -> Run:
    """Return the rehearsals of a run as if there was nothing else."""
    others = {e.attempt for e in history if isinstance(e, Started) and e.rehearsal is None}
    return _folded(history, left_out=others)


def _folded(history: History, *, left_out: set[int]) -> Run:  # noqa: C901 - one branch per kind of event
    accepted = accepted_of(history)
    edited = saved_before = False
    attempts: list[Attempt] = []
    finished: Verdict | None = None
    decided: Decided | None = None
    renewed = 0
    steps: list[list[Progressed]] = []  # of each attempt
    furthest: list[int] = []  # step of those before each attempt
    places: dict[int, int] = {}
    for event in history[1:]:
        if event.attempt in left_out:
            continue
        match event:
            case Accepted() | Tried():
                pass
            case Started():
                remedy = decided.remedy if decided is not None else None
                number = event.attempt or len(attempts) + 1
                places[number] = len(attempts)
                edited, saved = False, saved_before or _saved(attempts, steps)
                if attempts and attempts[-1].diagnosis is not None and attempts[-1].diagnosis.expected:
                    # What followed was its cure; that it would have failed is not known.
                    attempts[-1] = msgspec.structs.replace(attempts[-1], diagnosis=None)
                attempts.append(
                    Attempt(
                        number=number,
                        knobs=event.knobs,
                        remedy=remedy,
                        renewed=renewed,
                        continued=event.resume and saved,
                        rehearsal=event.rehearsal,
                        longest=event.longest and event.rehearsal is not None,
                    )
                )
                steps.append([])
                furthest.append(max(furthest[-1], attempts[-2].step or 0) if furthest else 0)
                decided = None
            case Decided():
                decided = event
                if event.reason == RESUMED:
                    finished = None
                    renewed += 1
                    if attempts:
                        attempts[-1] = msgspec.structs.replace(attempts[-1], resumed=True)
            case Edited():
                finished = decided = None
                renewed += 1
                edited = event.knobs
                if attempts:
                    attempts[-1] = msgspec.structs.replace(attempts[-1], resumed=True)
                if event.forgets:
                    saved_before = saved_before or _saved(attempts, steps)
                    attempts, steps, furthest, places = [], [], [], {}
            case Finished():
                finished = event.verdict
            case CuredInPlace():
                if attempts:
                    place = places.get(event.attempt, len(attempts) - 1)
                    places[event.attempt] = len(attempts)
                    steps.append([done for done in steps[place] if done.step >= event.step])
                    steps[place] = [done for done in steps[place] if done.step < event.step]
                    attempts[place], after = _split(attempts[place], event, steps[place])
                    attempts.append(after)
                    furthest.append(max(furthest[place], attempts[place].step or 0))
            case (
                Progressed()
                | FailureSeen()
                | Foreseen()
                | GoalReached()
                | StopRequested()
                | Ended()
                | Diagnosed()
            ):
                if attempts:
                    place = places.get(event.attempt, len(attempts) - 1)
                    attempts[place] = _seen(attempts[place], event, furthest[place])
                    if isinstance(event, Progressed):
                        steps[place].append(event)
                        _raise_after(place, furthest, event.step)
            case _:
                assert_never(event)
    return Run(
        accepted=accepted,
        attempts=tuple(
            msgspec.structs.replace(attempt, progress=tuple(done))
            for attempt, done in zip(attempts, steps, strict=True)
        ),
        finished=finished,
        elapsed_s=elapsed_s(history),
        renewed=renewed,
        edited=edited and bool(attempts),
        saved=saved_before,
    )


def settled(history: History) -> History:
    """Return the history as if each attempt had started with the knobs that it reached in place."""
    knobs = {event.attempt: event.knobs for event in history if isinstance(event, Started)}
    for event in history:
        if isinstance(event, CuredInPlace) and event.attempt in knobs:
            knobs[event.attempt] = event.apply(knobs[event.attempt])
    return tuple(
        msgspec.structs.replace(event, knobs=knobs[event.attempt]) if isinstance(event, Started) else event
        for event in history
    )


def _split(attempt: Attempt, cure: CuredInPlace, steps: list[Progressed]) -> tuple[Attempt, Attempt]:
    """Split an attempt at a failure that it cured itself after `steps`: the part before, the part after."""
    reached = attempt.goal is not None and attempt.goal.step < cure.step
    before = msgspec.structs.replace(
        attempt,
        cured=True,
        diagnosis=cure.diagnosis,
        step=max((done.step for done in steps), default=None),
        new_step=attempt.new_step and bool(steps),
        stopping="",
        failure=None,
        foreseen=(),
        goal=attempt.goal if reached else None,
    )
    after = msgspec.structs.replace(
        attempt,
        knobs=cure.apply(attempt.knobs),
        remedy=None,
        new_step=attempt.step is not None and attempt.step >= cure.step and attempt.new_step,
        goal=None if reached else attempt.goal,
    )
    return before, after


def _saved(attempts: list[Attempt], steps: list[list[Progressed]]) -> bool:
    """Return whether any of the attempts wrote a checkpoint."""
    ended = any(a.ended is not None and a.ended.saved is not None for a in attempts)
    return ended or any(done.saved is not None for each in steps for done in each)


def _raise_after(place: int, furthest: list[int], step: int) -> None:
    """Take note of a step for the attempts that started later: trials run at the same time."""
    for later in range(place + 1, len(furthest)):
        furthest[later] = max(furthest[later], step)


def elapsed_s(history: History) -> float:
    """Return the seconds in which attempts ran or a relaunch was waited for, and a driver was at work.

    Rows that do not say how long that was are measured by their times, as far as they have some.
    """
    total, wait_s, before = 0.0, 0.0, ""
    under_way: set[int] = set()
    for event in history:
        passed = event.after_s
        if passed is None and event.at and before:
            passed = max(0.0, _seconds_between(before, event.at))
            if under_way and isinstance(event, Ended) and event.unwatched:
                passed = 0.0
        if passed is not None:
            total += passed if under_way else min(passed, wait_s)
        before = event.at or before
        match event:
            case Started():
                under_way.add(event.attempt)
                wait_s = 0.0
            case Ended():
                under_way.discard(event.attempt)
            case Decided():
                wait_s = event.not_before_s
            case Tried():
                wait_s = max(wait_s, event.wait_s)
            case _:
                pass
    return total


def unended(history: History) -> tuple[int, ...]:
    """Return the attempts that have started and have no recorded end."""
    ended = {e.attempt for e in history if isinstance(e, Ended)}
    return tuple(e.attempt for e in history if isinstance(e, Started) and e.attempt not in ended)


def _left_out(history: History, *, trials: bool) -> set[int]:
    """Return the attempts that are not looked at: a launch decides without a search's trials."""
    begun = [e for e in history if isinstance(e, Started) and e.trial is not None]
    forced = any(e.longest for e in begun)
    rehearsed = {e.attempt for e in history if isinstance(e, Started) and e.rehearsal is not None}
    return rehearsed | {e.attempt for e in begun if not trials or (forced and not e.longest)}


def accepted_of(history: History) -> Accepted:
    """Return the row that a history starts with, its job as the user changed it since.

    Raises ValueError where there is none, or a second one.
    """
    if not history or not isinstance(history[0], Accepted):
        raise ValueError("a history begins with Accepted")
    if any(isinstance(event, Accepted) for event in history[1:]):
        raise ValueError("a history has one Accepted")
    edit = next((event for event in reversed(history) if isinstance(event, Edited)), None)
    if edit is None:
        return history[0]
    return msgspec.structs.replace(history[0], job=edit.job, profile=edit.profile, cluster=edit.cluster)


def plain(diagnosis: Diagnosis) -> Diagnosis:
    """Return a journal row's diagnosis without what makes it a row."""
    return Diagnosis(**{name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__})


def _seen(
    attempt: Attempt,
    event: Progressed | FailureSeen | Foreseen | GoalReached | StopRequested | Ended | Diagnosed,
    furthest: int,
) -> Attempt:
    match event:
        case Progressed():
            return msgspec.structs.replace(
                attempt,
                step=max(event.step, attempt.step or 0),
                new_step=attempt.new_step or event.step > furthest,
            )
        case FailureSeen():
            return attempt if attempt.failure else msgspec.structs.replace(attempt, failure=event)
        case Foreseen():
            others = (each for each in attempt.foreseen if each.memory != event.memory)
            return msgspec.structs.replace(attempt, foreseen=(*others, event))
        case GoalReached():
            return msgspec.structs.replace(attempt, goal=event)
        case StopRequested():
            return attempt if attempt.stopping else msgspec.structs.replace(attempt, stopping=event.by)
        case Ended():
            ahead = attempt.imminent if event.outcome == Cancelled(by=FORECAST) else None
            expected = attempt.diagnosis if ahead is None else ahead.diagnosis
            return msgspec.structs.replace(attempt, ended=event, diagnosis=expected)
        case Diagnosed():
            return msgspec.structs.replace(attempt, diagnosis=plain(event))
    assert_never(event)


def _seconds_between(first: str, last: str) -> float:
    try:
        return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):  # rows without a time, or one with and one without a zone
        return 0.0
