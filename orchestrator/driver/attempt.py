"""One attempt that runs: polled until it is over, then stopped, its memory awaited, its end recorded."""

from __future__ import annotations

from collections.abc import Callable, Generator

import msgspec

from autotune.launchers.base import Handle, Observed, Unreachable
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.executor import Invoke, here
from autotune.orchestrator.driver.monitor import AttemptMonitor
from autotune.orchestrator.driver.signals import ForcedExit
from autotune.orchestrator.run.command import command_of
from autotune.orchestrator.run.directory import shown_argv
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.explain.secrets import shown
from autotune.policies.values.diagnosis import Diagnosis, Evidence
from autotune.policies.values.events import (
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    Progressed,
    Started,
    StopRequested,
)
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

POLL_S = 0.4
STOP_GRACE_S = 10.0
DRAIN_S = 60.0
LAST_WORDS_S = 8.0  # the handle gathers last words for 5 s


def intended(
    context: RunContext,
    job: Job,
    knobs: Knobs,
    *,
    number: int,
    resume: bool,
    trial: int | None = None,
    longest: bool = False,
) -> Callable[[], Handle]:
    """Record that an attempt begins and return what starts it.

    That raises Unreachable when the place cannot take it.
    """
    command = command_of(
        context.framework,
        job,
        knobs,
        history=context.journal.history(),
        run=context.folder.id,
        attempt=number,
        resume=resume,
    )
    attempt = context.folder.attempt(number)
    attempt.create()
    attempt.write_command(command, python=job.python)
    started = Started(
        attempt=number,
        knobs=knobs,
        command=shown_argv(command),
        resume=resume,
        trial=trial,
        longest=longest,
    )
    context.record(started)
    return lambda: context.runner.start(command, run=context.folder.id, attempt=number, python=job.python)


def explain(context: RunContext, evidence: Evidence, *, number: int) -> Diagnosed:
    """Record why an attempt failed, secrets masked, and return the row."""
    diagnosis = diagnose(evidence)
    fields = {name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__}
    fields["evidence"] = tuple(shown(line) for line in diagnosis.evidence)
    row = Diagnosed(**fields, attempt=number)
    context.record(row)
    context.folder.attempt(number).write_view("diagnosis", row)
    return row


def abandon(handle: Handle, *, grace_s: float = STOP_GRACE_S) -> float | None:
    """End an attempt without recording anything; returns the seconds it took."""
    try:
        stop_s = handle.stop(grace_s=grace_s)
        handle.drain(timeout_s=DRAIN_S)
        handle.release()
    except Unreachable:
        return None
    return stop_s


class RunningAttempt:
    """An attempt from its start, or from our attaching to it, to its end."""

    def __init__(
        self,
        context: RunContext,
        handle: Handle,
        *,
        watch: AttemptMonitor,
        number: int,
        started_at: float,
        record: Callable[[Event], None],
    ) -> None:
        self.handle, self.watch, self.number = handle, watch, number
        self.folder = context.folder.attempt(number)
        self.seen = Observed()
        self._started_at, self._record = started_at, record
        self._clock, self._interrupts = context.clock, context.interrupts

    def poll(self) -> bool:
        """Process new output and samples; returns whether the attempt hangs."""
        try:
            self.seen = self.handle.poll()
        except Unreachable as unreachable:
            self.seen = Observed(lost=unreachable.message)
        events = self.watch.feed(self.seen, now=self._clock.now())
        for event in events:
            self._record(event)
        return any(isinstance(event, StopRequested) for event in events)

    @property
    def over(self) -> bool:
        """Whether it ended by itself or can no longer be observed."""
        return self.seen.exit is not None or bool(self.seen.lost)

    def end(self, *, stopped_by: str) -> tuple[Ended, Evidence]:
        """Stop the attempt, wait until its memory is released and record how it ended."""
        ending = self.ending(stopped_by=stopped_by)
        while True:
            try:
                next(ending)
            except StopIteration as over:
                found: tuple[Ended, Evidence] = over.value
                return found
            self._clock.sleep(POLL_S)

    def ending(
        self, *, stopped_by: str, invoke: Invoke = here
    ) -> Generator[None, None, tuple[Ended, Evidence]]:
        """Do what `end` does as a generator, which yields between polls so that other trials can run."""
        if stopped_by:
            self.watch.expect_end()
        stop_s = yield from invoke(self._stop)
        if stopped_by and not self.seen.lost:
            yield from self._last_words()
        for event in self.watch.finish(now=self._clock.now()):
            if isinstance(event, (Progressed, GoalReached)):
                self._record(event)
        try:
            drain = yield from invoke(lambda: self.handle.drain(timeout_s=DRAIN_S))
            held, drain_s = ("" if drain.clear else drain.held or "unknown"), drain.seconds
        except Unreachable as unreachable:
            held, drain_s = "", None
            self.seen = msgspec.structs.replace(self.seen, lost=self.seen.lost or unreachable.message)
        outcome = self.watch.outcome(self.seen.exit, lost=self.seen.lost, stopped_by=stopped_by)
        evidence = self.watch.evidence(outcome, self.seen.exit)
        ended = Ended(
            attempt=self.number,
            outcome=outcome,
            seconds=round(self._clock.now() - self._started_at, 3),
            step=self.watch.step,
            saved=self.watch.saved,
            stop_s=None if stop_s is None else round(stop_s, 3),
            drain_s=None if drain_s is None else round(drain_s, 3),
            held=held,
            peaks=self.watch.peaks_since_step,
        )
        self._record(ended)
        self.folder.write_view("outcome", ended)
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

    def _stop(self) -> float | None:
        """End every process of the attempt; the user's second Ctrl-C cuts the grace short."""
        try:
            with self._interrupts.cutting():
                return self.handle.stop(grace_s=0.0 if self._interrupts.impatient else STOP_GRACE_S)
        except ForcedExit:
            return self.handle.stop(grace_s=0.0)
        except Unreachable:
            return None

    def _last_words(self) -> Generator[None, None, None]:
        """Poll until the stopped attempt's exit and the end of its logs have arrived."""
        until = self._clock.now() + LAST_WORDS_S
        while True:
            self.poll()
            if self.over or self._clock.now() >= until:
                return
            yield
