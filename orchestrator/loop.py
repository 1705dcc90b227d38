"""Runs a job: asks `decide` what follows from the history, does it, and records what happens."""

from __future__ import annotations

from typing import Protocol, assert_never

import msgspec

from launchers.base import Framework, Handle, Observed, Runner, Unreachable
from orchestrator.clock import Clock, seconds_of, timestamp
from orchestrator.errors import Failure
from orchestrator.interrupts import Impatient, Interrupts
from orchestrator.journal import Journal
from orchestrator.runs import Run, masked, shown_argv
from orchestrator.watch import Progress, Watch, evidence_on_record, unwatched_outcome
from policies.attempts import RESUMED
from policies.decide import decide
from policies.diagnose import diagnose
from policies.events import (
    Accepted,
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Finished,
    GoalReached,
    Infrastructure,
    Interrupted,
    Launch,
    Progressed,
    Started,
    Stop,
    StopRequested,
    Verdict,
)
from policies.evidence import Completed, Diagnosis, Evidence, Lost
from policies.types import Cluster, Job, Profile

POLL_S = 0.4
STOP_GRACE_S = 10.0
DRAIN_S = 60.0
LAST_WORDS_S = 8.0  # the handle gathers last words for 5 s


class Audience(Protocol):
    """Who watches a run."""

    def watch(self, progress: Progress, *, now: float) -> None:
        """See where the running attempt is; called at every poll."""

    def say(self, text: str) -> None:
        """Hear what is done beside the events."""


class Unseen:
    """Nobody watches."""

    def watch(self, progress: Progress, *, now: float) -> None:
        """See nothing."""

    def say(self, text: str) -> None:
        """Hear nothing."""


def accept(
    journal: Journal,
    *,
    run: str,
    job: Job,
    profile: Profile,
    cluster: Cluster,
    versions: dict[str, str],
    now: float,
) -> None:
    """Record that a run begins."""
    journal.append(
        Accepted(
            at=timestamp(now), run=run, job=masked(job), profile=profile, cluster=cluster, versions=versions
        )
    )


def run(
    journal: Journal,
    framework: Framework,
    runner: Runner,
    clock: Clock,
    *,
    folder: Run,
    job: Job,
    interrupts: Interrupts,
    audience: Audience | None = None,
) -> Verdict:
    """Drive a run from wherever its journal stands to its verdict."""
    driver = _Driver(journal, framework, runner, clock, folder, job, interrupts, audience or Unseen())
    return driver.drive()


