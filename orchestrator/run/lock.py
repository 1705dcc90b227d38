"""The lock of a run: one driver at a time, on one host by flock, between hosts by a heartbeat.

A host of the same name that was booted at another time counts as another host: machines share names, and a
file server may hold the lock of one that is gone for longer than it was away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from pathlib import Path

import msgspec

from autotune.orchestrator.calls import call
from autotune.orchestrator.errors import Failure, writing
from autotune.policies.values.value import Value

BEAT_S = 10.0
STALE_S = 60.0  # six beats: a driver of another host that is silent for so long is dead
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_OWNER_BYTES = 4096
_TRIES, _TRY_S = 20, 0.05  # about a second


class Owner(Value, frozen=True, kw_only=True):
    """Who drives a run: enough to signal it from another terminal of the same host."""

    host: str
    pid: int
    boot_id: str
    pids: int | None = None  # the namespace of its pid; containers of one host have their own

    @property
    def is_here(self) -> bool:
        """Whether the owner runs on this machine as it was booted last, in whichever container."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    @property
    def can_be_signalled(self) -> bool:
        """Whether the owner's pid means the same process here, as far as its lock tells."""
        return self.is_here and self.pids in (None, pid_namespace())


class Driven(Failure):
    """Another driver has the run. `free_in_s`: when its silence would end that; None: it is of this host."""

    def __init__(self, message: str, *, hint: str, free_in_s: float | None) -> None:
        super().__init__(message, hint=hint)
        self.free_in_s = free_in_s


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
    """Return who holds the run's lock now, if anyone does."""
    try:
        with (folder / "lock").open("rb") as file:
            holder = _decoded(file.read(_OWNER_BYTES))
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder
            beats = holder is not None and not holder.is_here and _silent_s(folder, file.fileno()) < STALE_S
            return holder if beats else None
    except OSError:
        return None


def last_owner(folder: Path) -> Owner | None:
    """Return who holds the run's lock, or held it when its process died; None after an orderly end."""
    try:
        return _decoded((folder / "lock").read_bytes())
    except OSError:
        return None


class Lock:
    """The held lock of a run. Its file's time is the heartbeat, which a thread renews."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; raises Driven while another driver has it."""
        self.path = folder / "lock"
        with writing(self.path):
            self._file = self._open()
            try:
                self.last_beat = os.fstat(self._file).st_mtime  # of the driver before
                self._take(folder)
            except BaseException:
                os.close(self._file)
                raise
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="autotune-heartbeat", daemon=True)
        self._beats.start()

    def check(self) -> None:
        """Raise Failure where another host has taken the run over, because this one was silent."""
        try:
            ours = os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return  # a folder that cannot be read cannot be written either; writing says why
        if not ours:
            raise Failure(
                f"run {self.path.parent.name} was taken over by another host, which this driver had not "
                f"reported to for {STALE_S:.0f} s",
                hint=f"`{call('status', self.path.parent)}` shows it",
            )

    def release(self) -> None:
        """Give the lock up."""
        self._released.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
        os.close(self._file)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _take(self, folder: Path) -> None:
        holder = _decoded(os.pread(self._file, _OWNER_BYTES, 0))
        away = holder is not None and not holder.is_here
        silent_s = _silent_s(folder, self._file) if away else 0.0
        if away and silent_s < STALE_S:
            raise self._driven(holder, free_in_s=STALE_S - silent_s)
        if away:
            self._replace()  # a free lock too: another host's may have lapsed, or not be seen here
        elif not self._granted():
            raise self._driven(holder, free_in_s=None)
        me = Owner(host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id(), pids=pid_namespace())
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, msgspec.json.encode(me), 0)

    def _granted(self) -> bool:
        """Return whether the file is locked now; readers lock it for a moment, another driver for long."""
        for left in reversed(range(_TRIES)):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if left:
                time.sleep(_TRY_S)
        return False

    def _replace(self) -> None:
        """Lock a new file in the place of a silent holder's; if that one lives, its `check` notices."""
        fresh = self.path.with_name(f".lock.{os.getpid()}.{secrets.token_hex(4)}")  # hosts share pids
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.replace(self.path)
        os.close(self._file)
        self._file = file

    def _driven(self, holder: Owner | None, *, free_in_s: float | None) -> Driven:
        run = self.path.parent.name
        who = f"pid {holder.pid} on {holder.host}" if holder is not None else "another process"
        hint = f"`{call('status', self.path.parent)}` shows it"
        if free_in_s is not None:
            hint += f"; if that host is gone, resume in {free_in_s:.0f} s"
        return Driven(f"run {run} is driven by {who}", hint=hint, free_in_s=free_in_s)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._file)


def _silent_s(folder: Path, lock: int) -> float:
    """Return how old the heartbeat is by the clock of the file system, which the hosts share."""
    probe = folder / f".time.{os.getpid()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    return max(0.0, now - os.fstat(lock).st_mtime)


def _decoded(data: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError:
        return None
