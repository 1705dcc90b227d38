"""Rank candidates by the calibrated estimate: those that fit, the fastest of them first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from autotune.policies.estimate.belief.calibration import Prediction, predicted
from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.outlook import (
    HEADROOM,
    MODELLED,
    Outlook,
    any_of,
    chances,
    less_than,
    with_host_and_pool,
)
from autotune.policies.recovery.relief import CLEARLY, RISK, SAME, freed, relieving, singles
from autotune.policies.recovery.step_times import SURELY, StepTimes, step_times
from autotune.policies.remedies.ladder import order_of_knobs
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.neighbours import Score, search
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.knob_table import KNOB_TABLE, Part
from autotune.policies.values.knobs import Knobs, Setting, new_values
from autotune.policies.values.remedy import Effect

_RISK_WEIGHT = 3.0  # of the chance against the logarithm of the seconds, if nothing fits with the margin
_NUMERIC_WEIGHT = 0.1
_MARGIN = 1.3  # standard deviations kept free while searching; about a tenth of a chance for one phase
_CLIMBING_RISK = 0.05
_WORTH_CLIMBING = 0.05  # of a step's time: less is not worth a restart
_NOISE = 0.04  # predicted step times that differ by less are equal
_EVEN = 0.5  # chance of an overflow above which one is expected
_EQUAL_RISK = 0.02  # by which undoing a change elsewhere may raise the chance of another failure
_LACKING = frozenset({Cause.HOST_OOM, Cause.POOL_TOO_SMALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A configuration with its predicted risk, speed and peaks."""

    knobs: Knobs
    risk: float  # chance that some phase does not fit, as if the phases were independent
    least_risk: float  # that of the worst phase alone: correlation cannot make it less
    step_s: float
    gpu: dict[Phase, float]  # expected peaks in bytes
    host: float

    @property
    def predicted(self) -> dict[str, int]:
        """The expected peaks as the journal records them, phase -> bytes."""
        return {phase.value: int(size) for phase, size in self.gpu.items()}


def assess(view: Outlook, knobs: Knobs) -> Ranked:
    """Return the predicted risk, speed and peaks of one configuration."""
    estimate = view.estimates((knobs,))
    times = step_times(view, None)
    return _ranked(times, (knobs,), estimate, predicted(view.calibration, estimate), 0)


def only_faster(view: Outlook, before: Knobs, chosen: Knobs) -> tuple[str, ...]:
    """Return the knobs of a chosen configuration with whose old values the job fits as well."""
    most, result = assess(view, chosen).risk + _EQUAL_RISK, list[str]()
    for knob in new_values(before, chosen):
        less = msgspec.structs.replace(chosen, **{knob: getattr(before, knob)})
        is_legal = less != before and not objections(view.run.accepted.profile, before, less, started=False)
        if is_legal and assess(view, less).risk <= most:
            chosen = less
            result.append(knob)
    return tuple(result)


def best(
    view: Outlook,
    present: Knobs,
    *,
    diagnosis: Diagnosis | None,
    started: bool,
    permitted: Callable[[Knobs], bool],
) -> Ranked | None:
    """Return the configuration to run next; None if none is permitted and differs from the present one.

    Of those that fit with the margin, it is the one with the least predicted step time, exact before numeric;
    if times differ by noise, fewer and smaller changes come first, then the ladder's order. If none fits so
    certainly, risk is weighed against speed.
    """
    relief = relieving(view, present, diagnosis, started=started)
    near = _neighbourhood(view, present, started, believed=False, options=relief.options)
    knobs, estimate, prediction = near.knobs, near.estimate, near.prediction
    acting = relief.acting
    changes = [new_values(present, k) for k in knobs]
    rungs = order_of_knobs(view.run.accepted.profile, present, diagnosis, started=started)
    failed = [
        a
        for a in view.run.attempts
        if a.diagnosis is not None and a.diagnosis.cause in MODELLED and not a.loading
    ]
    less = less_than(view, failed, clearly=CLEARLY)(estimate)
    order = _order(
        np.log(near.times.sure(estimate, knobs, acting)),
        chances(estimate, prediction),
        near.over,
        _misses(view, estimate, prediction) <= 0,
        _numeric(view, changes),
        changes,
        rungs,
        np.array([_distance(present, c) for c in changes]),
    )
    for index in order:
        # Changes that the ladder would not make for such a failure may join a remedy, but are none alone.
        cures = diagnosis is None or not changes[index].keys().isdisjoint(rungs.keys() - relief.idle)
        if changes[index] and cures and less[index] and permitted(knobs[index]):
            return _without_idle(near, knobs[index], acting, diagnosis, permitted)
    return None


