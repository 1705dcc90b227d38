"""The driver's loop: asks `decide` for the next action, executes it and records what happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import assert_never

import msgspec

from autotune.launchers.base import Handle, Unreachable
from autotune.orchestrator.clock import timestamp
from autotune.orchestrator.config.secrets import masked
from autotune.orchestrator.driver import log_writer, rehearsal
from autotune.orchestrator.driver.attempt import (
    POLL_S,
    RunningAttempt,
    end_survivors,
    explain,
    intended,
    kill,
)
from autotune.orchestrator.driver.capacity import NodesMissing, await_nodes
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.monitor import AttemptMonitor
from autotune.orchestrator.driver.signals import ForcedExit
from autotune.orchestrator.driver.unwatched import evidence_on_record, unwatched_end
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.journal import Journal
from autotune.orchestrator.run.lock import TakenOver
from autotune.policies.estimate.belief.calibration import kind_of
from autotune.policies.recovery.decide import decide_on
from autotune.policies.recovery.first_launch import AS_WRITTEN
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.events import (
    Accepted,
    Await,
    Decided,
    Ended,
    Finish,
    Finished,
    Infrastructure,
    Interrupted,
    Launch,
    Policy,
    Rehearsed,
    Stable,
    Started,
    Stop,
    StopRequested,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.history import RESUMED, Folding, fold
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost
from autotune.policies.values.priors import Kind, Learned
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import Part, Rehearsal
from autotune.policies.values.run.view import AttemptView, RunView


def accept(
    journal: Journal,
    *,
    run: str,
    job: Job,
    profile: Profile,
    cluster: Cluster,
    versions: dict[str, str],
    now: float,
    mode: str = "launch",
    policy: Policy = Policy.ESTIMATE,
    rehearsed: Rehearsal | None = None,
    recall: Callable[[Kind], Learned | None] = lambda _: None,
) -> None:
    """Record that a run starts, with a rehearsal if there is one.

    `recall` returns the calibration of earlier similar jobs.
    """
    accepted = Accepted(
        at=timestamp(now),
        run=run,
        job=masked(job),
        profile=profile,
        cluster=cluster,
        versions=versions,
        mode=mode,
        policy=policy,
        rehearsal=rehearsed,
    )
    known = recall(kind_of(fold((accepted,))))
    journal.append(msgspec.structs.replace(accepted, learned=known))


def run(context: RunContext, *, conclude: bool = True) -> Verdict:
    """Drive a run from the state in its journal to its verdict.

    Without `conclude` a success is not recorded as the end of the run, because something follows.
    """
    return _Reconciler(context, conclude=conclude).drive()


def resumed(attempt: int) -> Decided:
    """Return the row that records that the user resumes a run."""
    return Decided(attempt=attempt, reason=RESUMED)


class _Reconciler:
    def __init__(self, context: RunContext, *, conclude: bool) -> None:
        self.context, self.record, self.conclude = context, context.record, conclude
        self.journal, self.clock, self.folder = context.journal, context.clock, context.folder
        self.interrupts, self.observer = context.interrupts, context.observer
        self.under_way: RunningAttempt | None = None
        self.evidence: Evidence | None = None
        self.folding, self.folded = Folding(), 0  # events

    def drive(self) -> Verdict:
        try:
            with self.interrupts.cutting():
                return self.decide_and_act()
        except ForcedExit:
            return self.kill()
        except Unreachable:
            raise
        except Exception as error:
            if self.local and not isinstance(error, TakenOver):
                why = f"autotune failed: {type(error).__name__}: {error}"
                self.abandon(error.message if isinstance(error, Failure) else why)
            elif self.under_way is not None:
                ends = "" if isinstance(error, TakenOver) else f"; `{self.folder.call('stop')}` ends it"
                self.observer.warn(f"attempt #{self.number} is left running under its supervisor{ends}")
            raise

    def decide_and_act(self) -> Verdict:
        self.recover()
        while True:
            if self.interrupts.by:
                return self.interrupt()
            for event in self.journal.since(self.folded):
                self.folding.take(event)
            self.folded = self.journal.view.count
            action = decide_on(self.folding)
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

    @property
    def local(self) -> bool:
        """Whether attempts end with this driver; on a cluster they continue under their supervisors."""
        return self.accepted.cluster.address == "local"

    @property
    def accepted(self) -> Accepted:
        """The first row of the history, with the job as the user has changed it since."""
        assert self.view.accepted is not None
        return self.view.accepted

    @property
    def view(self) -> RunView:
        """The view of the run's journal."""
        return self.journal.view

    @property
    def number(self) -> int:
        """The number of the last attempt; 0 if none has started."""
        return self.view.last_number

    @property
    def attempt(self) -> AttemptView:
        """The last attempt; raises KeyError if none has started."""
        return self.view.attempts[self.number]

    # ------------------------------------------------------------------ taking over from a dead driver

    def recover(self) -> None:
        if isinstance(self.view.verdict, (Interrupted, Infrastructure)):
            self.record(resumed(self.number))
        if not self.number:
            return
        end_survivors(self.context)
        if self.attempt.ended is not None:
            self.context.runner.sweep(run=self.folder.id)
            self.go_on()
            return
        folder = self.folder.attempt(self.number)
        cursor = self.context.persist(lambda: log_writer.read_cursor(folder.path), path=folder.path)
        handle = self.context.runner.attach(run=self.folder.id, attempt=self.number, read=cursor.offsets)
        if handle is None:
            ended = self.context.runner.sweep(run=self.folder.id)
            left = f"; ended what was left: {', '.join(ended)}" if ended else ""
            self.observer.say(
                f"run {self.folder.id} · attempt #{self.number} has no supervisor any more{left}"
            )
            why = "the driver ended and no supervisor was left"
            end = self.context.persist(
                lambda: unwatched_end(self.context, self.attempt, reason=why), path=folder.path
            )
            self.record(end)
            if isinstance(end.outcome, Lost) and end.step is not None:
                # The cluster did not fail, so the user continues at once. An end before the first step is a
                # loss.
                self.record(resumed(self.number))
            self.go_on()
            return
        self.observer.say(f"run {self.folder.id} · attempt #{self.number} is still running, attaching")
        self.follow(handle, begun_at=self.clock.monotonic() - self.context.watched_s(self.number))
        if self.attempt.stop is not None:
            self.end(stopped_by=self.attempt.stop.by)
            self.go_on()

    def go_on(self) -> None:
        """Continue a run whose driver died while it handled a stop request, which no longer counts."""
        ended = self.attempt.ended
        asked = ended is not None and ended.outcome == Cancelled(by="user")
        if asked and self.view.last == ended and not self.interrupts.by:
            self.record(resumed(self.number))

    # ------------------------------------------------------------------ the four actions

    def launch(self, action: Launch) -> None:
        last = self.view.last
        is_recorded = isinstance(last, Decided) and last.remedy == action.remedy
        plain = action.rehearsal is not None or action.reason == AS_WRITTEN
        if (self.number or action.remedy is not None or not plain) and not is_recorded:
            self.record(
                Decided(
                    attempt=self.number,
                    remedy=action.remedy,
                    reason=action.reason,
                    not_before_s=action.not_before_s,
                    growth=action.growth,
                )
            )
        if not self.wait(action.not_before_s) or not self.await_nodes():
            return
        number = self.number + 1
        begun_at = self.clock.monotonic()
        part = action.rehearsal
        if part is None:
            again = bool(self.view.training)
            resume = self.accepted.profile.resumable and (again or self.context.job.resume)
            if not again and self.number:
                rehearsal.clear(self.context)
        else:
            resume = part is Part.RELOAD
        start = Started(
            attempt=number, knobs=action.knobs, resume=resume, rehearsal=part, longest=action.longest
        )
        try:
            handle = intended(self.context, rehearsal.job_of(self.context, start), start)()
        except Unreachable as unreachable:
            self.record(Ended(attempt=number, outcome=Lost(reason=unreachable.message)))
            if number == 1:
                self.finish(Infrastructure(reason=unreachable.message))
                raise Failure(unreachable.message, hint=unreachable.hint) from None
            return
        self.follow(handle, begun_at=begun_at)

    def wait(self, seconds: float) -> bool:
        """Wait before a relaunch or a poll; false if the user interrupted."""
        until = self.clock.monotonic() + seconds
        while (left_s := until - self.clock.monotonic()) > 0 and not self.interrupts.by:
            self.clock.sleep(min(POLL_S, left_s))
        return not self.interrupts.by

    def await_nodes(self) -> bool:
        """Wait for the nodes of the next attempt; false if the user interrupted."""
        try:
            return await_nodes(self.context)
        except NodesMissing as missing:
            self.finish(Infrastructure(reason=missing.message))
            raise

    def follow(self, handle: Handle, *, begun_at: float) -> None:
        self.evidence = None
        number, folder = self.number, self.folder.attempt(self.number)
        watch = AttemptMonitor(
            framework=self.context.framework,
            job=rehearsal.job_of(self.context, self.attempt.started),
            attempt=number,
            folder=folder,
            known=self.attempt,
            now=self.clock.monotonic(),
            saved=self.saved_before(),
            counts_from_zero=any(
                done.step == 0 for each in self.view.attempts.values() for done in each.steps
            ),
            longest_response=self.accepted.profile.layout.response_tokens or None,
            say=self.observer.say,
            persist=self.context.persist,
        )
        self.under_way = RunningAttempt(
            self.context,
            handle,
            watch=watch,
            number=number,
            begun_at=begun_at,
            record=self.record,
        )

    def saved_before(self) -> int | None:
        """Return the step of the checkpoint to resume from, if the attempt should."""
        started = self.attempt.started
        if not started.resume:
            return None
        alike = (each for each in self.view.attempts.values() if each.started.trains is started.trains)
        earlier = [each.saved for each in alike if each.number < started.attempt]
        return max((step for step in earlier if step is not None), default=None)

    def await_news(self) -> None:
        """Poll until something is recorded or the user interrupts."""
        attempt = self.under_way
        if attempt is None:
            self.explain()
            return
        before = self.journal.view.count
        while self.journal.view.count == before and self.wait(attempt.due_in_s):
            hung = attempt.poll()
            self.observer.watch({attempt.number: attempt.watch.progress}, now=self.clock.now())
            if hung:
                self.end(stopped_by="hang")
            elif attempt.over:
                self.end(stopped_by="")

    def interrupt(self) -> Verdict:
        verdict = self.interrupts.verdict
        if self.under_way is not None:
            self.record(StopRequested(attempt=self.number, by="user", reason=verdict.by))
            try:
                self.end(stopped_by="user")
            except Unreachable as unreachable:
                return self.leave(verdict, why=f": {unreachable.message}")
        return self.finish(verdict)

    def leave(self, verdict: Verdict, *, why: str = "") -> Verdict:
        """Return the verdict of a run whose attempt could not be stopped, without recording it."""
        if not self.local:
            hint = f"`{self.folder.call('stop')}` ends it"
            self.observer.warn(f"attempt #{self.number} may still run{why}; {hint}")
        return verdict

    def finish(self, verdict: Verdict) -> Verdict:
        success = isinstance(verdict, (TrainingCompleted, Stable, Rehearsed))
        if not isinstance(verdict, (Interrupted, Infrastructure)):
            rehearsal.clear(self.context)
        if self.view.finished is None and (self.conclude or not success):
            self.record(Finished(attempt=self.number, verdict=verdict))
        return verdict

    # ------------------------------------------------------------------ the end of an attempt

    def end(self, *, stopped_by: str) -> None:
        """Stop the running attempt."""
        assert self.under_way is not None
        attempt = self.under_way
        ended, self.evidence = attempt.end(stopped_by=stopped_by)
        self.observer.watch({attempt.number: attempt.watch.progress}, now=self.clock.now())
        self.under_way = None
        if isinstance(ended.outcome, (Crashed, Hung)) or ended.outcome == Cancelled(by="failure"):
            self.explain()  # now, because a resume repeats an attempt without a diagnosis

    def explain(self) -> None:
        """Record the diagnosis of the last attempt."""
        attempt, ended = self.attempt, self.attempt.ended
        if ended is None:
            raise RuntimeError("asked to wait although nothing runs")
        if isinstance(ended.outcome, Completed) or attempt.diagnosed is not None:
            raise RuntimeError("asked to wait although the last attempt is over and explained")
        folder = self.folder.attempt(attempt.number)
        evidence = self.evidence or self.context.persist(
            lambda: evidence_on_record(folder, attempt, ended.outcome), path=folder.log
        )
        explain(self.context, evidence, number=self.number)

    def kill(self) -> Verdict:
        """Kill running attempts immediately, after a second stop request at any point of the loop."""
        verdict = self.interrupts.verdict
        attempt, self.under_way = self.under_way, None
        if not self.number or self.attempt.ended is not None:
            return self.finish(verdict)
        self.observer.say(f"killing attempt #{self.number}")
        left = kill(
            self.context, {self.number: attempt.handle if attempt is not None else None}, by=verdict.by
        )
        return self.leave(verdict) if left else self.finish(verdict)

    def abandon(self, reason: str) -> None:
        """Stop running attempts because this driver cannot continue; the run can be resumed."""
        attempt, self.under_way = self.under_way, None
        if attempt is None:
            return
        stop_s = attempt.abandon()
        if self.attempt.ended is None:
            lost = Lost(reason=reason)
            with suppress(Failure):  # the first failure is the one to report
                self.record(
                    Ended(
                        attempt=attempt.number,
                        outcome=lost,
                        seconds=self.context.watched_s(attempt.number, until_now=True),
                        step=attempt.watch.step,
                        stop_s=stop_s,
                    )
                )
