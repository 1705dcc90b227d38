"""A run as the journal showed it at a place: what is asked of the past again is folded once."""

from __future__ import annotations

import msgspec

from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.values.events import Decided, History, Policy
from autotune.policies.values.history import RESUMED, Run, fold


class Past:
    """The beginnings of one history, by their number of events."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._runs: dict[int, Run] = {}
        self._views: dict[int, Outlook | None] = {}

    def run(self, count: int) -> Run:
        """Return the attempts as the first `count` events show them."""
        if count not in self._runs:
            self._runs[count] = fold(self.history[:count])
        return self._runs[count]

    def whole(self) -> Run:
        """Return the attempts as all events show them."""
        return self.run(len(self.history))

    def view(self, count: int) -> Outlook | None:
        """Return the estimate after `count` events, also of a run that does not ask it."""
        while count > 1 and _shows_nothing(self.history, count - 1):
            count -= 1  # so that a failure and the attempt that follows it share their view
        if count not in self._views:
            self._views[count] = _view(self.run(count))
        return self._views[count]

    def is_modelled(self) -> bool:
        """Return whether there is an estimate of the run's job."""
        return _view(msgspec.structs.replace(self.whole(), attempts=())) is not None


def _view(run: Run) -> Outlook | None:
    accepted = msgspec.structs.replace(run.accepted, policy=Policy.ESTIMATE)
    return outlook(msgspec.structs.replace(run, accepted=accepted))


def _shows_nothing(history: History, place: int) -> bool:
    event = history[place]
    return isinstance(event, Decided) and event.reason != RESUMED
