"""Connects this process to a Ray cluster, or starts a local one that ends with this process."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits
from autotune.launchers.runners.node.child import FOLDER
from autotune.launchers.runners.node.host import read_cards, read_host
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.value import Value

NAMESPACE = "autotune"
_LEAST_CPUS = 16  # frameworks start many light actors
_LEAST_STORE_BYTES = 256 * 1024 * 1024
_MOST_STORE_BYTES = 200 * 10**9  # as Ray's own default
_STORE_SHARE = 0.3  # of the available host memory, as Ray's own default
_SHM_SHARE = 0.95  # of what is free in /dev/shm, as Ray's own default
_SHM = Path("/dev/shm")  # noqa: S108 - where Ray keeps its objects on Linux
_NICENESS = "RAY_worker_niceness"
# For actors on others' clusters: a Ray worker adds to its niceness itself when it starts, so this needs no
# privilege. It takes a worker process of its own; our own Ray, where it holds for all, does without.
NORMAL_NICENESS = {"env_vars": {_NICENESS: "0"}}
_LONGEST_FOLDER = 36  # Ray's socket paths below it must stay under 107 bytes
_VERSION_LINES = 5  # of Ray's message about two versions
_LOCAL = "AUTOTUNE_CLUSTER"  # set in every process of a local Ray of ours
_NO_TABLES_HINT = "start the cluster with its dashboard, or install a Ray that the README names"
_HEALTH = "/grpc.health.v1.Health/Check"  # served by Ray's process on every node, and by the head's GCS
_REAPER = Path(__file__).with_name("local_ray_reaper.py")


class Connection(Value, frozen=True, kw_only=True):
    """A cluster that this process is connected to."""

    address: str  # of its GCS
    ours: bool  # started here
    note: str  # a line for the user; empty if they requested this cluster
    lifeline: int = -1  # our local Ray lives while this file descriptor is open
    reaper: int = -1


class Head:
    """Whether the cluster's head still answers.

    Checked before every use of Ray: without the head, Ray's calls block, and after 60 s it ends this process.
    Any thread may check; only the main thread connects and disconnects.
    """

    def __init__(self, address: str, *, waits: Waits = WAITS) -> None:
        self._waits = waits
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._answered_at = time.monotonic()
        self.gone = ""  # why this process has left the cluster

    def answers(self) -> bool:
        """Return whether the head accepts connections; disconnect if it has not for too long."""
        if self.gone:
            return False
        try:
            socket.create_connection(self._place, timeout=self._waits.connect).close()
        except OSError as error:
            if time.monotonic() - self._answered_at > self._waits.leave and in_main_thread():
                self.leave(f"the Ray cluster's head {self._place[0]} does not answer: {error}")
            return False
        self._answered_at = time.monotonic()
        return True

    def leave(self, reason: str) -> None:
        """Disconnect from a cluster that is gone."""
        import ray

        self.gone = reason
        with _own_signals():
            ray.shutdown()


def in_main_thread() -> bool:
    """Return whether this is the main thread, which may connect and disconnect."""
    return threading.current_thread() is threading.main_thread()


def connect(
    address: str | None, *, gpus: int | None = None, starting: Callable[[], None] = lambda: None
) -> Connection:
    """Connect to `auto`, `local`, host:port, or (None) to an existing cluster if any, otherwise a local one.

    Call from the main thread: the kernel ends the local Ray together with the thread that started it.
    `starting` is called before a local Ray is started, and may raise.
    """
    import ray

    if ray.is_initialized():
        raise Unreachable("this process is connected to a Ray cluster already")
    os.environ["RAY_DEDUP_LOGS"] = "0"
    if address == "local":
        starting()
        return _start_local(gpus, note="")
    if address not in (None, "auto"):
        return _join(str(address))
    result = existing(any_running=address == "auto")
    if result is not None:
        named = " (RAY_ADDRESS)" if os.environ.get("RAY_ADDRESS") == result else ""
        return replace(_join(result), note=f"connected to the Ray cluster at {result}{named}")
    if address == "auto":
        raise Unreachable(
            "no Ray cluster is running here",
            hint="start one with `ray start --head`, or write `address: local` to use this machine alone",
        )
    starting()
    return _start_local(gpus, note="no Ray cluster found; using a local one that ends with this run")


def disconnect(connection: Connection) -> None:
    """Disconnect; a local cluster of ours ends."""
    import ray

    with _own_signals():
        ray.shutdown()
    if connection.lifeline >= 0:
        os.close(connection.lifeline)
        os.waitpid(connection.reaper, 0)


def existing(*, any_running: bool) -> str | None:
    """Return the address that Ray itself would find: RAY_ADDRESS, that of `ray start`, or any running one.

    Local clusters of autotune are left out: they end with another run.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named and named != "auto":
        return named
    latest = internals.latest_address()
    running = {candidate for candidate in _gcs_addresses() if candidate}
    if latest in running:
        return latest
    return min(running) if running and any_running else None


def _gcs_addresses() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().split(b"\0")
            if not argv[0].endswith(b"/raylet"):
                continue
            if b"\0" + _LOCAL.encode() + b"=" in b"\0" + (process / "environ").read_bytes():
                continue
        except OSError:
            continue  # ended meanwhile, or another user's
        for word in argv:
            if word.startswith(b"--gcs-address="):
                yield word.partition(b"=")[2].decode()


