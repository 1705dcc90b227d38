"""Which mutants of the policies no test notices: `make mutation`, or `python -m benchmarks.mutation`.

A seeded sample, in equal parts of every room and, within one, of every kind of mutation, is made in a copy of
the repository. Each mutant meets the tests of its room first and those of all policies then. Results are kept
in a file, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("recovery", "estimate", "diagnosis")
_LIMIT_S = 600.0  # a mutant that loops counts as noticed


class Mutant(msgspec.Struct, frozen=True):
    """One change of one module."""

    room: str
    module: str  # path in the repository
    operator: str
    occurrence: int
    digest: str  # of the module, so that an old result is no result of a changed one

    @property
    def kind(self) -> str:
        """The operator without what it puts in the place of what."""
        return self.operator.partition("/")[2].split("_")[0]


class Verdict(msgspec.Struct, frozen=True):
    """Whether a test noticed a mutant."""

    mutant: Mutant
    noticed: bool
    change: str


def mutants(room: str) -> Iterator[Mutant]:
    """Yield every mutant of a room."""
    for path in sorted((ROOT / "policies" / room).rglob("*.py")):
        source = path.read_bytes()
        digest = hashlib.sha256(source).hexdigest()[:12]
        tree = get_ast(source.decode())
        for name in operator_names():
            kind = get_operator(name)
            if kind.arguments():
                continue
            operator = kind()
            places = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(tree))
            for occurrence in range(places):
                yield Mutant(room, str(path.relative_to(ROOT)), name, occurrence, digest)


def sample(every: list[Mutant], count: int, *, seed: int) -> list[Mutant]:
    """Return `count` mutants, in equal parts of every kind as far as there are so many."""
    shuffled = random.Random(seed).sample(every, len(every))
    met: Counter[str] = Counter()
    ranked = []
    for place, mutant in enumerate(shuffled):
        ranked.append((met[mutant.kind], place, mutant))
        met[mutant.kind] += 1
    return [mutant for _, _, mutant in sorted(ranked, key=lambda row: row[:2])[:count]]


def tried(mutant: Mutant, copy: Path) -> Verdict | None:
    """Return whether the tests notice a mutant; None where the change leaves the text as it was."""
    path = copy / mutant.module
    source = path.read_text()
    changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
    if changed is None or changed == source:
        return None
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    change = "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))
    path.write_text(changed)
    try:
        own = f"tests/policies/{mutant.room}"
        noticed = _fails(copy, own) or _fails(copy, "tests/policies", f"--ignore={own}")
    finally:
        path.write_text(source)
    return Verdict(mutant, noticed, change)


def _fails(copy: Path, *tests: str) -> bool:
    """Return whether a test fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def copied(folder: Path) -> Path:
    """Return a copy of what git knows of the repository, as it lies in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


def printed(found: list[Verdict]) -> str:
    """Return the share of noticed mutants by room, and the others."""
    rows = []
    for room in ROOMS:
        own = [v for v in found if v.mutant.room == room]
        if own:
            rows.append(f"{room}: {sum(v.noticed for v in own)} of {len(own)} noticed")
    rows.append(f"all: {sum(v.noticed for v in found) / max(1, len(found)):.0%} of {len(found)} noticed")
    for verdict in found:
        if not verdict.noticed:
            mutant = verdict.mutant
            rows.append(f"\n{mutant.module} ({mutant.operator}, {mutant.occurrence})\n{verdict.change}")
    return "\n".join(rows)


def main() -> None:
    """Try the sample and print what no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutation.jsonl")
    asked = parser.parse_args()
    chosen = [
        mutant
        for place, room in enumerate(ROOMS)
        for mutant in sample(list(mutants(room)), (asked.count + place) // len(ROOMS), seed=asked.seed)
    ]
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if asked.results.exists():
        rows = (msgspec.json.decode(line, type=Verdict) for line in asked.results.read_bytes().splitlines())
        known = {verdict.mutant: verdict for verdict in rows}
    with tempfile.TemporaryDirectory() as folder, asked.results.open("ab") as file:
        copy = copied(Path(folder))
        if any(m not in known for m in chosen) and _fails(copy, "tests/policies"):
            sys.exit("tests/policies fails without a mutant")
        for number, mutant in enumerate(chosen, start=1):
            if mutant in known:
                continue
            verdict = tried(mutant, copy)
            if verdict is None:
                continue
            known[mutant] = verdict
            file.write(msgspec.json.encode(verdict) + b"\n")
            file.flush()
            word = "noticed" if verdict.noticed else "not noticed"
            print(f"{number}/{len(chosen)} {mutant.module}: {word}", file=sys.stderr, flush=True)
    print(printed([known[mutant] for mutant in chosen if mutant in known]))


if __name__ == "__main__":
    main()
