"""The parts of the golden data: what is recorded, where it is kept, and how a difference is shown."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.golden import estimates, explain, histories, launch, lookalikes, search

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
_SHOWN = 40  # lines of a difference
_HEAD = "== "


class Part(NamedTuple):
    """One file of golden data."""

    cases: Callable[[], tuple[str, ...]]
    record: Callable[[str], list[str]]  # a case -> its lines
    fast_cases: Callable[[], tuple[str, ...]]  # those that the fast tests compare


# Strides of the fast cases are prime to the three strata, the two starts and the look-alikes' scenarios.
PARTS: Mapping[str, Part] = {
    "launch": Part(launch.cases, launch.record, lambda: launch.cases()[::11]),
    "search": Part(search.cases, search.record, lambda: search.cases()[::7]),
    "lookalikes": Part(lookalikes.cases, lookalikes.record, lambda: lookalikes.cases()[::5]),
    "histories": Part(histories.cases, histories.record, histories.fast_cases),
    "estimates": Part(estimates.cases, estimates.record, estimates.cases),
    "explain": Part(explain.cases, explain.record, explain.cases),
}


def recorded(name: str, cases: Sequence[str], *, processes: int = 1) -> dict[str, list[str]]:
    """Return the lines of cases as the code decides now, in the order of the cases."""
    tasks = [(name, case) for case in cases]
    if processes == 1:
        return dict(zip(cases, map(_record, tasks), strict=True))
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(cases, pool.map(_record, tasks, chunksize=2), strict=True))


def kept(name: str) -> dict[str, list[str]]:
    """Return the lines of each case as they are kept; empty where nothing is."""
    cases: dict[str, list[str]] = {}
    lines: list[str] = []
    file = path(name)
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith(_HEAD):
            lines = cases.setdefault(line.removeprefix(_HEAD), [])
        else:
            lines.append(line)
    return cases


def keep(name: str, cases: Mapping[str, Sequence[str]]) -> None:
    """Write the lines of all cases of a part."""
    path(name).write_text("".join(f"{line}\n" for line in _text(cases)))


def path(name: str) -> Path:
    """Return the file of a part."""
    return FOLDER / f"{name}.txt"


def difference(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> str:
    """Return the first lines of the difference and how many cases differ; empty where none does."""
    names = [case for case in dict.fromkeys((*before, *after)) if before.get(case) != after.get(case)]
    if not names:
        return ""
    pairs = ({case: cases[case] for case in names if case in cases} for cases in (before, after))
    old, new = (list(_text(cases)) for cases in pairs)
    lines = list(difflib.unified_diff(old, new, "kept", "decided now", lineterm="", n=1))
    left = f"\n... {len(lines) - _SHOWN} more lines" if len(lines) > _SHOWN else ""
    return "\n".join(lines[:_SHOWN]) + f"{left}\n{len(names)} of {len(after)} cases differ"


def _record(task: tuple[str, str]) -> list[str]:
    name, case = task
    return PARTS[name].record(case)


def _text(cases: Mapping[str, Sequence[str]]) -> Iterable[str]:
    for case, lines in cases.items():
        yield f"{_HEAD}{case}"
        yield from lines
