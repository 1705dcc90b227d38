"""Write the report of a finished run in a separate process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from autotune.orchestrator.errors import Failure, reason_of
from autotune.orchestrator.run import directory

LIMIT_S = 60.0  # a journal of 70,000 events takes 3.5 s of CPU time
HURRIED_S = 10.0  # Slurm and Kubernetes kill 30 s after the first signal
_POLL_S = 0.2
_KILLED_S = 5.0  # a process blocked on a dead file system survives even SIGKILL


def write(run: directory.RunFolder, *, limit_s: float = LIMIT_S, cut: Callable[[], object] = bool) -> None:
    """Let `autotune report` write report.html of a run; raises Failure.

    The process is killed after `limit_s` seconds, or when `cut` becomes true. A separate process protects the
    driver from its running time, its memory use and its crashes.
    """
    if cut():
        raise _unwritten(run, "interrupted")
    try:
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "autotune.orchestrator.cli"),
                *("report", run.id, "--runs-dir", str(run.path.parent), "--color", "never"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": ""},  # its message is read by line
            start_new_session=True,
        )
    except OSError as error:
        raise _unwritten(run, reason_of(error)) from None
    try:
        output = _stderr_of(run, child, time.monotonic() + limit_s, cut)
    finally:
        _end(run, child)
    if child.returncode:
        raise _failure(run, output.decode("utf-8", "replace"))


def _stderr_of(
    run: directory.RunFolder, child: subprocess.Popen[bytes], until: float, cut: Callable[[], object]
) -> bytes:
    """Return the stderr of a process once it has ended; raises Failure if it is cut or takes too long."""
    while True:
        try:
            return child.communicate(timeout=_POLL_S)[1]
        except subprocess.TimeoutExpired:
            if cut():
                raise _unwritten(run, "interrupted") from None
            if time.monotonic() >= until:
                raise _unwritten(run, "it takes too long") from None


def _end(run: directory.RunFolder, child: subprocess.Popen[bytes]) -> None:
    """Kill the process if it still runs, and remove its partial file."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILLED_S)
    with contextlib.suppress(OSError):
        directory.partial_of(run.path / "report.html", child.pid).unlink()


def _failure(run: directory.RunFolder, output: str) -> Failure:
    """Return the failure that a process reported, or the last line of its traceback."""
    lines = [line for line in output.splitlines() if line.strip()]
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    if message:
        return Failure(message)
    named = [line for line in lines if not line.startswith((" ", "autotune: ", "Traceback "))]
    return _unwritten(run, named[-1] if named else "its process died")


def _unwritten(run: directory.RunFolder, why: str) -> Failure:
    return Failure(f"report.html is not written: {why}; `{run.call('report')}` writes it")
