"""Who drives a run: the holder of the highest number in `drivers/`, which every row of its journal carries.

A number is claimed by link(2), which is atomic wherever there are hard links, NFS included; flock is unused.
A claim is never taken away: the next driver claims the next number, and readers of the journal ignore what an
older number writes later. The holder renews the time of its claim; a watcher judges only whether that time
changes, by its own monotonic clock, never what it is.

Why no library: Optuna's JournalFileSymlinkLock rests on the same call but has no number, and a late release
can remove the next holder's lock. filelock's SoftFileLease ends its heartbeat after an outage, and takes
nothing over where two names cannot be exchanged, as on NFS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from autotune.orchestrator.calls import call
from autotune.orchestrator.errors import ExitCode, Failure, writing
from autotune.orchestrator.run.storage import create_durably, open_to_read, sync_folder
from autotune.policies.values.value import Value

FOLDER = "drivers"
BEAT_S = 10.0
STALE_S = (
    90.0  # NFS clients show a change up to 60 s late (acdirmax); after three more beats a driver is dead
)
_CONFIRMED_S = 30.0  # a driver renews a claim older than this before it writes
_LOOK_S = 1.0
_TRIES = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_RECORD_BYTES = 8192
_NUMBER = re.compile(r"[1-9][0-9]{0,16}")  # fits a row of the journal, also after the next claim
_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EMLINK)


class Owner(Value, frozen=True, kw_only=True):
    """Who drives a run: enough to signal it from another terminal of the same host."""

    host: Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x20\x7f-\x9f]{1,255}\Z")]  # it is printed
    pid: Annotated[int, msgspec.Meta(ge=1)]  # a record without one is damaged; UNKNOWN has 0
    boot_id: str
    pids: int | None = None  # its pid namespace; containers have their own
    started: int = 0  # clock ticks from boot to the process's start; 0: unknown
    folder: str = ""  # the run's path on its host: a copy of the run has no driver
    over: bool = False  # it has released the run

    @property
    def is_here(self) -> bool:
        """Whether the owner runs on this machine since its last boot, in any container."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    @property
    def can_be_signalled(self) -> bool:
        """Whether the owner's pid means the same process here."""
        return self.is_here and self.pids in (None, pid_namespace())

    @property
    def is_known(self) -> bool:
        """Whether the owner could be read."""
        return self.pid > 0


UNKNOWN = Owner(host="an unknown host", pid=0, boot_id="unknown")


class Driven(Failure):
    """Another driver has the run."""


class TakenOver(Failure):
    """Another driver has taken the run over from this one, which leaves the job alone."""


class Claim(NamedTuple):
    """The newest claim as a watcher sees it."""

    number: int  # 0: none yet
    owner: Owner | None  # None: nobody drives the run
    changed: bool  # the claim was renewed while watched: its owner lives


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def pid_namespace() -> int | None:
    """Return what tells the pids of this container from those of others; None where that is not known."""
    try:
        return _PID_NAMESPACE.stat().st_ino
    except OSError:
        return None


def owner(folder: Path) -> Owner | None:
    """Return who drives the run; None: nobody. UNKNOWN where that cannot be read. Writes nothing.

    Whether an owner of another host still lives shows only to a `Watch`, after a while.
    """
    return Watch(folder).owner()


