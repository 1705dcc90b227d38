"""Measured memory in the driver: peaks by phase, recent readings of each host, series for forecasts."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from autotune.launchers.base import Exit
from autotune.orchestrator import messages
from autotune.policies.forecast.foresee import WARM_UP, Measured, foresee, host_growth
from autotune.policies.forecast.trend import WINDOW
from autotune.policies.values.events import Event
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.observation import HOST, Peak, ProcessMemory, Sample, StepDone
from autotune.policies.values.run.view import AttemptView

_LENGTHS = re.compile(r"(?i)response_?len(?:gth)?s?[_/](?:max|mean)\b")
_MOST_OF = 0.5  # share of a host's growth from which a process is named
_DEATH_S = 5.0
_READINGS = 150  # per node, a minute: readings after a death do not displace those before it
_FORGOTTEN_S = 1200.0  # longer than a runner waits for an unresponsive node


def raise_to(peaks: dict[str, Peak], phase: Phase | str, peak: Peak) -> None:
    """Keep a peak if it is the highest of its phase so far."""
    before = peaks.get(str(phase))
    if before is None or messages.fullness(peak) > messages.fullness(before):
        peaks[str(phase)] = peak


class PhasePeaks:
    """The highest memory use by phase: as the job prints it, or as sampled where it prints none."""

    def __init__(self) -> None:
        self._printed: dict[str, Peak] = {}  # since the last step
        self._sampled: dict[str, Peak] = {}  # since the last step
        self._highest: dict[str, Peak] = {}  # of those printed
        self._has_gpus = False  # whether the attempt's GPUs are known

    @property
    def since_step(self) -> dict[str, Peak]:
        """The peaks since the last completed step."""
        return dict(self._printed or self._sampled)

    def add(self, printed: Mapping[str, Peak]) -> None:
        """Add peaks that the job printed."""
        for phase, peak in printed.items():
            raise_to(self._printed, phase, peak)
            raise_to(self._highest, phase, peak)

    def take(self, sample: Sample, phase: Phase) -> None:
        """Add a sample of a node: of the attempt's GPUs, or of all GPUs before those are known."""
        ours = [card for card in sample.gpus if card.of_attempt]
        if ours and not self._has_gpus:
            self._has_gpus, self._sampled = True, {}  # they may include other GPUs
        if phase is not Phase.NONE:
            for card in ours if self._has_gpus else sample.gpus:
                peak = Peak(used_bytes=card.used_bytes, capacity_bytes=card.total_bytes, upper_bound=True)
                raise_to(self._sampled, phase, peak)

    def end_step(self) -> tuple[dict[str, Peak], dict[str, Peak]]:
        """Return the peaks since the last step and the highest of all steps, and begin the next step."""
        peaks = self._printed if self._highest else self._sampled
        highest = self._highest or self._sampled
        self._printed, self._sampled = {}, {}
        return peaks, highest


class HostMemory:
    """The use of each node's host memory in the last seconds of an attempt.

    A node's own last reading counts too: the node may have died long before the driver notices, and its clock
    may differ from that of the node that dates the attempt's end.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Readings] = {}
        self._ends: dict[str, float] = {}  # node -> its last reading when the end was noticed

    def take(self, sample: Sample, now: float) -> None:
        """Add a reading that arrived at a time of the driver's clock."""
        if sample.host_total_bytes:
            node = self._nodes.setdefault(sample.node, _Readings())
            node.shares.append((sample.at, sample.host_used_bytes / sample.host_total_bytes))
            node.arrived_at = now

    def ended(self) -> None:
        """Record that the end of the attempt was noticed; later readings do not count."""
        self._ends = self._ends or self._last()

    def share(self, ended: Exit | None) -> float | None:
        """Return the largest share of a node's memory in use in the last seconds, or around the exit."""
        at = ended.at if ended is not None else 0.0
        ends = self._ends or self._last()
        return max(
            (
                share
                for node, readings in self._nodes.items()
                for taken_at, share in readings.shares
                if (at and abs(taken_at - at) <= _DEATH_S)
                or (node in ends and 0 <= ends[node] - taken_at <= _DEATH_S)
            ),
            default=None,
        )

    def _last(self) -> dict[str, float]:
        newest = max((readings.arrived_at for readings in self._nodes.values()), default=0.0)
        return {
            node: readings.shares[-1][0]
            for node, readings in self._nodes.items()
            if newest - readings.arrived_at <= _FORGOTTEN_S
        }


@dataclass
class _Readings:
    """The readings of one node: time by its clock and share of memory in use."""

    shares: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_READINGS))
    arrived_at: float = 0.0  # the last, by the driver's clock


