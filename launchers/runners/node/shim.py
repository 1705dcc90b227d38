"""Start the framework in its own session and end that session when the supervisor is gone.

Run by path with `python -I`, standard library only: `shim.py LIFELINE STATUS MARKER ARGV...`. LIFELINE is the
read end of a pipe that the supervisor keeps open, STATUS the file for how the framework ended. If the
supervisor is killed (as by Ray's memory monitor), the end of the pipe or the parent-death signal, whichever
comes first, kills all processes of the attempt.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_START = 127  # as in a shell
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run the framework and return its exit code, or 128 + n after signal n."""
    lifeline, status, marker, argv = int(arguments[0]), Path(arguments[1]), arguments[2], arguments[3:]
    supervisor = os.getppid()
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_inheritable(lifeline, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for handled in _HANDLED:
        signal.signal(
            handled, lambda *_: None
        )  # handled by the loop; a handler, unlike SIG_IGN, is reset by exec
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans get this process as parent, not process 1
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
    begun, child = time.monotonic(), _start(argv)
    while True:
        select.select([lifeline, wakeup_read], [], [])
        if select.select([wakeup_read], [], [], 0)[0]:
            os.read(wakeup_read, 4096)
        if select.select([lifeline], [], [], 0)[0] or os.getppid() != supervisor:
            _end_attempt(marker)
        ended = _reap(child)
        if ended is not None:
            code, number = ended
            ran_s = time.monotonic() - begun
            record = {"code": code, "signal": number, "at": time.time(), "ran_s": ran_s}
            status.with_suffix(".part").write_text(json.dumps(record))
            status.with_suffix(".part").rename(status)
            return code if code is not None else 128 + (number or 0)


def _start(argv: list[str]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_CANNOT_START)
    signal.set_wakeup_fd(-1)
    for number in (*_HANDLED, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - argv is the framework's command, without a shell
    except OSError as error:
        os.write(2, f"autotune: cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(_CANNOT_START)


def _reap(child: int) -> tuple[int | None, int | None] | None:
    """Reap ended children; return exit code and signal of `child`, None while it runs."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            ended = (None, -code) if code < 0 else (code, None)


def _end_attempt(marker: str) -> None:
    """Kill all processes of the attempt on this machine, then the own process group."""
    wanted = b"\0" + marker.encode() + b"\0"
    for _ in range(3):  # a process may fork during the search
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid():
                continue
            try:
                if wanted in b"\0" + (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # ended meanwhile, or belongs to another user
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
