"""Follows one attempt: its output, progress and memory, and whether it failed or hangs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from autotune.launchers.base import OWN_SOURCE, Exit, Framework, Observed
from autotune.orchestrator.driver.hang_detector import HangDetector
from autotune.orchestrator.driver.log_writer import LogLines, LogWriter
from autotune.orchestrator.driver.memory import Forecaster, HostMemory, PhasePeaks, raise_to
from autotune.orchestrator.driver.scores import scores_of
from autotune.orchestrator.driver.witness import Suspicions
from autotune.orchestrator.run.directory import AttemptFolder
from autotune.orchestrator.run.storage import Persist, at_once
from autotune.policies.certificate.overlap import step_loss
from autotune.policies.diagnosis.job_records import cure_of
from autotune.policies.diagnosis.log_context import ends_traceback
from autotune.policies.diagnosis.rules.own import restarted, stalled
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.explain.secrets import without_secrets
from autotune.policies.values.diagnosis import Evidence, Finding
from autotune.policies.values.events import (
    CuredInPlace,
    Event,
    FailureSeen,
    GoalReached,
    Progressed,
    StopRequested,
)
from autotune.policies.values.failure import HOST_LIMIT, Phase
from autotune.policies.values.history import FORECAST, RESTART
from autotune.policies.values.job import Forecasting, Job
from autotune.policies.values.observation import (
    Cancelled,
    Completed,
    Crashed,
    Hung,
    Lost,
    Marker,
    Outcome,
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Sample,
    Saved,
    StepDone,
    StepTokens,
    TrainingDone,
    UpdateDone,
)
from autotune.policies.values.run.view import AttemptView
from autotune.policies.values.value import Value

_SIGKILL, _SIGTERM = 9, 15
# Ray's message for a worker whose connection ended without an exit (gcs, WorkerExitType).
_WORKER_GONE = "Worker exit type: SYSTEM_ERROR"
# Those of `accelerate launch` and of torchrun, which itself kills workers once one of them has failed.
_WORKER_KILLED = ("died with <Signals.SIGKILL: 9>", "Signal 9 (SIGKILL) received")
_REPORTED = 64  # steps by which a worker's own log may lag behind the driver's
_ANY_SCRIPT = "command"  # only its exit code shows that it is done


class Progress(Value, frozen=True, kw_only=True):
    """The progress of an attempt, as observers receive it."""

    phase: Phase = Phase.NONE
    step: int | None = None
    of: int | None = None
    tokens_per_second: float | None = None
    scores: dict[str, float] = {}  # loss and reward of the last step
    peaks: dict[str, Peak] = {}
    samples: dict[str, Sample] = {}  # the last of each node


class AttemptMonitor:
    """Turns an attempt's output and samples into events; those in `known` are not reported again."""

    def __init__(
        self,
        *,
        framework: Framework,
        job: Job,
        attempt: int,
        folder: AttemptFolder,
        now: float,
        known: AttemptView | None = None,
        saved: int | None = None,
        counts_from_zero: bool = False,
        longest_response: int | None = None,
        say: Callable[[str], None] = lambda _: None,
        persist: Persist = at_once,
    ) -> None:
        """Follow an attempt that should resume from the checkpoint of step `saved`, if there is one.

        `counts_from_zero`: an earlier attempt of the same script printed a step 0. `longest_response` is the
        job's limit in tokens. `say` reports that the log cannot be written; `persist` retries reading its
        record.
        """
        self._framework = framework
        self._job = job
        self._attempt = attempt
        self.files = LogWriter(folder.log, limit_bytes=job.log_limit_bytes, say=say, persist=persist)
        self._scanner = Scanner()
        steps = known.steps if known is not None else []
        self._recorded_steps = Counter(done.step for done in steps)
        self._took_s = {done.step: done.seconds for done in steps}
        self._late = bool(self._took_s)  # the output read may date from a time without a driver
        stop = known.stop if known is not None else None
        self._failure_known = known is not None and bool(known.failures)
        self._goal_known = known is not None and known.goal is not None
        self._stop_known = stop is not None
        self._suspicions = Suspicions()
        self._stepped_at_line = self._outlived = 0  # the log's lines at the last step and at the one before
        limits = job.recovery
        self._liveness = HangDetector(silence_s=limits.silence_s, stall_s=limits.stall_s, now=now)
        self._unread = False  # nothing was read since the supervisor stopped answering
        self._to_continue = saved
        self.saved: int | None = None  # the step of the attempt's own last checkpoint
        self._window: deque[dict[str, Peak]] = deque(maxlen=job.goal.steps)  # of consecutive steps
        self._peaks = PhasePeaks()
        self._resumed_from: int | None = None  # for the next step to report
        self._resumed_at: int | None = None  # the last that was reported
        self._losses: deque[float] = deque(maxlen=10_000)  # of the updates since the last step
        self._step_s: float | None = None  # of the last step
        self._reported: dict[int, StepDone] = {}  # the latest steps as printed
        self._forecaster = Forecaster(known=known, longest_response=longest_response)
        self._cures = {(cure.knob, cure.after) for cure in (known.cures if known is not None else ())}
        self._done = False
        self._hang = stop.reason if stop is not None and stop.by == "hang" else ""
        self._last_step = framework.last_step(job)
        self._counts_from_zero = counts_from_zero or any(done.step == 0 for done in steps)
        self._hosts = HostMemory()
        self.progress = Progress()

    @property
    def step(self) -> int | None:
        """The last completed step."""
        return self.progress.step

    @property
    def peaks_since_step(self) -> dict[str, Peak]:
        """The peaks of phases since the last completed step."""
        return self._peaks.since_step

    def catch_up(self, *, now: float) -> tuple[Event, ...]:
        """Process a part of the record; return events that follow from it and are not in the journal."""
        recorded = self.files.catch_up()
        self._late = self._late or bool(recorded)
        return tuple(self._read(recorded, now))

    def feed(self, observed: Observed, *, now: float) -> tuple[Event, ...]:
        """Process new output and samples; return the resulting events."""
        lines = self.files.write(observed.chunks, observed.samples)
        self._suspicions.sampled(observed.samples, now)
        events = self._read(lines, now)
        if observed.lost:  # data arriving with it date from after the attempt
            self._hosts.ended()
        if observed.killed_for_memory:
            self.expect_end()
            for line in observed.killed_for_memory:
                events += self._read(self.files.remark(line), now)
        for sample in observed.samples:
            self._take(sample, now)
        if observed.ending or observed.exit is not None:
            self._hosts.ended()
        if observed.chunks:
            self._liveness.heard(now)
        self._liveness.worked(self._suspicions.worked(now))
        self._unread = bool(observed.silent_s or (self._unread and not observed.samples))
        self._late = self._late and (observed.behind or self._unread)
        if self._unread:  # the runner does not reach the job, so a hang cannot be detected
            self._liveness.pause(now)
            return tuple(events)
        if observed.exit is None and not self._failure_known:
            confirmed = self._suspicions.confirmed(now)
            events += () if confirmed is None else [self._failure(*confirmed)]
        if observed.exit is None and not observed.lost and not self._failure_known and not self._stop_known:
            reason = self._liveness.hung(now)
            if reason:
                self._stop_known, self._hang = True, reason
                self._read(self.files.remark(stalled(reason)), now)
                events.append(StopRequested(attempt=self._attempt, by="hang", reason=reason))
        return tuple(events)

    def expect_end(self) -> None:
        """Stop looking for failures: the attempt is being stopped."""
        self._stop_known = self._failure_known = True

    def finish(self, *, now: float) -> tuple[Event, ...]:
        """Process incomplete lines and close the files."""
        return tuple(self._read(self.files.finish(), now))

    def outcome(self, ended: Exit | None, *, lost: str, stopped_by: str) -> Outcome:
        """Return how the attempt ended."""
        if stopped_by == "hang":
            return Hung(silent_s=round(self._liveness.silent_s, 1), reason=self._hang)
        known = self.progress.of or self._last_step or self._job.framework != _ANY_SCRIPT
        if (
            stopped_by in (FORECAST, RESTART)
            and known
            and ended is not None
            and ended.code == 0
            and self._complete
        ):
            return Completed()  # a script with an unknown last step may end whenever it wants
        if stopped_by:
            return Cancelled(by=stopped_by)
        causes = [f.cause for f in self._findings() if f.cause is not None and f.fatal != "never"]
        host = self._hosts.share(ended)
        host_full = host is not None and host >= HOST_LIMIT
        if ended is None:
            return (
                Crashed()
                if host_full or any(cause.is_oom for cause in causes)
                else Lost(reason=lost or "its supervisor is gone")
            )
        if ended.code == 0:
            return Completed() if self._complete else Crashed(exit_code=0)
        if ended.killed_by in (_SIGKILL, _SIGTERM) and not causes and not host_full:
            killed = ended.killed_by == _SIGKILL
            name = "SIGKILL" if killed else "SIGTERM"
            return Lost(reason=f"killed by {name}; the log gives no reason", killed=killed)
        findings = self._findings()
        gone = any(_WORKER_GONE in f.line.text for f in findings)
        if all(f.cause is None for f in findings):
            gone |= any(words in f.line.text for f in findings for words in _WORKER_KILLED)
        if gone and not causes and not host_full:
            return Lost(reason="a worker was killed or crashed; the log gives no reason", killed=True)
        return Crashed(exit_code=ended.code, signal=ended.signal)

    def evidence(self, outcome: Outcome, ended: Exit | None) -> Evidence:
        """Return the evidence for a diagnosis."""
        scanned: Evidence = self._scanner.evidence()
        return msgspec.structs.replace(
            scanned,
            findings=self._findings(),
            outcome=outcome,
            steps=self.progress.of or self._last_step,
            host_peak_share=self._hosts.share(ended),
            host_growth=self._forecaster.host_growth,
            process_limit_bytes=self._forecaster.process_limit_bytes,
            last_phase=self.progress.phase if scanned.last_phase is Phase.NONE else scanned.last_phase,
        )

    @property
    def _complete(self) -> bool:
        """Whether exit code 0 means that the training is complete; some programs hide their failures."""
        if self._done and self._framework.done_is_final:
            return True
        of, step = self.progress.of or self._last_step, self.progress.step
        if of is not None and step is not None:
            from_zero = self._counts_from_zero and self._job.framework == _ANY_SCRIPT
            return step >= of - from_zero  # AReaL prints the same end line after a failure
        if self._done:
            return True
        if of is not None:
            return False
        if self._framework.announces_end or (step is None and self._job.framework != _ANY_SCRIPT):
            return False
        last = self._findings(outlived=self._stepped_at_line)
        return not any(f.cause is not None and f.fatal != "never" for f in last)

    def _findings(self, *, outlived: int | None = None) -> tuple[Finding, ...]:
        past = self._outlived if outlived is None else outlived
        return self._suspicions.without_quotations(self._scanner.evidence().findings, outlived=past)

    def _read(self, parts: list[LogLines], now: float) -> list[Event]:
        events: list[Event] = []
        self._scanner.make_room()
        for lines in parts:
            if not self._skimmed(lines, events, now):
                self._scanned(lines, events, now)
        return events

    def _skimmed(self, lines: LogLines, events: list[Event], now: float) -> bool:
        """Process lines that contain only markers; false if each line has to be read."""
        if lines.source == OWN_SOURCE or b"\r" in lines.data or not self._suspicions.quiet:
            return False
        rows = lines.data.decode("utf-8", "replace").split("\n")
        if not self._scanner.skip(rows, lines.data, number=lines.number, source=lines.source):
            return False
        for row in rows if self._framework.marks(lines.data) else ():
            self._take_marker(self._framework.marker(row), events, now)
        return True

    def _scanned(self, lines: LogLines, events: list[Event], now: float) -> None:
        for line in lines:
            events += self._cured(line.text) if line.source == OWN_SOURCE else ()
            self._suspicions.printed(line, now)
            self._take_marker(self._framework.marker(line.text), events, now)
            for finding in self._scanner.line(line.text, number=line.number, source=line.source):
                if line.source != OWN_SOURCE:
                    memory = finding.cause is not None and finding.cause.is_memory
                    traceback = memory and ends_traceback(self._scanner.recent(line.source))
                    self._suspicions.suspect(finding, line, now, traceback=traceback)
                elif finding.fatal == "always" and not self._failure_known:
                    events.append(self._failure(finding, "a record by autotune's own code"))

    def _cured(self, text: str) -> list[Event]:
        """Return the cure in a record by autotune's own code, unless it is known."""
        cure = cure_of(text)
        if cure is None or (cure.knob, cure.after) in self._cures:
            return []
        failure = cure.failure
        if failure.step is None:
            return []
        self._cures.add((cure.knob, cure.after))
        return [
            CuredInPlace(
                attempt=self._attempt,
                cause=failure.cause,
                phase=failure.phase,
                component=failure.component,
                rank=failure.rank,
                step=failure.step,
                facts=failure.facts,
                knob=cure.knob,
                before=cure.before,
                after=cure.after,
            )
        ]

    def _take_marker(self, marker: Marker | None, events: list[Event], now: float) -> None:
        if isinstance(marker, StepTokens):
            events[:] = self._counted(events, marker.tokens)
        elif marker is not None and not (isinstance(marker, StepDone) and self._is_repeated(marker)):
            events += self._mark(marker, now)

    def _is_repeated(self, done: StepDone) -> bool:
        """Return whether a step was read before; Ray forwards lines of workers' logs to the driver."""
        if self._reported.get(done.step) == done:
            return True
        self._reported[done.step] = done
        if len(self._reported) > _REPORTED:
            del self._reported[next(iter(self._reported))]
        return False

    def _failure(self, finding: Finding, witness: str) -> FailureSeen:
        self._failure_known = True
        finding = msgspec.structs.replace(finding, line=without_secrets(finding.line))
        return FailureSeen(attempt=self._attempt, finding=finding, witness=witness)

    def _mark(self, marker: Marker, now: float) -> list[Event]:
        match marker:
            case PhaseStarted(phase=phase):
                self._suspicions.passed(marker, now)
                self.progress = msgspec.structs.replace(self.progress, phase=phase)
            case PhaseEnded(phase=phase, peak=peak):
                self._suspicions.passed(marker, now)
                if self.progress.phase is phase:
                    self.progress = msgspec.structs.replace(self.progress, phase=Phase.NONE)
                if peak is not None:
                    self._peaks.add({phase: peak})
            case UpdateDone(loss=loss):
                self._losses.append(loss)
            case Resumed(step=step) if step != self._resumed_at:  # otherwise the same line in another log
                self._resumed_from = self._resumed_at = step
            case Saved(step=step, last=last):
                self.saved = step if step is not None else (self.progress.step or 0) + (not last)
            case TrainingDone():
                self._done = True
            case StepDone():
                self._suspicions.passed(marker, now)
                if not self._failure_known:  # a step of a running peer does not refute a known failure
                    self._scanner.progress(marker.step)
                    self._outlived, self._stepped_at_line = self._stepped_at_line, self._scanner.lines
                    self._scanner.outlive(self._outlived)
                return self._stepped(marker, now)
        return []

    def _stepped(self, done: StepDone, now: float) -> list[Event]:
        if done.of and self._last_step:  # AReaL's lines count the steps of all epochs, and it ends before
            done = msgspec.structs.replace(done, of=min(done.of, self._last_step))
        restart = self._restarted(done, now) if self.progress.step is None else []
        if done.saved:
            self.saved = done.step
        self._counts_from_zero = self._counts_from_zero or done.step == 0
        self._peaks.add(done.peaks)
        seconds = self._took_s.pop(done.step, None) if done.seconds is None else done.seconds
        seconds = self._step_s = self._liveness.stepped(now, seconds=seconds, late=self._late)
        peaks, highest = self._peaks.end_step()
        scores = scores_of(done.metrics, loss=self._framework.loss)
        if self.progress.step is not None and done.step != self.progress.step + 1:
            self._window.clear()
        self._window.append(peaks)
        self.progress = msgspec.structs.replace(
            self.progress,
            step=done.step,
            of=done.of or self._last_step,
            tokens_per_second=done.tokens_per_second,
            scores=scores,
            peaks=highest,
        )
        event = Progressed(
            attempt=self._attempt,
            step=done.step,
            of=done.of,
            seconds=None if seconds is None else round(seconds, 3),
            tokens_per_second=done.tokens_per_second,
            peaks=peaks,
            resumed_from=self._resumed_from,
            saved=self.saved,
            scores=scores,
            loss=step_loss(done.metrics, self._framework.loss, updates=self._losses),
        )
        self._losses.clear()
        self._resumed_from = None
        events: list[Event] = []
        again = self._recorded_steps[done.step] > 0  # an earlier driver has recorded it
        forecasts = self._job.recovery.forecast is not Forecasting.OFF
        is_new = forecasts and not (again or self._failure_known)
        last = done.of or self._last_step
        foreseen = self._forecaster.stepped(done, peaks, attempt=self._attempt, of=last, new=is_new)
        if again:
            self._recorded_steps[done.step] -= 1
        else:
            events += [event, *foreseen]
        stable = len(self._window) == self._window.maxlen
        if stable and not (self._goal_known or self._failure_known):
            events.append(self._goal(done))
        return restart + events

    def _counted(self, events: list[Event], tokens: float) -> list[Event]:
        """Return the events with the last step's throughput; steps reported by an earlier poll get none."""
        if not self._step_s:
            return events
        rate = round(tokens / self._step_s, 3)
        self.progress = msgspec.structs.replace(self.progress, tokens_per_second=rate)
        return [
            msgspec.structs.replace(event, tokens_per_second=rate)
            if isinstance(event, Progressed | GoalReached) and event.step == self.progress.step
            else event
            for event in events
        ]

    def _restarted(self, done: StepDone, now: float) -> list[Event]:
        """Return the failure of an attempt that should have resumed but started over."""
        saved = self._to_continue
        if saved is None or done.step > min(saved, 1) or self._failure_known:
            return []
        return self._read(self.files.remark(restarted(step=done.step, saved=saved)), now)

    def _goal(self, done: StepDone) -> GoalReached:
        self._goal_known = True
        peaks: dict[str, Peak] = {}
        for step in self._window:
            for phase, peak in step.items():
                raise_to(peaks, phase, peak)
        free = min(
            (1 - p.used_bytes / p.capacity_bytes for p in peaks.values() if p.capacity_bytes), default=1.0
        )
        return GoalReached(
            attempt=self._attempt,
            step=done.step,
            marginal=free < self._job.goal.headroom,
            headroom=round(free, 4),
            peaks=peaks,
            tokens_per_second=done.tokens_per_second,
        )

    def _take(self, sample: Sample, now: float) -> None:
        self._hosts.take(sample, now)
        samples = {**self.progress.samples, sample.node: sample}
        self.progress = msgspec.structs.replace(self.progress, samples=samples)
        self._forecaster.take(sample, self.progress.phase)
        self._peaks.take(sample, self.progress.phase)
