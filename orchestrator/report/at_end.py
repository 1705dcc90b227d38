"""The report that every run leaves behind, written by a process of its own once the run is over."""

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

LIMIT_S = 60.0  # a journal of 70,000 events takes 3.5 s of a processor
HURRIED_S = 10.0  # Slurm and Kubernetes kill 30 s after they asked
_POLL_S = 0.2
_KILLED_S = 5.0  # a process that waits for a dead file system does not even die


def write(run: directory.RunFolder, *, limit_s: float = LIMIT_S, cut: Callable[[], object] = bool) -> None:
    """Let `autotune report` write report.html of a run; raises Failure.

    What takes longer than `limit_s` seconds, or still runs when `cut` becomes true, is killed: neither its
    time, nor its memory, nor its end is the driver's.
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
    """Return what a process printed on stderr by its end; raises Failure if that is not waited for."""
    while True:
        try:
            return child.communicate(timeout=_POLL_S)[1]
        except subprocess.TimeoutExpired:
            if cut():
                raise _unwritten(run, "interrupted") from None
            if time.monotonic() >= until:
                raise _unwritten(run, "it takes too long") from None


def _end(run: directory.RunFolder, child: subprocess.Popen[bytes]) -> None:
    """Kill what still runs, and remove what it had started to write."""
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
