"""A cached summary of a finished run, so that listing runs does not read every journal.

A summary is valid only while the journal has the size, modification time and last bytes that the summary was
made from, and only for the version of autotune that made it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autotune.launchers.packages import DISTRIBUTION, version_of
from autotune.orchestrator.run.directory import partial_of
from autotune.orchestrator.run.storage import open_to_read
from autotune.policies.values.value import Value

NAME = ".summary.json"
_TAIL_BYTES = 4096  # bytes of the journal to compare
_LONGEST = 8 << 20  # bytes of a summary; larger files are ignored

_T = TypeVar("_T", bound=Value)


class Stamp(Value, frozen=True, kw_only=True):
    """Identifies the content of a journal without reading all of it."""

    version: str
    bytes: int
    mtime_ns: int
    tail: str  # digest of its last bytes


class _Kept(Value, frozen=True, kw_only=True):
    stamp: Stamp
    summary: msgspec.Raw


def stamp_of(folder: Path) -> Stamp | None:
    """Return the stamp of a run's journal; None if there is none to read."""
    try:
        with open_to_read(folder / "events.jsonl") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _TAIL_BYTES))
            tail = hashlib.sha256(file.read(_TAIL_BYTES)).hexdigest()
    except OSError:
        return None
    return Stamp(version=_version(), bytes=status.st_size, mtime_ns=status.st_mtime_ns, tail=tail)


@functools.cache
def _version() -> str:
    return version_of(DISTRIBUTION)


def read(folder: Path, kind: type[_T], *, stamp: Stamp) -> _T | None:
    """Return the summary for a journal with this stamp; None if there is none."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_LONGEST)
        kept = msgspec.json.decode(data, type=_Kept)
        return msgspec.json.decode(kept.summary, type=kind) if kept.stamp == stamp else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def keep(folder: Path, summary: Any, *, stamp: Stamp) -> None:
    """Store the summary of a finished run, if its folder is ours and writable."""
    data = msgspec.json.encode(_Kept(stamp=stamp, summary=msgspec.Raw(msgspec.json.encode(summary))))
    partial = partial_of(folder / NAME, os.getpid())
    with suppress(OSError):
        if len(data) > _LONGEST or folder.stat().st_uid != os.geteuid():
            return
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            partial.replace(folder / NAME)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