class Watch:
    """The claims of a run, looked at again and again."""

    def __init__(self, folder: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._monotonic = folder, monotonic
        self._stamp: tuple[int, int, int] | None = None  # number, inode and time of the newest claim
        self._since = 0.0
        self._changes = 0
        self.beat_at = 0.0  # Unix seconds of the newest claim by the file server's clock, for display only

    def owner(self) -> Owner | None:
        """Return who drives the run, as far as known; UNKNOWN if it cannot be read."""
        try:
            return self.look().owner
        except OSError:
            return UNKNOWN

    def look(self) -> Claim:
        """Return the newest claim; its owner is None if it has ended, is dead or did not renew for STALE_S.

        Raises OSError.
        """
        newest = _newest(self._folder)
        if newest is None:
            return Claim(0, None, changed=False)
        number, holder, state = newest
        self.beat_at = state.st_mtime
        stamp, now = (number, state.st_ino, state.st_mtime_ns), self._monotonic()
        if stamp != self._stamp:
            self._changes += self._stamp is not None
            self._stamp, self._since = stamp, now
        if holder.over or _is_copied(holder, self._folder):
            gone = True
        elif holder.can_be_signalled:
            gone = not _lives(holder)
        else:
            gone = now - self._since >= STALE_S
        return Claim(number, None if gone else holder, changed=self._changes > 0)


def last_owner(folder: Path) -> Owner | None:
    """Return who holds the run's lock, or held it when its process died; None after an orderly end."""
    try:
        newest = _newest(folder)
    except OSError:
        return UNKNOWN
    return None if newest is None or newest[1].over else newest[1]


class Lock:
    """The claim of the driver of a run, renewed by a thread; the rows of its journal carry its `number`."""

    def __init__(
        self,
        folder: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], str] = str,
    ) -> None:
        """Claim the run; raises Driven while another driver has it.

        A driver on another host is watched, for STALE_S if it does not renew its claim, which `say` reports.
        A signal from `interrupted` ends this wait and raises Failure.
        """
        self._folder = folder
        self._me = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=boot_id(),
            pids=pid_namespace(),
            started=_started(os.getpid()),
            folder=str(folder.resolve()),
        )
        with writing(folder / FOLDER):
            _create_folder(folder / FOLDER)
            self.number = self._take(say, interrupted)
        self._taken_by = 0
        self._confirmed_at = _boot_s()
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="autotune-heartbeat", daemon=True)
        self._beats.start()

    @property
    def path(self) -> Path:
        """The file of the claim."""
        return self._folder / FOLDER / str(self.number)

    def raise_above(self, number: int) -> None:
        """Claim a number above those in the journal; raises Driven if another driver has it."""
        while self.number <= number:
            with writing(self._folder / FOLDER):
                if not self._claim(number + 1):
                    raise self._driven(UNKNOWN)
            self.number = number + 1

    def check(self) -> None:
        """Raise TakenOver if another driver has claimed the run, OSError if that is unknown."""
        if _boot_s() - self._confirmed_at > _CONFIRMED_S:
            self._confirm()
        if self._taken_by:
            raise self.taken_over(self._taken_by)

    def taken_over(self, number: int) -> TakenOver:
        """Return the failure for a run that another driver has claimed with a number."""
        return TakenOver(
            f"run {self._folder.name} was taken over by another host, which this driver had not "
            f"reported to for {STALE_S:.0f} s (driver {number}; this one is driver {self.number})",
            hint=f"`{call('status', self._folder)}` shows it",
        )

    def forget_older(self) -> None:
        """Remove older claims; the newest always stays, so that numbers are never reused."""
        with contextlib.suppress(OSError):
            for number in _numbers(self._folder):
                if number < self.number:
                    (self._folder / FOLDER / str(number)).unlink(missing_ok=True)

    def release(self) -> None:
        """Release the run."""
        self._released.set()
        self._beats.join()
        with contextlib.suppress(OSError):  # on this host, the claim also ends with the process
            fresh = self._fresh(msgspec.structs.replace(self._me, over=True))
            fresh.replace(self.path)
            sync_folder(self.path.parent)

    def _take(self, say: Callable[[str], None], interrupted: Callable[[], str]) -> int:
        watch, announced = Watch(self._folder), False
        while True:
            claim = watch.look()
            if claim.owner is None:
                if self._claim(claim.number + 1):
                    return claim.number + 1  # otherwise another driver was faster
            elif claim.owner.can_be_signalled or claim.changed:
                raise self._driven(claim.owner)
            elif not announced:
                announced = True
                say(
                    f"{_another(claim.owner)} was running run {self._folder.name};"
                    f" waiting up to {STALE_S:.0f} s to see whether it still does"
                )
            elif by := interrupted():
                raise Failure(
                    f"stopped by {by} while waiting for {_words(claim.owner)}",
                    code=ExitCode.INTERRUPTED if by == signal.SIGINT.name else ExitCode.TERMINATED,
                )
            time.sleep(_LOOK_S)

    def _claim(self, number: int) -> bool:
        """Claim a number; return whether it was free."""
        target = self._folder / FOLDER / str(number)
        fresh = self._fresh(self._me)
        try:
            try:
                os.link(fresh, target)
            except FileExistsError:
                return fresh.stat().st_nlink == 2  # an NFS server did it, but its answer was lost
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                try:
                    create_durably(target, msgspec.json.encode(self._me))
                except FileExistsError:
                    return False
            sync_folder(target.parent)
            return True
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _fresh(self, me: Owner) -> Path:
        """Return a new file with a record, flushed to disk before it becomes visible as a claim."""
        path = self._folder / FOLDER / f".{os.getpid()}.{secrets.token_hex(8)}"  # hosts share pids
        create_durably(path, msgspec.json.encode(me))
        return path

    def _driven(self, holder: Owner) -> Driven:
        view, logs = call("attach", self._folder), call("logs", self._folder, "-f")
        words = f"{_another(holder)} is running run {self._folder.name}"
        return Driven(words, hint=f"`{view}` and `{logs}` follow it")

    def _confirm(self) -> None:
        """Renew the claim, with a call that a file server must answer itself, and look for a newer one."""
        begun = _boot_s()
        newest = max(_numbers(self._folder), default=0)
        if newest > self.number:
            self._taken_by = newest
            return
        os.utime(self.path)
        self._confirmed_at = begun

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._confirm()


