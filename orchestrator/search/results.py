"""The trials on record, folded as rows arrive."""

from __future__ import annotations

from typing import Protocol

from autotune.policies.search.trial_history import TrialHistory, extended, trial_history
from autotune.policies.values.events import History


class Record(Protocol):
    """What holds the events of a run."""

    def history(self) -> History:
        """Return every event on record."""


class TrialResults:
    """The folded history of a journal."""

    def __init__(self, journal: Record) -> None:
        self._journal, self._rows = journal, 0
        self._trials: TrialHistory | None = None

    @property
    def trials(self) -> TrialHistory:
        """Everything on record so far."""
        history = self._journal.history()
        if self._trials is None:
            self._trials = trial_history(history)
        elif len(history) > self._rows:
            self._trials = extended(self._trials, history[self._rows :])
        self._rows = len(history)
        return self._trials
