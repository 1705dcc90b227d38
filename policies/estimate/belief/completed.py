"""What completed steps show of phases whose peaks no attempt reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.belief.observations import LATE_STEP, fills_microbatch
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Attempt
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile

_OF_UPDATES = frozenset({Phase.FORWARD, Phase.BACKWARD})
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a phase of one attempt needed by the estimate, and the steps that completed with it."""

    place: int  # in PHASES
    needs: Floats  # bytes: of each part, and for one standard deviation of the mean length
    capacity: float  # bytes
    steps: int  # 0: the device ran out in this phase


def completed(
    profile: Profile, attempts: Sequence[Attempt], estimate: Estimates, longest: Estimates
) -> tuple[Completed, ...]:
    """Return the phases that attempts completed without a reported peak, and those in which one ran out.

    Attempt i has column i + 1 of `estimate`, or of `longest` if its responses were forced to full length.
    After a second failure late in an attempt there are none: the job's memory grows, so that steps which
    completed say little of those that follow.
    """
    if sum(a.diagnosis is not None and len(a.progress) + 1 >= LATE_STEP for a in attempts) > 1:
        return ()
    result: dict[tuple[int, Knobs, bool, bool], Completed] = {}  # one for all attempts alike
    for column, attempt in enumerate(attempts, start=1):
        used, diagnosis = longest if attempt.longest else estimate, attempt.diagnosis
        failed = diagnosis.phase if diagnosis is not None and diagnosis.cause is Cause.GPU_OOM else None
        steps = len(attempt.progress)
        if steps and attempt.progress[0].step <= 1 and not attempt.continued:
            steps -= 1  # the first had no optimizer state
        reported = {name for e in attempt.progress for name in e.peaks if not e.peaks[name].upper_bound}
        filled = attempt.longest or fills_microbatch(profile, attempt)
        for place, phase in enumerate(PHASES):
            ran_out = failed is phase
            doubted = phase in _OF_UPDATES and (not filled or failed in _OF_UPDATES)  # they are one pass
            if not ran_out and (not steps or phase.value in reported or doubted):
                continue
            alike = (place, attempt.knobs, attempt.longest, ran_out)
            done = 0 if ran_out else max(steps, result[alike].steps if alike in result else 0)
            needs, capacity = _needs(used, place)[:, column], float(used.gpu_capacity[place, column])
            result[alike] = Completed(place=place, needs=needs, capacity=capacity, steps=done)
    return tuple(result.values())


def certainty(estimate: Estimates, past: Sequence[Completed]) -> Floats:
    """Return how surely each phase fits because steps completed with it: standard deviations.

    After n completed steps the chance that the next one fails is 1 / (n + 2) (Laplace's rule of succession),
    and each phase of a step has an equal part of it. This holds for configurations of which every part needs
    no more, on as large a device. Those that also need as much as a phase that ran out, and all others, have
    minus infinity. The result has the shape (phase, configuration).
    """
    result = np.full(estimate.gpu_capacity.shape, -np.inf)
    for place in {each.place for each in past if each.steps}:
        needs, capacity = _needs(estimate, place), estimate.gpu_capacity[place]
        for each in past:
            if each.place == place and each.steps:
                no_more = (needs <= each.needs[:, None] * _ROUNDING).all(axis=0)
                sure = NormalDist().inv_cdf(1 - 1 / (len(PHASES) * (each.steps + 2)))
                fits = no_more & (capacity * _ROUNDING >= each.capacity)
                result[place] = np.where(fits, np.maximum(result[place], sure), result[place])
        for each in past:
            if each.place == place and not each.steps:
                as_much = (needs * _ROUNDING >= each.needs[:, None]).all(axis=0)
                result[place, as_much & (capacity <= each.capacity * _ROUNDING)] = -np.inf
    return result


def _needs(estimate: Estimates, place: int) -> Floats:
    return np.vstack([estimate.gpu_parts[place], estimate.lengths[place]])