def _numbers(folder: Path) -> list[int]:
    """Return the numbers that are claimed; raises OSError."""
    try:
        return [int(each.name) for each in (folder / FOLDER).iterdir() if _NUMBER.fullmatch(each.name)]
    except FileNotFoundError:
        folder.stat()  # raises if the run is missing, such as on an unmounted file system
        return []


def _newest(folder: Path) -> tuple[int, Owner, os.stat_result] | None:
    """Return the newest claim, its record and its file's state, None if there is none; raises OSError."""
    for left in reversed(range(_TRIES)):
        number = max(_numbers(folder), default=0)
        if not number:
            return None
        try:
            with open_to_read(folder / FOLDER / str(number)) as file:  # opening makes NFS revalidate
                return number, _decoded(file.read(_RECORD_BYTES)), os.fstat(file.fileno())
        except FileNotFoundError:  # just replaced by a newer one
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def _create_folder(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_folder(path.parent)


def _decoded(data: bytes) -> Owner:
    try:
        return msgspec.json.decode(data, type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UNKNOWN  # incomplete: its host crashed, or its data are not visible yet


def _is_copied(holder: Owner, folder: Path) -> bool:
    """Return whether a record of this host names another folder of a run, which is there too."""
    if not (holder.folder and holder.can_be_signalled):
        return False
    with contextlib.suppress(OSError):
        return not folder.samefile(holder.folder)
    return False


def _lives(holder: Owner) -> bool:
    """Return whether a process of this host is the one that wrote the record."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    now = _started(holder.pid)
    return not (holder.started and now) or now == holder.started


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0: unknown, -1: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def _boot_s() -> float:
    """Return seconds of a clock that continues while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _another(holder: Owner) -> str:
    return f"another autotune ({_words(holder)})" if holder.is_known else "another autotune"


def _words(holder: Owner) -> str:
    return f"pid {holder.pid} on {holder.host}" if holder.is_known else "another process"