def faster(
    view: Outlook, present: Knobs, *, started: bool, permitted: Callable[[Knobs], bool]
) -> Ranked | None:
    """Return a configuration that is clearly faster than the present one and certainly fits; None if none."""
    near = _neighbourhood(view, present, started, believed=True)
    knobs, slow, estimate, prediction = near.knobs, near.slow, near.estimate, near.prediction
    changes = [new_values(present, k) for k in knobs]
    gain = slow[0] - slow  # the search begins with the present configuration
    share, error = near.times.gain(knobs, [present] * len(knobs))
    fits = (any_of(chances(estimate, prediction)) <= _CLIMBING_RISK) & (
        _misses(view, estimate, prediction) <= 0
    )
    left = np.nonzero((gain >= _WORTH_CLIMBING) & (share > error) & fits & ~_numeric(view, changes))[0]
    while left.size:
        equal = left[gain[left] >= gain[left].max() - _NOISE]
        counts = np.array([len(changes[i]) for i in equal])
        for index in equal[np.lexsort((-gain[equal], counts))].tolist():
            if permitted(knobs[index]):
                return _ranked(near.times, knobs, estimate, prediction, index)
        left = left[gain[left] < gain[left].max() - _NOISE]
    return None


def nearest(view: Outlook, present: Knobs, *, started: bool) -> Ranked:
    """Return the legal configuration whose expected peaks exceed their limits by least."""
    near = _neighbourhood(view, present, started, believed=False)
    knobs, estimate, prediction = near.knobs, near.estimate, near.prediction
    misses = (prediction.gpu / estimate.gpu_capacity).max(axis=0)
    misses = np.maximum(misses, (prediction.host / (HOST_LIMIT * estimate.host_capacity)).max(axis=0))
    misses = misses + np.maximum(0.0, -prediction.pool)
    return _ranked(near.times, knobs, estimate, prediction, int(misses.argmin()))


