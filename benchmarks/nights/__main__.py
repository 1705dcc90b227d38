"""`python -m benchmarks.nights`: nights of 2,000 steps in which something goes wrong, or only seems to.

Each seed is a table of its own: two that are fixed, and one drawn at the run. `oracle` knows what goes wrong
and restarts, or changes the settings, at the best steps. `--without` leaves out the answer to growth.
`--nights 0` prints only what a decision costs after 1,000 and after 200,000 steps.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from unittest.mock import patch

from benchmarks.nights import decide_cost
from benchmarks.nights.night import HEALTHY, LEAKS, OTHERS, Kind, drawn
from benchmarks.nights.play import Outcome, play
from benchmarks.simulation.summary import share

SEEDS = (20261127, 20270101)
_RATES = (2, 10, 50, 400)  # MiB a step


def main() -> int:
    """Play the nights and print a table for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=10, help="of each kind that is not healthy")
    parser.add_argument("--healthy", type=int, default=0, help="of each healthy kind")
    parser.add_argument("--kinds", nargs="*", choices=[*Kind], default=[*Kind], metavar="KIND")
    parser.add_argument("--seeds", type=int, nargs="*", help="instead of the fixed ones and a drawn one")
    parser.add_argument("--without", action="store_true", help="leave out the answer to growth")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    for seed in options.seeds or (*SEEDS, secrets.randbelow(1 << 31)):
        tasks = [
            (Kind(kind), n, seed, options.without)
            for kind in options.kinds
            for n in range(options.healthy if kind in HEALTHY else options.nights)
        ]
        with ProcessPoolExecutor(options.processes) as pool:
            outcomes = list(pool.map(_outcome, tasks))
        sys.stdout.write("\n".join(table(outcomes, seed=seed, without=options.without)) + "\n\n")
        sys.stdout.flush()
    sys.stdout.write(decide_cost.line(seed=SEEDS[0]) + "\n")
    return 0


def table(outcomes: Sequence[Outcome], *, seed: int, without: bool) -> Iterator[str]:
    """Yield the rows of a table of markdown: by kind, of leaks of devices by their rate, and of all.

    Nights that neither the oracle nor the policy ends are left out: no configuration of theirs fits.
    """
    yield f"Seed {seed}{', without the answer to growth' if without else ''}:\n"
    yield (
        "| what goes wrong | nights | reached the last step | restarts, oracle's | time lost median / p90 | "
        "more than 5 % slower settings | named |"
    )
    yield "|---" * 7 + "|"
    outcomes = [o for o in outcomes if o.possible or o.done]
    groups = [(kind.value, [o for o in outcomes if o.kind is kind]) for kind in Kind]
    device = groups[0][1]
    for least, most in pairwise(_RATES):
        own = [o for o in device if least <= o.grows / (1 << 20) < most]
        groups.append((f"device, {least} to {most} MiB a step", own))
    groups.append(("all leaks", [o for o in outcomes if o.kind in LEAKS]))
    groups.append(("all others", [o for o in outcomes if o.kind in OTHERS]))
    for name, own in groups:
        if own:
            yield _row(name, own)


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    lost = sorted(o.lost for o in outcomes if o.done)
    figures = f"{share(lost, 0.5):.1%} / {share(lost, 0.9):.1%}" if lost else "–"
    leaks = [o for o in outcomes if o.kind in LEAKS]
    return (
        f"| {name} | {len(outcomes)} | {statistics.mean(o.done for o in outcomes):.1%} | "
        f"{sum(o.restarts for o in outcomes)}, {sum(o.needed for o in outcomes)} | {figures} | "
        f"{sum(o.slower > 1.05 for o in outcomes)} | {sum(o.named for o in leaks) if leaks else '–'} |"
    ).replace("%", " %")


def _outcome(task: tuple[Kind, int, int, bool]) -> Outcome:
    kind, number, seed, without = task
    night = drawn(kind, seed=seed * 1009 + number * len(Kind) + list(Kind).index(kind))
    with ExitStack() as stack:
        for name in ("growth", "restart_now") if without else ():
            stack.enter_context(patch(f"autotune.policies.recovery.decide.{name}", lambda *_, **__: None))
        return play(night)


if __name__ == "__main__":
    raise SystemExit(main())
