"""`python -m benchmarks.soak`: what a long run costs the driver, against its limits.

Three parts: many attempts over a scripted runner in one process, fewer real ones on Ray, and the logs of many
workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import psutil
import yaml

from benchmarks.place import Head, ray_head
from tests.faults.page import placed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measured" / "reliability.md"
MIB = 1 << 20
SLOPE_LIMIT = 20 * 1024  # bytes an attempt, from the 200th on
MEMORY_LIMIT = 500 * 10**6
CPU_LIMIT = 1.0  # cores
WARM_UP = 200
PARTS = ("scripted", "ray", "logs")
_SCALE = "0.01"  # of the wait before a relaunch, which is no cost
_LONGEST_S = 3600.0


class Line(NamedTuple):
    """A line of the table."""

    what: str
    measured: str
    limit: str
    passed: bool | None  # None: it has no limit


class Meter:
    """A thread that follows memory and CPU time of a process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self.readings: list[tuple[float, int, float]] = []  # monotonic seconds, bytes, CPU seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(0.25):
            try:
                used = self._process.cpu_times()
                memory = self._process.memory_info().rss
            except psutil.NoSuchProcess:
                return
            self.readings.append((time.monotonic(), memory, used.user + used.system))

    @property
    def highest(self) -> int:
        """Most resident bytes."""
        return max((memory for _, memory, _ in self.readings), default=0)

    def cpu_s(self, since: float = 0.0) -> float:
        """Return the CPU seconds from a moment to the last reading."""
        used = [reading[2] for reading in self.readings if reading[0] >= since]
        return used[-1] - used[0] if used else 0.0


