"""A scenario: what goes wrong, what should come of it, and how that is checked."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import msgspec

from tests.faults.bench import Bench, Unmet


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one scenario came to with one seed: a line of the results file."""

    scenario: str
    seed: int
    survived: bool
    attempts: int  # that the job itself noted, whatever was recorded
    repeated: int  # steps made more than once
    left: int  # processes of the run after its end
    verdict: str
    exit_code: int | None
    notice_s: float | None  # from the fault to the driver's first line about it
    seconds: float
    scale: float
    version: str  # the commit
    at: str
    reason: str = ""  # why it did not survive


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and what a run that survives it looks like; more than one attempt needs a reason."""

    name: str
    fault: str  # in words, for the table
    play: Callable[[Bench, Random], int | None]  # returns the exit code of the last driver
    attempts: int = 1
    repeated: int = 0
    verdict: str = "completed"
    exit_code: int | None = 0
    why: str = ""  # why more than one attempt, a repeated step or another verdict cannot be avoided
    how: str = ""  # how the fault is made, where it is not the real one
    ci: bool = False

    @property
    def group(self) -> str:
        """Which module it is of."""
        return self.play.__module__.rpartition(".")[2]


def play(scenario: Scenario, *, seed: int, scale: float, version: str, stories: Path | None = None) -> Row:
    """Play a scenario with one seed and return its row.

    `stories` is the folder for what the drivers said, and for the runs, where it is not survived.
    """
    begun = time.monotonic()
    reason, code = "", None
    with Bench(scale=scale) as bench:
        try:
            code = scenario.play(bench, Random(f"{scenario.name}/{seed}"))
            bench.gone()
            reason = _difference(scenario, bench, code)
        except Unmet as unmet:
            reason = str(unmet)
        except Exception:  # the harness's own, or a file that the product never wrote: a row all the same
            reason = f"the scenario broke: {' / '.join(traceback.format_exc().strip().splitlines()[-3:])}"
        if reason and stories is not None:
            stories.mkdir(parents=True, exist_ok=True)
            place = stories / f"{scenario.name}-{seed}"
            place.with_suffix(".txt").write_text(f"{reason}\n\n{bench.story}")
            shutil.rmtree(place, ignore_errors=True)
            if bench.runs.exists():
                shutil.copytree(bench.runs, place, symlinks=True)
        return Row(
            scenario=scenario.name,
            seed=seed,
            survived=not reason,
            attempts=len(bench.starts()),
            repeated=bench.repeated(),
            left=len(bench.left()),
            verdict=bench.verdict,
            exit_code=code,
            notice_s=None if bench.noticed_s is None else round(bench.noticed_s, 1),
            seconds=round(time.monotonic() - begun, 1),
            scale=scale,
            version=version,
            at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            reason=" ".join(reason.split())[:400],
        )


def _difference(scenario: Scenario, bench: Bench, code: int | None) -> str:
    """Return in which way the end of the run is not what the scenario asks for."""
    starts, repeated = len(bench.starts()), bench.repeated()
    last = bench.drivers[-1].last_words if bench.drivers else ""
    if bench.verdict != scenario.verdict:
        return f"verdict {bench.verdict or 'none'}, not {scenario.verdict}: {last}"
    if scenario.exit_code is not None and code != scenario.exit_code:
        return f"exit code {code}, not {scenario.exit_code}: {last}"
    if starts > scenario.attempts:
        return f"{starts} attempts were started, not {scenario.attempts}: {last}"
    if (recorded := len(bench.of("started")) - len(bench.unbegun())) != starts:
        return f"{recorded} starts are on record, the job began {starts} times"
    if repeated > scenario.repeated:
        return f"{repeated} steps were repeated, not {scenario.repeated}"
    return ""
