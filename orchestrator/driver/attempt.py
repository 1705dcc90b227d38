"""A running attempt: polls it until it ends, stops it, waits for its memory and records its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial

import msgspec

from autotune.launchers.base import Drain, Handle, Observed, Unreachable
from autotune.orchestrator.config.secrets import shown_command
from autotune.orchestrator.driver.blocking_calls import Invoke, beside, here
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.monitor import AttemptMonitor
from autotune.orchestrator.driver.signals import ForcedExit
from autotune.orchestrator.run.script import command_of
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.resume import while_loading
from autotune.policies.explain.secrets import without_secrets
from autotune.policies.values.diagnosis import Diagnosis, Evidence
from autotune.policies.values.events import (
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    History,
    Progressed,
    Started,
    StopRequested,
)
from autotune.policies.values.job import Job
from autotune.policies.values.observation import Cancelled

POLL_S = 0.4
WATCH_S = 1.5  # seconds between polls, each of which costs driver and supervisor some milliseconds
STOP_GRACE_S = 10.0
DRAIN_S = 60.0
INTERRUPTED_DRAIN_S = 10.0  # who stops a driver with SIGTERM kills it after about 30 s: Slurm, Kubernetes
KILL_S = 10.0  # after the second stop request; processes that survive are named
LAST_WORDS_S = 8.0  # the handle collects last output for 5 s


def intended(context: RunContext, job: Job, begin: Started) -> Callable[[], Handle]:
    """Record the start of an attempt and return the function that starts it; `begin` lacks the command.

    That function raises Unreachable if the cluster cannot run the attempt.
    """
    number = begin.attempt
    command = command_of(
        context.framework,
        job,
        begin.knobs,
        history=context.journal.history(),
        run=context.folder.id,
        attempt=number,
        resume=begin.resume,
    )
    attempt = context.folder.attempt(number)
    context.persist(attempt.create, path=attempt.path)
    context.observer.write_view("command.sh", lambda: attempt.write_command(command, job))
    context.record(msgspec.structs.replace(begin, command=shown_command(command, job).argv))
    return lambda: context.runner.start(command, run=context.folder.id, attempt=number, python=job.python)


def explain(context: RunContext, evidence: Evidence, *, number: int) -> Diagnosed:
    """Record the diagnosis of an attempt, with secrets masked, and return the row."""
    diagnosis = while_loading(context.journal.history(), diagnose(evidence), attempt=number)
    fields = {name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__}
    fields["evidence"] = tuple(without_secrets(line) for line in diagnosis.evidence)
    row = Diagnosed(**fields, attempt=number)
    context.record(row)
    folder = context.folder.attempt(number)
    context.observer.write_view("diagnosis.json", lambda: folder.write_view("diagnosis", row))
    return row


def abandon(handle: Handle, *, grace_s: float = STOP_GRACE_S) -> float | None:
    """Stop an attempt without recording anything; return the seconds it took."""
    try:
        stop_s = handle.stop(grace_s=grace_s)
        handle.drain(timeout_s=DRAIN_S)
        handle.release()
    except Unreachable:
        return None
    return stop_s


def end_survivors(context: RunContext) -> None:
    """Stop attempts that ended according to the journal but still have a supervisor.

    They could not be reached, or the driver ended before it released them. Raises Unreachable if one still
    cannot be reached, because nothing may start beside it.
    """
    attempts = context.journal.view.attempts.values()
    ended = {attempt.number: attempt.ended for attempt in attempts if attempt.ended is not None}
    last = max(ended, default=0)
    for number in sorted(n for n, end in ended.items() if end.drain_s is None or n == last):
        handle = context.runner.attach(run=context.folder.id, attempt=number)
        if handle is not None:
            if ended[number].drain_s is None:
                context.observer.say(
                    f"attempt #{number} has ended, but its processes are still running; stopping them"
                )
            handle.stop(grace_s=0.0)
            handle.release()


def doubtful(history: History) -> tuple[int, ...]:
    """Return the attempts that may have left processes, according to the journal."""
    gone = {
        e.attempt
        for e in history
        if isinstance(e, Ended) and e.drain_s is not None and not (e.held or e.unreached)
    }
    return tuple(e.attempt for e in history if isinstance(e, Started) and e.attempt not in gone)


def end_doubtful(context: RunContext) -> None:
    """Stop what earlier drivers could not stop of a finished run, without recording anything.

    Raises Unreachable if it still cannot be reached.
    """
    for number in doubtful(context.journal.history()):
        handle = context.runner.attach(run=context.folder.id, attempt=number)
        if handle is not None:
            context.observer.say(f"attempt #{number} still ran; it is ended")
            handle.stop(grace_s=STOP_GRACE_S)
            handle.release()
    context.runner.sweep(run=context.folder.id)


def kill(context: RunContext, running: Mapping[int, Handle | None], *, by: str) -> tuple[int, ...]:
    """Kill attempts immediately and record those that ended; return the numbers of those that may continue.

    An attempt without a handle was about to start; its processes are searched for.
    """

    def end(number: int, handle: Handle | None) -> float:
        result = handle or context.runner.attach(run=context.folder.id, attempt=number)
        if result is None:
            context.runner.sweep(run=context.folder.id)
            return 0.0
        stop_s = result.stop(grace_s=0.0)
        result.release()
        return stop_s

    attempts = context.journal.view.attempts
    for number in running:
        if number not in attempts or attempts[number].stop is None:
            context.record(StopRequested(attempt=number, by="user", reason=by))
    asked = {number: beside(partial(end, number, handle)) for number, handle in running.items()}
    with suppress(ForcedExit), context.interrupts.cutting():  # a third request interrupts even this
        wait(asked.values(), timeout=KILL_S)
    left = []
    for number, killed in asked.items():
        if not killed.done() or killed.exception() is not None:
            left.append(number)
            continue
        context.record(
            Ended(
                attempt=number,
                outcome=Cancelled(by="user"),
                seconds=context.watched_s(number, until_now=True) if number in attempts else 0.0,
                step=attempts[number].step if number in attempts else None,
                stop_s=round(killed.result(), 3),
            )
        )
    return tuple(left)


class RunningAttempt:
    """An attempt from its start, or from attaching to it, to its end."""

    def __init__(
        self,
        context: RunContext,
        handle: Handle,
        *,
        watch: AttemptMonitor,
        number: int,
        begun_at: float,
        record: Callable[[Event], None],
    ) -> None:
        self.handle, self.watch, self.number = handle, watch, number
        self.folder = context.folder.attempt(number)
        self.latest = Observed()
        self._poll_s = 0.0
        self._looked_at = float("-inf")  # monotonic clock
        self._begun_at, self._record = begun_at, record  # monotonic clock
        self._clock, self._interrupts = context.clock, context.interrupts
        self._observer = context.observer

    def poll(self) -> bool:
        """Process new output and samples; return whether the attempt hangs."""
        asked_at = self._clock.monotonic()
        if not self._caught_up(asked_at):
            return False
        try:
            self.latest = self.handle.poll()
        except Unreachable as unreachable:
            self.latest = Observed(lost=unreachable.message)
        self._say(*self.latest.notes)
        events = self.watch.feed(self.latest, now=self._clock.monotonic())
        self._looked_at = self._clock.monotonic()
        self._poll_s = self._looked_at - asked_at
        if self.watch.files.acknowledged:
            self.handle.acknowledge(self.watch.files.acknowledged)
        for event in events:
            self._record(event)
        return any(isinstance(event, StopRequested) for event in events)

    def _caught_up(self, now: float) -> bool:
        """Process a part of what earlier drivers recorded; return whether it was the last part."""
        if not self.watch.files.caught_up:
            for event in self.watch.catch_up(now=now):
                self._record(event)
            self.latest, self._poll_s = Observed(behind=True), 0.0
        return self.watch.files.caught_up

    @property
    def due_in_s(self) -> float:
        """Seconds until the next poll; while there is more to read, as long as the last poll took."""
        latest, poll_s = self.latest, min(POLL_S, self._poll_s)
        pause_s = poll_s if latest.behind else POLL_S if latest.ending else WATCH_S
        return self._looked_at + pause_s - self._clock.monotonic()

    def _say(self, *notes: str) -> None:
        for note in notes:
            self._observer.say(f"attempt #{self.number}: {note}")

    @property
    def over(self) -> bool:
        """Whether it ended itself or can no longer be observed."""
        return self.latest.exit is not None or bool(self.latest.lost)

    def end(self, *, stopped_by: str) -> tuple[Ended, Evidence]:
        """Stop the attempt, wait until its memory is released and record how it ended.

        Raises Unreachable, recording nothing, if the user's stop request cannot reach it.
        """
        ending = self.ending(stopped_by=stopped_by, must_reach=stopped_by == "user")
        while True:
            try:
                next(ending)
            except StopIteration as over:
                result: tuple[Ended, Evidence] = over.value
                return result
            self._clock.sleep(POLL_S)

    def ending(
        self, *, stopped_by: str, invoke: Invoke = here, must_reach: bool = False
    ) -> Generator[None, None, tuple[Ended, Evidence]]:
        """Like `end`, as a generator that yields between polls so that other trials can proceed."""
        if stopped_by:
            self.watch.expect_end()
        try:
            stop_s = yield from invoke(self._stop)
        except Unreachable:
            if must_reach and not self.over:
                raise
            stop_s = None
        if self.latest.lost:
            self.poll()  # processes that the stop could not reach
        elif stopped_by:
            yield from self._last_words()
        for event in self.watch.finish(now=self._clock.monotonic()):
            if isinstance(event, (Progressed, GoalReached)):
                self._record(event)
        drain, unreached = None, ""
        try:
            drain = yield from invoke(self._drain)
        except Unreachable as unreachable:
            unreached = unreachable.message
            self.latest = msgspec.structs.replace(self.latest, lost=self.latest.lost or unreachable.message)
        outcome = self.watch.outcome(self.latest.exit, lost=self.latest.lost, stopped_by=stopped_by)
        evidence = self.watch.evidence(outcome, self.latest.exit)
        # Also while nobody watched it.
        ran_s = self.latest.exit.ran_s if self.latest.exit is not None else None
        ended = Ended(
            attempt=self.number,
            outcome=outcome,
            seconds=round(max(self._clock.monotonic() - self._begun_at, ran_s or 0.0), 3),
            step=self.watch.step,
            saved=self.watch.saved,
            stop_s=None if stop_s is None else round(stop_s, 3),
            drain_s=None if drain is None else round(drain.seconds, 3),
            held=_held(drain),
            foreign=drain is not None and drain.foreign,
            unreached=unreached if drain is None else drain.unknown,
            peaks=self.watch.peaks_since_step,
        )
        self._record(ended)
        self._observer.write_view("outcome.json", lambda: self.folder.write_view("outcome", ended))
        yield from invoke(self.release)
        return ended, evidence

    def abandon(self) -> float | None:
        """End the attempt without recording anything; returns the seconds it took."""
        return abandon(self.handle)

    def release(self) -> None:
        """Release supervisor and samplers; one that cannot be reached is skipped."""
        try:
            self.handle.release()
        except Unreachable:
            return

    def _stop(self) -> float:
        """Stop every process of the attempt; a second Ctrl-C shortens the grace period."""
        try:
            with self._interrupts.cutting():
                return self.handle.stop(grace_s=0.0 if self._interrupts.impatient else STOP_GRACE_S)
        except ForcedExit:
            return self.handle.stop(grace_s=0.0)

    def _drain(self) -> Drain | None:
        """Wait for the attempt's memory; None if a stop request interrupted the wait."""
        try:
            with self._interrupts.cutting(at_once=True):
                if not self._interrupts.impatient:
                    drain = self.handle.drain(
                        timeout_s=INTERRUPTED_DRAIN_S if self._interrupts.by else DRAIN_S
                    )
                    if drain.unknown:  # not fatal: the next start waits for the nodes it needs
                        self._say(f"cannot confirm that all memory was released: {drain.unknown}")
                    return drain
        except ForcedExit:
            pass
        self._observer.warn(f"did not wait for attempt #{self.number} to release its memory")
        return None

    def _last_words(self) -> Generator[None, None, None]:
        """Poll until the stopped attempt's exit and its last output have arrived."""
        while not self.watch.files.caught_up and not self._interrupts.impatient:
            self.poll()
            yield
        until = self._clock.monotonic() + LAST_WORDS_S
        while not self._interrupts.impatient:
            self.poll()
            if self.over or self._clock.monotonic() >= until:
                return
            yield


def _held(drain: Drain | None) -> str:
    """Return who holds memory that was not released; empty if nobody does or it is unknown."""
    if drain is None or drain.clear or drain.unknown:
        return "" if drain is None else drain.held
    return drain.held or "unknown"
