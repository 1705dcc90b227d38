"""Parses the figures of failure messages, in bytes, in all known wordings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.values.diagnosis import Facts

_UNITS = {
    "": 1, "b": 1, "bytes": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,  # Kubernetes
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip  # Ray's messages about /dev/shm and SGLang's about host memory print decimal GB
_SIZE = r"(\d{1,20}(?:,\d{3})*(?:\.\d{1,9}|\.(?= [KMGT]i?B))?) ?([KMGT]i?B|[KMGT]i?\b|bytes|B)?"

# Ordered: the first matching pattern gives the figure.
_REQUESTED = (
    r"allocate \S{1,24} \((\d{1,20}) (bytes)\)",
    rf"[Tt]ried to allocate {_SIZE}",
    rf"CUDA (?:calloc|malloc|host alloc) (?:async )?{_SIZE}",
    rf"Object size is {_SIZE}",
    rf"\(alloc\)size={_SIZE}",
    rf"Requesting {_SIZE}",
    rf"{_SIZE} KV cache is needed",
    rf"failed to alloc {_SIZE}",
    rf"Unable to allocate {_SIZE}",
    rf"(?:trying to|[Ff]ailed to) allocate {_SIZE}",
    rf"[Oo]ut of memory allocating {_SIZE}",
    rf"(?:memory allocation|(?:m|re)alloc|mmap) of (?:size )?{_SIZE}",
    rf"unable to mmap {_SIZE}",
    rf"posix_fallocate of {_SIZE}",
    rf"with info \[size:{_SIZE}",
    rf"Allocation failed for size::{_SIZE}",
    rf"\bRequested +: {_SIZE}",
    rf"[Ff]ailed to allocate memory for \S{{1,80}} with size {_SIZE}",
    rf"failed to allocate \w+ buffer of size {_SIZE}",
    rf"allocating {_SIZE} on device \d+",
    rf"[Rr]equested amount of GPU memory \({_SIZE}\)",
    rf"shared memory segment \S+ \(size {_SIZE}\)",
    rf"[Aa]llocation of size {_SIZE} failed",
    rf"requires more system memory \({_SIZE}\)",
    rf"failed to extend \S+ to {_SIZE}",
    rf"[Aa]ttempting to (?:allocate|reserve) {_SIZE}",
    rf"less than desired GPU memory utilization \([\d.]+, {_SIZE}\)",
    rf"when allocating {_SIZE}",
    rf"\b[Rr]equested:? {_SIZE}",
    rf"\bfunc=cu_mem_create .*\bsize={_SIZE}",
    rf"rtMalloc fail.*\bsize:{_SIZE}",
    rf"\. Need {_SIZE}, have ",
    r"Cannot allocate (?P<number>\d{1,9}(?:\.\d{1,9})?)(?P<unit>[KMG])B memory on",
    rf"smaller than required size\[{_SIZE}",
    rf"requested buffer of size {_SIZE}",
    rf"smaller than requested bytes of {_SIZE}",
    rf"\balloc fail type .{{1,120}} size {_SIZE}",
    rf"Too large swap space\. {_SIZE} out of",
    rf"Failed to [mc]alloc {_SIZE}",
    rf"with OOM on device \d+ while trying to allocate {_SIZE}",
    rf"halMemAlloc failed: size={_SIZE}",
    rf"in /dev/shm\. The request is for {_SIZE}",
    rf"object store size \({_SIZE}\) exceeds",
    rf"space in /dev/shm: {_SIZE} required",
    rf"allocate KV-caches\. Required: {_SIZE}",
    rf"\bUsed {_SIZE} of \S{{1,24}} hbm\b",
)
_CAPACITY = (
    rf"total capaci?ty of {_SIZE}",
    rf"{_SIZE} total capacity",
    rf"lru\) capacity: {_SIZE}",
    rf"\bDevice limit +: {_SIZE}",
    rf"out of the {_SIZE} total CPU memory",
    rf"\(free: \d+, total: {_SIZE}\)",
    rf"\bfree:? [\d.]{{1,20}} ?\w{{0,5}}[,;] total:? {_SIZE}",
    rf"\bmax allowed: {_SIZE}",
    rf"\blimit set to: {_SIZE}",
    rf"\bLimits:\s+(?:cpu:\s+\S+\s+)?memory:\s+{_SIZE}",
    rf"\bof {_SIZE} hbm\b",
    r"Total GPU memory \((?P<unit>GiB)\): (?P<number>\d{1,9}\.\d+)",
    r"Free memory on device [^(]{0,12}\([\d.]+/(?P<number>\d{1,9}(?:\.\d+)?) (?P<unit>GiB)\)",
    r"memory limit of (?P<number>\d{1,12}) (?P<unit>m)egabytes",
    # the kernel's kB are of 1024 bytes
    r"memory: usage \d+kB, limit (?P<number>\d{1,15})(?P<unit>k)B",
    r"\bvmem \d{1,20} exceeded limit (?P<number>\d{1,20})(?P<unit>)",
    r"\bmem \d+kb exceeded limit (?P<number>\d{1,15})(?P<unit>k)b",
    r"exceeded memory limit \(\d+ > (?P<number>\d{1,20}) (?P<unit>B)\)",
    r"exceeded memory limit \(\d+ > (?P<kib>\d{1,15})\)",
    r"of (?P<number>\d{1,9}(?:\.\d{1,9})?) (?P<unit>[KMGT])B physical memory used",
)
_FREE = (
    rf"of which {_SIZE} is free",
    rf"; {_SIZE} free",
    rf"only have {_SIZE} free",
    rf"available KV cache memory \({_SIZE}\)",
    rf"free_bytes={_SIZE}",
    rf"Free \(according to CUDA\): {_SIZE}",
    rf"\(free: {_SIZE}, total: \d+\)",
    rf"than is available \({_SIZE}\)",
    rf"There are {_SIZE} free",
    rf"[,;(] ?free:? {_SIZE}",
    rf"\. Need \S+ \w+, have {_SIZE}",
    rf"shm has only {_SIZE} available",
    r"available memory is only (?P<number>\d{1,9}(?:\.\d{1,9})?)(?P<unit>[KMG])B",
    rf"current free memory size\[{_SIZE}",
    rf"Available memory of {_SIZE} is smaller",
    rf"Threshold quantity: \w+, available: {_SIZE}",
    rf"\b[Rr]equested:? [\d.]{{1,20}} ?\w{{0,5}}[,;] available:? {_SIZE}",
    r"Free GPU memory before component creation attempt \((?P<unit>GiB)\): (?P<number>\d{1,9}\.\d+)",
    r"Free memory on device [^(]{0,12}\((?P<number>\d{1,9}(?:\.\d+)?)/[\d.]+ (?P<unit>GiB)\)",
    rf"Error in memory profiling\. Initial free memory {_SIZE}",
    r"Available Free mem : (?P<number>\d{1,12}) (?P<unit>[KMG])B",
    rf"allocate KV-caches\. Required: \d{{1,20}}, Available: {_SIZE}",
    rf"the amount available is {_SIZE}",
    rf"exceeds /dev/shm size \({_SIZE}\)",
    rf"space in /dev/shm: [\d.]{{1,20}} \w{{1,5}} required, {_SIZE} free",
)
_ALLOCATED = (
    rf"{_SIZE} is allocated by PyTorch",
    rf"{_SIZE} already allocated",
    rf"\bCurrently allocated +: {_SIZE}",
    rf"\bMPS allocated: {_SIZE}",
    rf"\(allocated so far: {_SIZE}",
    r"(?P<number>\d{1,9}(?:\.\d{1,9})?)(?P<unit>[KMGT])B memory has been allocated",
)
_UNALLOCATED = (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"; {_SIZE} cached\)")
_RESERVED = (rf"{_SIZE} reserved in total by PyTorch",)
_ALLOWED = (rf"{_SIZE} allowed;",)  # of a process limited to a fraction of the GPU
# Of the whole memory, printed before a message or by a supervisor after it.
_STATED_CAPACITY = (
    rf"calculating max tokens .*total: {_SIZE}",
    r"memory: usage \d+kB, limit (?P<number>\d{1,15})(?P<unit>k)B",
)
_STATED_FREE = (rf"calculating max tokens .*available: {_SIZE}", rf"shm has only {_SIZE} available")
# PyTorch's sentences, matched without spaces: terminals wrap them anywhere, and copies of these pad the rows.
_UNSPACED_SIZE = r"(\d{1,20}(?:\.\d{1,9})?)([KMGT]iB|bytes)"
_UNSPACED = {
    name: tuple(Pattern(sentence.replace(" ", "").replace("SIZE", _UNSPACED_SIZE)) for sentence in sentences)
    for name, sentences in {
        "requested": ("out of memory. Tried to allocate SIZE",),
        "capacity": (r"has a total capaci?ty of SIZE", r";SIZE total capacity"),
        "free": (r"of which SIZE is free", r";SIZE free[;)]"),
        "allocated": (r"Of the allocated memory SIZE is allocated by", r";SIZE already allocated"),
        "unallocated": (r"and SIZE is reserved by PyTorch but", r";SIZE cached\)"),
        "reserved": (r";SIZE reserved in total by",),
        "allowed": (r"[.;]SIZE allowed;",),
    }.items()
}
_REQUEST = "Tried to"  # in every message of PyTorch's allocator
# The exact bytes of a figure that the message before it rounds.
_EXACT = re.compile(r"\bbuffer of size (\d{1,20})\b")
_ROUNDED = 0.001  # maximum relative difference between a rounded figure and the exact one
_MPS_UNIT = re.compile(r"\b([KMGT])B\b")  # the MPS allocator writes MB for 1024 x 1024 bytes
# An engine that has just started: other processes hold all memory that is not free.
_AT_START = re.compile(r"Free memory on device .* on startup")
# Host memory of a node as Ray's memory monitor prints it: used, total, and the allowed share.
_HOST = re.compile(
    r"(?:was running|\(IP: [^)]{1,80}\)) was (?P<used>\d{1,9}\.\d+)Gi?B / (?P<all>\d{1,9}\.\d+)Gi?B \("
    r"(?:[\d.]{1,12}\), which exceeds the memory usage threshold of (?P<share>[01](?:\.\d{1,9})?))?"
)
_HOST_ONCE = re.compile(
    r"of the memory on node \S+ is used \((?P<used>\d{1,9}(?:\.\d+)?) / (?P<all>\d{1,9}(?:\.\d+)?) GB\)"
)
_HOST_IN_BYTES = (  # since Ray 2.56
    re.compile(
        r"Memory usage (\d{1,20})B exceeded threshold of (\d{1,20})B \([\d.]{1,8}% of (\d{1,20})B limit\)"
    ),
    re.compile(
        r"memory usage above threshold, used: (\d{1,20}), threshold_bytes: (\d{1,20}), "
        r"total bytes: (\d{1,20})"
    ),
)

_COMPILED = {
    name: tuple(map(Pattern, patterns))
    for name, patterns in {
        "requested": _REQUESTED,
        "capacity": _CAPACITY,
        "free": _FREE,
        "allocated": _ALLOCATED,
        "unallocated": _UNALLOCATED,
        "reserved": _RESERVED,
        "allowed": _ALLOWED,
        "stated capacity": _STATED_CAPACITY,
        "stated free": _STATED_FREE,
    }.items()
}
NOTHING = Facts()
# vLLM (v1/worker/gpu_worker.py, sleep): what is in use on the whole device, by all of its processes.
SLEPT = " memory is still in use"  # every such line contains it
ASLEEP = re.compile(
    r"[Ss]leep mode (?:\(level=\w+\) )?freed (\d{1,9}\.\d{1,9}) GiB memory, "
    r"(\d{1,9}\.\d{1,9}) GiB memory is still in use"
)


def asleep_bytes(line: str) -> int | None:
    """Return what stays in use on a device whose engine goes to sleep; None: the line does not say."""
    slept = ASLEEP.search(line) if SLEPT in line else None
    return None if slept is None else round(float(slept[2]) * (1 << 30))


_PRINTED = ("requested", "capacity", "free", "allocated", "unallocated", "reserved", "allowed")


def facts_of(text: str) -> Facts:
    """Return the figures in a message."""
    if "MPS backend" in text:
        text = _MPS_UNIT.sub(r"\1iB", text)
    result = _facts({name: _first(_COMPILED[name], text) for name in _PRINTED} | _unspaced(text))
    node = _of_node(text)
    if node is not None:
        used, allowed, whole = node
        return with_outside(
            msgspec.structs.replace(
                result, capacity_bytes=whole, free_bytes=max(0, whole - used), allowed_bytes=allowed
            )
        )
    capacity, free = result.capacity_bytes, result.free_bytes
    if capacity is not None and free is not None and _AT_START.search(text):
        return msgspec.structs.replace(result, outside_bytes=max(0, capacity - free))
    return with_outside(result)


def _of_node(text: str) -> tuple[int, int | None, int] | None:
    """Return a node's used bytes, those that Ray allows (None if not printed), and its total.

    Ray's memory monitor prints GB of 1024**3 bytes. None if the text has no such figures.
    """
    if exact := next(filter(None, (one.search(text) for one in _HOST_IN_BYTES)), None):
        return int(exact[1]), int(exact[2]), int(exact[3])
    if (host := _HOST.search(text) or _HOST_ONCE.search(text)) is None:
        return None
    capacity, share = _bytes(host["all"], "gib"), host.groupdict().get("share")
    return _bytes(host["used"], "gib"), None if share is None else round(float(share) * capacity), capacity


def filled(facts: Facts, other: Facts) -> Facts:
    """Return `facts` with its unset fields taken from `other`."""
    missing = {
        name: getattr(other, name)
        for name in Facts.__struct_fields__
        if _is_unset(getattr(facts, name)) and not _is_unset(getattr(other, name))
    }
    return with_outside(msgspec.structs.replace(facts, **missing)) if missing else facts


def _is_unset(value: object) -> bool:
    return value is None or value is False or value == ()


def refined(facts: Facts, other: Facts, rows: list[str]) -> Facts:
    """Return a message's facts completed from its wrapped rows.

    Figures that a terminal split are read from the joined rows. The request is exact if the last row prints
    it in bytes.
    """
    whole = _unspaced("".join(rows)) if _REQUEST in rows[0] else {}
    result = filled(_facts(whole), filled(facts, other))
    exact, rounded = _EXACT.search(rows[-1]), facts.requested_bytes
    if exact is not None and rounded is not None and abs(int(exact[1]) - rounded) <= _ROUNDED * rounded:
        return msgspec.structs.replace(result, requested_bytes=int(exact[1]))
    return result


def stated_above(context: list[str]) -> Facts:
    """Return a memory's capacity and free bytes that a program printed before its message."""
    text = "\n".join(context)
    return Facts(
        capacity_bytes=_first(_COMPILED["stated capacity"], text),
        free_bytes=_first(_COMPILED["stated free"], text),
    )


