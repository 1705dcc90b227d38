"""Tables of what was forecast of series of a memory, and how far they may be off."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

AHEAD = 5  # steps between the word and the failure that make it a warning in time
_RESAMPLES = 2000
_INTERVAL = (0.025, 0.975)


class Outcome(NamedTuple):
    """What was said of a series."""

    kind: str
    fails: int | None
    warned_after: int | None  # after which step
    run: int = 0  # of those recorded


def compared(where: str, outcomes: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield the rows that compare what the methods say of the same series."""
    yield f"| {where} series | fail: {AHEAD} steps ahead or more | hold: false alarms |"
    yield "|---|---|---|"
    for name, every in outcomes.items():
        in_time, failing, false, calm = _counted(every)
        yield f"| {name} | {in_time / failing:.1%} | {false / calm:.1%} ({false} of {calm}) |"
    yield ""


def table(where: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the rows of each kind: what was reported, and how early."""
    yield (
        f"| {where} series | jobs | reported | {AHEAD} steps ahead or more "
        "| steps ahead, median (10th, 90th) |"
    )
    yield "|---|---|---|---|---|"
    groups: dict[str, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(each.kind, []).append(each)
    failing = [each for each in outcomes if each.fails is not None]
    groups |= {"**all that fail**": failing, "**all that hold**": [e for e in outcomes if e.fails is None]}
    for kind, rows in groups.items():
        warned = [row for row in rows if row.warned_after is not None]
        cells = [kind, str(len(rows)), f"{len(warned) / len(rows):.1%}"]
        if rows[0].fails is not None:
            ahead = sorted((row.fails or 0) - (row.warned_after or 0) for row in warned) or [0]
            in_time = sum(steps >= AHEAD for steps in ahead)
            tenth, ninetieth = ahead[len(ahead) // 10], ahead[len(ahead) * 9 // 10]
            cells += [f"{in_time / len(rows):.1%}", f"{statistics.median(ahead):.0f} ({tenth}, {ninetieth})"]
        else:
            cells += ["", ""]
        yield f"| {' | '.join(cells)} |"
    yield ""


def resampled(outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[str]:
    """Yield the 95 % intervals of each method, by drawing the recorded runs anew.

    The phases of one run rise and fall together, so that its series are no independent sample.
    """
    runs = sorted({each.run for every in outcomes.values() for each in every})
    if len(runs) < 2:
        return
    yield (
        f"| 95 % intervals, {len(runs)} runs drawn anew | fail: {AHEAD} steps ahead or more "
        "| hold: false alarms |"
    )
    yield "|---|---|---|"
    for name, every in outcomes.items():
        rng, shares = Random(name), []
        counts = {run: _counted([each for each in every if each.run == run]) for run in runs}
        for _ in range(_RESAMPLES):
            drawn = [
                sum(column)
                for column in zip(*(counts[run] for run in rng.choices(runs, k=len(runs))), strict=True)
            ]
            shares.append((drawn[0] / max(1, drawn[1]), drawn[2] / max(1, drawn[3])))
        cells = []
        for column in zip(*shares, strict=True):
            low, high = (sorted(column)[int(share * len(column))] for share in _INTERVAL)
            cells.append(f"{low:.1%} to {high:.1%}")
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _counted(every: Sequence[Outcome]) -> tuple[int, int, int, int]:
    """Return failures said in time, failures, false alarms, and series that hold."""
    failing, calm = [e for e in every if e.fails], [e for e in every if not e.fails]
    in_time = sum(
        e.warned_after is not None and e.fails - e.warned_after >= AHEAD for e in failing if e.fails
    )
    return in_time, len(failing), sum(e.warned_after is not None for e in calm), len(calm)
