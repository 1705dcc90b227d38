"""Fold a run's history into attempts: the knobs, last step and outcome of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, assert_never, overload

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
    Event,
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
from autotune.policies.values.observation import Cancelled, Lost, MemoryGrowth
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.value import Value

RESUMED = "resumed by the user"  # the reason of the `Decided` row that is written when the user resumes a run
FORECAST = "forecast"  # `Cancelled.by` of an attempt stopped before its predicted failure
RESTART = "restart"  # `Cancelled.by` of an attempt stopped for a fresh process with the same settings


class Attempt(Value, frozen=True, kw_only=True):
    """One launch and its outcome."""

    number: int
    knobs: Knobs
    remedy: Remedy | None = None  # that led to this attempt
    step: int | None = None  # last completed
    new_step: bool = False  # completed a step that no earlier attempt had completed
    stopping: str = ""  # who requested its stop; empty: nobody
    failure: FailureSeen | None = None
    foreseen: tuple[Foreseen, ...] = ()  # the latest forecast for each memory
    withdrawn: frozenset[str] = frozenset()  # memories whose forecast was withdrawn at least once
    goal: GoalReached | None = None
    ended: Ended | None = None
    diagnosis: Diagnosis | None = None
    progress: Sequence[Progressed] = ()  # its completed steps
    resumed: bool = False  # the user resumed the run, or edited its job, after it
    renewed: int = 0  # how often the user had resumed the run before it; budgets restart each time
    continued: bool = False  # it loads the optimizer state that an earlier attempt saved
    cured: bool = False  # the job itself continued with other knobs, which are an attempt of their own here
    rehearsal: Part | None = None
    longest: bool = False  # a rehearsal with responses forced to the job's longest length
    growth: MemoryGrowth | None = None  # because of which the same settings were started again after it
    start_s: float = 0.0  # seconds from its start until its first completed step began; 0: unknown

    @property
    def infrastructure(self) -> bool:
        """Whether the cluster ended it, by its diagnosis if there is one, otherwise by its outcome."""
        if self.diagnosis is not None:
            return self.diagnosis.cause is Cause.INFRASTRUCTURE
        return self.ended is not None and isinstance(self.ended.outcome, Lost)

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed because a memory was too small for its configuration."""
        return self.diagnosis is not None and self.diagnosis.cause.is_memory

    @property
    def loading(self) -> bool:
        """Whether it failed while loading a checkpoint, which gives no information about its steps."""
        return self.diagnosis is not None and self.diagnosis.phase is Phase.RESUME

    @property
    def imminent(self) -> Foreseen | None:
        """The earliest expected failure, without forecasts from figures that may include a cache."""
        return min(
            (each for each in self.expected if not each.upper_bound),
            key=lambda each: each.step or 0,
            default=None,
        )

    @property
    def expected(self) -> tuple[Foreseen, ...]:
        """The failures with a chance of at least SURE, also from figures that may include a cache."""
        return tuple(
            each for each in self.foreseen if each.holds and each.step is not None and each.chance >= SURE
        )

    @property
    def saved(self) -> int | None:
        """The step of its last checkpoint; None if it wrote none."""
        if self.ended is not None and self.ended.saved is not None:
            return self.ended.saved
        return self.progress[-1].saved if self.progress else None

    @property
    def foregone(self) -> bool:
        """Whether it was stopped while healthy, before its predicted failure."""
        return self._was_stopped(by=FORECAST)

    @property
    def restarted(self) -> bool:
        """Whether it was stopped while healthy, for a fresh process with the same settings."""
        return self._was_stopped(by=RESTART)

    @property
    def interrupted(self) -> bool:
        """Whether the user ended it."""
        return self._was_stopped(by="user")

    def _was_stopped(self, *, by: str) -> bool:
        return self.ended is not None and self.ended.outcome == Cancelled(by=by)


class Refused(Value, frozen=True, kw_only=True):
    """A change of knobs that the job refused when an attempt made it."""

    number: int  # of the attempt
    changes: dict[str, tuple[Setting, Setting]]  # value before and after by knob
    error: str  # its decisive line
    renewed: int = 0  # that of its attempt


