"""The tables: a row per case that may be looked at, and a summary of each half."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.published.judge import Figure, Judgement

_GIB = 1 << 30


def rows(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield a table with a row per case."""
    yield (
        f"{'case':32} {'ran/oom':7} {'of':10} {'said':7} {'share':>6}  {'phase':14} {'chance':>6} "
        f"{'right':5} changed first; cure; figures predicted / measured"
    )
    for found in judgements:
        notes = [
            "" if found.truth.complete else "partial report",
            f"changed: {' '.join(found.changed)}" if found.changed else "",
            f"cure: {found.cure}" if found.cure else "",
            *(_shown(figure) for figure in found.figures),
        ]
        yield (
            f"{found.truth.id:32} {found.truth.outcome:7} {found.truth.phase or '-':10} {found.said:7} "
            f"{found.share:6.2f}  {found.phase:14.14} {found.chance:6.2f} {'yes' if found.right else 'NO':5} "
            + "; ".join(note for note in notes if note)
        )


def summary(halves: Mapping[str, Sequence[Judgement]]) -> Iterator[str]:
    """Yield a row for each half, and for its completely reported cases alone."""
    yield (
        f"{'':24} {'ran, foreseen':>14} {'changed first':>14} {'failed, foreseen':>17} {'figures':>8} "
        f"{'|ln ratio|':>11} {'cures in three':>15} {'chance ran/failed':>18}"
    )
    for title, half in halves.items():
        complete = [found for found in half if found.truth.complete]
        for name, chosen in ((title, half), ("  completely reported", complete)):
            ran, failed = _of(chosen, "ran"), _of(chosen, "oom")
            errors = [figure.error for found in chosen for figure in found.figures]
            changed = sum(bool(found.changed) for found in ran)
            yield (
                f"{name:24} {_right(ran):>14} {changed:>14} {_right(failed):>17} {len(errors):>8} "
                f"{statistics.median(errors) if errors else float('nan'):>11.3f} {_cured(chosen):>15}"
                f" {_chance(ran):>12.2f}/{_chance(failed):.2f}"
            )


def _of(judgements: Sequence[Judgement], outcome: str) -> list[Judgement]:
    return [found for found in judgements if found.truth.outcome == outcome]


def _right(judgements: Sequence[Judgement]) -> str:
    right = sum(found.right for found in judgements)
    return f"{right} of {len(judgements)}"


def _chance(judgements: Sequence[Judgement]) -> float:
    return statistics.fmean(found.chance for found in judgements) if judgements else float("nan")


def _cured(judgements: Sequence[Judgement]) -> str:
    known = [found.cure for found in judgements if found.cure]
    return f"{sum(cure != '-' for cure in known)} of {len(known)}"


def _shown(figure: Figure) -> str:
    unit, name = (1, "tokens") if figure.name == "pool_tokens" else (_GIB, "GiB")
    return (
        f"{figure.name} {figure.predicted / unit:.1f} / {figure.measured / unit:.1f} {name}"
        f" = {figure.predicted / figure.measured:.2f}"
    )
