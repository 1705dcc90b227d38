"""The trials on record, folded as rows arrive."""

from __future__ import annotations

from autotune.orchestrator.run.journal import Journal
from autotune.policies.search.trial_history import TrialHistory, extended, trial_history


class TrialResults:
    """The folded history of a journal."""

    def __init__(self, journal: Journal) -> None:
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
