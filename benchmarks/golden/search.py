"""What a search tries on simulated jobs of `benchmarks.search`, trial by trial."""

from __future__ import annotations

from autotune.policies.values.events import Diagnosed
from benchmarks.golden.launch import SEED
from benchmarks.golden.lines import changes_text
from benchmarks.searches.harness import PROBE_STEPS, Book, attempt, started, tried
from benchmarks.searches.methods import proposals
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum

# Of the 120 jobs of docs/measured/search.md every seventh, which takes the strata in turn, from both starts.
# All of them with 40 trials each take 20 minutes of a core; the sampler proposes every third trial.
_JOBS, _TRIALS = range(0, 120, 7), 15
_KINDS = ("launched", "timid")


def cases() -> tuple[str, ...]:
    """Return the jobs and their starts."""
    return tuple(f"{number:03} {kind}" for number in _JOBS for kind in _KINDS)


def record(case: str) -> list[str]:
    """Return a line for each trial: who proposed it, its changes of the start, what became of it."""
    number, _, kind = case.partition(" ")
    strata = tuple(Stratum)
    world, _ = drawn(strata[int(number) % len(strata)], seed=SEED * 100_003 + int(number))
    start = started(world, timid=kind == "timid")
    if start is None:
        return [f"{world.name}: no such start holds"]
    book, lines = Book(start.events), [world.name]
    propose, first = proposals(start, book), max(event.attempt for event in start.events)
    for trial in range(_TRIALS):
        proposed = propose()
        if proposed is None:
            return [*lines, "  nothing is worth a trial"]
        rows = attempt(start.world, proposed.knobs, first + trial + 1, steps=PROBE_STEPS, trial=trial)
        result = tried(start.world, proposed.knobs, rows, trial=trial)
        book.add([*rows, result])
        phases = [row.phase.value for row in rows if isinstance(row, Diagnosed)]
        lines.append(
            f"  {trial} {proposed.by}: {changes_text(start.knobs, proposed.knobs)} | "
            + " ".join([result.result.value, *phases])
        )
    return lines
