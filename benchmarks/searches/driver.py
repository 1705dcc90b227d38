"""What the driver of a search costs: decisions, memory, reload."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from autotune.orchestrator.run import journal
from autotune.orchestrator.search.optuna_study import TpeProposals
from autotune.orchestrator.search.trial import TrialResults
from autotune.policies.search.next_trial import SearchSpace, forecast_of, next_trial
from autotune.policies.search.space import neighbours
from autotune.policies.values.events import Event, Tried
from autotune.policies.values.knobs import Knobs
from benchmarks.searches.harness import Book, Start, attempt, started, tried
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum

_SEED = 11
_DECISIONS = 15


def report() -> str:
    """Measure and return rows of markdown."""
    lines = []
    for count, goal in ((1_000, "100 ms"), (10_000, "250 ms")):
        with tempfile.TemporaryDirectory(prefix="autotune-search-") as folder:
            decisions = _decisions(Path(folder), count)
            lines.append(
                f"| a decision at {count:,} trials, median / longest of {_DECISIONS} | "
                f"{decisions.middle_ms:.0f} / {decisions.longest_ms:.0f} ms | {goal} |\n"
            )
            lines.append(
                f"| recording a result at {count:,} trials | {decisions.record_ms:.0f} ms | |\n"
                f"| memory of the driver at {count:,} trials | {decisions.memory_mib:.0f} MiB | 500 MB |\n"
                f"| reload of {count:,} trials | {decisions.reload_s:.1f} s | "
                f"{'3 s' if count == 1_000 else ''} |\n"
            )
    return "".join(lines)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver with so many trials costs."""

    middle_ms: float
    longest_ms: float
    record_ms: float
    memory_mib: float
    reload_s: float


def _decisions(folder: Path, count: int) -> Costs:
    """Return what a driver costs that finds so many trials on disk."""
    start = _start()
    _write(folder, start, count)
    begun = time.process_time()
    history = journal.read(folder / "events.jsonl")
    book = Book(history)
    ledger = TrialResults(book)
    space = SearchSpace(
        profile=start.profile, dimensions=start.dimensions, starts=(start.knobs,), min_gain=0.01
    )
    forecast_of(ledger.trials, space)
    reload_s = time.process_time() - begun
    decided, recorded = [], []
    number = max(e.attempt for e in history)
    for trial in range(count, count + _DECISIONS):
        begun = time.process_time()  # other programs of the machine do not count
        past = ledger.trials
        proposed = next_trial(past, space=space, forecast=forecast_of(past, space), sampler=TpeProposals)
        if proposed is None:
            break
        decided.append(time.process_time() - begun)
        number += 1
        rows = attempt(start.world, proposed.knobs, number, steps=5, trial=trial)
        result = tried(start.world, proposed.knobs, rows, trial=trial)
        begun = time.process_time()
        book.add([*rows, result])
        recorded.append(time.process_time() - begun)
    return Costs(
        middle_ms=1e3 * median(decided),
        longest_ms=1e3 * max(decided),
        record_ms=1e3 * median(recorded),
        memory_mib=_resident_bytes() / (1 << 20),
        reload_s=reload_s,
    )


def _start() -> Start:
    seed = _SEED
    while True:
        world, _ = drawn(Stratum.NEAR, seed=seed)
        start = started(world, timid=True)
        if start is not None and len(start.dimensions) >= 10:
            return start
        seed += 1


def _write(folder: Path, start: Start, count: int) -> None:
    """Write the files of a search that made so many trials."""
    rows, _ = _past(start, count)
    (folder / "events.jsonl").write_bytes(b"".join(journal.encode(row) + b"\n" for row in rows))


def _past(start: Start, count: int) -> tuple[list[Event], list[Tried]]:
    """Return the rows of a search that made so many trials around its start."""
    rows: list[Event] = list(start.events)
    results: list[Tried] = []
    known: dict[Knobs, None] = {start.knobs: None}
    waiting = [start.knobs]
    while len(known) < count:
        for knobs in neighbours(start.profile, start.knobs, waiting.pop(0), start.dimensions):
            if knobs not in known:
                known[knobs] = None
                waiting.append(knobs)
    number = max(e.attempt for e in rows)
    for trial, knobs in enumerate(list(known)[:count]):
        own = attempt(start.world, knobs, number + 1 + trial, steps=5, trial=trial)
        result = tried(start.world, knobs, own, trial=trial)
        rows += [*own, result]
        results.append(result)
    return rows, results


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
