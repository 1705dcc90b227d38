"""Handles failing storage: essential writes are retried, others pause, and training continues.

The folder of a run may be on NFS, Lustre, BeeGFS, GPFS or a mounted bucket. Calls are repeated after every
error of such a file system (EIO, ESTALE, ESHUTDOWN, ETIMEDOUT, EACCES, ENOENT until it is mounted again, a
full disk), because an error with the driver's files says nothing about the job.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from autotune.orchestrator.calls import call
from autotune.orchestrator.errors import Failure, reason_of

T = TypeVar("T")
RETRY_S = 15.0  # between two tries of a non-essential write
REMIND_S = 600.0
_TOGETHER = 1000  # items read per try
_FIRST_S, _LAST_S = 0.25, 2.0  # between two tries of an essential write


class Unrecordable(Failure):
    """An essential write failed until the time limit; the running attempt is left to its supervisor."""


class Persist(Protocol):
    """A way to run a call that the run cannot continue without, such as a `Persistence`."""

    def __call__(self, do: Callable[[], T], *, path: Path) -> T:
        """Return the call's result once it raises no OSError."""


def at_once(do: Callable[[], T], *, path: Path) -> T:
    """Return what the call returns, or raise what it raises."""
    return do()


def steadily(items: Callable[[], Iterator[T]], *, persist: Persist, path: Path) -> Iterator[T]:
    """Yield each item once; if reading fails, start over and skip items already yielded."""
    done, source = 0, None

    def following() -> list[T]:
        nonlocal source
        try:
            source = islice(items(), done, None) if source is None else source
            return list(islice(source, _TOGETHER))
        except OSError:
            source = None
            raise

    while batch := persist(following, path=path):
        done += len(batch)
        yield from batch


def is_absent(path: Path) -> bool:
    """Return whether a file is missing from an existing folder; raises OSError if that is unknown."""
    try:
        path.lstat()
    except FileNotFoundError:
        path.parent.stat()
        return True
    return False


def open_to_read(path: Path) -> BinaryIO:
    """Open a file of a run that may be another user's; raises OSError, also for a pipe, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def append(descriptor: int, data: bytes) -> None:
    """Append bytes to an open file, all of them or none; raises OSError."""
    size = os.fstat(descriptor).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_size == size + len(data) - len(view):  # nobody else's bytes
                os.ftruncate(descriptor, size)
        raise


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # cannot sync folders
            raise
    finally:
        os.close(descriptor)


def create_durably(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read, flushed to disk; raises FileExistsError, OSError.

    Its name is on disk after `sync_folder`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        append(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Pause:
    """Non-essential writes: a failure is reported and the write retried later; nothing is raised."""

    def __init__(self, path: Path, *, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._again_at: float | None = None  # None: not paused
        self._reported_at = -math.inf
        self._lost = 0  # samples

    def tries(self, write: Callable[[], None], *, samples: int = 0) -> bool:
        """Write, unless a write failed recently; return whether it was done.

        `samples`: how many are lost if it was not.
        """
        now = time.monotonic()
        if self._again_at is not None and now < self._again_at:
            self._lost += samples
            return False
        try:
            write()
        except OSError as error:
            if self._again_at is None or now - self._reported_at >= REMIND_S:
                self._reported_at = now
                self._say(
                    f"cannot write `{self._path}`: {reason_of(error)}; logs and samples pause,"
                    " the attempt runs on. hint: make room, or make the storage available"
                )
            self._again_at = now + RETRY_S
            self._lost += samples
            return False
        if self._again_at is not None:
            lost = f"; {self._lost} samples of memory were not recorded" if self._lost else ""
            self._again_at, self._lost = None, 0
            self._say(f"`{self._path}` is writable again; logging resumed{lost}")
        return True


class Persistence:
    """Repeats calls that the run cannot continue without, while its storage fails."""

    def __init__(
        self,
        run: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        patience_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wait at most `patience_s` seconds; not at all before a run has anything to lose."""
        self._run = run
        self.patience_s = patience_s
        self.hurry_s: Callable[[], float] = lambda: math.inf  # seconds that a stop request leaves
        self._say, self._monotonic, self._sleep = say, monotonic, sleep

    def __call__(self, do: Callable[[], T], *, path: Path) -> T:
        """Return the call's result; repeat it while it raises OSError, with a message every 10 minutes.

        Raises Unrecordable after the time limit, including `hurry_s`.
        """
        begun = reported_at = self._monotonic()
        until = begun + self.patience_s
        pause_s, error = _FIRST_S, None
        while True:
            try:
                done = do()
            except OSError as failed:
                now = self._monotonic()
                until = min(until, now + self.hurry_s())
                if now >= until:
                    raise Unrecordable(
                        f"cannot access `{path}`: {reason_of(failed)}",
                        hint="make room, or make the storage available, then "
                        f"`{call('resume', self._run)}` continues the run",
                    ) from None
                if error is None or now - reported_at >= REMIND_S:
                    reported_at = now
                    waited = f" for {now - begun:.0f} s" if error is not None else ""
                    self._say(
                        f"cannot access `{path}`: {reason_of(failed)}; waiting for the storage{waited},"
                        " what runs goes on. hint: make room, or make the storage available"
                    )
                error = failed
                self._sleep(min(pause_s, until - now))
                pause_s = min(2 * pause_s, _LAST_S)
                continue
            if error is not None:
                self._say(f"`{path}` can be accessed again after {self._monotonic() - begun:.0f} s")
            return done