def main() -> int:
    """Measure, print the table, and return 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; default: all")
    parser.add_argument("--attempts", type=int, default=1000, help="scripted attempts (default: 1000)")
    parser.add_argument("--real", type=int, default=64, help="attempts on Ray (default: 64)")
    parser.add_argument("--workers", type=int, default=256, help="workers with logs (default: 256)")
    parser.add_argument("--rate", type=int, default=50, help="megabytes a second of their logs (default: 50)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of their logs (default: 30)")
    parser.add_argument(
        "--page", action="store_true", help="write the table into measured/reliability.md too"
    )
    options = parser.parse_args()
    parts = options.only or list(PARTS)
    if options.page and parts != list(PARTS):
        parser.error("--page takes all parts")
    if "scripted" in parts and options.attempts <= WARM_UP + 50:
        parser.error(f"at least {WARM_UP + 51} attempts: the first {WARM_UP} are left out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started
    lines: list[Line] = []
    if "scripted" in parts:
        lines += scripted(options.attempts)
    if "ray" in parts:
        lines += real(options.real)
    if "logs" in parts:
        lines += logs(options.workers, options.rate * 10**6, options.seconds)
    text = table(lines)
    print(text)
    if options.page:
        PAGE.write_text(placed(PAGE.read_text(), "soak", f"\n{text}\n"))
    return 1 if any(line.passed is False for line in lines) else 0


def table(lines: list[Line]) -> str:
    """Return the table with its date and machine."""
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    words = {True: "pass", False: "**fail**", None: ""}
    rows = [f"| {line.what} | {line.measured} | {line.limit} | {words[line.passed]} |" for line in lines]
    where = (
        f"{datetime.now(UTC):%Y-%m-%d}, {cores} cores, {memory:.1f} GiB, Python {platform.python_version()}; "
        f"load average {os.getloadavg()[0]:.1f} at the end."
    )
    return "\n".join((where, "", "| | measured | limit | |", "|---|---|---|---|", *rows))


# ------------------------------------------------------------------ the parts


def scripted(count: int) -> list[Line]:
    """Return what COUNT attempts in one process come to."""
    _say(f"{count} scripted attempts")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak.scripted", str(count)],
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LONGEST_S,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    cpu_s = [row["cpu_s"] for row in lines]
    fitted = slope([row["attempt"] for row in lines], [row["rss"] for row in lines], since=WARM_UP)
    return [
        Line(
            f"driver's memory, attempts {WARM_UP} to {len(lines):,}, scripted",
            f"{fitted / 1024:.1f} KiB an attempt ({lines[-1]['rss'] / MIB:.0f} MiB at the end)",
            f"{SLOPE_LIMIT // 1024} KiB an attempt",
            fitted <= SLOPE_LIMIT and len(lines) == count,
        ),
        Line(
            "driver's CPU time for them",
            f"{cpu_s[-1]:.0f} s; 100 from {WARM_UP} on {cpu_s[WARM_UP + 100] - cpu_s[WARM_UP]:.1f} s, "
            f"the last 100 {cpu_s[-1] - cpu_s[-101]:.1f} s",
            "",
            None,
        ),
    ]


def real(count: int) -> list[Line]:
    """Return what COUNT attempts on a Ray head come to."""
    _say(f"{count} attempts on Ray")
    folder = Path(tempfile.mkdtemp(prefix="autotune-soak-"))
    try:
        with ray_head() as head:
            program = str(Path(__file__).with_name("ends.py"))
            _job(folder, head, ["{python}", program, str(folder), str(count)])
            begun = time.monotonic()
            with _launched(folder, head) as driver, Meter(driver.pid) as meter:
                code = driver.wait(_LONGEST_S)
            took_s = time.monotonic() - begun
            left = [p for p in psutil.process_iter() if f"{_run(folder).name}/" in _attempt(p)]
        starts = (folder / "starts.txt").read_text().split()
        third = len(meter.readings) // 3  # Python and Ray are loaded by then
        moments = [moment for moment, _, _ in meter.readings[third:]]
        per_s = slope(moments, [memory for _, memory, _ in meter.readings[third:]], since=0)
        return [
            Line(
                "attempts on Ray",
                f"{len(starts)} begun, exit code {code}, {len(left)} processes left, "
                f"{meter.cpu_s() / count:.2f} s of the driver's CPU each",
                f"{count}, 0, none",
                (len(starts), code, left) == (count, 0, []),
            ),
            Line(
                "driver's memory meanwhile",
                f"{per_s * took_s / count / 1024:.1f} KiB an attempt, {meter.highest / 10**6:.0f} MB at most",
                f"{MEMORY_LIMIT // 10**6} MB",
                meter.highest <= MEMORY_LIMIT,
            ),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def logs(workers: int, rate: int, seconds: float) -> list[Line]:
    """Return what following the logs of many workers comes to."""
    _say(f"{workers} workers, {rate / 10**6:.0f} MB/s for {seconds:.0f} s")
    folder = Path(tempfile.mkdtemp(prefix="autotune-soak-"))
    try:
        with ray_head() as head:
            program = str(Path(__file__).with_name("workers.py"))
            _job(folder, head, ["{python}", program, str(workers), str(rate), str(seconds)])
            with _launched(folder, head) as driver, Meter(driver.pid) as meter:
                _until_steps(folder, driver, 120)
                begun = time.monotonic()
                supervisor = _supervisor(head)
                with Meter(supervisor) as beside:
                    time.sleep(max(0.0, seconds - 2.0))
                    until = time.monotonic()
                    followed = _recorded(folder)
                    code = driver.wait(_LONGEST_S)
                ended = time.monotonic()
        written, count, wrote_s = _written(folder)
        recorded = _recorded(folder)
        return [
            Line("logs written", f"{written / wrote_s / 10**6:.1f} MB/s for {wrote_s:.0f} s", "", None),
            Line("exit code of the driver", str(code), "0", code == 0),
            Line(
                "driver's memory",
                f"{meter.highest / 10**6:.0f} MB at most",
                f"{MEMORY_LIMIT // 10**6} MB",
                meter.highest <= MEMORY_LIMIT,
            ),
            Line(
                "driver's CPU time for them",
                _at_rate(meter.cpu_s(begun), written, rate),
                f"{CPU_LIMIT:.0f} core",
                meter.cpu_s(begun) * rate / written <= CPU_LIMIT,
            ),
            Line("supervisor's", _at_rate(beside.cpu_s(), written, rate), "", None),
            Line(
                "lines recorded near the end of the writing",
                f"{followed / count:.0%} of {count:,}",
                "",
                None,
            ),
            Line(
                "lines recorded at the driver's end",
                f"{recorded / count:.0%}, {max(0.0, ended - until - 2.0):.0f} s after the job's",
                "all",
                recorded == count,
            ),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _at_rate(cpu_s: float, written: int, rate: int) -> str:
    """Return CPU time with the cores that it is at the rate that the logs should have."""
    cores = cpu_s * rate / written
    return f"{cpu_s:.1f} s for {written / 10**6:,.0f} MB, {cores:.2f} cores at {rate / 10**6:.0f} MB/s"


def slope(places: list[float], values: list[float], *, since: float) -> float:
    """Return by how much the values grow with each unit of the places from `since` on."""
    chosen = [(place, value) for place, value in zip(places, values, strict=True) if place >= since]
    if len(chosen) < 2:
        return 0.0
    x, y = np.array(chosen, dtype=float).T
    return float(np.polyfit(x, y, 1)[0])


# ------------------------------------------------------------------ helpers


def _environment(head: Head | None = None) -> dict[str, str]:
    base = dict(os.environ) if head is None else head.env
    paths = (str(ROOT / "src"), str(ROOT), base.get("PYTHONPATH", ""))
    return {**base, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _job(folder: Path, head: Head, command: list[str]) -> None:
    job: dict[str, Any] = {
        "name": "soak",
        "framework": "command",
        "command": [*command, "{tokens_per_microbatch?}"],
        "settings": {"tokens_per_microbatch": 16384, "resume": True},
        "cluster": {"address": head.address},
        "recovery": {"infrastructure_retries": 100_000},
        "goal": {"steps": 3},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))


@contextlib.contextmanager
def _launched(folder: Path, head: Head) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "tests.faults.product", _SCALE, "--runs-dir", str(folder / "runs")]
    with (folder / "driver.txt").open("wb") as output:
        driver = subprocess.Popen(
            [*argv, "launch", "job.yaml"],
            cwd=folder,
            env=_environment(head),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def _run(folder: Path) -> Path:
    return next((folder / "runs").iterdir())


def _journal(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "runs").glob("*/events.jsonl"))


def _attempt(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("AUTOTUNE_ATTEMPT", ""))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _supervisor(head: Head) -> int:
    for process in psutil.Process(head.pid).children(recursive=True):
        if "NodeActor" in " ".join(process.cmdline()[:1]):  # its title names the call that it answers
            return int(process.pid)
    raise RuntimeError("no supervisor is seen")


def _lines(folder: Path) -> Iterator[bytes]:
    """Yield the recorded lines of the attempt, those of compressed parts too."""
    for path in (_run(folder) / "attempts" / "0001").glob("run.log*"):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file


def _recorded(folder: Path) -> int:
    """Return the lines of the job's workers that the driver has recorded, in compressed parts too."""
    while True:
        try:
            return sum(line.startswith(b"[@worker-") for line in _lines(folder))
        except FileNotFoundError:  # the driver has compressed a part meanwhile
            continue


def _written(folder: Path) -> tuple[int, int, float]:
    """Return what the job says that it wrote: bytes, lines, seconds."""
    pattern = re.compile(rb"written (\d+) bytes, (\d+) lines in ([\d.]+) s$")
    for line in _lines(folder):
        if match := pattern.match(line):
            return int(match[1]), int(match[2]), float(match[3])
    raise RuntimeError(f"the job did not end: {(folder / 'driver.txt').read_text()[-2000:]}")


def _until_steps(folder: Path, driver: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while '"progressed"' not in _journal(folder):
        if driver.poll() is not None or time.monotonic() > end:
            output = (folder / "driver.txt").read_text()[-2000:]
            raise RuntimeError(f"the job makes no steps (exit code {driver.poll()}): {output}")
        time.sleep(0.05)


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
