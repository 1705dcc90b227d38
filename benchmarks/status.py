"""`python -m benchmarks.status`: processor time of `autotune status` over many finished runs.

The runs are written, not driven. Each figure is the CPU time of a whole command, its start included, so that
it holds on a machine that is busy with other work too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from autotune.orchestrator.clock import timestamp
from autotune.orchestrator.run import journal, summary
from autotune.policies.values.events import Accepted, Ended, Finished, Progressed, Started, TrainingCompleted
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Peak
from autotune.policies.values.profile import Profile

_STATUS = (sys.executable, "-m", "autotune.orchestrator.cli", "status")
_BEGUN = 1_800_000_000.0
_PEAK = Peak(used_bytes=60 << 30, capacity_bytes=80 << 30)


def main() -> int:
    """Measure and print the table; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="finished runs (default: 100)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each (default: 2000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        for number in range(options.runs):
            write_run(runs / f"{number:08x}", steps=options.steps)
        journals = list(runs.glob("*/events.jsonl"))
        mib = sum(path.stat().st_size for path in journals) >> 20
        print(f"{options.runs} finished runs of {options.steps:,} steps, {mib} MiB of journals")
        start = seconds(Path(folder, "none"))
        first = seconds(runs)
        repeated = seconds(runs)
        for path in runs.glob(f"*/{summary.NAME}"):
            path.unlink()
            path.mkdir()  # so that nothing can be kept there
        without = seconds(runs)
    print(f"start of the command alone    {start:6.2f} s")
    print(f"without summaries             {without:6.2f} s")
    print(f"the first time                {first:6.2f} s")
    print(f"every other time              {repeated:6.2f} s")
    print(f"without summaries takes {without / repeated:.1f} times as long")
    return 0


def write_run(folder: Path, *, steps: int) -> None:
    """Write a finished run of one attempt."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / "job.yaml").write_text("name: status\nframework: builtin\n")
    cluster = Cluster(
        address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
    )
    profile = Profile(framework="builtin", knobs=Knobs(), supported={})
    job = Job(name="status", framework="builtin")
    peaks = {phase.value: _PEAK for phase in (*Phase,)[:10]}
    begun = timestamp(_BEGUN)
    rows = [
        Accepted(at=begun, run=folder.name, job=job, profile=profile, cluster=cluster),
        Started(at=begun, attempt=1, knobs=Knobs()),
        *(
            Progressed(
                at=timestamp(_BEGUN + step),
                attempt=1,
                after_s=1.0,
                step=step,
                of=steps,
                seconds=1.0,
                peaks=peaks,
            )
            for step in range(1, steps + 1)
        ),
        Ended(at=timestamp(_BEGUN + steps), attempt=1, outcome=Completed(), seconds=float(steps), step=steps),
        Finished(at=timestamp(_BEGUN + steps), attempt=1, verdict=TrainingCompleted()),
    ]
    (folder / "events.jsonl").write_bytes(b"".join(journal.encode(row) + b"\n" for row in rows))


def seconds(runs: Path) -> float:
    """Return the CPU seconds of one `autotune status`."""
    before = os.times()
    subprocess.run([*_STATUS, "--runs-dir", str(runs)], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


if __name__ == "__main__":
    raise SystemExit(main())