class Run(Value, frozen=True, kw_only=True):
    """A history folded into attempts."""

    accepted: Accepted
    attempts: tuple[Attempt, ...] = ()
    finished: Verdict | None = None  # unless resumed since
    elapsed_s: float = 0.0  # in which attempts ran or a relaunch was pending
    renewed: int = 0
    edited: bool = False  # the user changed knobs, and no attempt has run with them yet
    refused: tuple[Refused, ...] = ()  # their attempts are not among `attempts`
    rehearsed: tuple[Attempt, ...] = ()  # the rehearsals before the training, which are not among `attempts`
    saved: bool = False  # attempts before an edit of what is trained, dropped from `attempts`, saved one

    @property
    def best_step(self) -> int | None:
        """The furthest completed step of all attempts."""
        return max((a.step for a in self.attempts if a.step is not None), default=None)

    @property
    def is_late(self) -> bool:
        """Whether its time limit has passed."""
        limit_s = self.accepted.job.recovery.duration_s
        return limit_s is not None and self.elapsed_s >= limit_s

    @property
    def growth(self) -> MemoryGrowth | None:
        """The growth that caused the latest restart with the same settings; None if there was none.

        Growth that was not measured counts as long as the restarted process did not run out of memory in
        another way.
        """
        following = (*self.attempts[1:], None)
        return next(
            (
                each.growth
                for each, after in zip(reversed(self.attempts), reversed(following), strict=True)
                if each.growth is not None
                and (each.growth.per_step_bytes or after is None or not after.out_of_memory)
            ),
            None,
        )

    @property
    def since_resumed(self) -> tuple[Attempt, ...]:
        """The attempts since the user last resumed the run."""
        return tuple(a for a in self.attempts if a.renewed == self.renewed)

    @property
    def since_gain(self) -> tuple[Attempt, ...]:
        """The attempts that count against the budgets: since the last that saved new steps, inclusive."""
        furthest = -1
        gained = 0
        for place, attempt in enumerate(self.attempts):
            if attempt.saved is not None and attempt.saved > furthest:
                furthest, gained = attempt.saved, place
        return tuple(a for a in self.attempts[gained:] if a.renewed == self.renewed)


def fold(history: History, *, trials: bool = False) -> Run:
    """Return the history as attempts; raises ValueError if it does not start with Accepted.

    With `trials`, include the trials of a search that show the worst case: if any forced the longest
    sequences, those on the job's own lengths are left out. Rehearsals are in `rehearsed` alone.
    """
    return Folding(history, trials=trials).run()


class Folding:
    """Folds a history row by row; the cost of a row does not grow with the number of rows before it."""

    def __init__(self, history: History = (), *, trials: bool = False) -> None:
        """Fold `history`; `take` extends it. With `trials` (see `fold`) it must be complete."""
        self._all_trials = trials
        self._forced = trials and any(
            isinstance(e, Started) and e.trial is not None and e.longest for e in history
        )
        self._launches, self._rehearsals = _Attempts(), _Attempts()
        self._left_out: set[int] = set()  # attempts that are not among the launches
        self._not_rehearsals: set[int] = set()
        self._elapsed = _Elapsed()
        self._first: Accepted | None = None
        self._edited: Edited | None = None  # the last edit
        self._forgot = False  # an edit has changed what is trained
        for event in history:
            self.take(event)

    def take(self, event: Event) -> None:
        """Fold the next row; raises ValueError unless the first row, and no other, is Accepted."""
        if self._first is None or isinstance(event, Accepted):
            if self._first is not None or not isinstance(event, Accepted):
                raise ValueError("a history begins with Accepted, and has one")
            self._first = event
        self._elapsed.take(event)
        if isinstance(event, Edited):
            self._edited, self._forgot = event, self._forgot or event.forgets
        elif isinstance(event, Started):
            trial = event.trial is not None and (not self._all_trials or (self._forced and not event.longest))
            if trial or event.rehearsal is not None:
                self._left_out.add(event.attempt)
            if event.rehearsal is None:
                self._not_rehearsals.add(event.attempt)
        if event.attempt not in self._left_out:
            self._launches.take(event, self._elapsed.seconds)
        if event.attempt not in self._not_rehearsals:
            self._rehearsals.take(event, self._elapsed.seconds)

    def run(self) -> Run:
        """Return the rows so far as attempts; raises ValueError if there are no rows."""
        run = self._launches.run(accepted=self._accepted, elapsed_s=self._elapsed.seconds)
        if run.accepted.rehearsal is None or self._forgot:
            return run
        return msgspec.structs.replace(run, rehearsed=self._rehearsals.attempts)

    def rehearsal(self) -> Run:
        """Return the rehearsals as a run of their own; raises ValueError if there are no rows."""
        return self._rehearsals.run(accepted=self._accepted, elapsed_s=self._elapsed.seconds)

    @property
    def _accepted(self) -> Accepted:
        if self._first is None:
            raise ValueError("a history begins with Accepted")
        return self._first if self._edited is None else self._edited.apply(self._first)


