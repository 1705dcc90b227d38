"""What a failing actor of the built-in job says about itself: one line of JSON."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import msgspec

Cause = Literal["gpu-oom", "host-oom", "pool-too-small", "kv-pool", "disk", "code", "config"]
Component = Literal["trainer", "ref", "rollout"]

PREFIX = "builtin: failure "
CURED = "builtin: cured "
_FILE = "AUTOTUNE_RECORDS"  # names the file that autotune reads; a log may hold anybody's text

# Texts of torch 2.13, glibc and SGLang 0.5.23.
_REQUESTED = re.compile(r"tried to allocate (?P<number>[0-9.]+) ?(?P<unit>bytes|KiB|MiB|GiB)", re.IGNORECASE)
_MESSAGE = 2000  # characters; CUDA's message names every process on the card before its last figures
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator|std::bad_alloc|CUDA out of memory|can't start new thread|Cannot allocate memory"
)
_POOL = re.compile(r"Not enough memory|leave no GPU memory|more than available memory")
# oneDNN says this, and nothing else, when its scratchpad could not be allocated.
_ONEDNN = re.compile(r"could not (create|execute) a (primitive|memory)")


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One failure, as the actor that met it knows it."""

    schema: int = 1
    cause: Cause
    device: Literal["cpu-budget", "cuda"] | None = None
    phase: str
    component: Component
    rank: int = 0
    step: int
    requested_bytes: int | None = None
    used_bytes: int | None = None  # above the baseline
    budget_bytes: int | None = None
    message: str
    exception: str

    def line(self) -> str:
        """Return the log line, without its newline."""
        return PREFIX + msgspec.json.encode(self).decode()


class CureRecord(FailureRecord, frozen=True, kw_only=True):
    """A failure after which all ranks continued with smaller micro-batches."""

    knob: str
    before: int
    after: int

    def line(self) -> str:
        """Return the log line, without its newline."""
        return CURED + msgspec.json.encode(self).decode()


class HostMemoryExhausted(OSError):  # noqa: N818 - says what happened
    """The host area (mappings in host_dir) could not grow."""


class PhaseFailure(RuntimeError):  # noqa: N818 - the noun of the log line
    """Carries a record from an actor to the main program."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return self.record.line()


def describe(
    error: BaseException,
    *,
    phase: str,
    component: Component,
    rank: int,
    step: int,
    on_gpu: bool,
    used_bytes: int | None,
    budget_bytes: int | None,
) -> FailureRecord:
    """Return the record of an exception; `budget_bytes` is None in a process without a device budget."""
    cause = _cause(error, on_gpu=on_gpu, used_bytes=used_bytes, budget_bytes=budget_bytes)
    text = " ".join(f"{error}".split("\n", 1)[0].split())
    requested = getattr(error, "requested_bytes", None) or _requested(f"{error}")
    device: Literal["cpu-budget", "cuda"] = "cuda" if on_gpu else "cpu-budget"
    return FailureRecord(
        cause=cause,
        device=device if cause in ("gpu-oom", "pool-too-small", "kv-pool") else None,
        phase=phase,
        component=component,
        rank=rank,
        step=step,
        requested_bytes=requested,
        used_bytes=used_bytes,
        budget_bytes=budget_bytes,
        message=text[:_MESSAGE],
        exception=type(error).__name__,
    )


def report(record: FailureRecord, error: BaseException) -> None:
    """Write the traceback and then the record to stderr, so that a log of the dying process has both."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"{text}{record.line()}\n")
    sys.stderr.flush()
    deliver(record)


def deliver(record: FailureRecord) -> None:
    """Append the record to the attempt's own file, where this machine has it."""
    path = os.environ.get(_FILE)
    # Where it fails, as on another node or a full disk, the main program delivers it once more.
    with suppress(OSError):
        if path:
            with open(
                path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)
            ) as file:
                file.write(f"{record.line()}\n".encode())


def _cause(error: BaseException, *, on_gpu: bool, used_bytes: int | None, budget_bytes: int | None) -> Cause:
    for link in _chain(error):
        text = f"{link}"
        if isinstance(link, HostMemoryExhausted):
            return "host-oom"
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk"
        if type(link).__name__ == "OutOfMemoryError" and type(link).__module__.startswith("torch"):
            return "gpu-oom"
        if _POOL.search(text):
            return "pool-too-small"
        if isinstance(link, MemoryError) or _ALLOCATOR.search(text):
            return "gpu-oom" if budget_bytes is not None and not on_gpu else "host-oom"
        full = budget_bytes is not None and used_bytes is not None and used_bytes > 0.8 * budget_bytes
        if _ONEDNN.search(text) and full:
            return "gpu-oom"
    return "code"


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _requested(text: str) -> int | None:
    match = _REQUESTED.search(text)
    if match is None:
        return None
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])
