"""Fold the history of a search: results, failures, and the attempts that calibrate the estimate."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from autotune.policies.search import trials
from autotune.policies.values.events import (
    Accepted,
    Diagnosed,
    Edited,
    Ended,
    Event,
    History,
    Purpose,
    Result,
    Started,
    Tried,
)
from autotune.policies.values.history import accepted_of
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Lost
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

_REMEMBERED = 16  # attempts of each kind that the calibration uses; earlier ones add little


class TrialHistory(Value, frozen=True, kw_only=True):
    """The folded history of a search."""

    accepted: Accepted
    results: tuple[Tried, ...] = ()  # in the order of the journal
    tried: dict[Knobs, int] = {}  # configurations that ran to a result -> trial
    failures: dict[int, tuple[Knobs, Diagnosed]] = {}  # attempts that ran out of a memory
    attempts: dict[int, tuple[Event, ...]] = {}  # attempt -> its rows
    complete: tuple[int, ...] = ()  # attempts not cut short from outside, in the order of their ends
    last_attempt: int = 0

    @property
    def evidence(self) -> tuple[Event, ...]:
        """The rows of the attempts that are most informative about the job's memory.

        Attempts cut short from outside are left out, so that a killed search decides as one that was not.
        """
        failed = [number for number in self.complete if number in self.failures]
        held = [number for number in self.complete if number not in self.failures]
        return tuple(event for number in sorted(informative(failed, held)) for event in self.attempts[number])


def trial_history(history: History) -> TrialHistory:
    """Return the folded history; raises ValueError if it does not start with Accepted."""
    return extended(TrialHistory(accepted=accepted_of(history)), history[1:])


def extended(past: TrialHistory, events: Iterable[Event]) -> TrialHistory:
    """Return the folded history with these events appended."""
    results, tried = list(past.results), dict(past.tried)
    failures, attempts, complete = dict(past.failures), dict(past.attempts), dict.fromkeys(past.complete)
    last = past.last_attempt
    for event in events:
        match event:
            case Accepted() | Edited():
                pass
            case Tried():
                results.append(event)
                if event.result not in (Result.GATED, Result.LOST):
                    tried.setdefault(event.knobs, event.trial)
            case Started():
                last = max(last, event.attempt)
                attempts[event.attempt] = (event,)
            case _ if event.attempt in attempts:
                rows = (*attempts[event.attempt], event)
                attempts[event.attempt] = rows
                if isinstance(event, Ended) and not _cut_short(event):
                    complete[event.attempt] = None
                if isinstance(event, Diagnosed) and event.cause.is_memory:
                    failures[event.attempt] = (_knobs(rows), event)
            case _:
                pass
    return msgspec.structs.replace(
        past,
        results=tuple(results),
        tried=tried,
        failures=failures,
        attempts=attempts,
        complete=tuple(complete),
        last_attempt=last,
    )


def informative(failed: list[int], held: list[int]) -> set[int]:
    """Return the numbers of the attempts to use: the latest that failed, the first and latest that held."""
    return {*failed[-_REMEMBERED:], *held[:1], *held[-_REMEMBERED:]}


def stable_start(view: RunView) -> AttemptView:
    """Return the attempt that made the job stable; raises IndexError if none has ended."""
    return [attempt for attempt in view.training if attempt.ended is not None][-1]


def start_result(view: RunView, *, headroom: float) -> Tried:
    """Return the attempt that made the job stable as the result of a trial that held for goal.steps."""
    start = stable_start(view)
    steps = start.steps
    peaks = trials.highest(*(step.peaks for step in steps))
    result = Tried(
        attempt=start.number,
        trial=0,
        knobs=start.started.knobs,
        purpose=Purpose.CONFIRM,
        result=Result.FITS,
        headroom=trials.free_share(peaks),
        constraints=trials.excess(peaks, headroom=headroom),
        reason="the stable start",
    )
    return trials.timed(result, trials.speed(steps))


def _knobs(rows: tuple[Event, ...]) -> Knobs:
    first = rows[0]
    assert isinstance(first, Started)
    return first.knobs


def _cut_short(event: Ended) -> bool:
    outcome = event.outcome
    return isinstance(outcome, Lost) or (
        isinstance(outcome, Cancelled) and outcome.by in ("user", "deadline")
    )
