"""When a file of a run cannot be written: recording pauses, the journal waits, training continues."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from autotune.orchestrator.calls import call
from autotune.orchestrator.errors import Failure, reason_of

RETRY_S = 15.0  # between two tries
PATIENCE_S = 1800.0  # that the journal waits for room before the driver leaves the attempt alone
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class Unrecordable(Failure):
    """The journal cannot be written and the wait for room is over; what runs is left to its supervisor."""


def is_full(error: OSError) -> bool:
    """Return whether a disk is full, a quota or limit is used up or a file system became read-only."""
    return error.errno in _FULL


def append(descriptor: int, data: bytes) -> None:
    """Append bytes to an open file, all of them or none; raises OSError."""
    size = os.fstat(descriptor).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class Pause:
    """Writes that are not essential: one that fails is told once and tried again later; nothing is raised."""

    def __init__(self, path: Path, *, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._again_at: float | None = None  # None: not paused

    def tries(self, write: Callable[[], None]) -> bool:
        """Write unless a failed write was a moment ago; returns whether it was done."""
        if self._again_at is not None and time.monotonic() < self._again_at:
            return False
        try:
            write()
        except OSError as error:
            if self._again_at is None:
                self._say(
                    f"cannot write `{self._path}`: {reason_of(error)}; logs and samples pause,"
                    " the attempt runs on. hint: make room"
                )
            self._again_at = time.monotonic() + RETRY_S
            return False
        if self._again_at is not None:
            self._again_at = None
            self._say(f"`{self._path}` can be written again; logs and samples go on")
        return True


def wait_for_room(
    write: Callable[[], None],
    *,
    path: Path,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = PATIENCE_S,
) -> None:
    """Write what is essential; while the disk is full, wait and try again.

    Raises Unrecordable after `patience_s` seconds or when the user interrupts the wait, OSError for anything
    but a full disk.
    """
    waited_s = 0.0
    while True:
        try:
            write()
        except OSError as error:
            if not is_full(error):
                raise
            if waited_s >= patience_s or interrupted():
                raise Unrecordable(
                    f"cannot write `{path}`: {reason_of(error)}",
                    hint=f"make room, then `{call('resume', path.parent)}` continues the run",
                ) from None
            if not waited_s:
                most = f" up to {patience_s / 60:.0f} minutes" if math.isfinite(patience_s) else ""
                say(
                    f"cannot write `{path}`: {reason_of(error)}; waiting{most} for room, what runs goes on."
                    " hint: make room"
                )
            pause_s = min(1.0, patience_s - waited_s)
            sleep(pause_s)
            waited_s += pause_s
            continue
        if waited_s:
            say(f"`{path}` can be written again after {waited_s:.0f} s")
        return
