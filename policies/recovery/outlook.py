"""The calibrated estimate of a run's configurations, and when it must not be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from autotune.policies.estimate.belief.calibration import (
    Calibration,
    Prediction,
    calibrated,
    in_phase,
    predicted,
)
from autotune.policies.estimate.belief.gaussian import Floats, exceeded
from autotune.policies.estimate.lengths import Assumption
from autotune.policies.estimate.peaks import PHASES, Estimates, estimates, joined
from autotune.policies.remedies.step_size import missing_bytes, needed_bytes
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Policy
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.knobs import Knobs

HEADROOM = 0.01  # share of the capacity kept free in addition, for needs that no step has shown so far
_WRONG = 2  # failed predictions for one phase from which on the ladder alone decides
_BEYOND = 1.6  # times the estimate: coefficients a quarter off, all in one direction, stay well below
_ROUNDING = 1e-9  # share by which vectorised sums of one configuration may differ, depending on the processor
LATE = 4  # steps of an attempt from which on a failure does not contradict its prediction
MODELLED = frozenset({Cause.GPU_OOM, Cause.HOST_OOM, Cause.POOL_TOO_SMALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The calibrated estimate by which the configurations of one run are ranked."""

    run: Run
    model: Model
    calibration: Calibration
    assumption: Assumption = Assumption.EXPECTED
    # The estimates of all configurations so far, and the place of each: a ranking asks for most many times.
    _estimated: list[Estimates] = field(default_factory=list, init=False)
    _places: dict[Knobs, int] = field(default_factory=dict, init=False)

    def estimates(self, knobs: Sequence[Knobs]) -> Estimates:
        """Return the uncalibrated estimates."""
        accepted = self.run.accepted
        new = tuple(dict.fromkeys(each for each in knobs if each not in self._places))
        if new or not self._estimated:
            more = estimates(
                accepted.profile,
                accepted.cluster,
                self.model,
                new,
                assumption=self.assumption,
                steps=accepted.job.goal.steps,
            )
            self._estimated[:] = [joined([*self._estimated, more])]
            self._places.update(zip(new, count(len(self._places)), strict=False))
        return self._estimated[0].at(np.array([self._places[each] for each in knobs], dtype=np.intp))


def outlook(run: Run) -> Outlook | None:
    """Return the outlook of a run; None if no model is known or the ladder's order alone is to decide."""
    model = _known_model(run)
    if model is None:
        return None
    calibration = calibrated(run, model)
    likely = tuple(
        in_phase(a, calibration.moved[a.number]) if a.number in calibration.moved else a for a in run.attempts
    )
    forced = bool(run.attempts) and run.attempts[-1].longest
    return Outlook(
        run=msgspec.structs.replace(run, attempts=likely),
        model=model,
        calibration=calibration,
        assumption=Assumption.LONGEST if forced else Assumption.EXPECTED,
    )


def _known_model(run: Run) -> Model | None:
    """Return the model of a run if the estimate applies to it."""
    accepted = run.accepted
    if accepted.policy is Policy.LADDER:
        return None
    capacity = accepted.profile.trainer_budget_bytes or accepted.cluster.gpu_memory_bytes
    if not capacity or accepted.profile.layout.sequences <= 0:
        return None  # the adapter knows too little about the job
    return accepted.job.shape


def measures(view: Outlook, diagnosis: Diagnosis) -> bool:
    """Return whether the size of the failed memory is known; otherwise no candidate can be shown to fit."""
    estimate = view.estimates((view.run.accepted.profile.knobs,))
    if diagnosis.cause is Cause.HOST_OOM:
        return math.isfinite(estimate.host_capacity)
    return diagnosis.phase in PHASES and math.isfinite(
        estimate.gpu_capacity[PHASES.index(diagnosis.phase), 0]
    )


def trusted(run: Run, diagnosis: Diagnosis) -> bool:
    """Return whether the estimate may still rank the remedies for such a failure."""
    if diagnosis.cause not in MODELLED or diagnosis.phase is Phase.RESUME:
        return False
    if diagnosis.cause is Cause.GPU_OOM and diagnosis.phase not in PHASES:
        return False
    if diagnosis.cause is Cause.POOL_TOO_SMALL and diagnosis.phase is Phase.ROLLOUT:
        return False  # the engine ran out of slots for requests, which are not bytes
    if _beyond_belief(run, diagnosis):
        return False
    return sum(_was_wrong(attempt, diagnosis) for attempt in run.attempts) < _WRONG


