"""Decides which failure lines in a job's output are confirmed by a second observation.

The output of a job is untrusted: models print tracebacks, judges print verdicts, prompts are about errors. A
line that looks like a failure is a suspicion until the process that printed it has ended, or until there is
no step or phase for a while in which the process, or the whole attempt, does no work. Records by autotune's
own code have a separate source and need no confirmation.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import msgspec

from autotune.launchers.base import OWN_SOURCE
from autotune.orchestrator.driver.log_writer import LogLine
from autotune.policies.diagnosis.log_prefixes import parsed, printers_of
from autotune.policies.diagnosis.phase_patterns import component_of
from autotune.policies.diagnosis.rules.catalogue import BY_NAME
from autotune.policies.diagnosis.rules.own import OWN
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER
from autotune.policies.values.diagnosis import BUILTIN_FAILURE, Finding
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import PhaseEnded, PhaseStarted, Sample, StepDone

SILENCE_S = 15.0  # an out-of-memory line can be a warning while the run goes on
_SILENCE_DURATIONS = 2
_UNWINDING_S = 5.0  # work after the line that still belongs to the failure: a traceback, a dump
# Processes with a GPU may be idle while others work, as engines are in every step. Such a process must have
# worked until the line, and be idle for long before the first step.
_JUST_WORKED_S = 30.0
_SILENCE_UNKNOWN_S = 600.0
# A rank that ran out of memory may stay alive and idle while its peers wait in a collective with busy GPUs.
# In a container NVML lists no processes, so the rank cannot be tied to a GPU. This is the default timeout of
# an NCCL collective in torch.distributed (default_pg_nccl_timeout); frameworks raise it to hours.
FAILED_RANK_S = 600.0
_FAILED_RANK_STEPS = 3
_ON_CARDS = (Component.TRAINER, Component.REF, Component.CRITIC, Component.ROLLOUT)
_LAST_WORDS_S = 10.0  # a process that keeps printing for longer did not fail at that line
_MOST = 256  # printers to track
_ORIGINS = 2000  # findings whose printer is kept
_RECENT = 50
_WORKER = re.compile(r"worker-(\d+)\.\w+(?:@(.+))?")
_OWN = frozenset(rule.name for rule in OWN)
# A consequence of other failures does not make an earlier line a quotation.
_FOLLOWS = (Cause.INFRASTRUCTURE, Cause.HANG)


class _Printer(NamedTuple):
    """The printer of a line: a process if its id is known, otherwise a log source."""

    name: str
    pid: int | None = None
    address: str = ""  # of its node; empty: unknown
    tag: str = ""  # the rank, role or container that prefixes some of its lines


@dataclass(kw_only=True)
class _Suspicion:
    """Failure lines of one printer since the last marker."""

    finding: Finding  # the first of the latest burst
    at: float  # of the first line
    burst_at: float
    always: bool  # one of the burst is always fatal
    worked_until: bool  # the process was working when it printed the first
    traceback: bool  # one of the burst ends a complete traceback of a memory failure
    by: _Printer  # of the first, with its tag
    phase_passed: bool = False  # another process began or ended a phase since


class _Durations:
    """Durations of phases and steps."""

    def __init__(self) -> None:
        self._phases: dict[Phase, deque[float]] = {}
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._open: tuple[Phase, float] | None = None
        self._step: tuple[int, float] | None = None

    def passed(self, marker: PhaseStarted | PhaseEnded | StepDone, now: float) -> None:
        if isinstance(marker, StepDone):
            self._stepped(marker.step, now)
        if isinstance(marker, PhaseEnded) and marker.seconds:
            self._add(marker.phase, marker.seconds)
        elif self._open is not None:
            self._add(self._open[0], now - self._open[1])
        self._open = (marker.phase, now) if isinstance(marker, PhaseStarted) else None

    def _add(self, phase: Phase, seconds: float) -> None:
        if seconds > 0:  # a log that is reread arrives all at once
            self._phases.setdefault(phase, deque(maxlen=_RECENT)).append(seconds)

    def _stepped(self, step: int, now: float) -> None:
        """Measure the time between steps by our own clock, because any text may look like a step."""
        if self._step is not None and step == self._step[0] + 1 and now > self._step[1]:
            self._steps.append(now - self._step[1])
        self._step = step, now

    @property
    def step_s(self) -> float | None:
        """The usual duration of a step in seconds."""
        return median(self._steps) if self._steps else None

    @property
    def usual_s(self) -> float | None:
        """The usual duration in seconds of the current phase, otherwise of a step."""
        known = self._phases.get(self._open[0]) if self._open is not None else None
        return median(known) if known else self.step_s


class Suspicions:
    """Failure lines in an attempt's output, and the observations that confirm or refute them."""

    def __init__(self) -> None:
        self._processes = ProcessTable()
        self._durations = _Durations()
        self._open: dict[_Printer, _Suspicion] = {}
        self._printed: dict[_Printer, float] = {}
        self._origins: dict[int, tuple[_Printer, float]] = {}  # line -> who printed it, when
        self._stepped = float("-inf")

    def sampled(self, samples: tuple[Sample, ...], now: float) -> None:
        """Add samples, before the lines that arrived with them; after an attach they are old."""
        latest = {sample.node: sample.at for sample in samples}
        for sample in samples:
            self._processes.take(sample, now - max(0.0, latest[sample.node] - sample.at))

    def worked(self, now: float) -> float:
        """Return when any process of the attempt last worked; `now` while samples of a node are missing."""
        return self._processes.attempt_worked(now)

    @property
    def quiet(self) -> bool:
        """Whether there are no suspicions, so that printers need not be tracked."""
        return not self._open and not self._origins

    def printed(self, line: LogLine, now: float) -> None:
        """Record a line: a printer that keeps printing did not fail at an earlier line."""
        if self.quiet:
            return
        printer = self._printer(line)
        for each in {printer, _tagged(printer, line)}:
            if len(self._printed) >= _MOST and each not in self._printed:
                self._printed.pop(next(iter(self._printed)))
            self._printed[each] = now

    def suspect(self, finding: Finding, line: LogLine, now: float, *, traceback: bool = False) -> None:
        """Record a failure line; `traceback`: it ends a complete traceback of a memory failure."""
        printer = self._printer(line)
        if finding.cause is not None:
            while len(self._origins) >= _ORIGINS:
                self._origins.pop(next(iter(self._origins)))
            self._origins[finding.line.line] = printer, now
        if finding.fatal == NEVER:
            return
        before = self._open.get(printer)
        if before is None or before.phase_passed:
            if len(self._open) >= _MOST:
                self._open.pop(next(iter(self._open)))
            self._open[printer] = _Suspicion(
                finding=finding,
                at=now,
                burst_at=now,
                always=finding.fatal == ALWAYS,
                worked_until=self._just_worked(printer, now),
                traceback=traceback,
                by=_tagged(printer, line),
            )
        elif now - before.burst_at >= _LAST_WORDS_S:
            before.finding, before.burst_at, before.by = finding, now, _tagged(printer, line)
            before.always, before.traceback = finding.fatal == ALWAYS, traceback
        else:
            before.always |= finding.fatal == ALWAYS
            before.traceback |= traceback

    def passed(self, marker: PhaseStarted | PhaseEnded | StepDone, now: float) -> None:
        """Drop suspicions that a marker refutes: a step all, a phase those of live processes.

        Peers may continue with phases for a while after a rank has failed with a traceback.
        """
        self._durations.passed(marker, now)
        step = isinstance(marker, StepDone)
        if step:
            self._origins = {line: by for line, by in self._origins.items() if by[1] >= self._stepped}
            self._stepped = now
        kept = {}
        for printer, suspicion in self._open.items():
            ended = self._ended(printer)
            suspicion.phase_passed = ended is None
            outlives = suspicion.traceback and not step if ended is None else not step or ended >= now
            if outlives and not self._prints_on(printer, suspicion.burst_at):
                kept[printer] = suspicion
        self._open = kept

    def confirmed(self, now: float) -> tuple[Finding, str] | None:
        """Return the first confirmed line, and a description of what confirms it."""
        for printer, suspicion in self._open.items():
            witness = self._witness(printer, suspicion, now)
            if witness:
                return suspicion.finding, witness
        return None

    def without_quotations(self, findings: tuple[Finding, ...], *, outlived: int) -> tuple[Finding, ...]:
        """Return the findings of a finished attempt, with quotations marked as never fatal.

        Two steps follow the line `outlived`. A line whose printer continued for long is a quotation if its
        printer's last output contains another failure.
        """
        records = {f.line.text for f in findings if f.source == OWN_SOURCE}
        findings = tuple(
            _never(f) if f.line.line <= outlived or _forged(f, records=records) else f for f in findings
        )
        real = any(_strong(f) and f.cause not in _FOLLOWS and not self._went_on(f) for f in findings)
        return tuple(_never(f) if real and self._went_on(f) else f for f in findings)

    def _witness(self, printer: _Printer, suspicion: _Suspicion, now: float) -> str:
        failed = self._failed_rank(printer, suspicion, now)
        if failed or suspicion.phase_passed:
            return failed
        if self._ended(printer) is not None and not self._prints_on(printer, suspicion.burst_at):
            if suspicion.always or now - suspicion.burst_at >= SILENCE_S:
                return f"process {printer.pid}, which printed it, ended"
            return ""
        silent_s = now - suspicion.at
        silence = f"no step or phase for {silent_s:.0f} s"
        usual_s, step_s = self._durations.usual_s, self._durations.step_s
        window_s = _window_s(usual_s)
        if silent_s < window_s:
            return ""
        if now - _idle_since(suspicion.at, self._processes.attempt_worked(now)) >= window_s:
            return f"{silence} while nothing of the job works"
        alone_s = max(window_s, _window_s(step_s) if step_s else _SILENCE_UNKNOWN_S)
        worked = self._worked(printer) if suspicion.worked_until else None
        if worked is not None and now - _idle_since(suspicion.at, worked) >= alone_s:
            return f"{silence} while process {printer.pid}, which printed it, is idle"
        return ""

    def _failed_rank(self, printer: _Printer, suspicion: _Suspicion, now: float) -> str:
        """Return a description if a trainer or engine has been idle since its memory failure's traceback."""
        by = suspicion.by
        told_apart = by.pid is not None or by.tag
        if not suspicion.traceback or (told_apart and self._prints_on(by, suspicion.burst_at)):
            return ""
        least_s = max(FAILED_RANK_S, _FAILED_RANK_STEPS * (self._durations.step_s or 0.0))
        silence = f"no step for {now - suspicion.at:.0f} s while process"
        if printer.pid is None:
            pid = self._stopped_with(suspicion, now)
            if pid is None or now - suspicion.burst_at < least_s:
                return ""
            return f"{silence} {pid}, which worked until the traceback of a memory failure, is idle"
        processes = self._processes.living(printer.pid, printer.address, now)
        names = (f"{printer.name} {process.name}" for process in processes)
        if not any(component_of(name) in _ON_CARDS for name in names):
            return ""
        worked = max(process.idle_since for process in processes)
        if now - _idle_since(suspicion.burst_at, worked) < least_s:
            return ""
        rests = "which printed the traceback of a memory failure, neither prints nor works"
        return f"{silence} {printer.pid}, {rests}"

    def _stopped_with(self, suspicion: _Suspicion, now: float) -> int | None:
        """Return the process that worked until a traceback and not since, if the log names none.

        None before the first step, and if stack frames show neither trainer nor engine.
        """
        component, at = suspicion.finding.component, suspicion.burst_at
        if component not in _ON_CARDS or self._durations.step_s is None:
            return None
        stopped = self._processes.stopped(at - _JUST_WORKED_S, at + _UNWINDING_S, now)
        own = (Component.UNKNOWN, component)
        return next((pid for pid, process in stopped if component_of(process.name) in own), None)

    def _printer(self, line: LogLine) -> _Printer:
        """Return the printer of a line, from its file or from a prefix that names one of our processes."""
        printer = _Printer(name=line.source)
        if (worker := _WORKER.fullmatch(line.source)) is not None:
            printer = _Printer(line.source.partition(".")[0], int(worker[1]), worker[2] or "")
        for named in printers_of(line.text):
            address = named.address or printer.address
            daemon = named.pid is None and not line.source
            if daemon or (named.pid is not None and self._processes.known(named.pid, address)):
                printer = _Printer(named.prefix, named.pid, address)
        return printer

    def _ended(self, printer: _Printer) -> float | None:
        return None if printer.pid is None else self._processes.ended(printer.pid, printer.address)

    def _worked(self, printer: _Printer) -> float | None:
        return None if printer.pid is None else self._processes.worked(printer.pid, printer.address)

    def _just_worked(self, printer: _Printer, now: float) -> bool:
        worked = self._worked(printer)
        return worked is not None and now - worked <= _JUST_WORKED_S

    def _prints_on(self, printer: _Printer, since: float) -> bool:
        return self._printed.get(printer, since) - since >= _LAST_WORDS_S

    def _went_on(self, finding: Finding) -> bool:
        origin = self._origins.get(finding.line.line)
        return origin is not None and self._prints_on(*origin)


