"""Real GPU failures, cured by `autotune launch`: `python benchmarks/gpu/launch.py`.

Launches the built-in job, with a light engine and with SGLang where it is installed, and the example job of
every framework that is installed, and prints how each run went, attempt by attempt.
Exit codes: 0 every run became stable or finished, 1 one did not, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # started as a file: the checkout is not on the path
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]

from autotune.launchers.frameworks import FRAMEWORKS  # noqa: E402
from autotune.orchestrator.config import loader as jobs  # noqa: E402
from autotune.orchestrator.run import journal  # noqa: E402
from autotune.policies.values.events import (  # noqa: E402
    Decided,
    Diagnosed,
    Event,
    Finished,
    GoalReached,
    Progressed,
    Stable,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.job import Cluster  # noqa: E402
from benchmarks.one_estimate import estimate  # noqa: E402

# What must be importable, and the job that is launched then. The first two need no SGLang.
JOBS = {
    "light": ("transformers", "benchmarks/gpu/jobs/relaunched.yaml"),
    "light-in-place": ("transformers", "benchmarks/gpu/jobs/in-place.yaml"),
    "builtin": ("sglang", "configs/builtin-gpu.yaml"),
    "verl": ("verl", "configs/verl-grpo-qwen2.5-7b.yaml"),
    "areal": ("areal", "configs/areal-gsm8k.yaml"),
    "slime": ("slime", "configs/slime-colocated.yaml"),
}
_NO_GPU = 3
_HEAD = ("job", "attempt", "steps", "cause", "phase", "remedy", "changes")


class Row(NamedTuple):
    """One attempt of a run."""

    job: str
    attempt: int
    steps: int
    cause: str  # of its failure, or how the run ended with it
    phase: str
    remedy: str
    changes: str


def table(job: str, history: Iterable[Event]) -> list[Row]:
    """Return a row per attempt of a run."""
    rows: list[Row] = []
    for event in history:
        match event:
            case Started():
                rows.append(Row(job, event.attempt, 0, "", "", "", ""))
            case Progressed():
                rows[-1] = rows[-1]._replace(steps=rows[-1].steps + 1)
            case GoalReached():
                rows[-1] = rows[-1]._replace(cause="marginal" if event.marginal else "stable")
            case Diagnosed():
                rows[-1] = rows[-1]._replace(cause=event.cause.value, phase=event.phase.value)
            case Decided(remedy=remedy) if remedy is not None and rows:
                changes = " ".join(f"{name}={value}" for name, value in remedy.changes.items())
                rows[-1] = rows[-1]._replace(remedy=remedy.name, changes=changes)
            case Finished(verdict=Stable()) if rows:
                rows[-1] = rows[-1]._replace(cause="stable")
            case Finished(verdict=TrainingCompleted()) if rows:
                rows[-1] = rows[-1]._replace(cause="completed")
            case _:
                pass
    return rows


def printed(rows: list[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = [_HEAD, tuple("---" for _ in _HEAD), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def predicted_misses(path: Path, *, gpu_memory_bytes: int) -> dict[str, int]:
    """Return the phases for which a job as written is too big on one card, and by how many bytes."""
    job = jobs.load(path)
    framework = FRAMEWORKS[job.framework]
    cluster = Cluster(
        address="local",
        nodes=1,
        gpus_per_node=1,
        gpu_memory_bytes=gpu_memory_bytes,
        host_memory_bytes=0,
    )
    profile = framework.profile(job, cluster)
    model = job.shape or framework.shape(job)
    if model is None:
        return {}
    predicted = estimate(profile, cluster, model, profile.knobs)
    return {
        phase.value: round(part.gpu_missing_bytes)
        for phase, part in predicted.phases.items()
        if part.gpu_missing_bytes > 0
    }


def launched(name: str, job: Path, *, runs: Path, minutes: float) -> list[Row]:
    """Launch a job and return its attempts, however it ended."""
    folder = runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [
        sys.executable,
        "-m",
        "autotune.orchestrator.cli",
        "launch",
        str(job),
        "--runs-dir",
        str(folder),
    ]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    )
    try:
        child.wait(timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        child.terminate()  # it ends its processes and its Ray
        child.wait(timeout=300)
    rows: list[Row] = []
    for events in sorted(folder.glob("*/events.jsonl")):
        rows += table(name, journal.read(events))
    return rows


def cards() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []


def main(arguments: list[str] | None = None) -> int:
    """Launch what is installed and print the attempts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=list(JOBS))
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each run at most")
    options = parser.parse_args(arguments)
    gpus = cards()
    if not gpus:
        sys.stderr.write("no GPU: NVML shows no NVIDIA card on this machine\n")
        return _NO_GPU
    print(f"{len(gpus)} × {gpus[0]}")
    good = True
    rows: list[Row] = []
    for name in options.jobs:
        package, path = JOBS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: skipped, {package} is not installed")
            continue
        attempts = launched(name, ROOT / path, runs=options.runs_dir, minutes=options.minutes)
        good = good and bool(attempts) and attempts[-1].cause in ("stable", "completed")
        rows += attempts
    print(printed(rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
