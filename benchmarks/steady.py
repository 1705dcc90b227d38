"""`python -m benchmarks.steady`: CPU time of autotune's own processes while a job makes steps that cost none.

The job and its Ray workers print as a training does and sleep in between, so that the figures hold on a
machine that is busy with other work too: they are CPU seconds, not times. There they are higher than on an
idle one, whose caches are autotune's own.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import yaml

from benchmarks.figures import rates
from benchmarks.overhead import idle, journals, launched
from benchmarks.place import AUTOTUNE, DRIVER, SUPERVISOR, Head, Meter, ray_head

STEP_S = 0.45
WORKERS = 3
WARM_UP_STEPS = 12
START_S = 200.0

# Prints what the built-in job prints: a phase begins and ends in every worker, then a step. The phases
# name no step: the adapter of commands would count each as one.
_JOB = f"""
import ray, sys, time

@ray.remote(num_cpus=0)
class Worker:
    def work(self, until):
        while time.time() < until:
            print("builtin: phase start name=forward", flush=True)
            time.sleep({STEP_S} / 3)
            print("builtin: phase end name=forward", flush=True)
            time.sleep({STEP_S} * 2 / 3)

ray.init(log_to_driver=False, logging_level="ERROR")
until, step = time.time() + float(sys.argv[1]), 0
working = [Worker.remote().work.remote(until) for _ in range({WORKERS})]
while time.time() < until:
    step += 1
    print(f"step: {{step}} loss=0.42", flush=True)
    time.sleep({STEP_S})
ray.get(working)
"""


def main() -> int:
    """Measure and print the table; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady", description=__doc__)
    parser.add_argument("--runs", type=int, default=4, help="runs of the job (default: 4)")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured of each (default: 40)")
    options = parser.parse_args()
    load, measured = os.getloadavg()[0], []
    folder = Path(tempfile.mkdtemp(prefix="autotune-steady-"))
    try:
        with ray_head() as head:
            floor = idle(head)
            for number in range(1, options.runs + 1):
                print(f"run {number} of {options.runs}", file=sys.stderr, flush=True)
                measured.append(_run(head, folder / str(number), options.seconds))
    finally:
        shutil.rmtree(folder)
    sums = [sum(rate.get(name, 0.0) for name in AUTOTUNE) for rate in measured]
    rows = [
        (f"{name}, while steps run", statistics.fmean(rate.get(name, 0.0) for rate in measured))
        for name in AUTOTUNE
    ]
    rows += [
        (
            f"**all three** (lowest and highest run {min(sums):.2%} and {max(sums):.2%})",
            statistics.fmean(sums),
        ),
        ("idle floor: a Ray driver that does nothing", floor.get(DRIVER, math.nan)),
        ("idle floor: a Ray actor that does nothing", floor.get(SUPERVISOR, math.nan)),
    ]
    cores = os.cpu_count() or 1
    print(f"{datetime.now(UTC):%Y-%m-%d}, {cores} cores, load average {load:.1f} before.\n")
    print("| | of one core | per core |\n|---|---|---|")
    for what, rate in rows:
        print(f"| {what} | {rate:.2%} | {rate / cores:.2%} |")
    return 0


def _run(head: Head, folder: Path, seconds: float) -> dict[str, float]:
    """Return CPU seconds per second of each group while a job makes steps."""
    folder.mkdir()
    (folder / "job.py").write_text(_JOB)
    lasts = str(seconds + 2 * WARM_UP_STEPS * STEP_S + 15.0)
    job = {
        "name": "steady",
        "framework": "command",
        "command": ["{python}", str(folder / "job.py"), lasts, "{tokens_per_microbatch?}"],
        "settings": {"tokens_per_microbatch": 16384, "resume": True},
        "workdir": str(folder),
        "cluster": {"address": head.address},
        "goal": {"steps": 3},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    with launched(head, folder) as driver, Meter(head, driver=driver.pid) as meter:
        until = time.monotonic() + START_S
        while journals(folder).count('"progressed"') < WARM_UP_STEPS:
            if driver.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the job makes no steps:\n{(folder / 'terminal').read_text()}")
            time.sleep(0.5)
        begun = time.time()
        time.sleep(seconds)
        ended = time.time()
    return rates(meter.readings, since=begun, until=ended)


if __name__ == "__main__":
    sys.exit(main())
