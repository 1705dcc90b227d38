"""Real Ray clusters of a few nodes on this machine, whose nodes can be frozen, lost and added."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
_STORE_BYTES = 80 << 20
_DEATH_S = 20.0


# The shell is the first process of the table: Ray's own takes a parent that is the first for a lost one.
_APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@" & wait $!', "sh")


class Nodes:
    """A cluster whose nodes have temporary folders, and so logs, of their own.

    Where this user may make them, nodes after the head have process tables of their own too: a sampler
    there sees the attempt's processes only where they are, as on machines of their own.
    """

    def __init__(
        self, count: int, *, cards: Path | None = None, durable: bool = False, port: int | None = None
    ) -> None:
        """Start `count` nodes, with `cards` one scripted card each; `durable`: the GCS keeps its state."""
        self.folder = Path(
            tempfile.mkdtemp(prefix="atf-", dir="/tmp")
        )  # sockets below it have a longest path
        (self.folder / "ray").mkdir()  # where Ray writes its address
        self._before = dict(os.environ)
        os.environ.update(HOME=str(self.folder), RAY_TMPDIR=str(self.folder), RAY_AUTH_MODE="disabled")
        os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
        os.environ.pop("RAY_ADDRESS", None)
        if durable:
            (self.folder / "gcs").mkdir()
            os.environ.update(RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(self.folder / "gcs"))
        self._cards = cards
        self.port = port or free_port()
        self._started = 0
        self._nodes: dict[int, Any] = {}
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=False)
        try:
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise
        self.address = str(self._cluster.address)

    def close(self) -> None:
        """End what is left of the cluster."""
        try:
            for number in sorted(self._nodes, reverse=True):
                self.lose(number)
        finally:
            os.environ.clear()
            os.environ.update(self._before)
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self) -> int:
        """Start another node; the first is the head. Returns its number."""
        self._started += 1
        number = self._started
        place = self.folder / str(number)
        place.mkdir()
        environment = {"FAULTS_NODE": str(number), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        if self._cards is not None:
            paths = (str(Path(__file__).with_name("scripted")), str(ROOT), environment["PYTHONPATH"])
            environment |= {"SCRIPTED_CARDS": str(self._cards), "PYTHONPATH": os.pathsep.join(paths)}
        head = {"gcs_server_port": self.port} if number == 1 else {}
        with contextlib.nullcontext() if number == 1 else _apart():
            self._nodes[number] = self._cluster.add_node(
                **head,
                num_cpus=8,
                num_gpus=0 if self._cards is None else 1,
                resources={f"at-{number}": 1},
                object_store_memory=_STORE_BYTES,
                include_dashboard=False,
                temp_dir=str(place),
                env_vars=environment,
            )
        return number

    def processes(self, number: int) -> list[psutil.Process]:
        """Return everything that runs on a node: its daemons, Ray's workers, what these started."""
        roots = [info.process.pid for infos in self._nodes[number].all_processes.values() for info in infos]
        result: dict[int, psutil.Process] = {}
        for pid in roots:
            try:
                root = psutil.Process(pid)
                result |= {process.pid: process for process in (root, *root.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
        return list(result.values())

    def freeze(self, number: int) -> None:
        """Stop everything on a node where it stands."""
        _send(self.processes(number), signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        """Let a frozen node go on."""
        _send(self.processes(number), signal.SIGCONT)

    def lose(self, number: int) -> None:
        """Kill everything on a node at once, as when its power fails."""
        node = self._nodes.pop(number)
        victims = self._of(node)
        _send(victims, signal.SIGKILL)
        psutil.wait_procs(victims, timeout=_DEATH_S)
        for infos in node.all_processes.values():
            for info in infos:
                info.process.wait()
        node.all_processes.clear()

    def _of(self, node: Any) -> list[psutil.Process]:
        result: list[psutil.Process] = []
        for infos in node.all_processes.values():
            for info in infos:
                try:
                    root = psutil.Process(info.process.pid)
                    result += [root, *root.children(recursive=True)]
                except psutil.NoSuchProcess:
                    continue
        return result

    def restart_gcs(self, *, down_s: float) -> None:
        """Kill the cluster's GCS and start it again at the same address."""
        head = self._nodes[1]
        head.kill_gcs_server()
        time.sleep(down_s)
        head.start_gcs_server()

    def gcs(self) -> list[psutil.Process]:
        """Return the process of the head that answers drivers and keeps the cluster's tables."""
        return [process for process in self.processes(1) if process.name() == "gcs_server"]

    def actors(self, number: int) -> list[psutil.Process]:
        """Return autotune's actors on a node: the supervisor, or a sampler."""
        return [process for process in self.processes(number) if _is_actor(process)]


@cache
def has_process_tables() -> bool:
    """Return whether this user may give a node a process table of its own."""
    try:
        return subprocess.run([*_APART, "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Let Ray's process of a node that is started inside, and all that it starts, be apart from others."""
    from ray._private import services

    plain = services.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        apart = process_type == "raylet" and has_process_tables()
        return plain([*_APART, *command] if apart else command, process_type, *args, **options)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = plain


def _is_actor(process: psutil.Process) -> bool:
    try:
        return "NodeActor" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
