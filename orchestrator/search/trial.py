"""One trial of a configuration: the attempts that its purpose requires, and their result."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path

import msgspec

from autotune.launchers.base import Handle, Unreachable
from autotune.orchestrator.driver.attempt import RunningAttempt, abandon, explain, intended
from autotune.orchestrator.driver.blocking_calls import Invoke
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.monitor import AttemptMonitor, Progress
from autotune.orchestrator.errors import Failure, reason_of
from autotune.orchestrator.run.journal import Journal
from autotune.policies.search import schedule, trials
from autotune.policies.search.trial_history import TrialHistory, extended, trial_history
from autotune.policies.values.diagnosis import Diagnosis, Evidence
from autotune.policies.values.events import (
    Ended,
    Event,
    FailureSeen,
    Progressed,
    Purpose,
    Result,
    Started,
    StopRequested,
    Tried,
)
from autotune.policies.values.failure import Cause
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Lost, Peak, Speed


class TrialResults:
    """The recorded trials, updated as rows are added to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._rows = journal, 0
        self._trials: TrialHistory | None = None

    @property
    def trials(self) -> TrialHistory:
        """The trials recorded so far."""
        history = self._journal.history()
        if self._trials is None:
            self._trials = trial_history(history)
        elif len(history) > self._rows:
            self._trials = extended(self._trials, history[self._rows :])
        self._rows = len(history)
        return self._trials


class TrialContext:
    """The context that all trials of a search share."""

    def __init__(self, context: RunContext, *, cluster: Cluster) -> None:
        self.context, self.job, self.cluster = context, context.job, cluster
        self.forced = context.framework.can_force_longest(context.job)
        self.ledger = TrialResults(context.journal)

    @property
    def _folder(self) -> Path:
        return Path(self.job.workdir) / "trials"

    def clear(self) -> None:
        """Remove the files written by this run's trials; report where they are if that fails."""
        mine = f"{self.context.folder.id}-*"
        try:
            if not Path(self.job.workdir).is_dir():
                self.context.observer.say(
                    f"{self._folder / mine} of the trials cannot be seen from here: remove it on the cluster"
                )
            for folder in self._folder.glob(mine):
                shutil.rmtree(folder)  # it follows no links
        except OSError as error:
            self.context.observer.say(f"the trials' files stay in {self._folder / mine}: {reason_of(error)}")

    def trial_job(self, trial: str, *, longest: bool, steps: int) -> Job:
        """Return the job of a trial, with its own names and folders."""
        folder = self._folder / f"{self.context.folder.id}-{trial}"
        job = self.context.framework.trial(self.job, folder=str(folder), steps=steps, longest=longest)
        goal = msgspec.structs.replace(job.goal, steps=steps)
        return msgspec.structs.replace(job, goal=goal)

    def parts(self, purpose: Purpose) -> list[tuple[bool, int]]:
        """Return the attempts that a purpose requires, each as: longest sequences forced, and steps."""
        steps = self.job.goal.steps if purpose is Purpose.CONFIRM else self.job.search.probe_steps
        if not self.forced:
            return [(False, steps)]
        longest, own = (self.trial_job("0", longest=forced, steps=steps) for forced in (True, False))
        if longest.settings == own.settings:
            return [(True, steps)]
        return [(True, steps), (False, self.job.search.probe_steps)]


