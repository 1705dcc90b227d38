"""What a search asks of its journal over and over, kept up to date as rows arrive."""

from __future__ import annotations

from typing import Protocol

from autotune.policies.search.feasibility import telling
from autotune.policies.values.events import Accepted, Diagnosed, Ended, Event, History, Result, Started, Tried
from autotune.policies.values.evidence import Cancelled, Lost
from autotune.policies.values.types import Knobs


class Record(Protocol):
    """What holds the events of a run."""

    def history(self) -> History:
        """Return every event on record."""


class Ledger:
    """The results of a search, its failures, and the rows of the attempts that tell most."""

    def __init__(self, journal: Record) -> None:
        self._journal, self._read = journal, 0
        self._results: list[Tried] = []
        self._tried: dict[Knobs, int] = {}
        self._failures: dict[int, tuple[Knobs, Diagnosed]] = {}
        self._rows: dict[int, list[Event]] = {}
        self._whole: dict[int, None] = {}  # attempts that ended by what they are
        self._last = 0

    @property
    def results(self) -> list[Tried]:
        """Every result so far, in the order of the journal."""
        self._catch_up()
        return self._results

    @property
    def tried(self) -> dict[Knobs, int]:
        """The configurations that were run to a result, with their trials."""
        self._catch_up()
        return self._tried

    @property
    def failures(self) -> list[tuple[Knobs, Diagnosed]]:
        """The configurations that ran out of a memory, and why."""
        self._catch_up()
        return list(self._failures.values())

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt."""
        self._catch_up()
        return self._last + 1

    def evidence(self) -> list[Event]:
        """Return the rows of the attempts that say most about the job's memory.

        What was cut short from outside is left out: a search that was killed chooses as if it was not.
        """
        self._catch_up()
        failed = [number for number in self._whole if number in self._failures]
        held = [number for number in self._whole if number not in self._failures]
        chosen = telling(failed, held)
        return [event for number in sorted(chosen) for event in self._rows[number]]

    def _catch_up(self) -> None:
        history = self._journal.history()
        for event in history[self._read :]:
            self._take(event)
        self._read = len(history)

    def _take(self, event: Event) -> None:
        match event:
            case Accepted():
                pass
            case Tried():
                self._results.append(event)
                if event.result not in (Result.GATED, Result.LOST):
                    self._tried.setdefault(event.knobs, event.trial)
            case Started():
                self._last = max(self._last, event.attempt)
                self._rows[event.attempt] = [event]
            case _ if event.attempt in self._rows:
                rows = self._rows[event.attempt]
                rows.append(event)
                first = rows[0]
                if isinstance(event, Ended) and not _cut_short(event):
                    self._whole[event.attempt] = None
                if isinstance(event, Diagnosed) and isinstance(first, Started) and event.cause.is_memory:
                    self._failures[event.attempt] = (first.knobs, event)
            case _:
                pass


def _cut_short(event: Ended) -> bool:
    outcome = event.outcome
    return isinstance(outcome, Lost) or (
        isinstance(outcome, Cancelled) and outcome.by in ("user", "deadline")
    )
