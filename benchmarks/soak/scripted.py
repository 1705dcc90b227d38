"""`python -m benchmarks.soak.scripted COUNT`: one run of COUNT attempts over a scripted runner.

Every attempt makes a few steps and is killed, so that the run goes on with the same knobs; the clock's hands
move when the driver sleeps. Prints a line of JSON per attempt: its number, the CPU seconds so far, the bytes
of this process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from autotune.launchers import frameworks
from autotune.launchers.base import Chunk, Drain, Exit, Observed
from autotune.orchestrator.clock import Clock
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver import reconcile
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster
from autotune.policies.values.observation import ProcessMemory, Sample

GIB = 1 << 30
STEPS = 5  # of an attempt
LINES = 40  # of its log, a step
JOB = """\
name: soak
framework: command
command: [train, --tokens, '{tokens_per_microbatch}']
settings: {tokens_per_microbatch: 16384, resume: true}
recovery: {infrastructure_retries: 1000000}
goal: {steps: 3}
"""


class Hands(Clock):
    """A clock whose hands move when somebody sleeps."""

    def __init__(self) -> None:
        self._at = 1_800_000_000.0

    def now(self) -> float:
        """Return Unix seconds."""
        return self._at

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self._at

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._at += seconds


class Scripted:
    """A runner whose attempts make steps and are killed; the last completes."""

    address, note = "local", ""

    def __init__(self, count: int, clock: Hands) -> None:
        self._count, self._clock = count, clock
        self._process = psutil.Process()

    def capacity(self, *, gpus: int | None, joining: bool) -> None:
        """Return that no node may come."""

    def withdraw(self) -> None:
        """Do nothing: nothing was requested."""

    def cluster(self) -> Cluster:
        """Return a node without cards."""
        return Cluster(
            address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=24 * GIB
        )

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> Attempt:
        """Begin an attempt, and tell what the driver holds by now."""
        settings = {
            "attempt": attempt,
            "cpu_s": round(time.process_time(), 3),
            "rss": self._process.memory_info().rss,
        }
        sys.stdout.write(json.dumps(settings) + "\n")
        sys.stdout.flush()
        return Attempt(attempt, last=attempt == self._count, clock=self._clock)

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> None:
        """Return nothing: no attempt outlives this process."""

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """Return that nothing was left."""
        return ()

    def end_all(self, *, run: str) -> tuple[str, ...]:
        """Return that nothing is left."""
        return ()

    def close(self) -> None:
        """Leave."""


class Attempt:
    """A handle: a step and a sample a poll, then the end."""

    def __init__(self, number: int, *, last: bool, clock: Hands) -> None:
        self._first, self._last, self._clock = (number - 1) * STEPS, last, clock
        self._made = 0

    def poll(self) -> Observed:
        """Return the next step, or the end."""
        if self._made == STEPS:
            return Observed(exit=Exit(code=0) if self._last else Exit(signal=9))
        self._made += 1
        step = self._first + self._made
        lines = [f"worker {n} of step {step - 1}: loss 0.4213, gradient norm 1.82, ok" for n in range(LINES)]
        text = "\n".join([*lines, f"step: {step} loss=0.42", f"saved checkpoint at step {step}", ""])
        process = ProcessMemory(pid=4000 + step % 100, name="train", rss_bytes=GIB, cpu_share=1.0)
        sample = Sample(
            at=self._clock.now(),
            node="node",
            host_used_bytes=8 * GIB,
            host_total_bytes=24 * GIB,
            processes=(process,),
            cpu_share=1.0,
        )
        return Observed(chunks=(Chunk(source="", data=text.encode()),), samples=(sample,))

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Take no note: nothing is kept."""

    def stop(self, *, grace_s: float) -> float:
        """Return at once."""
        return 0.0

    def drain(self, *, timeout_s: float) -> Drain:
        """Return that nothing is held."""
        return Drain(clear=True, seconds=0.0)

    def release(self) -> None:
        """Give it up."""


def main(count: int) -> int:
    """Run COUNT attempts; returns 0 when the last of them completed the training."""
    with tempfile.TemporaryDirectory(prefix="autotune-soak-") as root:
        folder = directory.create(Path(root), job_text=JOB)
        clock, job = Hands(), parse(JOB, file="job.yaml")
        runner, framework = Scripted(count, clock), frameworks.find("command")
        with Journal(folder.path) as journal:
            cluster = runner.cluster()
            reconcile.accept(
                journal,
                run=folder.id,
                job=job,
                profile=framework.profile(job, cluster),
                cluster=cluster,
                versions={},
                now=clock.now(),
            )
            context = RunContext(
                journal=journal,
                framework=framework,
                runner=runner,
                clock=clock,
                folder=folder,
                job=job,
                interrupts=Interrupts(),
            )
            verdict = reconcile.run(context)
    return 0 if type(verdict).__name__ == "TrainingCompleted" else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
