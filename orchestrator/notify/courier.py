"""Sends notifications during a run, each in a thread of its own: the run never waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from autotune.orchestrator.clock import Clock, timestamp
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.notify.channels import Channel, Undelivered, channels, faults
from autotune.orchestrator.notify.document import Due, Notification, notification
from autotune.orchestrator.notify.occasions import due
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.events import Event, Finished, GoalReached, Notified
from autotune.policies.values.job import Job, Occasion

LIMIT_S = 25.0  # that the end of a driver waits: two tries of a webhook
HURRIED_S = 3.0  # the same after SIGTERM: Slurm and Kubernetes kill 30 s after they asked
_POLL_S = 0.05


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
                before.join(LIMIT_S)
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


class Courier:
    """Notifies of one run while a driver is at work. Nothing here is raised."""

    def __init__(
        self, run: directory.RunFolder, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        """Notify of `run`; `warn` is called once per channel that does not work."""
        self._run, self._say, self._warn = run, say, warn
        self._journal: Journal | None = None
        self._ways: dict[str, Channel] = {}
        self._on: frozenset[Occasion] = frozenset()
        self._under_way: list[_Delivery] = []
        self._begun: set[tuple[Occasion, str]] = set()
        self._warned: set[str] = set()

    @contextmanager
    def at_work(self, journal: Journal, interrupts: Interrupts) -> Iterator[None]:
        """Notify from the first row to the last; an end by an error is one that a person waits for."""
        self._journal = journal
        try:
            yield
        except Failure as failure:
            if failure.code is ExitCode.INFRASTRUCTURE:
                self._guarded(partial(self._ended_by, failure.message))
            raise
        except Exception as error:
            reason = f"autotune failed: {type(error).__name__}: {error}"
            self._guarded(partial(self._ended_by, reason))
            raise
        finally:
            self._guarded(lambda: self._wait(interrupts))

    def begin(self, job: Job) -> None:
        """Send to the channels of a job from now on, first what a driver that died has left unsent."""
        self._guarded(lambda: self._begin(job))

    def after(self, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return what is called with each row: `tell`, then what sends its notification."""

        def take(event: Event) -> None:
            tell(event)
            self._guarded(lambda: self._take(event))

        return take

    # ------------------------------------------------------------------ what is sent

    def _begin(self, job: Job) -> None:
        self._on = frozenset(job.notify.on)
        self._ways = channels(job.notify, workdir=job.workdir)
        for fault in faults(job.notify, workdir=job.workdir):
            self._warn(fault)
        self._send_due()

    def _take(self, event: Event) -> None:
        if self._under_way:
            self._settle()
        if isinstance(event, (GoalReached, Finished)):
            self._send_due()

    def _send_due(self) -> None:
        if self._journal is not None and self._ways:
            for each in due(self._journal.view, self._journal.notified()):
                self._send(each)

    def _ended_by(self, reason: str) -> None:
        """Notify that the driver ends although the run is not over, unless that is known."""
        if self._journal is None or not self._journal.history():
            return
        history, notified = self._journal.history(), self._journal.notified()
        if isinstance(history[-1], Finished):
            return
        since = history[-1].at
        if not any(row.occasion is Occasion.INFRASTRUCTURE and row.at >= since for row in notified):
            self._send(Due(occasion=Occasion.INFRASTRUCTURE, reason=reason))

    def _send(self, news: Due) -> None:
        assert self._journal is not None
        key = (news.occasion, news.of)
        if not self._ways or news.occasion not in self._on or key in self._begun:
            return
        self._begun.add(key)
        document = notification(self._run, self._journal.view, news, at=timestamp(Clock().now()))
        before = self._under_way[-1] if self._under_way else None
        self._under_way.append(_Delivery(news, document, self._ways, before))

    # ------------------------------------------------------------------ what became of it

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Record and tell what is through; with `all_of_them` also what did not answer."""
        for delivery in list(self._under_way):
            if not (delivery.over or all_of_them):
                continue
            self._under_way.remove(delivery)
            assert self._journal is not None
            attempt = 0 if delivery.about.about is None else delivery.about.about.attempt
            row = delivery.row(attempt=attempt, at=timestamp(Clock().now()))
            if row.by:
                self._say(f"notified of `{row.occasion}`: {', '.join(row.by)}")
            for name, error in row.failed.items():
                if name not in self._warned:
                    self._warned.add(name)
                    self._warn(
                        f"notify.{name}: `{row.occasion}` was not delivered: {error}; the run is unaffected"
                    )
            self._journal.append_notified(row)

    def _wait(self, interrupts: Interrupts) -> None:
        """Let what is under way arrive, within reason, and record it."""
        begun = time.monotonic()
        while self._under_way and not all(delivery.over for delivery in self._under_way):
            limit_s = HURRIED_S if interrupts.by else LIMIT_S
            if interrupts.impatient or time.monotonic() - begun >= limit_s:
                break
            time.sleep(_POLL_S)
        self._settle(all_of_them=True)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Do what no run may fail of."""
        try:
            call()
        except Failure as failure:
            self._fault(failure.message)
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}")

    def _fault(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            self._warn(f"notifications: {words}; the run is unaffected")
