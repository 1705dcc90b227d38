"""`python -m benchmarks.policies`: policies of recovery compared on a simulated cluster, one table."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.simulation.baselines import POLICIES, least_batches
from benchmarks.simulation.cluster import run
from benchmarks.simulation.distance import Distance, distance_table, distances
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.play import Day, play
from benchmarks.simulation.summary import table
from benchmarks.simulation.world import Perturbation, Stratum

ABLATIONS = ("autotune", "no calibration", "no figures", "ladder", "everything")
# The parts of our own policy that can be left out, and what is then played.
WITHOUT = {
    "estimate": "ladder",
    "calibration": "no calibration",
    "figures": "no figures",
    "relief": "no relief",
    "speeds": "no speeds",
}
COMPARED = tuple(name for name in POLICIES if not name.startswith("no "))
_OF_EACH = 110  # jobs of a stratum
STRATA: dict[str, Stratum | Perturbation] = {s.value: s for s in (*Stratum, *Perturbation)}


def main() -> int:
    """Play every policy on every job and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="in all strata together; 110 of each unless given")
    parser.add_argument(
        "--perturbed",
        action="store_true",
        help="structural errors of the estimate instead of the usual strata",
    )
    parser.add_argument("--strata", nargs="*", choices=[*STRATA], help="only these")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--policies", nargs="*", choices=list(POLICIES))
    parser.add_argument(
        "--without",
        nargs="*",
        choices=list(WITHOUT),
        help="our own policy beside itself without each of these parts; all of them unless given",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every day as a line of JSON")
    options = parser.parse_args()
    usual = tuple(Perturbation) if options.perturbed else tuple(Stratum)
    strata = tuple(STRATA[name] for name in options.strata) if options.strata else usual
    perturbed = any(isinstance(stratum, Perturbation) for stratum in strata)
    policies = options.policies or (ABLATIONS if perturbed else COMPARED)
    if options.without is not None:
        policies = ("autotune", *(WITHOUT[part] for part in options.without or WITHOUT))
    tasks = [
        (number, options.seed, strata[number % len(strata)], tuple(policies))
        for number in range(options.jobs or _OF_EACH * len(strata))
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        results = list(pool.map(_job, tasks, chunksize=4))
    days = [day for own, _, _ in results for day in own]
    if options.json is not None:
        options.json.write_bytes(b"\n".join(msgspec.json.encode(day) for day in days))
    sys.stdout.write(table(days, seed=options.seed))
    curable = sum(alone for _, _, alone in results)
    sys.stdout.write(f"\nThe least micro-batches alone cure {curable} of the {len(results)} jobs.\n")
    sys.stdout.write("\nDistance of the estimate from the truth before any run, median / p90:\n\n")
    sys.stdout.write(distance_table([row for _, rows, _ in results for row in rows]))
    return 0


def _job(
    task: tuple[int, int, Stratum | Perturbation, tuple[str, ...]],
) -> tuple[list[Day], list[Distance], bool]:
    number, seed, stratum, names = task
    world, best = drawn(stratum, seed=seed * 100_003 + number)
    alone = run(world, least_batches(world.accepted.profile)).failure is None
    return [play(world, best, name) for name in names], distances(world, best), alone


if __name__ == "__main__":
    raise SystemExit(main())
