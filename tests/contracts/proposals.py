"""What autotune may propose for a job, what it withholds, and the frameworks' own judgement of both.

`python -m tests.contracts.proposals` writes the table of docs/measured/settings.md.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import combinations
from pathlib import Path
from random import Random

from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.policies.remedies.candidate_values import values_in_range, values_near
from autotune.policies.remedies.legality import completed, objections, on_grid
from autotune.policies.remedies.neighbours import choices
from autotune.policies.search.space import neighbours, space
from autotune.policies.values.job import Job, Recovery
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value
from tests.contracts.changes import PAGE
from tests.contracts.judges import JUDGES
from tests.contracts.sampled_jobs import SEED, cluster, sampled
from tests.faults.page import placed

# Knobs that a framework's checks weigh against each other or against the job's sizes.
LINKED = (
    "tensor_parallel",
    "context_parallel",
    "sequence_parallel",
    "microbatch_size",
    "dynamic_batching",
    "rollout_tensor_parallel",
    "recompute",
)


def offered(job: Job, profile: Profile) -> tuple[Knobs, ...]:
    """Return what launch or search may try: one move from the job, or two of those that bind each other."""
    own = profile.knobs
    alone = choices(profile, own, recovery=Recovery(), started=False)
    moves = [{knob: value} for knob, values in alone.items() for value in values[1:]]
    for first, second in combinations([knob for knob in LINKED if knob in alone], 2):
        moves += [{first: one, second: other} for one in alone[first][1:] for other in alone[second][1:]]
    items = [replace(own, **completed(profile, own, move)) for move in moves]
    items += neighbours(profile, own, own, space(job, profile, own))
    legal = (each for each in items if each != own and not objections(profile, own, each, started=False))
    return tuple(dict.fromkeys(legal))


def withheld(profile: Profile) -> tuple[Knobs, ...]:
    """Return the single moves that are refused, of the values on the grid that launch or search look at."""
    own = profile.knobs
    result: dict[Knobs, None] = {}
    for knob, support in profile.supported.items():
        for value in (*values_near(profile, own, knob), *values_in_range(profile, own, knob)):
            moved = replace(own, **completed(profile, own, {knob: value}))
            if on_grid(support.grid, value) and objections(profile, own, moved, started=False):
                result[moved] = None
    return tuple(result)


class Judgement(Value, frozen=True, kw_only=True):
    """How a framework judged the proposals of its sampled jobs."""

    framework: str
    jobs: int
    proposals: int
    refused: tuple[str, ...]  # proposals that it refuses, each with the reason
    withheld: int
    only_ours: tuple[str, ...]  # withheld ones that it accepts


def judgement(framework: str, folder: Path, *, most: int | None = None) -> Judgement:
    """Return how a framework judges the proposals of its jobs; at most so many of each job."""
    judge = JUDGES[framework]
    jobs = [judge.prepared(job) for name in judge.frameworks or (framework,) for job in sampled(name)]
    rows: list[tuple[str, Job, Knobs, Knobs]] = []
    for job in jobs:
        profile = find(job.framework).profile(job, cluster(job))
        kinds = {"written": (profile.knobs,), "offered": offered(job, profile), "withheld": withheld(profile)}
        for kind, every in kinds.items():
            kept = [each for each in every if judge.knobs.isdisjoint(changed(profile.knobs, each))]
            rows += [(kind, job, profile.knobs, each) for each in _some(kept, profile.knobs, most)]
    reasons = judge.judge([(job, knobs) for _, job, _, knobs in rows], folder)
    of: dict[str, list[tuple[str, str]]] = {"written": [], "offered": [], "withheld": []}
    for (kind, job, own, knobs), why in zip(rows, reasons, strict=True):
        of[kind].append((f"{job.name}: {changed(own, knobs)}", why))
    assert all(not why for _, why in of["written"]), of["written"]
    return Judgement(
        framework=framework,
        jobs=len(jobs),
        proposals=len(of["offered"]),
        refused=tuple(f"{what}: {why}" for what, why in of["offered"] if why),
        withheld=len(of["withheld"]),
        only_ours=tuple(what for what, why in of["withheld"] if not why),
    )


def _some(every: list[Knobs], own: Knobs, most: int | None) -> list[Knobs]:
    if most is None or len(every) <= most:
        return every
    linked = [each for each in every if not changed(own, each).keys().isdisjoint(LINKED)]
    return Random(SEED).sample(linked if len(linked) > most else every, most)


_HEAD = (
    "| framework | judged by | jobs | proposals | refused by it | withheld | of these it accepts |",
    "|---|---|---|---|---|---|---|",
)


def line(row: Judgement) -> str:
    """Return the judgement of a framework as a row of the table."""
    counts = (row.jobs, row.proposals, len(row.refused), row.withheld, len(row.only_ours))
    return f"| {row.framework} | {JUDGES[row.framework].by} | {' | '.join(map(str, counts))} |"


def main() -> None:
    """Judge the proposals for the jobs of some frameworks, and write their rows of the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("frameworks", nargs="*", default=list(JUDGES), metavar="FRAMEWORK")
    parser.add_argument("--most", type=int, help="proposals of a job, those of knobs that bind each other")
    asked = parser.parse_args()
    for framework in asked.frameworks:
        with tempfile.TemporaryDirectory() as folder:
            result = judgement(framework, Path(folder), most=asked.most)
        print(line(result), *result.refused, *result.only_ours, sep="\n  ", flush=True)
        page = PAGE.read_text()
        kept = {each.split(" ")[1]: each for each in page.splitlines() if each.startswith("| ")}
        kept[framework] = line(result)
        rows = [*_HEAD, *(kept[name] for name in JUDGES if name in kept)]
        PAGE.write_text(placed(page, "proposals", "\n".join(rows)))


if __name__ == "__main__":
    main()
