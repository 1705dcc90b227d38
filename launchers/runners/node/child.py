"""The framework's main process: create its private folder, start it through the shim, end it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from autotune.launchers.base import Exit, Unreachable
from autotune.launchers.option_variables import without_options
from autotune.launchers.runners.node.logs import RECORDS
from autotune.launchers.runners.node.processes import MARKER, is_alive, read_stat
from autotune.policies.values.command import Command, File
from autotune.policies.values.value import Value

FOLDER = "AUTOTUNE_FOLDER"  # parent of private folders instead of the temporary folder; set for a local Ray
_PREFIX = "autotune-attempt-"
_OWNER = "owner.json"
_SHIM = Path(__file__).with_name("shim.py")

# Set by Ray for its worker processes; a framework that inherits them would act as such a worker.
_OF_RAY_WORKERS = (
    "RAY_JOB_ID",
    "RAY_RAYLET_PID",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_worker_niceness",
    "RAY_CLIENT_MODE",
    "RAY_WORKER_PROCESS_SETUP_HOOK",
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
)


class _Owner(Value, frozen=True, kw_only=True):
    """The supervisor of the attempt in a private folder."""

    attempt: str
    pid: int
    started: int


class Child:
    """A started framework, which lives at most as long as the process of this object."""

    def __init__(
        self, command: Command, *, attempt: str, python: str | None, environment: dict[str, str]
    ) -> None:
        self.attempt = attempt
        self._ended: Exit | None = None
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=os.environ.get(FOLDER)))  # mode 0700
        except OSError as error:
            raise _unwritable(error, os.environ.get(FOLDER) or "the temporary folder") from error
        self.output = self.folder / "output.log"
        try:
            self._write(command.files)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise _unwritable(error, str(self.folder.parent)) from error
        interpreter = python or sys.executable
        argv = [self._fill(word).replace("{python}", interpreter) for word in command.argv]
        filled = {
            name: self._fill(value).replace("{python}", interpreter) for name, value in command.env.items()
        }
        environment = {
            "PYTHONUNBUFFERED": "1",
            **without_options(environment),
            **filled,
            MARKER: attempt,
            "AUTOTUNE_RECORDS": str(self.folder / RECORDS),
            "RAY_DEDUP_LOGS": "0",
            "SPT_NOENV": "1",  # otherwise setproctitle, used by SGLang, overwrites the marker in /proc
        }
        try:
            self._shim = self._start(argv, environment=environment, cwd=self._fill(command.cwd))
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise Unreachable(f"cannot start in {command.cwd}: {error.strerror}") from error

    def _write(self, files: tuple[File, ...]) -> None:
        """Write the framework's files, and the record of its supervisor."""
        own = read_stat(os.getpid())
        owner = _Owner(attempt=self.attempt, pid=os.getpid(), started=own.started if own else 0)
        (self.folder / _OWNER).write_bytes(msgspec.json.encode(owner))
        for file in files:
            path = self.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._fill(file.text))
            path.chmod(0o600)
        self.output.touch()

    def _fill(self, text: str) -> str:
        return text.replace("{attempt}", str(self.folder))

    def _start(self, argv: list[str], *, environment: dict[str, str], cwd: str) -> subprocess.Popen[bytes]:
        lifeline, self._lifeline = os.pipe()
        try:
            with self.output.open("ab", buffering=0) as output:
                return subprocess.Popen(
                    [
                        sys.executable,
                        *("-I", "-S", str(_SHIM), str(lifeline)),
                        *(str(self.folder / "exit.json"), f"{MARKER}={self.attempt}", *argv),
                    ],
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(lifeline,),
                )
        finally:
            os.close(lifeline)

    @property
    def group(self) -> int:
        """The process group of the framework."""
        return self._shim.pid

    def ended(self) -> Exit | None:
        """Return how the framework's main process ended; None while it runs."""
        code = self._shim.poll()
        if code is None or self._ended is not None:
            return self._ended
        record = self.folder / "exit.json"
        if record.exists():
            self._ended = Exit(**json.loads(record.read_text()))
            return self._ended
        at = self.output.stat().st_mtime  # read once, because freeing a part of the file changes it, too
        self._ended = Exit(signal=-code, at=at) if code < 0 else Exit(code=code, at=at)
        return self._ended

    def stop(self, *, grace_s: float) -> None:
        """End the process group: SIGTERM, then SIGKILL if the main process still runs after `grace_s`."""
        if self._shim.poll() is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._shim.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._shim.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.killpg(self._shim.pid, number)

    def close(self) -> None:
        """End the framework if it still runs, and remove the private folder."""
        os.close(self._lifeline)
        self._shim.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _unwritable(error: OSError, folder: str) -> Unreachable:
    place = f"{folder} of {os.uname().nodename}"
    return Unreachable(
        f"cannot write the files of the attempt in {place}: {error.strerror or error}",
        hint="make room there",
    )


def outside_ray_worker(environment: dict[str, str], *, initial: dict[str, str]) -> dict[str, str]:
    """Return the variables that a process outside Ray may inherit from a Ray worker.

    `initial` is the environment that the worker was started with; Ray adds variables later.
    """
    kept = {name: value for name, value in environment.items() if name not in _OF_RAY_WORKERS}
    if kept.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del kept["PYTHONBREAKPOINT"]
    if "OMP_NUM_THREADS" not in initial:
        kept.pop("OMP_NUM_THREADS", None)
    if not kept.get("CUDA_VISIBLE_DEVICES"):
        kept.pop("CUDA_VISIBLE_DEVICES", None)  # empty means: no devices
    return kept


def initial_environment() -> dict[str, str]:
    """Return the environment that this process was started with."""
    entries = Path("/proc/self/environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def living_attempts(run: str) -> set[str]:
    """Return the attempts `<run>/<n>` whose supervisor is alive on this machine."""
    return {owner.attempt for _, owner in _owned_folders(run) if is_alive(owner.pid, owner.started)}


def remove_dead_folders(run: str, *, spared: set[str]) -> tuple[str, ...]:
    """Remove private folders of a run's attempts, except `spared` and supervised ones; return the removed."""
    removed = []
    for folder, owner in _owned_folders(run):
        if owner.attempt not in spared and not is_alive(owner.pid, owner.started):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(owner.attempt)
    return tuple(removed)


def _owned_folders(run: str) -> list[tuple[Path, _Owner]]:
    result = []
    for record in Path(os.environ.get(FOLDER) or tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        try:
            owner = msgspec.json.decode(record.read_bytes(), type=_Owner)
        except (OSError, msgspec.DecodeError):
            continue  # belongs to another user, or is being removed
        if owner.attempt.startswith(run + "/"):
            result.append((record.parent, owner))
    return result
