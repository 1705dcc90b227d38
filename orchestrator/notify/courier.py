"""Sends notifications during a run, each in a thread of its own: the run never waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from autotune.orchestrator.clock import Clock, timestamp
from autotune.orchestrator.driver.side_task import SideTask
from autotune.orchestrator.notify.channels import Channel, Undelivered, channels, faults
from autotune.orchestrator.notify.notification import Due, Notification, due, notification
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Event, Finished, GoalReached, Notified
from autotune.policies.values.job import Job, Occasion

_BEFORE_S = 25.0  # that a channel waits for the notification before: two tries of a webhook


class _Delivery:
    """A notification on its way through every channel, behind the one before it."""

    def __init__(
        self, about: Due, document: Notification, ways: dict[str, Channel], before: _Delivery | None
    ) -> None:
        self.about = about
        self._threads: dict[str, threading.Thread] = {}
        self._errors: dict[str, str] = {}  # by channel that is through; empty: it arrived
        self._ways = tuple(ways)
        for name, send in ways.items():
            # A daemon: one that hangs does not keep the driver's process alive.
            self._threads[name] = threading.Thread(
                target=self._send,
                args=(name, send, document, None if before is None else before._threads.get(name)),
                daemon=True,
            )
        for thread in self._threads.values():
            thread.start()

    def _send(
        self, name: str, send: Channel, document: Notification, before: threading.Thread | None
    ) -> None:
        try:
            if before is not None:
                before.join(_BEFORE_S)
            send(document)
        except Undelivered as error:
            self._errors[name] = str(error)
        except Exception as error:
            self._errors[name] = type(error).__name__  # its words may hold the URL
        else:
            self._errors[name] = ""

    @property
    def over(self) -> bool:
        return len(self._errors) == len(self._ways)

    def row(self, *, attempt: int, at: str) -> Notified:
        """Return what became of it; a channel that is not through has not answered."""
        errors = {name: self._errors.get(name, "no answer") for name in self._ways}
        return Notified(
            at=at,
            attempt=attempt,
            occasion=self.about.occasion,
            of=self.about.of,
            by=tuple(name for name, error in errors.items() if not error),
            failed={name: error for name, error in errors.items() if error},
        )


class Courier(SideTask):
    """Notifies of one run."""

    label = "notifications"

    def __init__(
        self, run: directory.RunFolder, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        """Notify of `run`; `warn` is called once per channel that does not work."""
        super().__init__(run, say=say, warn=warn)
        self._channels: dict[str, Channel] = {}
        self._on: frozenset[Occasion] = frozenset()
        self._under_way: list[_Delivery] = []
        self._begun: set[tuple[Occasion, str]] = set()

    def begin(self, job: Job) -> None:
        """Send to the channels of a job from now on, first what a driver that died has left unsent."""
        self._on = frozenset(job.notify.on)
        self._channels = channels(job.notify, workdir=job.workdir)
        for fault in faults(job.notify, workdir=job.workdir):
            self.warn(fault)
        self._send_due()

    def take(self, event: Event) -> None:
        """Send the notification of a row, and record what became of those before it."""
        assert self.journal is not None
        for row in self._reported():
            self.journal.append_notified(row)
        if isinstance(event, (GoalReached, Finished)):
            self._send_due()

    def failed(self, reason: str) -> None:
        """Notify that the driver ends although the run is not over, unless that is known."""
        last = self.journal.view.last if self.journal is not None else None
        if self.journal is None or last is None or isinstance(last, Finished):
            return
        notified = self.journal.notified()
        if not any(row.occasion is Occasion.INFRASTRUCTURE and row.at >= last.at for row in notified):
            self._send(Due(occasion=Occasion.INFRASTRUCTURE, reason=reason))

    @property
    def pending(self) -> bool:
        """Whether a notification is on its way."""
        return not all(delivery.over for delivery in self._under_way)

    def settle(self) -> None:
        """Report what became of every notification; a channel that did not answer has failed.

        It is recorded unless another driver has the run by now, which has sent again what it found without a
        row: a person may be notified twice, and is not kept from the run by a channel that hangs.
        """
        if self._under_way:
            rows = list(self._reported(all_of_them=True))
            with Journal(self.run.path, interrupted=lambda: "the end of its driver") as journal:
                for row in rows:
                    journal.append_notified(row)

    def _send_due(self) -> None:
        if self.journal is not None and self._channels:
            for each in due(self.journal.view, self.journal.notified()):
                self._send(each)

    def _send(self, news: Due) -> None:
        assert self.journal is not None
        key = (news.occasion, news.of)
        if not self._channels or news.occasion not in self._on or key in self._begun:
            return
        self._begun.add(key)
        document = notification(self.run, self.journal.view, news, at=timestamp(Clock().now()))
        before = self._under_way[-1] if self._under_way else None
        self._under_way.append(_Delivery(news, document, self._channels, before))

    def _reported(self, *, all_of_them: bool = False) -> Iterator[Notified]:
        """Report and yield what is through; with `all_of_them` also what did not answer."""
        for delivery in list(self._under_way):
            if not (delivery.over or all_of_them):
                continue
            self._under_way.remove(delivery)
            attempt = 0 if delivery.about.about is None else delivery.about.about.attempt
            row = delivery.row(attempt=attempt, at=timestamp(Clock().now()))
            if row.by:
                self.say(f"notified of `{row.occasion}`: {', '.join(row.by)}")
            for name, error in row.failed.items():
                self.warn_once(name, f"notify.{name}: `{row.occasion}` was not delivered: {error}")
            yield row
