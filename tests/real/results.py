"""A row per case of a real framework: `python -m tests.real.results` writes the table of measured/real.md."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from autotune.orchestrator.run import journal
from autotune.policies.values.events import Ended
from benchmarks.gpu.launch import table
from tests.faults.page import placed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "real" / "results.jsonl"
PAGE = ROOT / "docs" / "measured" / "real.md"


def machine() -> str:
    """Return the processor and the number of its cores."""
    cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    name = cpus[1].splitlines()[0] if len(cpus) > 1 else platform.machine()
    return f"{os.cpu_count()} cores of {name}, no GPU"


def version() -> str:
    """Return the commit that is tested, marked where other files than the results differ from it."""
    git = ["git", "-C", str(ROOT)]
    results = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, RESULTS.with_name("logs"), PAGE)]
    commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *results])
    return (commit.stdout.strip() or "unknown") + ("-dirty" if changed.returncode else "")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one case: a line of the results file, written only where the test's claims held."""

    framework: str  # and its release
    case: str  # what was run, in words
    outcome: str  # see `story`
    seconds: float  # of wall clock, of the whole command
    played: str = ""  # what of the failure is not what the program printed; empty: all of it is real
    machine: str = msgspec.field(default_factory=machine)
    version: str = msgspec.field(default_factory=version)
    at: str = msgspec.field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")


def story(runs: Path) -> str:
    """Return the attempts of the one run in a folder of runs: steps, failure and change of each."""
    (path,) = runs.glob("*/events.jsonl")
    events = list(journal.read(path))
    rows = table("", events)
    ends = {
        event.attempt: type(event.outcome).__name__.lower() for event in events if isinstance(event, Ended)
    }
    attempts = []
    for row in rows:
        steps = f"{row.steps} step{'' if row.steps == 1 else 's'}"
        where = f" in {row.phase}" if row.phase else ""
        text = f"attempt {row.attempt}: {steps}, {row.cause or ends.get(row.attempt, 'unfinished')}{where}"
        attempts.append(text + (f", then `{row.changes}`" if row.changes else ""))
    return "; ".join(attempts)


def keep(path: Path, row: Row) -> None:
    """Write a row in place of an earlier one of the same case."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two processes share the cases
        others = [old for old in read(path) if (old.framework, old.case) != (row.framework, row.case)]
        rows = sorted([*others, row], key=lambda each: (each.framework, each.case))
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in rows))


def read(path: Path) -> list[Row]:
    """Return the rows of a results file."""
    return msgspec.json.Decoder(Row).decode_lines(path.read_bytes()) if path.exists() else []


def written(rows: list[Row], page: str) -> str:
    """Return the page with its table made anew."""
    lines = ["| framework | case | outcome | played | seconds | day, version |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.framework} | {row.case} | {row.outcome} | {row.played or 'nothing'} | {row.seconds:.0f} | "
        f"{row.at}, {row.version} |"
        for row in rows
    ]
    machines = [f"Measured on {name}.\n" for name in sorted({row.machine for row in rows})]
    return placed(page, "runs", "\n".join([*machines, *lines]))


if __name__ == "__main__":
    PAGE.write_text(written(read(RESULTS), PAGE.read_text()))
