"""Runs the program that writes annotations: in the environment of the job where it is here, else in ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.orchestrator.annotate import tracker_writer
from autotune.orchestrator.errors import reason_of
from autotune.policies.values.job import Job, Tracker

LIMIT_S = 120  # of one tracker: on a machine that is busy its package alone takes half a minute
_GRACE_S = 2.0  # in which a program that is over its time ends by itself
# Of the variables of a job, those that trackers and the stores behind them read.
_PREFIXES = ("WANDB_", "MLFLOW_", "SWANLAB_", "TRACKIO_", "HF_", "DATABRICKS_", "AWS_", "AZURE_", "GOOGLE_")


class Child:
    """One program at a time, which another thread can end."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()

    def ask(
        self, pythons: Iterable[str], asked: Mapping[str, Any], *, cwd: str, env: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the answer of the first interpreter that has the tracker's package, or of the last."""
        answer: dict[str, str] = {}
        for python in pythons:
            answer = self._ask(python, {"limit_s": LIMIT_S, **asked}, cwd=cwd, env=env)
            if "missing" not in answer:
                break
        return answer

    def _ask(
        self, python: str, asked: Mapping[str, Any], *, cwd: str, env: Mapping[str, str]
    ) -> dict[str, str]:
        late = {"error": f"no answer within {asked['limit_s']} s"}
        if self._closed.is_set():
            return {"error": "the run is over"}
        try:
            child = subprocess.Popen(
                [python, str(Path(tracker_writer.__file__).absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=cwd,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as error:
            return {"error": f"cannot start {python}: {reason_of(error)}"}
        self._running = child
        if self._closed.is_set():
            self.close()
        try:
            output, _ = child.communicate(msgspec.json.encode(asked), timeout=asked["limit_s"] + _GRACE_S)
            return msgspec.json.decode(output, type=dict[str, str])
        except subprocess.TimeoutExpired:
            return late
        except msgspec.DecodeError:
            return late if child.returncode == -signal.SIGALRM else {"error": f"exit code {child.returncode}"}
        finally:
            self._kill(child)
            self._running = None

    def close(self) -> None:
        """End what runs, and what would be started."""
        self._closed.set()
        if self._running is not None:
            self._kill(self._running)

    @staticmethod
    def _kill(child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def pythons(job: Job) -> tuple[str, ...]:
    """Return the interpreters to try: the job's, which has its tracker, and ours."""
    return tuple(dict.fromkeys((*_of_job(job), sys.executable)))


def _of_job(job: Job) -> Iterator[str]:
    if job.python is not None:
        named = str(Path(job.workdir, Path(job.python).expanduser())) if os.sep in job.python else job.python
        if result := shutil.which(named):
            yield result


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a writer: ours, overridden by the job's settings for its trackers."""
    return {**os.environ, **{k: v for k, v in variables.items() if k.startswith(_PREFIXES)}}


def absent(job: Job, trackers: Iterable[Tracker], child: Child) -> Iterator[tuple[Tracker, str]]:
    """Yield the trackers whose package no interpreter has, with what is missing and how to get it."""
    for tracker in trackers:
        answer = child.ask(pythons(job), {"tracker": tracker}, cwd=here(job), env=environment({}))
        if "missing" in answer:
            yield tracker, lacks(job, answer["missing"])


def lacks(job: Job, package: str) -> str:
    """Return that no interpreter has a package, and the command that installs it into one."""
    tried = pythons(job)
    lack = f"{tried[0]} lacks" if len(tried) == 1 else f"{' and '.join(tried)} lack"
    return f"needs {package}, which {lack}; hint: {tried[0]} -m pip install {package}"


def here(job: Job) -> str:
    """Return the job's folder where it is on this machine: stores are relative to it."""
    return job.workdir if Path(job.workdir).is_dir() else str(Path.cwd())
