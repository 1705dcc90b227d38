"""The losses of steps that several attempts trained, and the band within which they must agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from statistics import median

from autotune.policies.certificate.contents import Losses, Overlap, Replayed
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.view import RunView

# Two runs of a step differ as much as two neighbouring steps, because other samples are drawn. In a normal
# distribution four standard deviations of that difference are exceeded once in 16,000 steps. Losses of
# policies have rare steps far outside it, so the band includes 1.5 times the largest jump in one attempt.
_SIGMAS, _JUMPS = 4.0, 1.5
_STRAYS = 0.01  # share of the compared steps that may be outside the band by chance
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_FEWEST_PAIRS = 8  # of neighbouring steps; with fewer the deviation itself is off by more than a third
_ROUNDING = 1e-5  # of the largest loss: fp32 sums in another order
_MOST_STEPS = 10_000  # kept, the newest


def step_loss(metrics: Mapping[str, float], name: str, *, updates: Sequence[float]) -> float | None:
    """Return a step's loss from its metric `name`, else the mean over its `updates`; None if not finite."""
    loss = metrics.get(name, sum(updates) / len(updates) if updates else nan)
    return loss if isfinite(loss) else None


def losses_of(view: RunView, *, stable: Knobs) -> Losses:
    """Return the overlapping steps of a run's attempts, without trials, which train other checkpoints."""
    by_attempt = {
        attempt.number: {row.step: row.loss for row in attempt.steps if row.loss is not None}
        for attempt in view.training
    }
    steps: dict[int, dict[str, float]] = {}
    for attempt, losses in sorted(by_attempt.items()):
        for step, loss in losses.items():
            steps.setdefault(step, {})[str(attempt)] = loss
    overlapping = tuple(
        Overlap(step=step, losses=result) for step, result in sorted(steps.items()) if len(result) > 1
    )
    band, pairs = _band(by_attempt.values())
    numbers = tuple(str(attempt.number) for attempt in view.training if attempt.knobs == stable)
    return Losses(overlapping=overlapping[-_MOST_STEPS:], band=band, pairs=pairs, stable=numbers)


def outside(compared: Sequence[Overlap], *, band: float | None) -> tuple[Overlap, ...]:
    """Return the steps whose losses differ by more than the band; empty if chance explains their number."""
    if band is None:
        return ()
    beyond = tuple(o for o in compared if spread(o) > band)
    return beyond if len(beyond) > _STRAYS * len(compared) else ()


def spread(overlap: Overlap) -> float:
    """Return the difference between the largest and smallest loss of a step."""
    return max(overlap.losses.values()) - min(overlap.losses.values()) if overlap.losses else 0.0


def replayed_steps(losses: Losses) -> tuple[Overlap, ...]:
    """Return the steps that attempts with the stable settings and with others both trained.

    All overlapping steps if the attempts with the stable settings are not recorded.
    """
    if losses.stable is None:
        return losses.overlapping
    stable = set(losses.stable)
    return tuple(o for o in losses.overlapping if 0 < len(stable & o.losses.keys()) < len(o.losses))


def replay_of(view: RunView, losses: Losses) -> tuple[Replayed, str]:
    """Return whether the replayed steps show the same training, and a description of what was compared."""
    repeated = replayed_steps(losses)
    if all(row.loss is None for attempt in view.attempts.values() for row in attempt.steps):
        return Replayed.NOT_RUN, "the log shows no losses of steps"
    if not repeated:
        return Replayed.NOT_RUN, "no step was trained both with the stable settings and with others"
    if losses.band is None:
        few = f"{losses.pairs} pairs of neighbouring steps do not tell how much a loss varies"
        return Replayed.NOT_RUN, f"{few}; {_FEWEST_PAIRS} would"
    beyond = outside(repeated, band=losses.band)
    if beyond:
        return Replayed.DIFFERS, apart(beyond[0], band=losses.band)
    first, last = repeated[0].step, repeated[-1].step
    numbers = f"step {first}" if first == last else f"{len(repeated)} steps ({first} to {last})"
    what = f"the losses of {numbers} with both settings lie within a band of {losses.band:.6g}"
    return Replayed.AGREED, what


def apart(overlap: Overlap, *, band: float) -> str:
    """Return a description of a step outside the band."""
    return (
        f"step {overlap.step}: the losses of its attempts are {spread(overlap):.6g} apart; "
        f"the band is {band:.6g}"
    )


def _band(attempts: Iterable[dict[int, float]]) -> tuple[float | None, int]:
    every = [sorted(losses.items()) for losses in attempts]
    jumps = [
        abs(after - before)
        for steps in every
        for (first, before), (second, after) in pairwise(steps)
        if second == first + 1
    ]
    if len(jumps) < _FEWEST_PAIRS:
        return None, len(jumps)
    largest = max(abs(loss) for steps in every for _, loss in steps)
    widest = max(_SIGMAS * _MAD_TO_SIGMA * median(jumps), _JUMPS * max(jumps), _ROUNDING * largest)
    return widest, len(jumps)
