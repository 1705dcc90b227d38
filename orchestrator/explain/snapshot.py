"""Explains a PyTorch memory snapshot without a GPU: what used the memory, and how fragmented it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from autotune.orchestrator.errors import Failure, UserError
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.explain.unpickle import LARGEST_BYTES
from autotune.orchestrator.units import show_gib
from autotune.policies.explain.snapshot import DeviceMemory, Site, Snapshot
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.value import Value

_READER = "autotune.orchestrator.explain.unpickle"
_SITES = 10  # maximum sites printed; the JSON document has more
_LONGEST_S = 1800.0  # timeout; the reader's own limit grows with the file
_INDENT = " " * 6
_MOMENTS = {
    "oom": "at the first failed request",
    "peak": "at the peak of what was recorded",
    "state": "when it was taken; allocations were not recorded",
}


class SnapshotFacts(Value, frozen=True, kw_only=True):
    """Figures of the failed request, in bytes; null where there is none."""

    requested_bytes: int | None  # size of the request
    free_bytes: int | None  # free memory of the GPU at that request
    allocated_bytes: int | None  # in use by allocations of the process
    reserved_unallocated_bytes: int | None  # reserved by the allocator, but not in use


class SnapshotDocument(Value, frozen=True, kw_only=True):
    """What a snapshot of PyTorch's allocator shows."""

    schema: int  # version of this document's format; fields are added without changing it
    file: str  # path of the snapshot
    kind: str  # snapshot
    cause: Cause
    is_oom: bool  # whether the snapshot contains a failed request
    resource: str  # the memory that ran out: gpu, or none without a failed request
    facts: SnapshotFacts
    fragmentation: bool  # whether `expandable_segments` could have satisfied the failed request
    devices: list[DeviceMemory]
    # settings of PyTorch's allocator, e.g. `expandable_segments`; empty: not recorded
    settings: dict[str, str]


def explain_snapshot(path: Path) -> Snapshot:
    """Return the contents of a snapshot, fit to print; raises Failure if the file is not one."""
    if path.stat().st_size > LARGEST_BYTES:
        raise _refused(path, f"it is larger than {show_gib(LARGEST_BYTES)}")
    command = [sys.executable, "-P", "-m", _READER, str(path.absolute())]
    try:
        reader = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _refused(path, "reading it took too long") from None
    if reader.returncode == 0:
        return _printable(msgspec.json.decode(reader.stdout, type=Snapshot))
    try:
        reason = msgspec.json.decode(reader.stdout, type=str)
    except msgspec.DecodeError:
        reason = "reading it took too much memory or time"
    raise _refused(path, plain(reason))


def _refused(path: Path, reason: str) -> Failure:
    return UserError(
        f"{plain(str(path))} is not a readable memory snapshot: {reason}",
        hint="torch.cuda.memory._dump_snapshot writes one",
    )


def cause(snapshot: Snapshot) -> Cause:
    """Return GPU_OOM if the snapshot contains a failed request, otherwise UNKNOWN."""
    return Cause.GPU_OOM if any(device.moment == "oom" for device in snapshot.devices) else Cause.UNKNOWN


def snapshot_document(name: str, snapshot: Snapshot) -> bytes:
    """Return a snapshot as one line of JSON, with those fields of a log's document that apply."""
    why = cause(snapshot)
    failed = next((device for device in snapshot.devices if device.moment == "oom"), None)
    facts = SnapshotFacts(
        requested_bytes=failed.requested_bytes if failed is not None else None,
        free_bytes=failed.device_free_bytes if failed is not None else None,
        allocated_bytes=failed.allocated_bytes if failed is not None else None,
        reserved_unallocated_bytes=failed.unallocated_bytes if failed is not None else None,
    )
    result = SnapshotDocument(
        schema=1,
        file=name,
        kind="snapshot",
        cause=why,
        is_oom=why.is_oom,
        resource=why.resource,
        facts=facts,
        fragmentation=failed is not None and failed.fragmented,
        devices=list(snapshot.devices),
        settings=snapshot.settings,
    )
    return msgspec.json.encode(result)


def _printable(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without control characters in its texts."""
    devices = []
    for device in snapshot.devices:
        sites = tuple(msgspec.structs.replace(site, place=plain(site.place)) for site in device.sites)
        labels = {plain(label): size for label, size in device.labels.items()}
        devices.append(msgspec.structs.replace(device, sites=sites, labels=labels))
    settings = {plain(key): plain(value) for key, value in snapshot.settings.items()}
    return msgspec.structs.replace(snapshot, devices=tuple(devices), settings=settings)


def snapshot_text(name: str, snapshot: Snapshot) -> str:
    """Return the explanation of a snapshot as text."""
    if not snapshot.devices:
        return f"unknown: {plain(name)} is an empty snapshot: no memory and no records\n"
    return "\n".join(line for device in snapshot.devices for line in _device(plain(name), device))


def _device(name: str, device: DeviceMemory) -> Iterable[str]:
    used, idle = show_gib(device.allocated_bytes), show_gib(device.unallocated_bytes)
    figures = f"{used} was in use, {idle} reserved but unused"
    if device.requested_bytes is not None:
        if device.device_free_bytes is not None:
            figures += f", {show_gib(device.device_free_bytes)} free on the GPU"
        wanted = f"GPU {device.device} could not allocate {show_gib(device.requested_bytes)}"
        yield f"error[{Cause.GPU_OOM}]: {wanted}: {figures}"
    else:
        yield f"GPU {device.device}: {figures}"
    yield f"{_INDENT}--> {name}"
    yield (
        f"info: {_MOMENTS[device.moment]}: {device.allocations:,} allocations; "
        f"{device.events:,} events recorded, peak {show_gib(device.peak_bytes)}"
    )
    yield f"info: {_fragmentation(device)}"
    yield f"info: by phase   {_shares(device.phases)}"
    if device.labels:
        yield f"info: by category   {_shares(device.labels)}"
    yield "info: largest allocation sites"
    yield from (_site(site) for site in device.sites[:_SITES])
    rest = len(device.sites) - _SITES
    if rest > 0:
        yield f"{_INDENT}and {rest} more (--json)"


def _fragmentation(device: DeviceMemory) -> str:
    if not device.free_pieces:
        return "not fragmentation: all reserved memory is in use"
    largest = show_gib(device.largest_free_bytes)
    idle = f"{show_gib(device.unallocated_bytes)} unused in {device.free_pieces:,}"
    pieces = f"{idle} {'piece' if device.free_pieces == 1 else f'pieces, the largest {largest}'}"
    if device.requested_bytes is None:
        return pieces
    if device.fragmented:
        return f"fragmented: {pieces}; `expandable_segments` could have satisfied the request"
    if device.largest_free_bytes >= device.requested_bytes:
        return f"{pieces}, which was large enough but belongs to another stream or pool"
    return f"not fragmentation: {pieces}, so `expandable_segments` would not help"


def _shares(sizes: dict[str, int]) -> str:
    whole = max(1, sum(sizes.values()))
    parts = (
        f"{name if name != Phase.NONE else 'no phase'} {show_gib(size)} ({size / whole:.0%})"
        for name, size in sizes.items()
        if size
    )
    return " · ".join(parts) or "nothing in use"


def _site(site: Site) -> str:
    phase = "" if site.phase is Phase.NONE else f"   {site.phase}"
    return f"{_INDENT}{show_gib(site.size_bytes):>12}  {site.allocations:>6,} ×  {site.place}{phase}"
