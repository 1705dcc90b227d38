"""The tables of the overhead benchmark."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from autotune.launchers.runners.node.host import read_host
from autotune.orchestrator.cli.shared.drive import versions
from autotune.policies.values.events import Diagnosed, Finished, History
from benchmarks.figures import interval95, paired_ratios, recoveries, spread, table
from benchmarks.place import AUTOTUNE, DRIVER, RAY, SUPERVISOR

WARM_UP_STEPS = 5


class Run(NamedTuple):
    """One run of the job that went well."""

    steps: list[float]  # seconds each, without the first ones
    steady: dict[str, float]  # CPU seconds per second of each group, while those steps ran
    whole: dict[str, float]  # the same from the start to the end of the run
    seconds: float


class Measured(NamedTuple):
    """Everything that the tables show."""

    idle: dict[str, float]
    supervised: list[Run]
    alone: list[Run]
    history: History
    written: list[float]
    launched: list[float]


def report(
    measured: Measured, options: argparse.Namespace, *, load: tuple[float, ...], took_s: float
) -> list[str]:
    """Return the lines of the tables."""
    cores = len(os.sched_getaffinity(0))
    return [
        "Overhead of autotune",
        table(_circumstances(options, cores=cores, load=load, took_s=took_s)),
        "",
        "1. CPU of autotune's own processes, in % of one core (of all cores)",
        table(_cpu_rows(measured, cores)),
        "",
        "2. Step times of the same job on the same Ray head, with and without autotune",
        table(_step_rows(measured)),
        "",
        "3. Recovery from real out-of-memory failures: median (range, attempts)",
        table(_recovery_rows(measured)),
    ]


def _circumstances(
    options: argparse.Namespace, *, cores: int, load: tuple[float, ...], took_s: float
) -> list[tuple[str, str]]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else os.uname().machine
    installed = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "sglang")
    return [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("command", f"python -m benchmarks.overhead --pairs {options.pairs} --steps {options.steps}"),
        ("hardware", f"{cores} cores, {model}, {read_host().total_bytes / (1 << 30):.1f} GiB"),
        ("versions", f"{installed}; Linux {os.uname().release}"),
        ("load before", " ".join(f"{value:.2f}" for value in load) + " (1, 5, 15 minutes)"),
        ("took", f"{took_s:.0f} s"),
    ]


def _cpu_rows(measured: Measured, cores: int) -> list[tuple[str, str]]:
    def cell(values: Sequence[float]) -> str:
        return f"{100 * statistics.fmean(values):6.2f} %   ({100 * statistics.fmean(values) / cores:.2f} %)"

    def own(rates_: dict[str, float]) -> float:
        return sum(rates_.get(name, 0.0) for name in AUTOTUNE)

    idle, runs = measured.idle, measured.supervised
    whole = cell([own(run.whole) for run in runs])
    floor = idle.get(DRIVER, 0.0) + idle.get(SUPERVISOR, 0.0)
    rows = []
    for name in AUTOTUNE:
        missed = sum(name not in run.steady for run in runs)
        note = f"   not seen in {missed} of {len(runs)} runs: too low" if missed else ""
        rows.append((f"{name}, while steps run", cell([run.steady.get(name, 0.0) for run in runs]) + note))
    shares = [own(run.steady) for run in runs]
    return [
        *rows,
        ("all three", cell(shares)),
        ("  lowest and highest run", f"{100 * min(shares):6.2f} % to {100 * max(shares):.2f} %"),
        ("idle floor: a Ray driver that does nothing", cell([idle.get(DRIVER, 0.0)])),
        ("idle floor: a Ray actor that does nothing", cell([idle.get(SUPERVISOR, 0.0)])),
        ("all three above the floor", cell([share - floor for share in shares])),
        (
            "all three, whole run with start and end",
            f"{whole}   of {statistics.fmean(run.seconds for run in runs):.0f} s",
        ),
        ("Ray's own daemons, job with autotune", cell([run.steady.get(RAY, 0.0) for run in runs])),
        ("Ray's own daemons, job alone", cell([run.steady.get(RAY, 0.0) for run in measured.alone])),
        ("Ray's own daemons, no job", cell([idle.get(RAY, 0.0)])),
    ]


def _step_rows(measured: Measured) -> list[tuple[str, str]]:
    a, b = [run.steps for run in measured.supervised], [run.steps for run in measured.alone]
    ratios = paired_ratios(a, b)
    mean, low, high = interval95(ratios)
    interval = f"95 % interval {low:.4f} to {high:.4f}, t, {len(ratios)} pairs"
    if len(ratios) < 2:
        interval = "one pair has no interval"
    return [
        ("steps counted", f"{len(a[0])} of each run, the first {WARM_UP_STEPS} left out"),
        ("median step with autotune", " ".join(f"{statistics.median(steps):.3f}" for steps in a) + " s"),
        ("median step without", " ".join(f"{statistics.median(steps):.3f}" for steps in b) + " s"),
        ("ratio of each pair", " ".join(f"{ratio:.4f}" for ratio in ratios)),
        ("mean ratio", f"{mean:.4f}   ({interval})"),
    ]


def _recovery_rows(measured: Measured) -> list[tuple[str, str]]:
    rows = recoveries(measured.history, written=measured.written, launched=measured.launched)
    causes = [f"{e.cause}/{e.phase}" for e in measured.history if isinstance(e, Diagnosed)]
    verdicts = [type(e.verdict).__name__ for e in measured.history if isinstance(e, Finished)]
    return [
        ("failures", ", ".join(causes) or "none"),
        ("the run's end", ", ".join(verdicts) or "none"),
        ("OOM line -> seen by the driver", spread([row.seen_s for row in rows])),
        ("OOM line -> gang stopped", spread([row.stopped_s for row in rows])),
        ("gang stopped -> memory drained", spread([row.drained_s for row in rows])),
        ("  of that, the drain gate alone", spread([row.gate_s for row in rows])),
        ("memory drained -> decision recorded", spread([row.decided_s for row in rows])),
        ("  of that, choosing the remedy alone", spread([row.policy_s for row in rows])),
        ("OOM line -> next attempt's program runs", spread([row.relaunched_s for row in rows])),
        ("not in it: the job's own start to its first step or OOM", spread([row.job_s for row in rows])),
    ]
