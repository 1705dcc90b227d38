"""How far the estimate lies from the simulation's truth before any run: what the strata mean in practice."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.values.value import Value
from benchmarks.simulation.cluster import peaks
from benchmarks.simulation.oracle import Best
from benchmarks.simulation.world import World


class Distance(Value, frozen=True, kw_only=True):
    """One phase of one job at the oracle's configuration."""

    stratum: str
    phase: str
    off: float  # estimate / truth - 1


def distances(world: World, best: Best) -> list[Distance]:
    """Return the distance of every phase of one job."""
    accepted = world.accepted
    result = estimates(accepted.profile, accepted.cluster, world.model, (best.knobs,))
    return [
        Distance(
            stratum=world.stratum.value,
            phase=phase.value,
            off=float(result.gpu[PHASES.index(phase), 0]) / truth - 1,
        )
        for phase, truth in peaks(world, best.knobs, 2).items()
    ]


def distance_table(rows: Sequence[Distance]) -> str:
    """Return median and 90th percentile of the distances as a table of markdown."""
    phases = dict.fromkeys(row.phase for row in rows)
    lines = ["| stratum | " + " | ".join(phases) + " |\n", "|---" * (1 + len(phases)) + "|\n"]
    for stratum in dict.fromkeys(row.stratum for row in rows):
        cells = []
        for phase in phases:
            off = sorted(abs(r.off) for r in rows if r.phase == phase and r.stratum == stratum)
            cells.append(f"{_at(off, 0.5):.0%} / {_at(off, 0.9):.0%}" if off else "–")
        lines.append(f"| {stratum} | " + " | ".join(cells) + " |\n")
    return "".join(lines).replace("%", " %")


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
