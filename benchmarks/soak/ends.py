"""The job of the soak's attempts: `ends.py FOLDER LAST` makes two steps and dies; attempt LAST completes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

STEPS = 2


def main(folder: Path, last: int) -> int:
    """Make two steps more than the attempts before."""
    attempt = int(os.environ["AUTOTUNE_ATTEMPT"].rpartition("/")[2])
    for step in range((attempt - 1) * STEPS + 1, attempt * STEPS + 1):
        time.sleep(0.1)
        os.write(1, f"step: {step} loss=0.42\nsaved checkpoint at step {step}\n".encode())
    with (folder / "starts.txt").open("a") as file:
        file.write(f"{attempt}\n")
    if attempt < last:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
