"""The measured memory of one attempt over time, with its phases.

Logs contain durations but no times: the phases of a step are placed before the time when its end was
observed.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.report.document import PhaseSpan, Series, Timeline
from autotune.orchestrator.run import directory, memory_record
from autotune.policies.values.observation import Marker, PhaseEnded, PhaseStarted, StepDone
from autotune.policies.values.run.view import AttemptView

_POINTS = 1500  # per series
_DEVICES, _HOSTS, _PROCESSES = 8, 2, 4  # shown series
_RAY, _IDLE, _WORKER = "ray::", "IDLE", "Ray worker"
_SPANS = 400  # last phases and steps that are shown

_Points = dict[float, int]  # seconds since the attempt began -> bytes


def timeline_of(
    run: directory.RunFolder, attempt: AttemptView, markers: tuple[Marker, ...]
) -> Timeline | None:
    """Return the timeline of an attempt; None if no memory was recorded."""
    begin = seconds_of(attempt.started.at)
    devices, hosts = _series(run.attempt(attempt.number), begin)
    if not devices and not hosts:
        return None
    for series in (devices, hosts):
        series.sort(key=lambda each: (-max(each.bytes), each.name))
    drawn = [*sorted(devices[:_DEVICES], key=lambda s: s.name), *hosts[:_HOSTS]]
    ends = {done.step: seconds_of(done.at) - begin for done in attempt.steps}
    last = None if attempt.ended is None else seconds_of(attempt.ended.at) - begin
    return Timeline(
        attempt=attempt.number,
        series=tuple(drawn),
        left_out=len(devices) + len(hosts) - len(drawn),
        phases=tuple(_spans(markers, ends, last)[-_SPANS:]),
        steps=tuple((step, round(end, 3)) for step, end in sorted(ends.items())[-_SPANS:]),
    )


def _series(attempt: directory.AttemptFolder, begin: float) -> tuple[list[Series], list[Series]]:
    """Return the series of GPUs, or of processes if there are none, and of hosts."""
    used: dict[str, _Points] = {}
    capacity: dict[str, int] = {}
    processes: dict[tuple[str, int], _Points] = {}  # by node and pid
    names: dict[tuple[str, int], str] = {}
    limits: dict[tuple[str, int], int] = {}
    hosts: dict[str, _Points] = {}
    own: set[str] = set()

    def add(node: str, at: float, host: tuple[int, int], cards: Iterable[tuple[int, int, int, bool]]) -> None:
        """Take the use and the size of the host and of each GPU, with its index and whether it is ours."""
        hosts.setdefault(node, {})[at], capacity[node] = host
        for index, used_bytes, total_bytes, of_attempt in cards:
            name = f"{node} GPU {index}"
            used.setdefault(name, {})[at], capacity[name] = used_bytes, total_bytes
            own.update({name} if of_attempt else ())

    samples = memory_record.samples_of(attempt.path)
    since = {s.node: s.at for s in reversed(samples)}
    for span in memory_record.minutes_of(attempt.path):
        if span.until >= since.get(span.node, float("inf")):
            continue  # covered by samples
        at = round((span.at + span.until) / 2 - begin, 2)
        spans = ((c.index, c.used.most, c.total_bytes, c.of_attempt) for c in span.gpus)
        add(span.node, at, (span.host.most, span.host_total_bytes), spans)
    for sample in samples:
        at = round(sample.at - begin, 2)
        gpus = ((g.index, g.used_bytes, g.total_bytes, g.of_attempt) for g in sample.gpus)
        add(sample.node, at, (sample.host_used_bytes, sample.host_total_bytes), gpus)
        for process in sample.processes:
            key = (sample.node, process.pid)
            if process.limit_bytes:
                limits[key] = process.limit_bytes
            held = process.limited_bytes if process.limit_bytes else process.rss_bytes
            processes.setdefault(key, {})[at] = held
            names[key] = legend_name(process.name, names.get(key, ""))
    cards = [_one(n, points, capacity[n]) for n, points in used.items() if not own or n in own]
    if not used:
        largest = sorted(processes.items(), key=lambda item: (-max(item[1].values()), item[0]))[:_PROCESSES]
        cards = [_one(f"{names[key]} (pid {key[1]})", points, limits.get(key)) for key, points in largest]
    return cards, [_one(f"{n} host", points, capacity[n], host=True) for n, points in hosts.items()]


def legend_name(name: str, before: str = "") -> str:
    """Return the name of a process for the legend: what a Ray worker runs, or ran last.

    A worker of Ray is titled `ray::IDLE` between tasks, `ray::Trainer` or `ray::Trainer.step` in them.
    """
    if not name.startswith(_RAY):
        return name
    runs = name.removeprefix(_RAY).partition(".")[0]
    return before or _WORKER if runs == _IDLE else f"{_WORKER} {runs}"


def _one(name: str, points: _Points, capacity: int | None, *, host: bool = False) -> Series:
    """Return a series of at most `_POINTS` points; of neighbouring points the highest is kept."""
    every = sorted(points.items())
    size = -(-len(every) // _POINTS)
    kept = [max(every[at : at + size], key=lambda point: point[1]) for at in range(0, len(every), size)]
    return Series(
        name=name,
        seconds=tuple(at for at, _ in kept),
        bytes=tuple(value for _, value in kept),
        capacity=capacity or None,
        host=host,
    )


def _spans(markers: tuple[Marker, ...], ends: dict[int, float], last: float | None) -> list[PhaseSpan]:
    spans: list[PhaseSpan] = []
    waiting: list[PhaseEnded] = []
    open_phase, before = "", 0.0

    def lay(until: float) -> None:
        nonlocal before
        at, laid = until, list[PhaseSpan]()
        for ended in reversed(waiting):
            begin = max(before, at - ended.seconds)
            if begin < at:
                laid.append(PhaseSpan(phase=ended.phase.value, begin=round(begin, 3), end=round(at, 3)))
            at = begin
        spans.extend(reversed(laid))
        waiting.clear()
        before = until

    for marker in markers:
        match marker:
            case PhaseStarted(phase=phase):
                open_phase = phase.value
            case PhaseEnded():
                waiting.append(marker)
                open_phase = ""
            case StepDone(step=step) if step in ends:
                lay(ends[step])
            case _:
                pass
    if last is not None and open_phase:
        # It began after the waiting phases, which follow the last known step.
        begin = min(last, before + sum(each.seconds for each in waiting))
        lay(begin)
        spans.append(PhaseSpan(phase=open_phase, begin=round(begin, 3), end=round(last, 3)))
    elif last is not None:
        lay(last)
    return spans