class Trial:
    """A running trial of a configuration."""

    def __init__(
        self, bench: TrialContext, *, number: int, knobs: Knobs, purpose: Purpose, invoke: Invoke
    ) -> None:
        """Try `knobs`; blocking calls, which start and end attempts, go through `invoke`."""
        self.number, self.knobs, self.purpose = number, knobs, purpose
        self.over = False
        self.unreached = ""  # why the attempt may still run although the user stopped it
        self._bench, self._invoke = bench, invoke
        self._parts = bench.parts(purpose)
        self._longest, self._wanted = False, 0
        self._under_way: RunningAttempt | None = None
        self.handle: Handle | None = None  # set as soon as there is an attempt to end
        self.attempt = 0  # number of the running attempt; 0: none yet
        self._failed = False
        self._steps: list[Progressed] = []  # of the running attempt
        self._peaks: dict[str, Peak] = {}  # of all attempts of the trial
        self._speed: Speed | None = None  # with the job's own lengths
        self._seconds = 0.0
        self._best: Tried | None = None
        self._pace_s = 0.0
        self._stop_by, self._stop_reason = "", ""
        self._course = self._run()

    def turn(self, *, best: Tried | None, pace_s: float) -> Tried | None:
        """Process new output and samples, at most every `pace_s` seconds.

        Returns the result once the trial is over; None before that, and for a trial that was stopped.
        """
        self._best, self._pace_s = best, pace_s
        try:
            next(self._course)
        except StopIteration as over:
            self.over = True
            result: Tried | None = over.value
            return result
        return None

    def stop(self, *, by: str, reason: str) -> None:
        """Stop the attempt in the next turns; a resumed search tries its configuration again."""
        self._stop_by, self._stop_reason = by, reason

    def abandon(self) -> None:
        """End the running attempt without recording anything."""
        if self.handle is not None:
            abandon(self.handle)

    @property
    def progress(self) -> Progress | None:
        """The progress of the running attempt."""
        return None if self._under_way is None else self._under_way.watch.progress

    @property
    def _own_lengths(self) -> bool:
        """Whether the running attempt measures the job's own speed."""
        return not self._longest or not self._parts

    def _record(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self._steps.append(event)
            self._peaks = trials.highest(self._peaks, event.peaks)
        self._failed = self._failed or isinstance(event, FailureSeen)
        self._bench.context.record(event)

    def _run(self) -> Generator[None, None, Tried | None]:
        """Run the attempts that the purpose requires, one after another."""
        result: Tried | None = None
        while result is None and self._parts and not self._stop_by:
            result = yield from self._start()
            if result is None:
                yield
                by = yield from self._follow()
                result = yield from self._end(by)
        return result

    def _start(self) -> Generator[None, None, Tried | None]:
        bench = self._bench
        self._longest, steps = self._parts.pop(0)
        self._wanted = steps
        self._steps, self._failed = [], False
        self.attempt = bench.ledger.trials.last_attempt + 1
        job = bench.trial_job(str(self.number), longest=self._longest, steps=steps)
        begin_as = Started(attempt=self.attempt, knobs=self.knobs, trial=self.number, longest=self._longest)
        start = intended(bench.context, job, begin_as)

        def begin() -> Handle:
            self.handle = start()
            return self.handle

        try:
            handle = yield from self._invoke(begin)
        except Unreachable as unreachable:
            bench.context.record(Ended(attempt=self.attempt, outcome=Lost(reason=unreachable.message)))
            return self._result(Result.LOST, reason=unreachable.message)
        now, folder = bench.context.clock.monotonic(), bench.context.folder.attempt(self.attempt)
        watch = AttemptMonitor(
            framework=bench.context.framework,
            job=job,
            attempt=self.attempt,
            folder=folder,
            now=now,
            say=bench.context.observer.say,
            persist=bench.context.persist,
        )
        self._under_way = RunningAttempt(
            bench.context, handle, watch=watch, number=self.attempt, begun_at=now, record=self._record
        )
        return None

    def _follow(self) -> Generator[None, None, str]:
        """Poll the attempt until it is over or has to be stopped; returns who stops it, empty if over."""
        attempt = self._under_way
        assert attempt is not None
        while not self._stop_by:
            hung = attempt.poll()
            if hung or self._failed:
                return "hang" if hung else "failure"
            if attempt.over:
                return ""
            probing = self.purpose is not Purpose.CONFIRM and self._own_lengths
            if (
                probing
                and len(self._steps) < self._wanted
                and schedule.too_slow(self._steps, best=self._best)
            ):
                reason = "pruned: slower than the best trial"
                self._bench.context.record(StopRequested(attempt=attempt.number, by="slow", reason=reason))
                return "slow"
            again_at = self._bench.context.clock.monotonic() + self._pace_s
            yield
            while self._bench.context.clock.monotonic() < again_at and not self._stop_by:
                yield
        by, reason = self._stop_by, self._stop_reason
        self._bench.context.record(StopRequested(attempt=attempt.number, by=by, reason=reason))
        return by

    def _end(self, by: str) -> Generator[None, None, Tried | None]:
        """End the running attempt; returns None if the trial continues with its next one."""
        attempt = self._under_way
        assert attempt is not None
        try:
            ended, evidence = yield from attempt.ending(
                stopped_by=by, invoke=self._invoke, must_reach=by == "user"
            )
        except Unreachable as unreachable:
            self._under_way, self.unreached = None, unreachable.message
            return None
        self._under_way = self.handle = None
        self._seconds += ended.seconds or 0.0
        if by and by == self._stop_by:
            return None
        if ended.held:
            raise Failure(
                f"memory was not released: {ended.held}",
                hint=f"stop what holds it, then run `{self._bench.context.folder.call('resume')}`",
            )
        if by == "slow":
            self._speed = trials.speed(self._steps)
            return self._result(Result.SLOW)
        if not isinstance(ended.outcome, Completed):
            return self._failure(ended, evidence)
        if self._own_lengths:
            self._speed = trials.speed(self._steps)
        return None if self._parts else self._result(Result.FITS)

    def _failure(self, ended: Ended, evidence: Evidence) -> Tried:
        """Record why the attempt failed and return the result for the configuration."""
        diagnosis = explain(self._bench.context, evidence, number=self.attempt)
        reason = diagnosis.evidence[0].text.strip()[:160] if diagnosis.evidence else diagnosis.cause.value
        if diagnosis.cause is Cause.DISK:
            # The configuration is not the cause: the next one would fail on the same disk.
            raise Failure(
                f"attempt {self.attempt}: {reason}",
                hint=f"free space on the disk, then run `{self._bench.context.folder.call('resume')}`",
            )
        if diagnosis.cause.is_memory:
            where = f"{diagnosis.cause.value} in {diagnosis.phase.value}"
            return self._result(Result.FAILS, reason=where, failure=diagnosis)
        lost = diagnosis.cause is Cause.INFRASTRUCTURE or isinstance(ended.outcome, Lost)
        return self._result(Result.LOST if lost else Result.REFUSED, reason=reason)

    def _result(self, result: Result, *, reason: str = "", failure: Diagnosis | None = None) -> Tried:
        job, cluster = self._bench.job, self._bench.cluster
        constraints = trials.excess(self._peaks, headroom=job.goal.headroom)
        if failure is not None:
            constraints |= trials.excess_of_failure(failure)
        if result is Result.REFUSED:
            constraints["refused"] = 1.0
        free = trials.free_share(self._peaks)
        gpus = cluster.gpus / max(1, job.search.parallel)
        tried = Tried(
            attempt=self.attempt,
            trial=self.number,
            knobs=self.knobs,
            purpose=self.purpose,
            result=result,
            headroom=free if result is Result.FITS else None,
            constraints={name: round(value, 4) for name, value in constraints.items()},
            extrapolated=not self._bench.forced,
            reason=reason,
            seconds=round(self._seconds, 1),
            gpu_hours=round(gpus * self._seconds / 3600, 4),
        )
        return trials.timed(tried, self._speed and _in_short(self._speed))


def _in_short(speed: Speed) -> Speed:
    """Return a speed rounded for the journal."""
    rate, noise = float(f"{speed.per_second:.6g}"), round(speed.noise, 4)
    return msgspec.structs.replace(speed, per_second=rate, noise=noise)
