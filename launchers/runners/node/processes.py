"""Find the processes of an attempt by a marker in their environment, and end them."""

from __future__ import annotations

import os
import pwd
import resource
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

MARKER = "AUTOTUNE_ATTEMPT"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_YOUNG_S = 30.0  # younger processes may still get the marker by exec: Ray forks a worker before exec
_PATIENCE = 0.5  # share of a young stranger's age until it is checked again: a machine may run many censuses
_CENSUS_S = 1.0  # least time between checks of all processes
_ROTATION = 60  # each scan checks one in 60 known strangers again, because process ids are reused
_LAST_WAIT_S = 10.0  # for processes to end after SIGKILL


class ProcessStat(NamedTuple):
    """One line of /proc/<pid>/stat."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    cpu_s: float
    started: int  # clock ticks since boot: distinguishes a process from a later one with the same id
    rss_bytes: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return the kernel's data on a process; None if it has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read twice a second per process
            data = file.read()
    except OSError:
        return None
    head, _, tail = data.rpartition(b")")
    fields = tail.split()
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessStat(
        pid=pid,
        name=head[head.index(b"(") + 1 :].decode("utf-8", "replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        started=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


class OwnLimit(NamedTuple):
    """The limit that a process has of its own memory, and what counts against it."""

    bytes: int = 0  # 0: none
    used_bytes: int = 0


def own_limit(pid: int) -> OwnLimit:
    """Return the limit of a process's address space or data that is nearest to full, as its user set it.

    A soft limit of the data below an unlimited hard one is the process's own, such as a simulated device.
    """
    try:
        space, _ = resource.prlimit(pid, resource.RLIMIT_AS)
        data, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        data = resource.RLIM_INFINITY if hard == resource.RLIM_INFINITY else data
        if space == data == resource.RLIM_INFINITY:
            return OwnLimit()
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - read twice a second per process
            sizes = file.read().split()
    except (OSError, ValueError):  # it has ended, or belongs to another user
        return OwnLimit()
    limits = ((space, int(sizes[0])), (data, int(sizes[5])))
    known = [OwnLimit(limit, pages * _PAGE_BYTES) for limit, pages in limits if limit > 0]
    return max(known, key=lambda each: each.used_bytes / each.bytes, default=OwnLimit())


def attempt_of(pid: int) -> str | None:
    """Return the attempt `<run>/<n>` of a process; None for other or unreadable processes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - read for every process of the machine
            data = b"\0" + file.read()
    except OSError:
        return None
    at = data.find(b"\0" + MARKER.encode() + b"=")
    if at < 0:
        return None
    start = at + len(MARKER) + 2
    end = data.find(b"\0", start)
    return data[start : end if end >= 0 else None].decode("utf-8", "replace")


def all_pids() -> list[int]:
    """Return the ids of all visible processes."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208 - measured hot path


def _newest_pid() -> int:
    """Return the last process id assigned by the kernel; -1 if unknown."""
    try:
        with open("/proc/loadavg", "rb") as file:  # noqa: PTH123 - read twice a second
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return -1


def user_of(pid: int) -> str:
    """Return the name of a process's user."""
    try:
        owner = Path("/proc", str(pid)).stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process with this id and start time still runs."""
    stat = read_stat(pid)
    return stat is not None and stat.started == started


class Census:
    """The living processes of one attempt on this machine, updated at low cost."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._ours: dict[int, int] = {}  # pid -> started
        self._strangers: dict[int, tuple[float, float]] = {}  # pid -> first seen, time of the next check
        self._scans = 0
        self._newest = -1  # newest process id at the last check of all processes
        self._young = False  # a process may still get the marker
        self._looked_at = float("-inf")

    def scan(self) -> tuple[ProcessStat, ...]:
        """Return the processes with the marker, and their descendants.

        A process that started since the last check is found within a second.
        """
        now = time.monotonic()
        newest = _newest_pid()
        unchanged = 0 <= newest == self._newest and not self._young
        if unchanged or now - self._looked_at < _CENSUS_S:
            return self._known()
        self._newest, self._looked_at = newest, now
        self._scans += 1
        present = all_pids()
        result: list[ProcessStat] = []
        strangers: dict[int, tuple[float, float]] = {}
        for pid in present:
            started = self._ours.get(pid)
            if started is None:
                first_at, due = self._strangers.get(pid, (now, now))
                late = (pid + self._scans) % _ROTATION == 0 if now - first_at > _YOUNG_S else now >= due
                if not late:
                    strangers[pid] = first_at, due
                    continue
            stat = self._classify(pid, started)
            if stat is None:
                first_at = self._strangers.get(pid, (now, now))[0]
                strangers[pid] = first_at, now + _PATIENCE * (now - first_at)
            else:
                result.append(stat)
        self._strangers = strangers
        self._young = any(now - first_at <= _YOUNG_S for first_at, _ in strangers.values())
        self._ours = {stat.pid: stat.started for stat in result}
        return tuple(result)

    def _known(self) -> tuple[ProcessStat, ...]:
        """Return the processes of the last check that are still alive."""
        stats = (read_stat(pid) for pid in self._ours)
        result = tuple(s for s in stats if s is not None and s.started == self._ours[s.pid])
        self._ours = {stat.pid: stat.started for stat in result}
        return result

    def forget_strangers(self) -> None:
        """Make the next scan check all processes again."""
        self._strangers = {}
        self._newest, self._looked_at = -1, float("-inf")

    def _classify(self, pid: int, started: int | None) -> ProcessStat | None:
        if started is not None:
            stat = read_stat(pid)
            if stat is not None and stat.started == started:
                return stat
        if pid == os.getpid():
            return None
        if attempt_of(pid) == self._attempt:
            return read_stat(pid)
        if pid in self._strangers:
            return None
        stat = read_stat(pid)  # a child that dropped its environment also belongs to the attempt
        return stat if stat is not None and stat.parent in self._ours else None


def end(find: Callable[[], Iterable[ProcessStat]], *, grace_s: float) -> tuple[ProcessStat, ...]:
    """End the processes that `find` returns until it finds none; return those that survived SIGKILL.

    SIGTERM first, SIGKILL after `grace_s` seconds: an engine's owner may survive SIGTERM of its scheduler.
    """
    begun = time.monotonic()
    asked: set[tuple[int, int]] = set()
    victims: dict[tuple[int, int], ProcessStat] = {}
    quiet = 0
    while True:
        for stat in find():
            victims[stat.pid, stat.started] = stat
        victims = {key: stat for key, stat in victims.items() if is_alive(*key)}
        elapsed = time.monotonic() - begun
        quiet = 0 if victims else quiet + 1
        if quiet == 2 or elapsed > grace_s + _LAST_WAIT_S:  # twice: a process may be between fork and exec
            return tuple(victims.values())
        for key in victims:
            if elapsed >= grace_s:
                _signal(key[0], signal.SIGKILL)
            elif key not in asked:
                asked.add(key)
                _signal(key[0], signal.SIGTERM)
        time.sleep(0.1)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid in (1, os.getpid()):
        return
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        return  # reported as survivor with its user


def marked(wanted: Callable[[str], bool]) -> tuple[ProcessStat, ...]:
    """Return the processes of this machine whose attempt is `wanted`."""
    result = []
    for pid in all_pids():
        attempt = attempt_of(pid)
        if attempt is not None and wanted(attempt) and pid != os.getpid():
            stat = read_stat(pid)
            if stat is not None:
                result.append(stat)
    return tuple(result)
