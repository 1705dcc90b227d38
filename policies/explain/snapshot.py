"""summarised(snapshot) -> Snapshot: what used a GPU's memory at its peak, and how fragmented it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from autotune.policies.diagnosis.phase_patterns import phase_of
from autotune.policies.explain.snapshot_replay import Allocation, Moment, Segment, TraceEvent, moment_of
from autotune.policies.values.failure import Phase
from autotune.policies.values.value import Value

_SITES = 40  # maximum sites kept per device
_FRAMES = 256  # maximum frames read of a stack
_TEXT = 300  # maximum characters kept of a name
_NO_STACK = "(no stack recorded)"
_LIBRARIES = ("/torch/", "\\torch\\", "<frozen ")
_AUTOGRAD = "torch::autograd::Engine"  # the backward pass runs in a thread without Python frames


class Site(Value, frozen=True, kw_only=True):
    """A place of the program and what it held."""

    place: str  # file:line function
    phase: Phase
    size_bytes: int  # in use at the `moment` of the device
    allocations: int  # how many are in use at that moment


class DeviceMemory(Value, frozen=True, kw_only=True):
    """One card's allocator at the moment that matters."""

    device: int  # index of the device in the snapshot
    moment: str  # oom: first failed request | peak: of the recorded events | state: nothing was recorded
    allocated_bytes: int  # in use at that moment
    peak_bytes: int  # most in use at once during the recorded events
    reserved_bytes: int  # held by the allocator at that moment, in use or free
    free_pieces: int  # free chunks of the reserved memory
    largest_free_bytes: int  # largest of these pieces; 0: there is none
    requested_bytes: int | None = None  # by the request that failed
    device_free_bytes: int | None = None  # outside the allocator, at that request
    fragmented: bool = False  # the request would have fitted if the free pieces were contiguous
    allocations: int = 0  # how many are in use at that moment
    events: int = 0  # recorded events of the allocator; 0: no history was recorded
    sites: tuple[Site, ...] = ()  # largest first
    phases: dict[str, int] = {}  # bytes, largest first
    labels: dict[str, int] = {}  # bytes by the program's own labels, if any

    @property
    def unallocated_bytes(self) -> int:
        """Bytes reserved from the driver but not in use."""
        return max(0, self.reserved_bytes - self.allocated_bytes)


class Snapshot(Value, frozen=True, kw_only=True):
    """The contents of a memory snapshot."""

    devices: tuple[DeviceMemory, ...] = ()  # with memory or events
    settings: dict[str, str] = {}  # of the allocator


class _Raw(msgspec.Struct):
    segments: list[Segment] = []
    device_traces: list[list[TraceEvent]] = []
    allocator_settings: Any = None


def summarised(raw: object) -> Snapshot:
    """Return the summary of a snapshot; raises ValueError if it is not in torch's format."""
    if isinstance(raw, list):  # torch before 1.13 dumped only the segments
        raw = {"segments": raw}
    if not isinstance(raw, dict) or not {"segments", "device_traces"} & raw.keys():
        raise ValueError("no snapshot of torch's allocator: it has no segments and no traces")
    try:
        result = msgspec.convert(raw, _Raw)
    except msgspec.ValidationError as error:
        raise ValueError(f"no snapshot of torch's allocator: {str(error)[:_TEXT]}") from error
    segments: dict[int, list[Segment]] = defaultdict(list)
    for segment in result.segments:
        segments[segment.device].append(segment)
    traces = dict(enumerate(result.device_traces))
    numbers = sorted({*segments, *(number for number, events in traces.items() if events)})
    return Snapshot(
        devices=tuple(
            _device(number, traces.get(number, []), segments.get(number, [])) for number in numbers
        ),
        settings=_settings(result.allocator_settings),
    )


def _device(number: int, events: list[TraceEvent], segments: list[Segment]) -> DeviceMemory:
    moment = moment_of(events, segments)
    allocated = sum(one.size_bytes for one in moment.alive)
    largest = max(moment.free, default=0)
    requested = None if moment.failed is None else moment.failed.size
    sites = _sites(moment.alive)
    return DeviceMemory(
        device=number,
        moment=moment.kind,
        allocated_bytes=allocated,
        peak_bytes=moment.peak_bytes,
        reserved_bytes=moment.reserved_bytes,
        free_pieces=len(moment.free),
        largest_free_bytes=largest,
        requested_bytes=requested,
        device_free_bytes=None if moment.failed is None else moment.failed.device_free,
        fragmented=requested is not None and _torn(moment, requested),
        allocations=len(moment.alive),
        events=len(events),
        sites=tuple(sites[:_SITES]),
        phases=_totals((site.phase.value, site.size_bytes) for site in sites),
        labels=_totals((one.label, one.size_bytes) for one in moment.alive if one.label),
    )


def _torn(moment: Moment, requested: int) -> bool:
    """Return whether the request would have fitted if the free chunks were contiguous."""
    outside = moment.failed.device_free or 0 if moment.failed is not None else 0
    idle = sum(moment.free)
    return max(moment.free, default=0) < requested and idle >= min(requested, max(requested - outside, 1))


def _sites(alive: Iterable[Allocation]) -> list[Site]:
    known: dict[int, tuple[str, Phase]] = {}  # by id: stacks are shared, and stay alive during this call
    sizes: dict[tuple[str, Phase], list[int]] = defaultdict(lambda: [0, 0])
    for one in alive:
        key = id(one.frames)
        if key not in known:
            known[key] = _place(one.frames)
        held = sizes[known[key]]
        held[0] += one.size_bytes
        held[1] += 1
    sites = [
        Site(place=place, phase=phase, size_bytes=size, allocations=count)
        for (place, phase), (size, count) in sizes.items()
    ]
    return sorted(sites, key=lambda site: (-site.size_bytes, site.place))


def _place(frames: object) -> tuple[str, Phase]:
    """Return the innermost frame of the program's own code in a stack, and the stack's phase."""
    stack = [_frame(frame) for frame in frames[:_FRAMES]] if isinstance(frames, list | tuple) else []
    python = [(file, line, name) for file, line, name in stack if file.endswith(".py")]
    own = [frame for frame in python if not any(part in frame[0] for part in _LIBRARIES)]
    phase = phase_of(
        "\n".join(f'  File "{file}", line {line}, in {name}' for file, line, name in reversed(stack))
    )
    if phase is Phase.NONE and any(_AUTOGRAD in name for _, _, name in stack):
        phase = Phase.BACKWARD
    for file, line, name in (*own[:1], *python[:1]):
        return f"{file}:{line} {name}", phase
    return (next((name for _, _, name in stack if name), _NO_STACK), phase)


def _frame(frame: object) -> tuple[str, int, str]:
    if not isinstance(frame, dict):
        return "", 0, ""
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    return (
        file[-_TEXT:] if isinstance(file, str) else "",
        line if isinstance(line, int) else 0,
        name[:_TEXT] if isinstance(name, str) else "",
    )


def _totals(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for name, size in sizes:
        totals[name] += size
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _settings(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        return {}
    return {
        name[:_TEXT]: str(value)[:_TEXT]
        for name, value in raw.items()
        if isinstance(name, str) and isinstance(value, str | bool | int | float)
    }
