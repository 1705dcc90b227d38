"""What many trials at once cost: the real search on a Ray head of its own, with jobs that only print.

Driver, supervisors, samplers and shims are the real ones, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from autotune.launchers.runners.node.processes import all_pids, read_stat
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run import journal
from autotune.policies.values.events import History, Started, Tried
from benchmarks.figures import Reading, rates
from benchmarks.place import DRIVER, RAY, SHIM, SUPERVISOR, Head, Meter, group_of, ray_head

AT_ONCE, TRIALS, LIFE_S = 64, 128, 600.0
_STEPS = 20  # of every trial
_GOAL_STEPS = 2  # of the attempt before the search
_PROGRAM = Path(__file__).with_name("program.py")
_MIB = 1 << 20
_LOOK_S = 1.0
_ADDED_MOST = 3.0  # times the ideal: then something is stuck


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """What a search with many trials at once showed; seconds of the wall's clock, shares of one core."""

    trials: int
    at_once: int
    life_s: float  # of every trial's program
    took_s: float  # from the first trial's start to the last result
    first_wave_s: float  # from the first trial's start until the last of the first ones ran
    start_s: float  # of one trial, from its record to its program, median
    end_s: float  # of one trial, from its program's end to its result, median
    gap_s: float  # in which a place stays empty between two trials, median
    cpu: dict[str, float]  # while all of the first ones ran
    supervisor_bytes: int  # its own share of memory, median
    driver_bytes: int

    @property
    def added(self) -> float:
        """The wall time beyond that of the programs in full waves, as a share of it."""
        return self.took_s / (-(-self.trials // self.at_once) * self.life_s) - 1


def report(*, at_once: int = AT_ONCE, trials: int = TRIALS, life_s: float = LIFE_S) -> str:
    """Measure and return rows of markdown."""
    measured = measure(at_once=at_once, trials=trials, life_s=life_s)
    cpu = ", ".join(f"{name} {measured.cpu.get(name, 0.0):.1%}" for name in (DRIVER, SUPERVISOR, SHIM, RAY))
    rows = [
        (
            f"added wall time, {measured.trials} trials of {life_s:.0f} s, {at_once} at once",
            f"{measured.added:.1%}",
        ),
        (f"start of the first {at_once}", f"{measured.first_wave_s:.0f} s"),
        ("start of one trial / its end, median", f"{measured.start_s:.1f} / {measured.end_s:.1f} s"),
        ("a place stays empty between two trials, median", f"{measured.gap_s:.1f} s"),
        (f"CPU while {at_once} run, in % of one core", cpu),
        (
            "memory of a supervisor with its sampler / of the driver",
            f"{measured.supervisor_bytes / _MIB:.0f} / {measured.driver_bytes / _MIB:.0f} MiB",
        ),
    ]
    goals = ["10 %", *[""] * (len(rows) - 1)]
    return "".join(
        f"| {name} | {value} | {goal} |\n" for (name, value), goal in zip(rows, goals, strict=True)
    )


def measure(*, at_once: int, trials: int, life_s: float) -> Crowd:
    """Run a search of so many trials and return what it showed."""
    with tempfile.TemporaryDirectory(prefix="autotune-search-") as name, ray_head() as head:
        folder = Path(name)
        lives = folder / "lives"
        lives.touch()
        _write(folder, head, at_once=at_once, trials=trials, life_s=life_s)
        longest_s = _ADDED_MOST * (-(-trials // at_once) * life_s + 2.0 * trials) + life_s
        supervisors: list[int] = []
        driver_bytes = 0
        with _searching(folder, head) as child, Meter(head, driver=child.pid) as meter:
            until = time.monotonic() + longest_s
            while child.poll() is None:
                if time.monotonic() > until:
                    raise RuntimeError(f"the search did not end within {longest_s:.0f} s")
                time.sleep(_LOOK_S)
                begun, ended = _lives(lives)
                if not supervisors and len(begun) > at_once and len(ended) <= 1:
                    supervisors = [_own_bytes(pid) for pid in _supervisors(head)]
                driver_bytes = max(driver_bytes, _own_bytes(child.pid))
        if child.returncode:
            raise RuntimeError(f"the search exited with {child.returncode}:\n{(folder / 'said').read_text()}")
        (path,) = (folder / "runs").glob("*/events.jsonl")
        return _crowd(
            journal.read(path),
            meter.readings,
            _lives(lives),
            at_once=at_once,
            life_s=life_s,
            supervisors=supervisors,
            driver_bytes=driver_bytes,
        )


def _write(folder: Path, head: Head, *, at_once: int, trials: int, life_s: float) -> None:
    """Write the job and the interpreter that it runs with: a program that only prints."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{_PROGRAM}" "$@"\n')
    python.chmod(0o700)
    job: dict[str, Any] = {
        "name": "at-once",
        "framework": "builtin",
        "python": str(python),
        "workdir": str(folder),
        "cluster": {"address": head.address},
        "env": {"STEP_S": str(life_s / _STEPS), "LIVES": str(folder / "lives")},
        "settings": {
            "steps": 200,
            "prompts": 64,
            "samples": 8,
            "prompt_tokens": 8,
            "response_tokens": 24,
            "tokens_per_microbatch": 64,
            "logprob_tokens": 64,
            "concurrency": 4,
            "save_every": 10,
        },
        "goal": {"steps": _GOAL_STEPS},
        "search": {
            "trials": trials + 1,  # the start counts as one
            "duration": "24h",
            "probe_steps": _STEPS,
            "confirm": 0,
            "parallel": at_once,
            "min_gain": "0%",
            "vary": [
                "tokens_per_microbatch",
                "logprob_tokens",
                "concurrency",
                "recompute",
                "loss_recompute",
                "memory_fraction",
            ],
        },
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


@contextlib.contextmanager
def _searching(folder: Path, head: Head) -> Iterator[subprocess.Popen[bytes]]:
    """Yield `autotune search` in a process of its own, ended with the block."""
    argv = [sys.executable, "-m", "autotune.orchestrator.cli", "--runs-dir", str(folder / "runs")]
    with (folder / "said").open("wb") as output:
        child = subprocess.Popen(
            [*argv, "search", "job.yaml"],
            cwd=folder,
            env=head.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()  # the head that it uses ends as well, and with it what it started
            child.wait()


def _lives(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return when the program of each attempt began and ended."""
    result: tuple[dict[int, float], dict[int, float]] = {}, {}
    for line in path.read_text().splitlines():
        attempt, what, at = line.split()
        result[what == "ended"][int(attempt)] = float(at)
    return result


def _supervisors(head: Head) -> list[int]:
    """Return the processes of the attempts' actors below the head."""
    stats = {stat.pid: stat for pid in all_pids() if (stat := read_stat(pid)) is not None}
    result = []
    for stat in stats.values():
        above = stats.get(stat.parent)
        if above is None or above.parent != head.pid:
            continue
        words = Path(f"/proc/{stat.pid}/cmdline").read_bytes().split(b"\0")
        if group_of(words, parent=above.name, of_head=False) == SUPERVISOR:
            result.append(stat.pid)
    return result


def _own_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages by its share in them; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _crowd(
    history: History,
    readings: Sequence[Reading],
    lives: tuple[Mapping[int, float], Mapping[int, float]],
    *,
    at_once: int,
    life_s: float,
    supervisors: Sequence[int],
    driver_bytes: int,
) -> Crowd:
    begun, ended = lives
    starts = {e.attempt: seconds_of(e.at) for e in history if isinstance(e, Started) and e.trial is not None}
    results = {e.attempt: seconds_of(e.at) for e in history if isinstance(e, Tried) and e.attempt in starts}
    first = sorted(starts)[:at_once]
    all_run_s, one_ended_s = max(begun[n] for n in first), min(ended[n] for n in first)
    # The n-th program beyond the first wave takes the place that the n-th end left.
    followers = sorted(begun[n] for n in starts if n not in first)
    return Crowd(
        trials=len(results),
        at_once=at_once,
        life_s=life_s,
        took_s=max(results.values()) - min(starts.values()),
        first_wave_s=all_run_s - min(starts.values()),
        start_s=statistics.median(begun[n] - at for n, at in starts.items()),
        end_s=statistics.median(at - ended[n] for n, at in results.items()),
        gap_s=statistics.median(
            [b - e for b, e in zip(followers, sorted(ended[n] for n in starts), strict=False)] or [0.0]
        ),
        cpu=rates(readings, since=all_run_s, until=one_ended_s),
        supervisor_bytes=int(statistics.median(supervisors)) if supervisors else 0,
        driver_bytes=driver_bytes,
    )
