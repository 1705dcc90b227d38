"""Where the overhead benchmark measures: a Ray head of its own, and a reader of what processes use."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from autotune.launchers.builtin.process.records import PREFIX
from autotune.launchers.runners.node.processes import ProcessStat, read_stat
from benchmarks.figures import Reading

DRIVER, SUPERVISOR, SHIM, RAY = "driver", "supervisor and sampler", "shim", "Ray's own daemons"
AUTOTUNE = (DRIVER, SUPERVISOR, SHIM)
_PERIOD_S = 0.5
_HEAD_START_S = 90.0
_HEAD_END_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.02
_AGENT_TITLES = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
_AGENT_SCRIPTS = (b"/dashboard/agent.py", b"/runtime_env/agent/main.py")


class Head:
    """A Ray head that asks for a token, with the environment that its programs need."""

    def __init__(self, folder: Path, *, port: int, pid: int, env: dict[str, str]) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{port}"
        self.pid = pid
        self.env = env
        self.logs = folder / "session_latest" / "logs"


@contextlib.contextmanager
def ray_head() -> Iterator[Head]:
    """Yield a Ray head that ends, with its folder, at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="ato-"))  # sockets below it have a longest path
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AUTOTUNE_"))}
    env |= {"HOME": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    port = _free_port()
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
    ]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", str(folder)]
    command += ["--num-cpus", "16", "--object-store-memory", str(256 << 20), "--include-dashboard", "false"]
    command += ["--dashboard-agent-listen-port", str(_free_port())]  # another Ray may hold the usual one
    child = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _until_listening(child, port)
        yield Head(folder, port=port, pid=child.pid, env=env)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_HEAD_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _until_listening(child: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _HEAD_START_S
    while True:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if child.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the Ray head did not start")
        time.sleep(0.2)


class Meter:
    """A thread that adds up the CPU seconds of autotune's own processes and of Ray's daemons.

    The job's processes are left out: the shim's child and the Ray workers that it starts.
    """

    def __init__(self, head: Head, *, driver: int = 0, supervisor: int = 0) -> None:
        self._head = head
        self._named = {driver: DRIVER, supervisor: SUPERVISOR}
        self._groups: dict[tuple[int, int], str] = {}
        self._used_s: dict[tuple[int, int], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.readings: list[Reading] = []
        self.shims: dict[tuple[int, int], float] = {}  # process -> Unix seconds of its start

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            self._read()
            if self._ended.wait(_PERIOD_S):
                return

    def _read(self) -> None:
        stats = {
            stat.pid: stat
            for entry in os.listdir("/proc")  # noqa: PTH208 - only the names are wanted
            if entry.isdigit() and (stat := read_stat(int(entry))) is not None
        }
        for stat in stats.values():
            key = (stat.pid, stat.started)
            group = self._groups.get(key) or self._group(stat, stats)
            if group:
                self._groups[key] = group
                self._used_s[key] = stat.cpu_s
                if group == SHIM:
                    self.shims.setdefault(key, started_at(stat))
        total: dict[str, float] = {}
        for key, used_s in self._used_s.items():
            total[self._groups[key]] = total.get(self._groups[key], 0.0) + used_s
        self.readings.append(Reading(time.time(), total))

    def _group(self, stat: ProcessStat, stats: dict[int, ProcessStat]) -> str:
        if stat.pid in self._named:
            return self._named[stat.pid]
        if stat.pid == self._head.pid:
            return RAY
        if not self._below_head(stat, stats):
            return ""
        try:
            words = Path(f"/proc/{stat.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return ""  # ended meanwhile
        above = stats.get(stat.parent)
        return group_of(
            words, parent="" if above is None else above.name, of_head=stat.parent == self._head.pid
        )

    def _below_head(self, stat: ProcessStat, stats: dict[int, ProcessStat]) -> bool:
        above: ProcessStat | None = stat
        while above is not None and above.pid != self._head.pid:
            above = stats.get(above.parent)
        return above is not None


def group_of(words: list[bytes], *, parent: str, of_head: bool) -> str:
    """Return the group of a process below the Ray head, from its command line and its parent's name.

    Empty for the job's processes, and for a Ray worker that does not yet show what it runs.
    """
    if parent == "raylet":
        if words[0].startswith(b"ray::NodeActor"):
            return SUPERVISOR
        agent = words[0] in _AGENT_TITLES or any(word.endswith(_AGENT_SCRIPTS) for word in words)
        return RAY if agent else ""
    if any(word.endswith(b"/shim.py") for word in words):
        return SHIM if parent.startswith("ray::NodeActor") else ""  # not its child, before it runs the job
    return RAY if of_head else ""


def started_at(stat: ProcessStat) -> float:
    """Return the Unix seconds at which a process began."""
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot_s + stat.started / _TICKS_PER_S


class Lookout:
    """Notes when a failure line appears in the log of one of the job's Ray workers."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[str, int] = {entry.name: entry.stat().st_size for entry in logs.glob("worker-*.err")}
        self.written: list[float] = []

    def watch(self, child: subprocess.Popen[bytes], *, longest_s: float) -> None:
        """Look until `child` has ended, for so many seconds at most."""
        until = time.monotonic() + longest_s
        while child.poll() is None and time.monotonic() < until:
            self._look()
            time.sleep(_LOOK_S)

    def _look(self) -> None:
        with os.scandir(self._logs) as entries:
            grown = [
                (entry.name, status)
                for entry in entries
                if entry.name.startswith("worker-") and entry.name.endswith(".err")
                if (status := entry.stat()).st_size > self._read.get(entry.name, 0)
            ]
        for name, status in grown:
            with (self._logs / name).open("rb") as file:
                file.seek(self._read.get(name, 0))
                data = file.read()
            if PREFIX.encode() in data:
                self.written.append(status.st_mtime)
            self._read[name] = self._read.get(name, 0) + len(data)
