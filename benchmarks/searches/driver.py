"""What the driver of a search costs: decisions, memory, reload, and many trials at once."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import yaml

from benchmarks.searches.harness import Book, Start, attempt, started, tried
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum
from launchers import frameworks
from launchers.base import Chunk, Drain, Exit, Handle, Observed, Runner
from orchestrator import journal, loop, runs, searching
from orchestrator.choice import Choice
from orchestrator.clock import SystemClock
from orchestrator.guide import Estimated
from orchestrator.interrupts import Interrupts
from orchestrator.job import assumed, parse
from orchestrator.ledger import Ledger
from orchestrator.rig import Rig
from orchestrator.study import Study
from policies.events import Event, Started, Tried
from policies.space import neighbours
from policies.types import Cluster, Command, Knobs

_SEED = 11
_DECISIONS = 15
_AT_ONCE, _STEPS, _STEP_S = 64, 8, 5.0
_JOB = f"""\
name: fake
framework: builtin
settings: {{steps: 200, prompts: 64, samples: 8, prompt_tokens: 8, response_tokens: 24,
  tokens_per_microbatch: 64, logprob_tokens: 64, concurrency: 4, save_every: 10}}
goal: {{steps: 4}}
search: {{trials: {2 * _AT_ONCE}, probe_steps: {_STEPS}, confirm: 0, parallel: {_AT_ONCE}, min_gain: 0%,
  vary: [tokens_per_microbatch, logprob_tokens, concurrency, recompute, loss_recompute, memory_fraction]}}
"""


def report() -> str:
    """Measure and return the table of markdown."""
    lines = ["\n| what | measured | goal |\n|---|---|---|\n"]
    for count, goal in ((1_000, "100 ms"), (10_000, "250 ms")):
        with tempfile.TemporaryDirectory(prefix="autotune-search-") as folder:
            found = _decisions(Path(folder), count)
            lines.append(
                f"| a decision at {count:,} trials, median / longest of {_DECISIONS} | "
                f"{found.middle_ms:.0f} / {found.longest_ms:.0f} ms | {goal} |\n"
            )
            lines.append(
                f"| recording a result at {count:,} trials | {found.record_ms:.0f} ms | |\n"
                f"| memory of the driver at {count:,} trials | {found.memory_mib:.0f} MiB | 500 MB |\n"
                f"| reload of {count:,} trials | {found.reload_s:.1f} s | "
                f"{'3 s' if count == 1_000 else ''} |\n"
            )
    added, trials = _at_once()
    lines.append(
        f"| added wall time, {trials} fake trials of {_STEPS * _STEP_S:.0f} s, {_AT_ONCE} at a time | "
        f"{added:.1%} | 10 % |\n"
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
    start = _start()
    rows, results = _past(start, count)
    path = folder / "study.journal"
    study = Study(path, name="s", dimensions=start.dimensions)
    for result in results:
        study.begin(result.knobs, why="sampler")
        study.tell(result)
    (folder / "events.jsonl").write_bytes(b"".join(journal.encode(row) + b"\n" for row in rows))
    begun = time.process_time()
    history = journal.read(folder / "events.jsonl")
    study = Study(path, name="s", dimensions=start.dimensions)
    book = Book(history)
    ledger = Ledger(book)
    guide = Estimated(start.world.accepted, base=start.knobs, dimensions=start.dimensions)
    guide.learn(ledger)
    reload_s = time.process_time() - begun
    choice = Choice(
        ledger,
        guide,
        profile=start.profile,
        dimensions=start.dimensions,
        starts=(start.knobs,),
        min_gain=0.01,
    )
    decided, recorded = [], []
    number = max(e.attempt for e in history)
    for _ in range(_DECISIONS):
        begun = time.process_time()  # other programs of the machine do not count
        guide.learn(ledger)
        proposed = choice.next(())
        if proposed is None:
            break
        trial = study.begin(proposed.knobs, why=proposed.by)
        decided.append(time.process_time() - begun)
        number += 1
        rows = attempt(start.world, proposed.knobs, number, steps=5, trial=trial)
        result = tried(start.world, proposed.knobs, rows, trial=trial)
        begun = time.process_time()
        book.add([*rows, result])
        study.tell(result)
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


# --------------------------------------------------------------------------- many trials at once


class _Life:
    """A fake attempt that prints a step every so many seconds of the wall's clock."""

    def __init__(self, steps: int) -> None:
        self._begun, self._steps, self._said = time.monotonic(), steps, 0

    def poll(self) -> Observed:
        due = min(self._steps, int((time.monotonic() - self._begun) / _STEP_S))
        speed = f"seconds={_STEP_S} tokens=4096 tokens_per_second={4096 / _STEP_S}"
        text = "".join(f"builtin: step {n}/{self._steps} {speed}\n" for n in range(self._said + 1, due + 1))
        self._said = due
        if due == self._steps:
            text += f"builtin: done steps={self._steps}\n"
        chunks = (Chunk(source="", data=text.encode()),) if text else ()
        return Observed(chunks=chunks, exit=Exit(code=0) if due == self._steps else None)

    def stop(self, *, grace_s: float) -> float:
        return 0.0

    def drain(self, *, timeout_s: float) -> Drain:
        return Drain(clear=True, seconds=0.0)

    def release(self) -> None:
        return


class _Place:
    """A runner of fake attempts."""

    def __init__(self, steps: Callable[[Command], int]) -> None:
        self._steps = steps

    def cluster(self) -> Cluster:
        return Cluster(
            address="local", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=1 << 36
        )

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> Handle:
        return _Life(self._steps(command))

    def attach(self, *, run: str, attempt: int) -> Handle | None:
        return None

    def sweep(self, *, run: str) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        return


def _at_once() -> tuple[float, int]:
    """Return the wall time that the driver adds to waves of fake trials, as a share, and how many ran."""
    job, framework = parse(_JOB), frameworks.find("builtin")
    place: Runner = _Place(lambda command: int(yaml.safe_load(command.files[0].text)["steps"]))
    with tempfile.TemporaryDirectory(prefix="autotune-search-") as folder:
        run = runs.create(Path(folder), job_text=_JOB, asked=runs.Asked(mode="search"))
        with journal.Journal(run.path) as book:
            clock = SystemClock()
            profile = framework.profile(job, assumed(job))
            loop.accept(
                book,
                run=run.id,
                job=job,
                profile=profile,
                cluster=place.cluster(),
                versions={},
                now=clock.now(),
                mode="search",
            )
            rig = Rig(
                journal=book,
                framework=framework,
                runner=place,
                clock=clock,
                folder=run,
                job=job,
                interrupts=Interrupts(),
            )
            searching.search(rig, exported=lambda: None)
            results = [e for e in book.history() if isinstance(e, Tried) and e.seconds]
            begun = next(e for e in book.history() if isinstance(e, Started) and e.trial is not None)
            took_s = _unix(results[-1].at) - _unix(begun.at)
    waves = -(-len(results) // _AT_ONCE)
    ideal_s = waves * _STEPS * _STEP_S
    return took_s / ideal_s - 1, len(results)


def _unix(at: str) -> float:
    from orchestrator.clock import seconds_of

    return seconds_of(at)
