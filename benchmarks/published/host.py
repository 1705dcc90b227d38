"""`python -m benchmarks.published.host`: published outcomes of host memory beside what is predicted.

An outcome is in the tuned or in the held-out half by a hash of its name, as all published cases are; rows of
the held-out half are shown with `--all` alone. What a job had in use when it was killed is a lower bound of
what it needs, and no figure: such a job is judged by the share of its machine that is predicted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from autotune.orchestrator.planner import PhasePlan
from autotune.policies.estimate.pinned import block
from benchmarks.published.cases import Case, cases, is_held_out, planned

FOLDER = Path(__file__).parent / "host"
_LEAST = 0.8  # of its machine, that a job which ran out of host memory should be predicted to need
_GIB = 1 << 30


class Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Page-locked blocks and the host memory that a report measured for them, in bytes."""

    id: str
    url: str
    date: str
    what: str
    blocks: tuple[tuple[float, int], ...]  # bytes, number
    measured: float


class Outcome(NamedTuple):
    """A published outcome beside its prediction; bytes."""

    name: str
    held_out: bool
    outcome: str  # ran, oom, or what page-locked blocks took
    complete: bool
    share: float  # of the machine's memory; 0: no machine
    phase: str
    predicted: float  # of the figure; 0: there is none
    measured: float

    @property
    def error(self) -> float:
        """|ln(predicted / measured)| of a figure."""
        return abs(math.log(self.predicted / self.measured))


def outcomes(folder: Path = FOLDER) -> Iterator[Outcome]:
    """Yield every job of the folder, and every measurement of page-locked blocks in its blocks.json."""
    for case in cases(folder):
        yield _outcome_of(case)
    for report in msgspec.json.decode((folder / "blocks.json").read_bytes(), type=tuple[Blocks, ...]):
        taken = sum(number * float(block(np.float64(size))) for size, number in report.blocks)
        yield Outcome(report.id, is_held_out(report.id), "blocks", True, 0.0, "", taken, report.measured)


def _outcome_of(case: Case) -> Outcome:
    truth, plan = case.truth, planned(case)
    worst = max(plan.phases, key=lambda row: row.host_bytes)
    predicted = measured = 0.0
    for name, value in truth.figures.items():
        predicted, measured = _figure(name, {row.phase: row for row in plan.phases}), value
    return Outcome(
        truth.id,
        case.held_out,
        truth.outcome,
        truth.complete,
        worst.host_bytes / (plan.cluster.host_memory_bytes or math.inf),
        worst.phase,
        predicted,
        measured,
    )


def _figure(name: str, phases: dict[str, PhasePlan]) -> float:
    match name:
        case "host_peak_bytes":
            return max(row.host_bytes for row in phases.values())
        case "staged_bytes":  # beside what an update holds
            return phases["checkpoint"].host_bytes - phases["train"].host_bytes
    raise ValueError(f"no such figure as `{name}`")


def rows(every: Sequence[Outcome]) -> Iterator[str]:
    """Yield a row per outcome."""
    yield f"{'outcome':34} {'real':7} {'share':>6}  {'phase':12} {'GiB predicted / measured':>26}"
    for one in every:
        share = f"{one.share:6.2f}" if one.share else " " * 6
        figure = ""
        if one.measured:
            ratio = one.predicted / one.measured
            figure = f"{one.predicted / _GIB:10.1f} / {one.measured / _GIB:7.1f} = {ratio:.2f}"
        partial = "" if one.complete else "  partial report"
        yield f"{one.name:34} {one.outcome:7} {share}  {one.phase:12} {figure}{partial}".rstrip()


def summary(every: Sequence[Outcome]) -> Iterator[str]:
    """Yield a row for each half."""
    titles = ("ran, fits", "failed, overflows", f"failed, below {_LEAST}", "figures of jobs", "with blocks")
    yield f"{'half':10} " + " ".join(f"{title:>18}" for title in titles)
    for half, held_out in (("tuned", False), ("held out", True)):
        chosen = [one for one in every if one.held_out is held_out]
        ran, failed = ([one.share for one in chosen if one.outcome == name] for name in ("ran", "oom"))
        figures = [one for one in chosen if one.measured]
        cells = (
            _count([share <= 1 for share in ran]),
            _count([share > 1 for share in failed]),
            _count([share < _LEAST for share in failed]),
            _errors([one for one in figures if one.outcome != "blocks"]),
            _errors(figures),
        )
        yield f"{half:10} " + " ".join(f"{cell:>18}" for cell in cells)


def _count(each: Sequence[bool]) -> str:
    return f"{sum(each)} of {len(each)}"


def _errors(figures: Sequence[Outcome]) -> str:
    """Return the median |ln(predicted / measured)| and the number of figures, in words."""
    return f"{statistics.median(one.error for one in figures):.3f} of {len(figures)}" if figures else "none"


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.host", description=__doc__)
    parser.add_argument("--all", action="store_true", help="rows of the held-out half too")
    options = parser.parse_args(argv)
    every = list(outcomes())
    listed = [one for one in every if options.all or not one.held_out]
    sys.stdout.write("\n".join([*rows(listed), "", *summary(every)]) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
