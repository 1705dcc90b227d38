"""Which mutants of the policies no test notices: `make mutation`, or `python -m benchmarks.mutation`.

A seeded sample in equal parts of every room and, within one, of every kind of mutation. Each mutant meets
the tests of the policies that can reach it (`coverage_map`), in a copy of the repository (`trials`).
--write lists them on docs/measured/mutation.md.
build/mutation keeps the map and the results: the same command goes on where it was stopped, and tries a
mutant that no test noticed again once the tests have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import accumulate
from pathlib import Path

import msgspec

from benchmarks.mutation.coverage_map import CoverageMap
from benchmarks.mutation.mutants import difference, sample
from benchmarks.mutation.page import page, reasons
from benchmarks.mutation.results import ROOMS, Mutant, Verdict
from benchmarks.mutation.trials import Outcome, Trial

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measured" / "mutation.md"


def copied(folder: Path) -> Path:
    """Return a copy of what git knows of the repository, as it lies in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder.resolve()


def digest(copy: Path, *folders: str) -> str:
    """Return the digest of the files in folders; this program's own are left out."""
    parts = hashlib.sha256()
    for folder in folders:
        for path in sorted((copy / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", "mutation"} & set(path.relative_to(copy).parts):
                parts.update(f"{path.relative_to(copy)}\0".encode() + path.read_bytes())
    return parts.hexdigest()[:12]


def sampled(copy: Path, count: int, seed: int, rooms: Sequence[str], kept: Path) -> list[tuple[Mutant, str]]:
    """Return the sample with the changed texts, drawn where it is not yet known."""
    sources = digest(copy, *(f"policies/{room}" for room in rooms))
    file = kept / f"sample-{sources}-{seed}-{count}.json"
    if not file.exists():
        print("drawing the sample", file=sys.stderr)
        file.write_bytes(msgspec.json.encode(sample(copy, count, seed=seed, rooms=rooms)))
    return msgspec.json.decode(file.read_bytes(), type=list[tuple[Mutant, str]])


def coverage_map(copy: Path, kept: Path) -> CoverageMap:
    """Return which tests run which lines, recorded where it is not yet known."""
    if not kept.exists():
        print("recording which test runs which line", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.mutation.record", str(kept)]
        done = subprocess.run(command, cwd=copy, env=_environment(copy), stdout=sys.stderr)
        if done.returncode:
            sys.exit(done.returncode)
    return msgspec.json.decode(kept.read_bytes(), type=CoverageMap)


def tried(
    copy: Path, new: list[tuple[Mutant, str]], reach: CoverageMap, now: str, budget_s: float
) -> Iterator[Verdict]:
    """Yield what notices each mutant, in its first tests that take `budget_s` CPU seconds without it."""
    trials = []
    limited = set()
    for number, (mutant, changed) in enumerate(new):
        every = reach.tests_of(copy, mutant.module, mutant.line)
        spent = accumulate(every.values())
        tests = {
            test: cpu_s
            for (test, cpu_s), sum_s in zip(every.items(), spent, strict=True)
            if sum_s <= budget_s
        }
        if len(tests) < len(every):
            limited.add(number)
        early = reach.at_import.get(mutant.module, [])
        trials.append(msgspec.json.encode(Trial(number, mutant.module, changed, tests, early)) + b"\n")
    command = [sys.executable, "-m", "benchmarks.mutation.trials"]
    with subprocess.Popen(
        command, cwd=copy, env=_environment(copy), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        with child.stdin as pipe:
            pipe.writelines(trials)  # read to its end before the first is tried
        for line in child.stdout:
            outcome = msgspec.json.decode(line, type=Outcome)
            mutant, changed = new[outcome.number]
            place = f"{outcome.number + 1}/{len(new)} {mutant.module}:{mutant.line}"
            print(f"{place}: {outcome.by or 'not noticed'}", file=sys.stderr, flush=True)
            change = difference((copy / mutant.module).read_text(), changed)
            limit_s = budget_s if outcome.number in limited else None
            yield Verdict(mutant, outcome.by, change, now, limit_s)
    if child.returncode:
        sys.exit(child.returncode)


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONHASHSEED": "0"}


def printed(verdicts: list[Verdict]) -> str:
    """Return the share of noticed mutants by room, and the others."""
    rows = []
    for room in ROOMS:
        own = [v for v in verdicts if v.mutant.room == room]
        if own:
            rows.append(f"{room}: {sum(bool(v.by) for v in own)} of {len(own)} noticed")
    rows.append(
        f"all: {sum(bool(v.by) for v in verdicts) / max(1, len(verdicts)):.1%} of {len(verdicts)} noticed"
    )
    for verdict in verdicts:
        if not verdict.by:
            mutant = verdict.mutant
            rows.append(
                f"\n{mutant.module}:{mutant.line} ({mutant.operator}, {mutant.occurrence})\n{verdict.change}"
            )
    return "\n".join(rows)


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return f"commit {done.stdout.strip()}"


def main() -> None:
    """Try the sample and print what no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="CPU seconds of tests per mutant")
    parser.add_argument("--write", action="store_true", help="write docs/measured/mutation.md too")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "mutation")
    asked = parser.parse_args()
    if asked.write and set(asked.rooms) != set(ROOMS):
        parser.error("--write makes the page of all rooms")
    asked.kept.mkdir(parents=True, exist_ok=True)
    results = asked.kept / "results.jsonl"
    known: dict[Mutant, Verdict] = {}
    if results.exists():
        rows = (msgspec.json.decode(line, type=Verdict) for line in results.read_bytes().splitlines())
        known = {verdict.mutant: verdict for verdict in rows}
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        now = digest(copy, "policies", "launchers", "orchestrator", "tests/policies", "benchmarks")
        chosen = sampled(copy, asked.count, asked.seed, asked.rooms, asked.kept)
        new = [
            (mutant, changed)
            for mutant, changed in chosen
            if mutant not in known or not known[mutant].holds(now, asked.budget_s)
        ]
        if new:
            reach = coverage_map(copy, asked.kept / f"coverage-{now}.json")
            with results.open("ab") as file:
                for verdict in tried(copy, new, reach, now, asked.budget_s):
                    known[verdict.mutant] = verdict
                    file.write(msgspec.json.encode(verdict) + b"\n")
                    file.flush()
    verdicts = [known[mutant] for mutant, _ in chosen if mutant in known]
    print(printed(verdicts))
    if asked.write:
        command = f"python -m benchmarks.mutation --count {asked.count} --seed {asked.seed}"
        PAGE.write_text(page(verdicts, reasons(), measured=f"`{command}` on {date.today()}, of {_commit()}."))


if __name__ == "__main__":
    main()
