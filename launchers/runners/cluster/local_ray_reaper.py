"""Cleans up a local Ray after its driver has ended.

Run by path with `python -I`, standard library only: `local_ray_reaper.py LIFELINE TOKEN FOLDER`. When the
pipe LIFELINE ends, however the driver died, every process whose environment carries TOKEN is killed and
FOLDER removed. What an attempt leaves on a cluster is ended by the runner's `sweep`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

_POLITE_S = 2.0  # seconds for Ray's daemons to notice that their driver is gone
_LONGEST_S = 20.0


def main(arguments: list[str]) -> int:
    """Wait for the end of the driver, then clean up."""
    lifeline, token, folder = int(arguments[0]), arguments[1].encode(), Path(arguments[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the pipe is the only reason to act
    select.select([lifeline], [], [])
    begun = time.monotonic()
    while time.monotonic() - begun < _LONGEST_S:
        left = _carriers(token)
        if not left:
            break
        if time.monotonic() - begun > _POLITE_S:
            for pid in left:
                _kill(pid)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _carriers(token: bytes) -> list[int]:
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"\0" + token + b"\0" in b"\0" + (process / "environ").read_bytes():
                result.append(int(process.name))
        except OSError:
            continue  # ended meanwhile, or another user's
    return [pid for pid in result if pid != os.getpid()]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
