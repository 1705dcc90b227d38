"""The table of a comparison of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.simulation.play import MOST, Day
from benchmarks.simulation.world import Stratum

_HEAD = (
    "| stratum | policy | success | relaunches median / p90 / max | first stable / oracle median / p10 | "
    "repeats | forbidden | regret GPU-h, mean (median) | clipped at 0, mean |\n" + "|---" * 9 + "|\n"
)


def table(days: Sequence[Day], *, seed: int) -> str:
    """Return the comparison as a table of markdown; regrets clipped at zero stand beside the raw ones."""
    lines = [f"{sum(d.policy == days[0].policy for d in days)} jobs, seed {seed}.\n\n", _HEAD]
    policies = dict.fromkeys(day.policy for day in days)
    for stratum in dict.fromkeys(day.stratum for day in days):
        for policy in policies:
            own = [d for d in days if d.stratum == stratum and d.policy == policy]
            lines.append(_row(stratum, policy, own))
    lines += [_row("all", policy, [d for d in days if d.policy == policy]) for policy in policies]
    return "".join(lines)


def _row(stratum: str, policy: str, days: Sequence[Day]) -> str:
    counts = sorted(d.relaunches for d in days)
    extra = sorted(d.relaunches - (d.injected if d.relaunches < MOST else 0) for d in days)
    shares = sorted(d.first_stable for d in days if d.first_stable is not None)
    regrets = sorted(d.regret_gpu_hours for d in days)
    relaunches = f"{share(counts, 0.5):.0f} / {share(counts, 0.9):.0f} / {counts[-1]}"
    if stratum == Stratum.LATE.value:
        relaunches += (
            f" (less injected events {share(extra, 0.5):.0f} / {share(extra, 0.9):.0f} / {extra[-1]})"
        )
    first = f"{share(shares, 0.5):.2f} / {share(shares, 0.1):.2f}" if shares else "–"
    return (
        f"| {stratum} | {policy} | {mean(d.stable for d in days):.1%} | {relaunches} | {first} | "
        f"{sum(d.repeats for d in days)} | {sum(d.forbidden for d in days)} | "
        f"{mean(regrets):.0f} ({share(regrets, 0.5):.0f}) | {mean(max(0.0, r) for r in regrets):.0f} |\n"
    )


def share(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` of all values do not exceed."""
    place = max(0, -int(-part * len(values) // 1) - 1)
    return values[min(len(values) - 1, place)]


def mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)
