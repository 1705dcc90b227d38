"""`python -m benchmarks.coverage [FOLDER...]`: how often a measured peak lies within its printed error.

Every recorded run below the folders is read. The peaks of an attempt are predicted from earlier attempts or
runs, as `autotune plan`, `fix` and the report do; first attempts without either are left out, and so are
phases that ran out of memory, attempts that were cured in place, and figures that include a cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.orchestrator.errors import Failure
from autotune.orchestrator.report.memory import memory_of
from autotune.orchestrator.report.story import Past
from autotune.orchestrator.run import journal
from autotune.policies.estimate.constants import constant
from autotune.policies.values.events import Accepted, CuredInPlace
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

_HERE = Path(__file__).parent
RECORDED = (_HERE / "gpu" / "measurements", _HERE / "measurements" / "recorded")
_GOAL = 0.9


class Case(Value, frozen=True, kw_only=True):
    """A phase of one attempt of a recorded run."""

    run: str
    attempt: int
    phase: str
    predicted: float  # bytes
    error: float  # bytes: one standard deviation
    measured: float  # bytes

    @property
    def deviations(self) -> float:
        """By how many standard deviations the measured peak differs from the predicted one."""
        return (self.measured - self.predicted) / self.error


def cases_of(path: Path) -> Iterator[Case]:
    """Yield the predicted and measured peaks of a run's journal; nothing if the file is none."""
    try:
        history = tuple(journal.read(path))
    except Failure:
        return
    if not history or not isinstance(history[0], Accepted):
        return
    view = RunView(history)
    launched = {each.started.attempt: each for each in view.launched}
    cured = {event.attempt for event in history if isinstance(event, CuredInPlace)}
    for each in memory_of(Past(history), view).comparisons:
        failure = launched[each.attempt].diagnosed
        failed = failure is not None and failure.phase.value == each.phase
        if each.error and each.attempt not in cured and not failed:
            yield Case(
                run=path.parent.name + "/" + path.stem,
                attempt=each.attempt,
                phase=each.phase,
                predicted=each.predicted,
                error=each.error / constant("interval"),
                measured=each.measured,
            )


def cases_below(*folders: Path) -> list[Case]:
    """Return the cases of all recorded runs below the folders."""
    paths = sorted(path for folder in folders for path in folder.rglob("*.jsonl"))
    return [case for path in paths for case in cases_of(path)]


def share_within(cases: list[Case], deviations: float) -> float:
    """Return the share of the cases that lie within so many standard deviations."""
    return sum(abs(each.deviations) <= deviations for each in cases) / len(cases)


def main() -> int:
    """Print the shares; exit 1 if the printed error contains fewer than nine of ten."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=RECORDED)
    options = parser.parse_args()
    cases = cases_below(*options.folders)
    for case in cases:
        sys.stdout.write(
            f"{case.run:32} #{case.attempt} {case.phase:12} measured {case.measured / 2**20:9.1f} MiB"
            f"  predicted {case.predicted / 2**20:9.1f}  {case.deviations:+6.2f} standard deviations\n"
        )
    if not cases:
        sys.stdout.write("no recorded run has a second attempt with peaks\n")
        return 1
    printed = constant("interval")
    for width in (1.0, 2.0, printed):
        sys.stdout.write(
            f"within {width:.2f} standard deviations: {share_within(cases, width):.0%} of {len(cases)}\n"
        )
    return int(share_within(cases, printed) < _GOAL)


if __name__ == "__main__":
    sys.exit(main())
