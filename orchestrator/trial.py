"""One configuration on trial: the attempts that its purpose takes, and what they showed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from launchers.base import Framework, Runner, Unreachable
from orchestrator.clock import Clock, timestamp
from orchestrator.errors import Failure
from orchestrator.interrupts import Interrupts
from orchestrator.journal import Journal
from orchestrator.ledger import Ledger
from orchestrator.runs import Run
from orchestrator.underway import UnderWay, explain, start
from orchestrator.watch import Progress, Watch
from policies import trials
from policies.attempts import MEMORY_CAUSES
from policies.events import (
    Ended,
    Event,
    FailureSeen,
    Progressed,
    Purpose,
    Result,
    StopRequested,
    Tried,
)
from policies.evidence import Completed, Diagnosis, Evidence, Lost, Peak
from policies.types import Cause, Cluster, Job, Knobs


class Bench:
    """What every trial of a search needs."""

    def __init__(
        self,
        journal: Journal,
        framework: Framework,
        runner: Runner,
        clock: Clock,
        *,
        folder: Run,
        job: Job,
        cluster: Cluster,
        interrupts: Interrupts,
    ) -> None:
        self.journal, self.framework, self.runner, self.clock = journal, framework, runner, clock
        self.folder, self.job, self.cluster, self.interrupts = folder, job, cluster, interrupts
        self.forced = framework.can_force_longest(job)
        self.ledger = Ledger(journal)

    def record(self, event: Event) -> None:
        """Append an event to the journal."""
        self.journal.append(msgspec.structs.replace(event, at=timestamp(self.clock.now())))

    def trial_job(self, trial: str, *, longest: bool, steps: int) -> Job:
        """Return the job as a trial runs it, under names and folders of its own."""
        folder = Path(self.job.workdir) / "trials" / f"{self.folder.id}-{trial}"
        job = self.framework.trial(self.job, folder=str(folder), steps=steps, longest=longest)
        goal = msgspec.structs.replace(job.goal, steps=steps)
        return msgspec.structs.replace(job, goal=goal)

    def parts(self, purpose: Purpose) -> list[tuple[bool, int]]:
        """Return the attempts that a purpose takes: longest sequences forced or not, and steps."""
        steps = self.job.goal.steps if purpose is Purpose.CONFIRM else self.job.search.probe_steps
        if not self.forced:
            return [(False, steps)]
        longest, own = (self.trial_job("0", longest=forced, steps=steps) for forced in (True, False))
        if longest.settings == own.settings:
            return [(True, steps)]
        return [(True, steps), (False, self.job.search.probe_steps)]


class Trial:
    """A configuration that is being tried."""

    def __init__(self, bench: Bench, *, number: int, knobs: Knobs, purpose: Purpose) -> None:
        self.number, self.knobs, self.purpose = number, knobs, purpose
        self._bench = bench
        self._parts = bench.parts(purpose)
        self._longest, self._wanted = False, 0
        self._under_way: UnderWay | None = None
        self._attempt = 0
        self._failed = False
        self._steps: list[Progressed] = []  # of the running attempt
        self._peaks: dict[str, Peak] = {}  # of all its attempts
        self._speed: tuple[float, float] | None = None  # on the job's own lengths
        self._seconds = 0.0

    def turn(self, *, best: float | None) -> Tried | None:
        """Take in what is new; returns the result once the trial is over."""
        attempt = self._under_way
        if attempt is None:
            return self._start()
        hung = attempt.poll()
        if hung or self._failed:
            return self._end("hang" if hung else "failure")
        if attempt.over:
            return self._end("")
        probing = self.purpose is not Purpose.CONFIRM and self._own_lengths
        if probing and len(self._steps) < self._wanted and trials.too_slow(self._steps, best=best):
            reason = "it cannot become the fastest"
            self._bench.record(StopRequested(attempt=attempt.number, by="slow", reason=reason))
            return self._end("slow")
        return None

    def stop(self, *, by: str, reason: str) -> None:
        """Stop the running attempt; its configuration is tried again by a resumed search."""
        attempt, self._under_way = self._under_way, None
        if attempt is not None:
            self._bench.record(StopRequested(attempt=attempt.number, by=by, reason=reason))
            attempt.end(stopped_by=by)

    def abandon(self) -> None:
        """End the running attempt although nothing can be recorded any more."""
        if self._under_way is not None:
            self._under_way.abandon()

    @property
    def progress(self) -> Progress | None:
        """Where the running attempt is."""
        return None if self._under_way is None else self._under_way.watch.progress

    @property
    def _own_lengths(self) -> bool:
        """Whether the running attempt shows the speed of the job itself."""
        return not self._longest or not self._parts

    def _record(self, event: Event) -> None:
        if isinstance(event, Progressed):
            self._steps.append(event)
            self._peaks = trials.highest(self._peaks, event.peaks)
        self._failed = self._failed or isinstance(event, FailureSeen)
        self._bench.record(event)

    def _start(self) -> Tried | None:
        bench = self._bench
        self._longest, steps = self._parts.pop(0)
        self._wanted = steps
        self._steps, self._failed = [], False
        self._attempt = bench.ledger.next_attempt
        job = bench.trial_job(str(self.number), longest=self._longest, steps=steps)
        try:
            handle = start(
                bench.runner,
                bench.framework,
                job,
                self.knobs,
                folder=bench.folder,
                number=self._attempt,
                resume=False,
                record=bench.record,
                trial=self.number,
                longest=self._longest,
            )
        except Unreachable as unreachable:
            bench.record(Ended(attempt=self._attempt, outcome=Lost(reason=unreachable.message)))
            return self._result(Result.LOST, reason=unreachable.message)
        now, folder = bench.clock.now(), bench.folder.attempt(self._attempt)
        watch = Watch(
            framework=bench.framework, job=job, attempt=self._attempt, folder=folder, known=(), now=now
        )
        self._under_way = UnderWay(
            handle,
            watch=watch,
            number=self._attempt,
            folder=folder,
            started_at=now,
            record=self._record,
            clock=bench.clock,
            interrupts=bench.interrupts,
        )
        return None

    def _end(self, by: str) -> Tried | None:
        """End the running attempt; the trial goes on with its next one, or is over."""
        attempt, self._under_way = self._under_way, None
        assert attempt is not None
        ended, evidence = attempt.end(stopped_by=by)
        self._seconds += ended.seconds
        if ended.held:
            raise Failure(f"memory did not come back: {ended.held}", hint="free it; then go on")
        if by == "slow":
            self._speed = trials.speed(self._steps)
            return self._result(Result.SLOW)
        if not isinstance(ended.outcome, Completed):
            return self._failure(ended, evidence)
        if self._own_lengths:
            self._speed = trials.speed(self._steps)
        return None if self._parts else self._result(Result.FITS)

    def _failure(self, ended: Ended, evidence: Evidence) -> Tried:
        """Record why the attempt failed and return what that says about the configuration."""
        bench = self._bench
        found = explain(
            evidence, number=self._attempt, folder=bench.folder.attempt(self._attempt), record=bench.record
        )
        reason = found.evidence[0].text.strip()[:160] if found.evidence else found.cause.value
        if found.cause in MEMORY_CAUSES:
            where = f"{found.cause.value} in {found.phase.value}"
            return self._result(Result.FAILS, reason=where, failure=found)
        lost = found.cause is Cause.INFRASTRUCTURE or isinstance(ended.outcome, Lost)
        return self._result(Result.LOST if lost else Result.REFUSED, reason=reason)

    def _result(self, result: Result, *, reason: str = "", failure: Diagnosis | None = None) -> Tried:
        job, cluster = self._bench.job, self._bench.cluster
        constraints = trials.excess(self._peaks, headroom=job.goal.headroom)
        if failure is not None:
            constraints |= trials.excess_of_failure(failure)
        if result is Result.REFUSED:
            constraints["refused"] = 1.0
        free = trials.free_share(self._peaks)
        rate, noise = self._speed if self._speed is not None else (None, None)
        gpus = cluster.nodes * cluster.gpus_per_node / max(1, job.search.parallel)
        return Tried(
            attempt=self._attempt,
            trial=self.number,
            knobs=self.knobs,
            purpose=self.purpose,
            result=result,
            tokens_per_second=None if rate is None else round(rate, 3),
            noise=None if noise is None else round(noise, 4),
            headroom=free if result is Result.FITS else None,
            constraints={name: round(value, 4) for name, value in constraints.items()},
            extrapolated=not self._bench.forced,
            reason=reason,
            seconds=round(self._seconds, 1),
            gpu_hours=round(gpus * self._seconds / 3600, 4),
        )