class Steps(Sequence[Progressed]):
    """A snapshot of an attempt's completed steps; the attempt may add more."""

    __slots__ = ("_count", "_rows")

    def __init__(self, rows: list[Progressed]) -> None:
        """Keep the present rows of `rows`, a list that only grows."""
        self._rows, self._count = rows, len(rows)

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._count

    @overload
    def __getitem__(self, at: int) -> Progressed: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Progressed, ...]: ...
    def __getitem__(self, at: int | slice) -> Progressed | tuple[Progressed, ...]:
        """Return one step, or a slice of them as a tuple."""
        if isinstance(at, slice):
            return tuple(self._rows[n] for n in range(*at.indices(self._count)))
        return self._rows[range(self._count)[at]]

    def __iter__(self) -> Iterator[Progressed]:
        """Yield the steps in order."""
        return islice(self._rows, self._count)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same steps."""
        return isinstance(other, Steps | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the steps as a tuple."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Show the steps as a tuple."""
        return repr(tuple(self))


class _Attempts:
    """The attempts folded from some of the rows."""

    def __init__(self) -> None:
        self._edited = self._saved_before = False
        self._attempts: list[Attempt] = []
        self._finished: Verdict | None = None
        self._decided: Decided | None = None
        self._renewed = 0
        self._started_s = 0.0
        self._steps: list[list[Progressed]] = []  # of each attempt
        self._furthest: list[int] = []  # for each attempt: the furthest step of those before it
        self._places: dict[int, int] = {}

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts with their steps."""
        return tuple(
            msgspec.structs.replace(attempt, progress=Steps(done))
            for attempt, done in zip(self._attempts, self._steps, strict=True)
        )

    def run(self, *, accepted: Accepted, elapsed_s: float) -> Run:
        """Return the attempts so far as a run."""
        return Run(
            accepted=accepted,
            attempts=self.attempts,
            finished=self._finished,
            elapsed_s=elapsed_s,
            renewed=self._renewed,
            edited=self._edited and bool(self._attempts),
            saved=self._saved_before,
        )

    def take(self, event: Event, elapsed_s: float) -> None:
        """Fold a row, which came `elapsed_s` seconds into the run."""
        self._time(event, elapsed_s)
        match event:
            case Accepted() | Tried():
                pass
            case Started():
                self._start(event)
            case Decided():
                self._decided = event
                self._excuse(event)
                if event.reason == RESUMED:
                    self._finished = None
                    self._renew()
            case Edited():
                self._finished = self._decided = None
                self._edited = event.knobs
                self._renew()
                if event.forgets:
                    self._saved_before = self._saved_before or _saved(self._attempts, self._steps)
                    self._attempts, self._steps, self._furthest, self._places = [], [], [], {}
            case Finished():
                self._finished = event.verdict
            case CuredInPlace():
                if self._attempts:
                    self._cure(event)
            case (
                Progressed()
                | FailureSeen()
                | Foreseen()
                | GoalReached()
                | StopRequested()
                | Ended()
                | Diagnosed()
            ):
                if self._attempts:
                    self._see(event)
            case _:
                assert_never(event)

    def _time(self, event: Event, elapsed_s: float) -> None:
        """Record the seconds from an attempt's start until its first completed step began."""
        if isinstance(event, Started):
            self._started_s = elapsed_s
        elif isinstance(event, Progressed) and self._attempts and not self._steps[-1]:
            self._change_last(start_s=max(0.0, elapsed_s - self._started_s - (event.seconds or 0.0)))

    def _excuse(self, event: Decided) -> None:
        """Record growth and drop the diagnosis, because growth is no failure of the settings."""
        if event.growth is not None:
            self._change_last(growth=event.growth, diagnosis=None)

    def _change_last(self, **changes: Any) -> None:
        if self._attempts:
            self._attempts[-1] = msgspec.structs.replace(self._attempts[-1], **changes)

    def _start(self, event: Started) -> None:
        remedy = self._decided.remedy if self._decided is not None else None
        attempts = self._attempts
        number = event.attempt or len(attempts) + 1
        self._places[number] = len(attempts)
        self._edited, saved = False, self._saved_before or _saved(attempts, self._steps)
        if attempts and attempts[-1].diagnosis is not None and attempts[-1].diagnosis.expected:
            # The relaunch prevented the expected failure; whether it would have happened is unknown.
            self._change_last(diagnosis=None)
        attempts.append(
            Attempt(
                number=number,
                knobs=event.knobs,
                remedy=remedy,
                renewed=self._renewed,
                continued=event.resume and saved,
                rehearsal=event.rehearsal,
                longest=event.longest and event.rehearsal is not None,
            )
        )
        self._steps.append([])
        before = self._furthest
        before.append(max(before[-1], attempts[-2].step or 0) if before else 0)
        self._decided = None

    def _renew(self) -> None:
        self._renewed += 1
        self._change_last(resumed=True)

    def _cure(self, event: CuredInPlace) -> None:
        attempts, steps = self._attempts, self._steps
        place = self._places.get(event.attempt, len(attempts) - 1)
        self._places[event.attempt] = len(attempts)
        steps.append([done for done in steps[place] if done.step >= event.step])
        steps[place] = [done for done in steps[place] if done.step < event.step]
        attempts[place], after = _split(attempts[place], event, steps[place])
        attempts.append(after)
        self._furthest.append(max(self._furthest[place], attempts[place].step or 0))

    def _see(
        self,
        event: Progressed | FailureSeen | Foreseen | GoalReached | StopRequested | Ended | Diagnosed,
    ) -> None:
        place = self._places.get(event.attempt, len(self._attempts) - 1)
        self._attempts[place] = _updated(self._attempts[place], event, self._furthest[place])
        if isinstance(event, Progressed):
            self._steps[place].append(event)
            _raise_after(place, self._furthest, event.step)


