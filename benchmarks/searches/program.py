"""A training job without training: prints the built-in job's lines at fixed times of the wall's clock.

Run by path with `python -I -S`, standard library only, so that it costs nothing beside what is measured. It
takes the words that the built-in job would take; STEP_S is the length of a step and LIVES the file that
receives when it began and ended.
"""

from __future__ import annotations

import os
import sys
import time

_TOKENS = 4096


def main(arguments: list[str]) -> int:
    """Print as many steps as the settings ask for and return 0."""
    begun, started = time.time(), time.monotonic()
    _note("begun", begun)
    with open(arguments[-1], encoding="utf-8") as file:  # noqa: PTH123 - pathlib would be its largest import
        settings = dict(line.rstrip("\n").partition(": ")[::2] for line in file if ": " in line)
    steps, step_s = int(settings["steps"]), float(os.environ["STEP_S"])
    speed = f"seconds={step_s} tokens={_TOKENS} tokens_per_second={_TOKENS / step_s}"
    for number in range(1, steps + 1):
        time.sleep(max(0.0, started + number * step_s - time.monotonic()))
        print(f"builtin: step {number}/{steps} {speed}", flush=True)
    print(f"builtin: done steps={steps}", flush=True)
    _note("ended", time.time())
    return 0


def _note(what: str, at: float) -> None:
    attempt = os.environ["AUTOTUNE_ATTEMPT"].rpartition("/")[2]
    descriptor = os.open(os.environ["LIVES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{attempt} {what} {at:.3f}\n".encode())
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