def require_head(address: str) -> None:
    """Raise Unreachable where no head of a Ray cluster answers at host:port.

    Ray itself would try for a minute, and print a line for each try.
    """
    host, _, port = address.rpartition(":")
    hint = "write the host:port that `ray status` shows; Ray Client (ray://) is not supported"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=WAITS.connect).close()
    except (OSError, ValueError) as error:
        raise Unreachable(f"cannot connect to the Ray cluster at {address}: {error}", hint=hint) from error
    if not serves_ray(address, timeout_s=WAITS.connect):
        raise Unreachable(f"what listens at {address} is not the head of a Ray cluster (its GCS)", hint=hint)


def _join(address: str) -> Connection:
    import ray

    require_head(address)
    if "RAY_AUTH_MODE" not in os.environ:
        internals.use_token(of_user=True)  # as Ray does for clusters that it finds itself
    with _environment({"RAY_ADDRESS": address}):
        try:
            info = _init(address=address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unreachable(
                f"cannot connect to the Ray cluster at {address}: {_one_line(error)}",
                hint="this machine must be a node of the cluster (`ray start --address=...`)",
            ) from error
    try:
        internals.job_rows()
    except internals.TablesUnreadable as error:
        with _own_signals():
            ray.shutdown()
        raise Unreachable(str(error), hint=_NO_TABLES_HINT) from error
    return Connection(address=info["gcs_address"], ours=False, note="")


def serves_ray(address: str, *, timeout_s: float) -> bool:
    """Return whether a Ray server answers at host:port; true if that cannot be checked."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    try:
        import grpc
    except ImportError:
        return True
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_HEALTH)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True


def _one_line(error: Exception) -> str:
    """Return a Ray error as one sentence; a version mismatch lists both versions on separate lines."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([first, *more[:_VERSION_LINES]]) if "ersion mismatch" in first else first


def _start_local(gpus: int | None, *, note: str) -> Connection:
    """Start a Ray that ends with this process.

    All its workers, including supervisors and samplers, run at this process's niceness. Ray's default adds
    15, which suits shared machines; here the machine belongs to the job, and under other load the job and its
    supervisor would starve. RAY_worker_niceness in the environment overrides this.
    """
    folder = tempfile.mkdtemp(prefix="at-")
    if len(folder) > _LONGEST_FOLDER:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="at-", dir="/tmp")
    token = f"{_LOCAL}={secrets.token_hex(8)}"
    read, lifeline = os.pipe()
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_REAPER), str(read), token, folder],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(read,),
        cwd="/",
    )
    os.close(read)
    _protect()
    host = read_host()
    available = host.total_bytes - host.used_bytes
    name, _, value = token.partition("=")
    try:
        environment = {
            name: value,
            FOLDER: folder,
            "RAY_ADDRESS": None,
            "RAY_TMPDIR": folder,
            _NICENESS: os.environ.get(_NICENESS, "0"),
        }
        with _environment(environment), internals.daemons_apart():
            info = _init(
                address="local",
                num_cpus=max(_LEAST_CPUS, len(os.sched_getaffinity(0))),
                num_gpus=visible_gpus() if gpus is None else gpus,
                object_store_memory=object_store_bytes(available_bytes=available, shm_bytes=_free(_SHM)),
                include_dashboard=not internals.has_own_tables(),
            )
    except Exception as error:
        logs = _kept_logs(Path(folder))
        os.close(lifeline)
        hint = f"look at Ray's logs in `{logs}`; a busy machine may only need another try" if logs else ""
        raise Unreachable(
            f"cannot start Ray on this machine: {_one_line(error)}", hint=_limit_hint() or hint
        ) from error
    return Connection(address=info["gcs_address"], ours=True, note=note, lifeline=lifeline, reaper=reaper.pid)


def _limit_hint() -> str:
    """Return a hint about this shell's limit of address space, which Ray exceeds; empty if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"this shell limits a process to {show_gib(limit)} of address space (`ulimit -v`); Ray maps more: "
        "start autotune in a shell without it, and set the limit in the script"
    )


def _kept_logs(folder: Path) -> str:
    """Return a copy of the logs of a local Ray that failed to start; empty if there are none."""
    logs = folder / "ray" / "session_latest" / "logs"
    if not logs.is_dir():
        return ""
    kept = tempfile.mkdtemp(prefix="autotune-ray-logs-")
    shutil.copytree(logs, kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    return kept


def _protect() -> None:
    """Keep other users of this machine out of autotune's own Ray, without touching the user's token file."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    internals.use_token(of_user=False)


def object_store_bytes(*, available_bytes: int, shm_bytes: int) -> int:
    """Return the size of our own Ray's object store, given the host's available memory and free /dev/shm.

    Ray's own default: 30 % of available memory, at most 95 % of /dev/shm and 200 GB. It is a limit and
    reserves nothing. Rollouts that exceed it are spilled to disk and restored in every step; on a small host
    this happens before the trainer and the engines run out of memory. At least 256 MiB: with a smaller
    /dev/shm, such as Docker's default of 64 MiB, Ray keeps objects in a file.
    """
    wanted = min(_STORE_SHARE * available_bytes, _SHM_SHARE * shm_bytes, _MOST_STORE_BYTES)
    return max(_LEAST_STORE_BYTES, int(wanted))


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def visible_gpus() -> int:
    """Return the GPUs of this machine that a local Ray would use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(read_cards())
    return count if visible is None else min(count, len([entry for entry in visible.split(",") if entry]))


def _init(**options: Any) -> dict[str, Any]:
    import ray

    try:
        with _own_signals():
            context = ray.init(
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=True,
                **options,
            )
    except SystemExit as left:
        # Ray's own handler of SIGTERM, which is installed while it connects, leaves the process at once.
        if left.code == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
            raise Unreachable("stopped by SIGTERM while connecting to Ray") from None
        raise
    return dict(context.address_info)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the signal handlers of this process: Ray replaces SIGTERM's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
