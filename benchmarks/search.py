"""`python -m benchmarks.search`: ways to search compared on simulated jobs, and what the driver costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.searches import at_once, driver
from benchmarks.searches.harness import BUDGET, Night, play, started
from benchmarks.searches.methods import METHODS
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.summary import mean, share
from benchmarks.simulation.world import Stratum

_HEAD = (
    "| start | method | runs to 95 % of the oracle, median / p90 | got there | best / oracle, median / p10 | "
    "out of memory | too little headroom | repeats |\n|---|---|---|---|---|---|---|---|\n"
)


def main() -> int:
    """Play every method on every job, measure the driver, and print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--jobs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--driver", action="store_true", help="only what the driver costs")
    parser.add_argument("--no-driver", action="store_true", help="only the comparison")
    parser.add_argument(
        "--at-once", action="store_true", help="only what many trials at once cost, on a Ray head of its own"
    )
    parser.add_argument("--parallel", type=int, default=at_once.AT_ONCE, help="trials at once (%(default)s)")
    parser.add_argument("--trials", type=int, default=at_once.TRIALS, help="of them in all (%(default)s)")
    parser.add_argument(
        "--life", type=float, default=at_once.LIFE_S, help="seconds that each of them runs (%(default).0f)"
    )
    options = parser.parse_args()
    if not (options.driver or options.at_once):
        tasks = [(number, options.seed, tuple(options.methods)) for number in range(options.jobs)]
        with ProcessPoolExecutor(options.processes) as pool:
            nights = [night for own in pool.map(_job, tasks, chunksize=2) for night in own]
        sys.stdout.write(table(nights, seed=options.seed))
    if not options.no_driver:
        sys.stdout.write("\n| what | measured | goal |\n|---|---|---|\n")
        if not options.at_once:
            sys.stdout.write(driver.report())
        sys.stdout.write(at_once.report(at_once=options.parallel, trials=options.trials, life_s=options.life))
    return 0


def table(nights: Sequence[Night], *, seed: int) -> str:
    """Return the comparison as a table of markdown; never to get there counts as more than every run."""
    jobs = sum(n.method == nights[0].method for n in nights)
    lines = [f"{jobs} jobs, at most {BUDGET} runs each, seed {seed}.\n\n", _HEAD]
    for kind, method in dict.fromkeys((n.start, n.method) for n in sorted(nights, key=lambda n: n.start)):
        own = [n for n in nights if (n.start, n.method) == (kind, method)]
        counts = sorted(n.found_at or BUDGET + 1 for n in own)
        best = sorted(n.best for n in own)
        runs = sum(n.runs for n in own)
        lines.append(
            f"| {kind} | {method} | {_count(share(counts, 0.5))} / {_count(share(counts, 0.9))} | "
            f"{mean(n.found_at is not None for n in own):.0%} | "
            f"{share(best, 0.5):.2f} / {share(best, 0.1):.2f} | {sum(n.failures for n in own) / runs:.1%} | "
            f"{sum(n.refused for n in own) / runs:.1%} | {sum(n.repeats for n in own)} |\n"
        )
    return "".join(lines)


def _count(runs: float) -> str:
    return f"> {BUDGET}" if runs > BUDGET else f"{runs:.0f}"


def _job(task: tuple[int, int, tuple[str, ...]]) -> list[Night]:
    number, seed, names = task
    strata = tuple(Stratum)
    world, _ = drawn(strata[number % len(strata)], seed=seed * 100_003 + number)
    starts = [first for timid in (False, True) if (first := started(world, timid=timid)) is not None]
    return [play(start, name, METHODS[name], seed=seed + number) for start in starts for name in names]


if __name__ == "__main__":
    raise SystemExit(main())