def rehearsal_of(history: History) -> Run:
    """Return the rehearsals of a history as a run of their own."""
    return Folding(history).rehearsal()


def _split(attempt: Attempt, cure: CuredInPlace, steps: list[Progressed]) -> tuple[Attempt, Attempt]:
    """Return the parts of an attempt before and after a cure in place; `steps` are those before it."""
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
    """Record a step as furthest for the attempts that started later: trials run at the same time."""
    for later in range(place + 1, len(furthest)):
        furthest[later] = max(furthest[later], step)


def elapsed_s(history: History) -> float:
    """Return the seconds in which a driver was at work and attempts ran or a relaunch was pending.

    For rows without `after_s` the difference of their times counts, if they have times.
    """
    elapsed = _Elapsed()
    for event in history:
        elapsed.take(event)
    return elapsed.seconds


class _Elapsed:
    """Computes `elapsed_s` row by row."""

    def __init__(self) -> None:
        self.seconds = self._wait_s = 0.0
        self._before = ""
        self._under_way: set[int] = set()

    def take(self, event: Event) -> None:
        """Add the time between the previous row and this one."""
        passed = event.after_s
        if passed is None and event.at and self._before:
            passed = max(0.0, seconds_between(self._before, event.at))
            if self._under_way and isinstance(event, Ended) and event.unwatched:
                passed = 0.0
        if passed is not None:
            self.seconds += passed if self._under_way else min(passed, self._wait_s)
        self._before = event.at or self._before
        match event:
            case Started():
                self._under_way.add(event.attempt)
                self._wait_s = 0.0
            case Ended():
                self._under_way.discard(event.attempt)
            case Decided():
                self._wait_s = event.not_before_s
            case Tried():
                self._wait_s = max(self._wait_s, event.wait_s)
            case _:
                pass


def accepted_of(history: History) -> Accepted:
    """Return the Accepted row of a history, with the user's last edit of the job.

    Raises ValueError if the history does not begin with Accepted or has a second one.
    """
    if not history or not isinstance(history[0], Accepted):
        raise ValueError("a history begins with Accepted")
    if any(isinstance(event, Accepted) for event in history[1:]):
        raise ValueError("a history has one Accepted")
    edit = next((event for event in reversed(history) if isinstance(event, Edited)), None)
    return history[0] if edit is None else edit.apply(history[0])


def plain(diagnosis: Diagnosis) -> Diagnosis:
    """Return a journal row's diagnosis without the fields of a row."""
    return Diagnosis(**{name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__})


def _updated(
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
            withdrawn = attempt.withdrawn if event.holds else attempt.withdrawn | {event.memory}
            return msgspec.structs.replace(attempt, foreseen=(*others, event), withdrawn=withdrawn)
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


def seconds_between(first: str, last: str) -> float:
    """Return the seconds from one row's time to another's; 0 if they cannot be compared."""
    try:
        return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):  # rows without a time, or one with and one without a zone
        return 0.0
