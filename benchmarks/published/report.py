"""The tables: a row per case that may be looked at, and a summary of each half."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from benchmarks.published.judge import Figure, Judgement

_GIB = 1 << 30
_BINS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.1)  # limits of chances that are counted together
_LOW, _LEAST = 0.1, 1e-4  # a chance that counts as low; the least that a chance of 0 counts as


def rows(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield a table with a row per case."""
    yield (
        f"{'case':32} {'ran/oom':7} {'of':10} {'said':7} {'share':>6}  {'phase':14} {'chance':>6} "
        f"{'right':5} changed first; cure; figures predicted / measured"
    )
    for each in judgements:
        notes = [
            "" if each.truth.complete else "partial report",
            f"changed: {' '.join(each.changed)}" if each.changed else "",
            f"cure: {each.cure}" if each.cure else "",
            *(_text_of(figure) for figure in each.figures),
        ]
        yield (
            f"{each.truth.id:32} {each.truth.outcome:7} {each.truth.phase or '-':10} {each.prediction:7} "
            f"{each.share:6.2f}  {each.phase:14.14} {each.chance:6.2f} {'yes' if each.right else 'NO':5} "
            + "; ".join(note for note in notes if note)
        )


def summary(halves: Mapping[str, Sequence[Judgement]]) -> Iterator[str]:
    """Yield a row for each half, and for its completely reported cases alone."""
    yield (
        f"{'':24} {'ran, foreseen':>14} {'changed first':>14} {'failed, foreseen':>17} {'figures':>8} "
        f"{'|ln ratio|':>11} {'cures in three':>15} {'chance ran/failed':>18}"
    )
    for title, half in halves.items():
        complete = [each for each in half if each.truth.complete]
        for name, chosen in ((title, half), ("  completely reported", complete)):
            ran, failed = _of(chosen, "ran"), _of(chosen, "oom")
            errors = [figure.error for each in chosen for figure in each.figures]
            changed = sum(bool(each.changed) for each in ran)
            yield (
                f"{name:24} {_right(ran):>14} {changed:>14} {_right(failed):>17} {len(errors):>8} "
                f"{statistics.median(errors) if errors else float('nan'):>11.3f} {_cured(chosen):>15}"
                f" {_chance(ran):>12.2f}/{_chance(failed):.2f}"
            )


def losses(halves: Mapping[str, Sequence[Judgement]]) -> Iterator[str]:
    """Yield the log losses of the plans' chances of whole RL jobs and of trainers, and how pairs compare.

    `complete`: RL jobs whose report gives every setting that decides memory. The best constant is that of all
    the other jobs of the same row. Cases are chosen for failing, so that a row's own rate of failures is no
    rate of all jobs. `if true` is the log loss to expect of these chances if each of them is right: the mean
    entropy of their outcomes, below which only chances nearer to 0 and 1 can come.
    """
    yield (
        f"{'':24} {'':8} {'jobs':>5} {'failed':>7} {'log loss':>9} {'if true':>8} {'constant':>9} "
        f"{'0.2 + 0.8 P':>12} {'ran, below 0.1':>15} {'failed, below 0.1':>18}"
    )
    kinds = (("all", "RL jobs", False), ("all", "complete", True), ("trainer", "trainers", False))
    for title, half in halves.items():
        for scope, name, complete in kinds:
            chosen = [item for item in half if item.truth.scope == scope and item.truth.complete >= complete]
            failed = [item.truth.outcome == "oom" for item in chosen]
            if len(chosen) < 2:
                continue
            chances = [item.chance for item in chosen]
            floor = [0.2 + 0.8 * chance for chance in chances]
            others = [(sum(failed) - each) / (len(failed) - 1) for each in failed]
            low = [each for each, chance in zip(failed, chances, strict=True) if chance < _LOW]
            yield (
                f"{title:24} {name:8} {len(chosen):>5} {sum(failed):>7} {_log_loss(chances, failed):>9.3f} "
                f"{statistics.fmean(map(_entropy, chances)):>8.3f} {_log_loss(others, failed):>9.3f} "
                f"{_log_loss(floor, failed):>12.3f} "
                f"{f'{low.count(False)} of {failed.count(False)}':>15} {f'{sum(low)} of {len(low)}':>18}"
            )
    by_name = {item.truth.id: item for half in halves.values() for item in half}
    pairs = [(item, by_name.get(item.truth.fixed_by)) for item in by_name.values()]
    known = [(failing.chance, fixed.chance) for failing, fixed in pairs if fixed is not None]
    yield (
        f"pairs of a failing recipe and its fix: {len(known)}, the failing one has the higher chance in "
        f"{sum(failing > fixed for failing, fixed in known)}, twice as high in "
        f"{sum(failing >= 2 * fixed for failing, fixed in known)}"
    )


def reliability(judgements: Sequence[Judgement]) -> Iterator[str]:
    """Yield, for whole RL jobs and for trainers, how many failed of those with about the same chance."""
    yield f"{'chance':12} {'':8} {'jobs':>5} {'mean chance':>12} {'failed':>7} {'share that failed':>18}"
    for scope, name in (("all", "RL jobs"), ("trainer", "trainers")):
        for low, high in pairwise(_BINS):
            of = [item for item in judgements if item.truth.scope == scope and low <= item.chance < high]
            if of:
                failed = [item.truth.outcome == "oom" for item in of]
                yield (
                    f"{f'{low:.1f} to {min(high, 1.0):.1f}':12} {name:8} {len(of):>5} "
                    f"{statistics.fmean(item.chance for item in of):>12.2f} {sum(failed):>7} "
                    f"{statistics.fmean(failed):>18.2f}"
                )


def _entropy(chance: float) -> float:
    """Return the expected log loss of a chance that is right."""
    likely = min(1 - _LEAST, max(_LEAST, chance))
    return -likely * math.log(likely) - (1 - likely) * math.log1p(-likely)


def _log_loss(chances: Sequence[float], failed: Sequence[bool]) -> float:
    likely = [chance if each else 1 - chance for chance, each in zip(chances, failed, strict=True)]
    return -statistics.fmean(math.log(min(1 - _LEAST, max(_LEAST, each))) for each in likely)


def _of(judgements: Sequence[Judgement], outcome: str) -> list[Judgement]:
    return [each for each in judgements if each.truth.outcome == outcome]


def _right(judgements: Sequence[Judgement]) -> str:
    right = sum(each.right for each in judgements)
    return f"{right} of {len(judgements)}"


def _chance(judgements: Sequence[Judgement]) -> float:
    return statistics.fmean(each.chance for each in judgements) if judgements else float("nan")


def _cured(judgements: Sequence[Judgement]) -> str:
    known = [each.cure for each in judgements if each.cure]
    return f"{sum(cure != '-' for cure in known)} of {len(known)}"


def _text_of(figure: Figure) -> str:
    unit, name = (1, "tokens") if figure.name == "pool_tokens" else (_GIB, "GiB")
    return (
        f"{figure.name} {figure.predicted / unit:.1f} / {figure.measured / unit:.1f} {name}"
        f" = {figure.predicted / figure.measured:.2f}"
    )