class Forecaster:
    """The memory series of one attempt and its latest forecast."""

    def __init__(self, *, known: AttemptView | None, longest_response: float | None) -> None:
        """Continue from the `known` events; `longest_response` is the job's limit in tokens."""
        self._longest = longest_response
        self._measured: deque[Measured] = deque(maxlen=WINDOW + WARM_UP)
        self._forecasts = dict(known.forecasts) if known is not None else {}
        self._host: Peak | None = None  # since the last step
        self._host_phase = Phase.NONE
        self._processes: dict[
            str, int
        ] = {}  # name -> most bytes of all of them on a node since the last step
        self._held: deque[dict[str, int]] = deque(maxlen=WINDOW)  # the same of the steps before
        self._limited: Peak | None = None  # of the process nearest to a limit of its own, since the last step
        self._limits: deque[Peak | None] = deque(maxlen=WINDOW + WARM_UP)  # the same of the steps before
        self._limited_process = ""
        self.process_limit_bytes = 0  # the smallest limit of a process's own memory; 0: none

    def take(self, sample: Sample, phase: Phase) -> None:
        """Add a reading of one node during a phase."""
        if not sample.host_total_bytes:
            return
        used, total = sample.host_used_bytes, sample.host_total_bytes
        by_name: dict[str, int] = {}
        for process in sample.processes:
            if process.limit_bytes:
                self._take_limit(process)
            by_name[process.name] = by_name.get(process.name, 0) + process.rss_bytes
        for name, held in by_name.items():
            self._processes[name] = max(held, self._processes.get(name, 0))
        if self._host is None or used / total > self._host.used_bytes / self._host.capacity_bytes:
            # Caches, the object store and other users' processes are in it, and end by themselves.
            self._host = Peak(
                used_bytes=used, capacity_bytes=total, component=Component.UNKNOWN, upper_bound=True
            )
            self._host_phase = phase

    def _take_limit(self, process: ProcessMemory) -> None:
        limit = process.limit_bytes
        self.process_limit_bytes = min(limit, self.process_limit_bytes or limit)
        peak = Peak(used_bytes=process.limited_bytes, capacity_bytes=limit, component=Component.UNKNOWN)
        if self._limited is None or messages.fullness(peak) > messages.fullness(self._limited):
            self._limited, self._limited_process = peak, process.name

    def stepped(
        self, done: StepDone, peaks: dict[str, Peak], *, attempt: int, of: int | None, new: bool
    ) -> list[Event]:
        """Add a step with the peaks since the previous one; return the forecast to report if it is `new`.

        `of` is the last step of the training.
        """
        lengths = {
            name: value
            for name, value in done.metrics.items()
            if _LENGTHS.search(name) and math.isfinite(value)
        }
        measured = Measured(
            step=done.step, peaks=peaks, host=self._host, host_phase=self._host_phase, lengths=lengths
        )
        self._measured.append(measured)
        self._limits.append(self._limited)
        is_limited = self._limited is not None and (
            self._host is None or messages.fullness(self._limited)[0] > messages.fullness(self._host)[0]
        )
        self._host = self._limited = None
        self._held.append(self._processes)
        self._processes = {}
        if not new:
            return []
        rows = self._limited_rows() if is_limited else tuple(self._measured)
        result = foresee(rows, attempt=attempt, last=self._forecasts, of=of, longest=self._longest)
        if is_limited and HOST in result:
            name = self._limited_process
            result[HOST] = msgspec.structs.replace(result[HOST], process=name, own_limit=True)
        elif HOST in result and result[HOST].holds:
            name = growing(self._held, per_step_bytes=result[HOST].per_step_bytes)
            result[HOST] = msgspec.structs.replace(result[HOST], process=name)
        self._forecasts |= result
        return list(result.values())

    def _limited_rows(self) -> tuple[Measured, ...]:
        """Return the measured steps with the process that is nearest to its own limit as the host."""
        pairs = zip(self._measured, self._limits, strict=True)
        return tuple(msgspec.structs.replace(row, host=limited) for row, limited in pairs)

    @property
    def host_growth(self) -> int | None:
        """Growth of the job's processes on the host in bytes per step; None if none or unknown."""
        rows = list(self._measured)[-len(self._held) :] if self._held else []
        own = (
            msgspec.structs.replace(
                row, host=msgspec.structs.replace(row.host, used_bytes=sum(held.values()))
            )
            for row, held in zip(rows, self._held, strict=True)
            if row.host is not None and held
        )
        return host_growth(tuple(own))


def growing(held: Sequence[Mapping[str, int]], *, per_step_bytes: int) -> str:
    """Return the name of the processes that account for most of a host's growth per step; empty if none.

    `held` has the bytes of processes by name, per step. Memory that no process holds belongs to the object
    store, a cache or another user.
    """
    rows = [each for each in held if each]
    third = len(rows) // 3
    if not third:
        return ""
    early, late = rows[:third], rows[-third:]
    gained = {
        name: median(each.get(name, 0) for each in late) - median(each.get(name, 0) for each in early)
        for name in late[-1]
    }
    name = max(gained, key=lambda each: gained[each], default="")
    most = _MOST_OF * per_step_bytes * (len(rows) - third)
    return name if name and gained[name] >= most > 0 else ""