def overflowing(view: Outlook, ranked: Ranked) -> list[tuple[str, float]]:
    """Return the phases, and `host`, whose expected peak does not fit, and by how many bytes; worst first."""
    estimate = view.estimates((ranked.knobs,))
    sizes = [
        (phase.value, ranked.gpu[phase] - float(estimate.gpu_capacity[place, 0]))
        for place, phase in enumerate(PHASES)
    ]
    sizes.append(("host", ranked.host - HOST_LIMIT * estimate.host_capacity))
    return sorted(((name, size) for name, size in sizes if size > 0), key=lambda item: -item[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbourhood:
    """The configurations assessed near the present one, which is the first."""

    knobs: list[Knobs]
    slow: Floats  # logarithm of a step's seconds
    over: Floats  # overflow
    estimate: Estimates
    prediction: Prediction
    options: dict[str, tuple[Setting, ...]]
    times: StepTimes


def _neighbourhood(
    view: Outlook,
    present: Knobs,
    started: bool,
    *,
    believed: bool,
    options: dict[str, tuple[Setting, ...]] | None = None,
) -> _Neighbourhood:
    """Return the configurations near the present one; `believed`: accept every prediction of speed."""
    profile, recovery = view.run.accepted.profile, view.run.accepted.job.recovery
    options = singles(view, present, started=started) if options is None else options
    times = step_times(view, None if believed else present, options)
    score = _score(view, times)
    usual = {k: v for k, v in options.items() if not KNOB_TABLE[k].last}
    exact = {k: v for k, v in usual.items() if profile.supported[k].effect is not Effect.NUMERIC}
    result: dict[Knobs, tuple[float, float]] = {}
    # Numeric changes may save and speed up most: a search among all changes would miss the others' effects.
    rounds = [exact, usual] if len(exact) < len(usual) else [usual]
    for some in rounds + [options] * (len(usual) < len(options)):
        if some is options and min(excess for _, excess in result.values()) <= 0:
            break
        each, slow, over = search(profile, present, some, score, recovery=recovery, started=started)
        result |= zip(each, zip(slow.tolist(), over.tolist(), strict=True), strict=True)
    knobs = list(result)
    estimate = view.estimates(knobs)
    return _Neighbourhood(
        knobs=knobs,
        slow=np.array([seconds for seconds, _ in result.values()]),
        over=np.array([excess for _, excess in result.values()]),
        estimate=estimate,
        prediction=predicted(view.calibration, estimate),
        options=options,
        times=times,
    )


def _without_idle(
    near: _Neighbourhood,
    chosen: Knobs,
    acting: frozenset[str],
    diagnosis: Diagnosis | None,
    permitted: Callable[[Knobs], bool],
) -> Ranked:
    """Return the chosen configuration without unnecessary changes.

    Against a full host or too small a pool, a change stays if it frees some of it, or if something else would
    not fit without it. Otherwise a change outside `acting` stays if fit or speed require it.
    """
    view, present = near.times.view, near.knobs[0]
    most = assess(view, chosen).risk + _EQUAL_RISK
    own = frozenset() if diagnosis is not None and diagnosis.cause in _LACKING else acting
    while True:
        undone = [
            msgspec.structs.replace(chosen, **{knob: getattr(present, knob)})
            for knob in new_values(present, chosen)
            if knob not in own
        ]
        every = [chosen, *(knobs for knobs in undone if permitted(knobs))]
        estimate = view.estimates(every)
        prediction = predicted(view.calibration, estimate)
        risk, misses = any_of(chances(estimate, prediction)), _misses(view, estimate, prediction)
        if diagnosis is not None and diagnosis.cause in _LACKING:
            idle = freed(view, estimate, diagnosis)[0] >= -SAME
        else:
            gain, error = near.times.gain([chosen] * len(every), every)
            idle = (gain <= SURELY * error)[1:]
        allowed = (risk[1:] <= most) & (misses[1:] <= max(0.0, misses[0])) & idle
        if not allowed.any():
            return _ranked(near.times, every, estimate, prediction, 0)
        chosen = every[1 + int(np.where(allowed, risk[1:], np.inf).argmin())]


def _numeric(view: Outlook, changes: list[dict[str, Setting]]) -> NDArray[np.bool_]:
    return np.array([view.run.accepted.profile.effect_of(c) is Effect.NUMERIC for c in changes])


def _score(view: Outlook, times: StepTimes) -> Score:
    def score(knobs: Sequence[Knobs]) -> tuple[Floats, Floats]:
        estimate = view.estimates(knobs)
        prediction = predicted(view.calibration, estimate)
        capacity = estimate.gpu_capacity * (1 - HEADROOM)
        excess = np.maximum(0.0, (prediction.gpu + _MARGIN * prediction.gpu_error) / capacity - 1)
        over = np.where(prediction.certainty >= _MARGIN, 0.0, excess).sum(axis=0)
        over = np.maximum(over, _misses(view, estimate, prediction))
        over = with_host_and_pool(over, estimate, prediction, margin=_MARGIN)
        return np.log(times.seconds(estimate, knobs)), over

    return score


def _misses(view: Outlook, estimate: Estimates, prediction: Prediction) -> Floats:
    """Return each configuration's excess over the goal's memory limit, as a share of it.

    The limit is the capacity minus the headroom of the goal, the excess that of the fullest phase; shape
    (configurations,); at most 0 if every phase fits. A phase that completed steps and reported no peak counts
    as one that fits.
    """
    capacity = estimate.gpu_capacity * (1 - view.run.accepted.job.goal.headroom)
    misses: Floats = np.where(prediction.certainty > 0, 0.0, prediction.gpu / capacity).max(axis=0) - 1
    return misses


def _order(
    slow: Floats,
    risks: Floats,
    over: Floats,
    roomy: NDArray[np.bool_],
    numeric: NDArray[np.bool_],
    changes: list[dict[str, Setting]],
    rungs: dict[str, int],
    moved: Floats,
) -> Iterator[int]:
    """Yield the candidates, best first."""
    counts = np.array([len(c) for c in changes])
    steps = np.array([min((rungs.get(k, len(rungs)) for k in c), default=0) for c in changes])
    risk = any_of(risks)
    fitting = risk <= RISK
    kinds = (~numeric & roomy, ~numeric & ~roomy, numeric & roomy, numeric & ~roomy)
    for group in (np.nonzero(fitting & kind)[0] for kind in kinds):
        left = group
        while left.size:
            bound = slow[left].min() + _NOISE
            equal = left[slow[left] <= bound]
            yield from equal[np.lexsort((slow[equal], steps[equal], moved[equal], counts[equal]))].tolist()
            left = left[slow[left] > bound]
    others = np.nonzero(~fitting)[0]
    # A chance near one no longer shows by how much a candidate misses.
    missing = _RISK_WEIGHT * (risk[others] + 3.0 * over[others])
    worth = slow[others] + missing + _NUMERIC_WEIGHT * numeric[others]
    # Candidates that are expected to overflow come after all others.
    overflows = risks[:, others].max(axis=0) > _EVEN
    yield from others[np.lexsort((counts[others], np.round(worth, 2), overflows))].tolist()


def _ranked(
    times: StepTimes, knobs: Sequence[Knobs], estimate: Estimates, prediction: Prediction, index: int
) -> Ranked:
    risks = chances(estimate, prediction)
    return Ranked(
        knobs=knobs[index],
        risk=float(any_of(risks)[index]),
        least_risk=float(risks[:, index].max()),
        step_s=float(times.seconds(estimate, knobs)[index]),
        gpu={phase: float(prediction.gpu[place, index]) for place, phase in enumerate(PHASES)},
        host=float(prediction.host[:, index].max()),
    )


def _distance(present: Knobs, changes: dict[str, Setting]) -> float:
    """Return the size of the changes: doublings of numbers, one for every mode or switch.

    A switch of the engine counts half, because it does not change the pool and the requests.
    """
    far = 0.0
    for knob, after in changes.items():
        before = getattr(present, knob)
        numbers = isinstance(before, int | float) and isinstance(after, int | float)
        if numbers and before and after and not isinstance(after, bool):
            far += abs(math.log2(after / before))
        else:
            far += 0.5 if isinstance(after, bool) and KNOB_TABLE[knob].part is Part.ENGINE else 1.0
    return far