def with_outside(facts: Facts) -> Facts:
    """Return the facts with the bytes in use outside this process's allocator, if they can be computed.

    outside = capacity - free - allocated - reserved but unallocated, in bytes.
    """
    capacity, free, allocated = facts.capacity_bytes, facts.free_bytes, facts.allocated_bytes
    unallocated = facts.reserved_unallocated_bytes
    if capacity is None or free is None or allocated is None or unallocated is None:
        return facts
    return msgspec.structs.replace(facts, outside_bytes=max(0, capacity - free - allocated - unallocated))


def fragmented(facts: Facts) -> bool:
    """Return whether fragmentation, reserved memory that cannot be allocated, explains the failure.

    True if the idle reserve is at least the request, or a quarter of it and enough with the free memory
    added.
    """
    requested, idle = facts.requested_bytes, facts.reserved_unallocated_bytes
    if requested is None or idle is None or requested == 0:
        return False
    return idle >= requested or (4 * idle >= requested and (facts.room_bytes or 0) + idle >= requested)


def _facts(figures: Mapping[str, int | None]) -> Facts:
    """Return printed figures as facts; unallocated = reserved - allocated, unless it is printed."""
    allocated, reserved = figures.get("allocated"), figures.get("reserved")
    unallocated = figures.get("unallocated")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    return with_outside(
        Facts(
            requested_bytes=figures.get("requested"),
            free_bytes=figures.get("free"),
            capacity_bytes=figures.get("capacity"),
            allocated_bytes=allocated,
            reserved_unallocated_bytes=unallocated,
            allowed_bytes=figures.get("allowed"),
        )
    )


def _unspaced(text: str) -> dict[str, int]:
    """Return the figures of a message of PyTorch's allocator, even if a terminal wrapped it."""
    packed = "".join(text.split())
    figures = {name: _first(patterns, packed) for name, patterns in _UNSPACED.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _first(patterns: tuple[Pattern, ...], text: str) -> int | None:
    for pattern in patterns:
        match = pattern.search(text)
        if match is not None:
            named = match.groupdict()
            if "kib" in named:
                return _bytes(named["kib"], "kib")
            return _bytes(named["number"], named["unit"]) if named else _bytes(match[1], match[2])
    return None


def _bytes(number: str, unit: str | None) -> int:
    return round(float(number.replace(",", "")[:40]) * _UNITS[(unit or "").lower()])


def adds(whole: str, *rows: str) -> bool:
    """Return whether a message joined from two rows has a figure that neither row has alone."""
    apart = filled(facts_of(rows[0]), facts_of(rows[1]))
    return filled(apart, facts_of(whole)) != apart