def _tagged(printer: _Printer, line: LogLine) -> _Printer:
    """Return a printer without a process id, with the line's tag."""
    return printer if printer.pid is not None else printer._replace(tag=parsed(line.text).tag)


def _idle_since(at: float, worked: float) -> float:
    """Return since when there was no work after a line, apart from the failure's own handling."""
    return worked if worked > at + _UNWINDING_S else at


def _window_s(usual_s: float | None) -> float:
    return max(SILENCE_S, _SILENCE_DURATIONS * (usual_s or 0.0))


def _never(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, fatal=NEVER)


def _forged(finding: Finding, *, records: set[str]) -> bool:
    """Return whether a line imitates a record without being one."""
    line = finding.line
    if finding.source == OWN_SOURCE:
        return False
    return line.rule in _OWN or (line.rule == BUILTIN_FAILURE and bool(records) and line.text not in records)


def _strong(finding: Finding) -> bool:
    return finding.cause is not None and finding.fatal != NEVER and not BY_NAME[finding.line.rule].weak


_BUSY_CORES = 0.2  # all idle Ray workers of a small node stay below this
_BUSY_CORES_EACH = 0.01  # each idle Ray worker stays below this
_BUSY_GPU_SHARE = 0.05
_REMEMBERED_S = 60.0  # a log may be read this long after its process has ended
_STALE_S = 10.0  # samples arrive twice a second; without them work cannot be detected
_GIVEN_UP_S = 900.0  # as long as a runner waits for an unresponsive node
# Ray workers that are idle or run a task: Ray may end the former and repeats the latter's task. A process
# that ends before a sample shows its name may have been one.
_SETTLED_S = 5.0
_REPLACEABLE = re.compile(r"ray::(?:IDLE|[a-z_])")