class _Driver:
    def __init__(
        self,
        journal: Journal,
        framework: Framework,
        runner: Runner,
        clock: Clock,
        folder: Run,
        job: Job,
        interrupts: Interrupts,
        audience: Audience,
    ) -> None:
        self.journal, self.framework, self.runner, self.clock = journal, framework, runner, clock
        self.folder, self.job, self.interrupts = folder, job, interrupts
        self.audience = audience
        self.handle: Handle | None = None
        self.watch: Watch | None = None
        self.evidence: Evidence | None = None
        self.seen = Observed()

    def drive(self) -> Verdict:
        try:
            self.recover()
            while True:
                if self.interrupts.by:
                    return self.interrupt()
                action = decide(self.journal.history())
                match action:
                    case Launch():
                        self.launch(action)
                    case Await():
                        self.await_news()
                    case Stop():
                        self.record(StopRequested(attempt=self.number, by=action.by, reason=action.reason))
                        self.end(stopped_by=action.by)
                    case Finish():
                        return self.finish(action.verdict)
                    case _:
                        assert_never(action)
        except Failure as failure:
            self.abandon(failure)
            raise

    @property
    def number(self) -> int:
        """The number of the last attempt."""
        return max((e.attempt for e in self.journal.history() if isinstance(e, Started)), default=0)

    def of_attempt(self) -> tuple[Event, ...]:
        number = self.number
        return tuple(e for e in self.journal.history() if e.attempt == number and not isinstance(e, Accepted))

    def ended(self) -> Ended | None:
        return next((e for e in self.of_attempt() if isinstance(e, Ended)), None)

    def record(self, event: Event) -> None:
        self.journal.append(msgspec.structs.replace(event, at=timestamp(self.clock.now())))

    # ------------------------------------------------------------------ what a dead driver left behind

    def recover(self) -> None:
        history = self.journal.history()
        if isinstance(history[-1], Finished) and isinstance(
            history[-1].verdict, (Interrupted, Infrastructure)
        ):
            self.record(Decided(attempt=self.number, reason=RESUMED))
        if not self.number:
            return
        handle = self.runner.attach(run=self.folder.id, attempt=self.number)
        if self.ended() is not None:
            if handle is not None:
                handle.stop(grace_s=0.0)
                handle.release()
            self.runner.sweep(run=self.folder.id)
            return
        if handle is None:
            ended = self.runner.sweep(run=self.folder.id)
            left = f"; ended what was left: {', '.join(ended)}" if ended else ""
            self.audience.say(
                f"run {self.folder.id} · attempt #{self.number} has no supervisor any more{left}"
            )
            self.end_unwatched("the driver ended and no supervisor was left")
            ended_now = self.ended()
            if ended_now is not None and isinstance(ended_now.outcome, Lost):
                # Nothing of the cluster failed: the user goes on at once.
                self.record(Decided(attempt=self.number, reason=RESUMED))
            return
        self.audience.say(f"run {self.folder.id} · attempt #{self.number} is still running, attaching")
        self.handle = handle
        self.follow()
        stop = next((e for e in self.of_attempt() if isinstance(e, StopRequested)), None)
        if stop is not None:
            self.end(stopped_by=stop.by)

    def end_unwatched(self, reason: str) -> None:
        rows = self.of_attempt()
        steps = [e.step for e in rows if isinstance(e, Progressed)]
        outcome = unwatched_outcome(rows, reason=reason)
        self.record(Ended(attempt=self.number, outcome=outcome, step=steps[-1] if steps else None))

    # ------------------------------------------------------------------ the four actions

    def launch(self, action: Launch) -> None:
        history = self.journal.history()
        if self.number and not isinstance(history[-1], Decided):
            self.record(
                Decided(
                    attempt=self.number,
                    remedy=action.remedy,
                    reason=action.reason,
                    not_before_s=action.not_before_s,
                )
            )
        if not self.wait(action.not_before_s):
            return
        number = self.number + 1
        accepted = history[0]
        assert isinstance(accepted, Accepted)
        resume = accepted.profile.resumable and (number > 1 or self.job.resume)
        command = self.framework.command(
            self.job, action.knobs, run=self.folder.id, attempt=number, resume=resume
        )
        attempt = self.folder.attempt(number)
        attempt.create()
        attempt.write_command(command, python=self.job.python)
        self.record(Started(attempt=number, knobs=action.knobs, command=shown_argv(command), resume=resume))
        try:
            self.handle = self.runner.start(
                command, run=self.folder.id, attempt=number, python=self.job.python
            )
        except Unreachable as unreachable:
            self.record(Ended(attempt=number, outcome=Lost(reason=unreachable.message)))
            if number == 1:
                self.finish(Infrastructure(reason=unreachable.message))
                raise Failure(unreachable.message, hint=unreachable.hint) from None
            return
        self.follow()

    def wait(self, seconds: float) -> bool:
        """Wait before a relaunch; false when the user interrupted it."""
        until = self.clock.now() + seconds
        while self.clock.now() < until and not self.interrupts.by:
            self.clock.sleep(min(POLL_S, max(0.0, until - self.clock.now())))
        return not self.interrupts.by

    def follow(self) -> None:
        self.evidence = None
        self.watch = Watch(
            framework=self.framework,
            job=self.job,
            attempt=self.number,
            folder=self.folder.attempt(self.number),
            known=self.of_attempt(),
            now=self.clock.now(),
            saved=self.saved_before(),
        )

    def saved_before(self) -> int | None:
        """Return the step of the checkpoint that the attempt should continue, where it was told to."""
        history, number = self.journal.history(), self.number
        started = next(e for e in reversed(history) if isinstance(e, Started))
        earlier = [
            e.saved
            for e in history
            if isinstance(e, (Progressed, Ended)) and e.attempt < number and e.saved is not None
        ]
        return max(earlier, default=None) if started.resume else None

    def await_news(self) -> None:
        """Poll until something is recorded or the user interrupts."""
        if self.handle is None:
            self.explain()
            return
        before = len(self.journal.history())
        while len(self.journal.history()) == before and not self.interrupts.by:
            hung = self.poll()
            if hung:
                self.end(stopped_by="hang")
            elif self.seen.exit is not None or self.seen.lost:
                self.end(stopped_by="")
            elif len(self.journal.history()) == before:
                self.clock.sleep(POLL_S)

    def poll(self) -> bool:
        """Take in what is new; true when the attempt was found to hang."""
        assert self.handle is not None and self.watch is not None
        try:
            self.seen = self.handle.poll()
        except Unreachable as unreachable:
            self.seen = Observed(lost=unreachable.message)
        events = self.watch.feed(self.seen, now=self.clock.now())
        for event in events:
            self.record(event)
        self.audience.watch(self.watch.progress, now=self.clock.now())
        return any(isinstance(event, StopRequested) for event in events)

    def interrupt(self) -> Verdict:
        if self.handle is not None:
            self.record(StopRequested(attempt=self.number, by="user", reason=self.interrupts.by))
            self.end(stopped_by="user")
        return self.finish(Interrupted(by=self.interrupts.by))

    def finish(self, verdict: Verdict) -> Verdict:
        last = self.journal.history()[-1]
        if not isinstance(last, Finished):
            self.record(Finished(attempt=self.number, verdict=verdict))
        return verdict

    # ------------------------------------------------------------------ the end of an attempt

    def end(self, *, stopped_by: str) -> None:
        """End the whole attempt, wait for its memory and record how it ended."""
        assert self.handle is not None and self.watch is not None
        if stopped_by:
            self.watch.expect_end()
        stop_s = self.stop()
        if stopped_by and not self.seen.lost:
            self.last_words()
        for event in self.watch.finish(now=self.clock.now()):
            if isinstance(event, (Progressed, GoalReached)):
                self.record(event)
        try:
            drain = self.handle.drain(timeout_s=DRAIN_S)
            held, drain_s = ("" if drain.clear else drain.held or "unknown"), drain.seconds
        except Unreachable as unreachable:
            held, drain_s = "", None
            self.seen = msgspec.structs.replace(self.seen, lost=self.seen.lost or unreachable.message)
        outcome = self.watch.outcome(self.seen.exit, lost=self.seen.lost, stopped_by=stopped_by)
        self.evidence = self.watch.evidence(outcome, self.seen.exit)
        ended = Ended(
            attempt=self.number,
            outcome=outcome,
            seconds=round(self.clock.now() - self.started_at(), 3),
            step=self.watch.step,
            saved=self.watch.saved,
            stop_s=None if stop_s is None else round(stop_s, 3),
            drain_s=None if drain_s is None else round(drain_s, 3),
            held=held,
        )
        self.record(ended)
        self.folder.attempt(self.number).write_view("outcome", ended)
        self.release()

    def stop(self) -> float | None:
        """End every process of the attempt; the user's second Ctrl-C cuts the grace short."""
        assert self.handle is not None
        try:
            with self.interrupts.cutting():
                return self.handle.stop(grace_s=0.0 if self.interrupts.impatient else STOP_GRACE_S)
        except Impatient:
            return self.handle.stop(grace_s=0.0)
        except Unreachable:
            return None

    def last_words(self) -> None:
        """Poll until the stopped attempt's exit and the end of its logs have arrived."""
        until = self.clock.now() + LAST_WORDS_S
        while True:
            self.poll()
            if self.seen.exit is not None or self.seen.lost or self.clock.now() >= until:
                return
            self.clock.sleep(POLL_S)

    def started_at(self) -> float:
        starts = [e.at for e in self.of_attempt() if isinstance(e, Started)]
        return seconds_of(starts[-1]) if starts else self.clock.now()

    def release(self) -> None:
        assert self.handle is not None
        try:
            self.handle.release()
        except Unreachable:
            self.handle = None
        self.handle = self.watch = None
        self.seen = Observed()

    def explain(self) -> None:
        """Record why the last attempt failed."""
        ended = self.ended()
        if ended is None:
            raise RuntimeError("asked to wait although nothing runs")
        if isinstance(ended.outcome, Completed) or any(isinstance(e, Diagnosed) for e in self.of_attempt()):
            raise RuntimeError("asked to wait although the last attempt is over and explained")
        evidence = self.evidence or evidence_on_record(
            self.folder.attempt(self.number).log, self.of_attempt(), ended.outcome
        )
        diagnosis = diagnose(evidence)
        fields = {name: getattr(diagnosis, name) for name in Diagnosis.__struct_fields__}
        row = Diagnosed(**fields, attempt=self.number)
        self.record(row)
        self.folder.attempt(self.number).write_view("diagnosis", row)

    def abandon(self, failure: Failure) -> None:
        """Stop what runs because it can no longer be recorded; the run can be resumed."""
        if self.handle is None:
            return
        number, step = self.number, self.watch.step if self.watch is not None else None
        handle, self.handle = self.handle, None
        stop_s = self.stop_quietly(handle)
        if self.ended() is None:
            try:
                self.record(
                    Ended(attempt=number, outcome=Lost(reason=failure.message), step=step, stop_s=stop_s)
                )
            except Failure as second:
                failure.add_note(second.message)

    def stop_quietly(self, handle: Handle) -> float | None:
        try:
            stop_s = handle.stop(grace_s=STOP_GRACE_S)
            handle.drain(timeout_s=DRAIN_S)
            handle.release()
        except Unreachable:
            return None
        return stop_s
