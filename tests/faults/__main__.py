"""`python -m tests.faults`: play faults on real local Ray clusters and record what came of each.

A row per scenario and seed is appended to the results file; those that are there are not played again. The
table of docs/measured/reliability.md is written from that file with --page.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from tests.faults.page import written
from tests.faults.scenario import Row, Scenario, play
from tests.faults.scenarios import EVERY

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "faults" / "results.jsonl"
PAGE = ROOT / "docs" / "measured" / "reliability.md"


def main() -> int:
    """Play what is asked for; returns 1 where a scenario was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="names, with * as in file names, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="how often each is played (default: 3)")
    parser.add_argument("--ci", action="store_true", help="the scenarios that CI plays, with shortened waits")
    parser.add_argument(
        "--time-scale", type=float, help="factor of waits and faults (default: 1, with --ci 0.2)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--again", action="store_true", help="play also what is recorded, and replace it")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument(
        "--page", action="store_true", help="write measured/reliability.md from the results, play nothing"
    )
    options = parser.parse_args()
    chosen = [s for s in EVERY if _wanted(s, options)]
    if options.list:
        print("\n".join(f"{s.name:28} {s.fault}" for s in chosen))
        return 0
    if options.page:
        PAGE.write_text(written(read(options.out), PAGE.read_text()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started
    scale = options.time_scale or (0.2 if options.ci else 1.0)
    version = commit()
    failed = 0
    for seed in range(1, options.seeds + 1):
        for scenario in chosen:
            rows = read(options.out)
            known = [r for r in rows if (r.scenario, r.seed, r.scale) == (scenario.name, seed, scale)]
            if known and not options.again:
                continue
            _say(f"{scenario.name}, seed {seed}")
            stories = options.out.with_suffix(".stories")
            row = play(scenario, seed=seed, scale=scale, version=version, stories=stories)
            failed += not row.survived
            verdict = "survived" if row.survived else f"NOT SURVIVED: {row.reason}"
            _say(f"{scenario.name}, seed {seed}: {verdict} ({row.seconds:.0f} s)")
            store(options.out, [*(r for r in rows if r not in known), row])
    return 1 if failed else 0


def _wanted(scenario: Scenario, options: argparse.Namespace) -> bool:
    if options.only:
        return any(fnmatch(scenario.name, pattern) for pattern in options.only.split(","))
    return scenario.ci or not options.ci


def read(path: Path) -> list[Row]:
    """Return the rows of a results file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines() if line]


def store(path: Path, rows: list[Row]) -> None:
    """Write a results file as a whole."""
    partial = path.with_suffix(".part")
    partial.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    partial.replace(path)


def commit() -> str:
    """Return the version that is played: its commit, marked where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