class Process(NamedTuple):
    """A live process as seen in the samples; times are on the driver's clock."""

    name: str
    since: float  # time of the first sample with it
    on_card: bool  # it or a descendant uses a GPU
    worked: float | None  # when it or a descendant last used a CPU

    @property
    def idle_since(self) -> float:
        """When it last used a CPU, within the samples kept."""
        return self.since if self.worked is None else self.worked


class ProcessTable:
    """The processes of an attempt according to its samples; times are on the driver's clock."""

    def __init__(self) -> None:
        self._alive: dict[str, dict[int, Process]] = {}  # by node and pid
        self._ended: dict[tuple[str, int], float] = {}
        self._attempt_worked = float("-inf")
        self._sampled: dict[str, float] = {}  # node -> its latest sample

    def take(self, sample: Sample, now: float) -> None:
        """Add a sample taken at a time of the driver's clock."""
        node = sample.node
        self._sampled[node] = now
        before = self._alive.get(node, {})
        alive = {}
        for reading in sample.processes:
            earlier = before.get(reading.pid, Process(reading.name, now, on_card=False, worked=None))
            alive[reading.pid] = Process(
                reading.name,
                earlier.since,
                on_card=earlier.on_card or reading.gpu,
                worked=now if reading.cpu_share > _BUSY_CORES else earlier.worked,
            )
        for pid, process in before.items():
            settled = now - process.since >= _SETTLED_S
            if pid not in alive and settled and not _REPLACEABLE.match(process.name):
                self._ended[node, pid] = now
        self._alive[node] = alive
        self._ended = {key: at for key, at in self._ended.items() if now - at <= _REMEMBERED_S}
        idle_cores = max(_BUSY_CORES, _BUSY_CORES_EACH * len(alive))
        if sample.cpu_share > idle_cores or sample.gpu_share > _BUSY_GPU_SHARE:
            self._attempt_worked = now

    def known(self, pid: int, address: str) -> bool:
        """Return whether it is, or was until recently, a process of the attempt."""
        return any(self._living(pid, address)) or self.ended(pid, address) is not None

    def ended(self, pid: int, address: str) -> float | None:
        """Return when a process was first seen to have ended; None while it lives or if it was never seen.

        Without an address the process must be gone from every node.
        """
        if any(self._living(pid, address)):
            return None
        ends = (at for (node, other), at in self._ended.items() if other == pid and address in ("", node))
        return max(ends, default=None)

    def worked(self, pid: int, address: str) -> float | None:
        """Return when a live process with a GPU last worked, if ever.

        Processes without a GPU may be idle for most of a step, such as those that compute rewards.
        """
        living = self._living(pid, address)
        times = (process.worked for process in living if process.on_card and process.worked is not None)
        return max(times, default=None)

    def living(self, pid: int, address: str, now: float) -> tuple[Process, ...]:
        """Return the live processes with an id; none while samples of a node with one are late.

        Without an address several nodes may have one.
        """
        nodes = (node for node, alive in self._alive.items() if pid in alive and address in ("", node))
        late = any(now - self._sampled[node] > _STALE_S for node in nodes)
        return () if late else tuple(self._living(pid, address))

    def stopped(self, first: float, last: float, now: float) -> Iterator[tuple[int, Process]]:
        """Yield the live processes that last worked between two times, on nodes whose samples arrive."""
        for node, alive in self._alive.items():
            if now - self._sampled[node] <= _STALE_S:
                yield from (
                    (pid, each) for pid, each in alive.items() if first <= (each.worked or 0.0) <= last
                )

    def attempt_worked(self, now: float) -> float:
        """Return when any process of the attempt last worked; `now` while samples of a node are missing."""
        return now if self.unseen(now) else self._attempt_worked

    def unseen(self, now: float) -> bool:
        """Return whether samples of a node with processes of the attempt, or of every node, are late.

        A node without samples for as long as a runner waits for it is ignored.
        """
        held = [node for node in self._sampled if self._alive[node]] or self._newest()
        return any(_STALE_S < now - self._sampled[node] < _GIVEN_UP_S for node in held)

    def _newest(self) -> list[str]:
        return [max(self._sampled, key=self._sampled.__getitem__)] if self._sampled else []

    def _living(self, pid: int, address: str) -> Iterator[Process]:
        return (alive[pid] for node, alive in self._alive.items() if pid in alive and address in ("", node))