def with_host_and_pool(
    over: Floats,
    estimate: Estimates,
    prediction: Prediction,
    *,
    margin: float,
    host_share: float = HOST_LIMIT,
) -> Floats:
    """Return the excess of configurations with that of host memory and of the engine's pool added.

    `over` and the result are shares of the limits, of shape (configurations,), and 0 fits. The host adds its
    excess in every phase, so that a phase that always overflows does not hide others; the pool adds 0.1 for
    each standard deviation that it lacks. `margin` is in standard deviations of the error.
    """
    limit = host_share * estimate.host_capacity
    over = over + np.maximum(0.0, (prediction.host + margin * prediction.host_error) / limit - 1).sum(axis=0)
    return over + 0.1 * np.maximum(0.0, margin - np.maximum(-20.0, prediction.pool))


def chances(
    estimate: Estimates,
    prediction: Prediction,
    *,
    headroom: float = HEADROOM,
    host_share: float = HOST_LIMIT,
) -> Floats:
    """Return the chance that a memory overflows: a row for every phase's device, the host and the pool."""
    free = (estimate.gpu_capacity * (1 - headroom) - prediction.gpu) / prediction.gpu_error
    gpu = exceeded(np.maximum(free, prediction.certainty))
    host = exceeded((host_share * estimate.host_capacity - prediction.host) / prediction.host_error).max(
        axis=0
    )
    return np.vstack([gpu, host, exceeded(prediction.pool)])


def any_of(chances: Floats) -> Floats:
    """Return the chance that any memory overflows, assuming that the memories are independent."""
    return np.asarray(1 - np.prod(1 - chances, axis=0))


def of_host(host: Floats, diagnosis: Diagnosis) -> Floats:
    """Return each configuration's host bytes in the failed phase, or the maximum if that is unknown.

    `host` has a row for each of `PHASES` and a column for each configuration.
    """
    known = diagnosis.phase in PHASES
    return np.asarray(host[PHASES.index(diagnosis.phase)] if known else host.max(axis=0))


def less_than(
    view: Outlook, failed: Sequence[Attempt], *, clearly: float = 0.0
) -> Callable[[Estimates], NDArray[np.bool_]]:
    """Return a predicate: which candidates need less of each failed memory than the attempts that failed.

    `clearly`: by at least this share of it; if set, by the missing bytes in the message as well.
    """
    asked = view.estimates([a.knobs for a in failed])
    before = predicted(view.calibration, asked, late=False)

    def below(after: Floats, most: Floats) -> NDArray[np.bool_]:
        return after <= most if clearly else after < most * (1 - _ROUNDING)

    def less_of(estimate: Estimates) -> NDArray[np.bool_]:
        less = np.ones(len(estimate.step_s), dtype=bool)
        after = predicted(view.calibration, estimate, late=False)
        for column, diagnosis in enumerate(a.diagnosis for a in failed):
            match diagnosis:
                case Diagnosis(cause=Cause.GPU_OOM, phase=phase, facts=facts) if phase in PHASES:
                    short = max(clearly * view.calibration.unit, float(missing_bytes(facts) or 0))
                    most = before.gpu[PHASES.index(phase), column] - (short if clearly else 0.0)
                    less &= below(after.gpu[PHASES.index(phase)], most)
                case Diagnosis(cause=Cause.HOST_OOM):
                    most = of_host(before.host, diagnosis)[column] * (1 - clearly)
                    less &= below(of_host(after.host, diagnosis), most)
                case Diagnosis(cause=Cause.POOL_TOO_SMALL):
                    less &= estimate.pool_tokens > asked.pool_tokens[column]
        return less

    return less_of


def _beyond_belief(run: Run, diagnosis: Diagnosis) -> bool:
    """Return whether a failure needed so much more than estimated that the estimate is of another job."""
    model, last = _known_model(run), run.attempts[-1]
    if model is None or len(last.progress) >= LATE:
        return False
    assumption = Assumption.LONGEST if last.longest else Assumption.EXPECTED
    estimate = estimates(
        run.accepted.profile, run.accepted.cluster, model, (last.knobs,), assumption=assumption
    )
    if diagnosis.cause is Cause.HOST_OOM:
        prediction, expected = HOST_LIMIT * estimate.host_capacity, float(estimate.host.max())
        return math.isfinite(prediction) and prediction > _BEYOND * expected
    used = needed_bytes(diagnosis.facts)
    if used is None or diagnosis.phase not in PHASES:
        return False
    return used > _BEYOND * float(estimate.gpu[PHASES.index(diagnosis.phase), 0])


def _was_wrong(attempt: Attempt, diagnosis: Diagnosis) -> bool:
    """Return whether an attempt failed early with this cause and phase although it was predicted to fit."""
    own, remedy = attempt.diagnosis, attempt.remedy
    if own is None or remedy is None or not remedy.predicted or len(attempt.progress) >= LATE:
        return False
    return (own.cause, own.phase) == (diagnosis.cause, diagnosis.phase)
