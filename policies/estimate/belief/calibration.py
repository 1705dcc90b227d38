"""Calibrate a job's estimate by its own attempts and by earlier jobs of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from autotune.policies.estimate.belief.completed import Completed, certainty, completed
from autotune.policies.estimate.belief.gaussian import Belief, Floats, less_sure, within
from autotune.policies.estimate.belief.growth import Growth, without_growth
from autotune.policies.estimate.belief.observations import (
    fills_microbatch,
    growths,
    lengths_seen,
    likely_phase,
    settled_peaks,
    shown_by,
)
from autotune.policies.estimate.belief.prior import (
    HOST_COLUMNS,
    INDEX,
    LATE_ERROR,
    LEAST,
    LENGTHS,
    MOST,
    PART_COLUMNS,
    prior,
    scaled,
)
from autotune.policies.estimate.lengths import Assumption
from autotune.policies.estimate.peaks import PHASES, Estimates, estimates
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.priors import Factor, Kind, Learned

_POOL_ERROR = 0.10
_REPRODUCED = 0.05  # share of a GPU by which a belief may miss the peaks of its own run


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The belief about one job's memory."""

    belief: Belief
    unit: float  # bytes per unit of the late terms, which are shares of the capacity
    pool_tokens: float  # that a configuration's estimate must have for the engine to start
    moved: dict[int, Phase]  # attempt number -> phase in which it ran out, if its log names another
    completed: tuple[Completed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Peaks of many configurations with their standard deviations, (phase, configuration)."""

    gpu: Floats
    gpu_error: Floats
    certainty: Floats  # standard deviations by which completed steps show that the phase fits
    host: Floats
    host_error: Floats
    pool: Floats  # (configuration,): standard deviations by which the engine's pool is large enough


def calibrated(run: Run, model: Model) -> Calibration:
    """Return the belief after all attempts of a run and its rehearsals.

    Attempts with responses forced to the longest length are compared with the estimate of such steps.
    """
    profile, cluster = run.accepted.profile, run.accepted.cluster
    attempts = [
        without_growth(
            a
            if a.diagnosis is None or not a.diagnosis.expected
            else msgspec.structs.replace(a, diagnosis=None)
        )
        for a in (*run.rehearsed, *run.attempts)
        if (a.progress or a.ended is not None or a.diagnosis is not None) and not a.loading
    ]
    knobs = [profile.knobs, *(a.knobs for a in attempts)]
    steps = run.accepted.job.goal.steps
    estimate = estimates(profile, cluster, model, knobs, steps=steps)
    forced = any(a.longest for a in attempts)
    longest = (
        estimates(profile, cluster, model, knobs, assumption=Assumption.LONGEST, steps=steps)
        if forced
        else estimate
    )
    grown = [growths(attempt) for attempt in attempts]
    evidence = _Evidence(
        attempts=attempts,
        estimate=estimate,
        longest=longest,
        grown=grown,
        floors={is_forced: _floors(attempts, grown, longest=is_forced) for is_forced in (False, True)},
    )
    before = prior(estimate, run.accepted.learned)
    result = _after(before, run, evidence)
    if result.belief.surprise is None:
        return result
    # Surprising deviations get a wider prior, so that phases passed before the failure bound them as well.
    doubt = result.belief.surprise.copy()
    doubt[HOST_COLUMNS] = 1.0  # the host's parts are hardly correlated
    return _after(less_sure(before, doubt), run, evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """A run's attempts and their estimates."""

    attempts: Sequence[Attempt]
    estimate: Estimates
    longest: Estimates  # for attempts with responses forced to the longest length
    grown: Sequence[dict[str, Growth]]
    floors: dict[bool, dict[Knobs, dict[str, float]]]  # by whether responses were forced


def _after(belief: Belief, run: Run, evidence: _Evidence) -> Calibration:
    """Return the belief after all attempts, one after the other."""
    profile, estimate, attempts = run.accepted.profile, evidence.estimate, evidence.attempts
    capacity = float(profile.trainer_budget_bytes or run.accepted.cluster.gpu_memory_bytes or 1)
    needed = float(profile.longest_sequence or 1)
    failed_pool, refused = 0.0, 0
    moved: dict[int, Phase] = {}
    named: set[Phase] = set()
    for column, (attempt, grew) in enumerate(zip(attempts, evidence.grown, strict=True), start=1):
        diagnosis, used = attempt.diagnosis, evidence.longest if attempt.longest else estimate
        if diagnosis is not None and diagnosis.phase not in named:
            likely = likely_phase(belief, used, column, attempt, before=attempts[: column - 1])
            named.add(diagnosis.phase)
            if likely is not None:
                moved[attempt.number] = likely
                attempt = in_phase(attempt, likely)
        floor = evidence.floors[attempt.longest][attempt.knobs]
        filled = attempt.longest or fills_microbatch(profile, attempt)
        belief = shown_by(belief, used, column, attempt, capacity, floor, grew, filled)
        if not attempt.longest:
            belief = lengths_seen(belief, profile, attempt)
        belief = within(belief, LEAST, MOST)
        pool = float(estimate.pool_tokens[column])
        if attempt.diagnosis is not None and attempt.diagnosis.cause is Cause.POOL_TOO_SMALL:
            failed_pool, refused = max(failed_pool, pool), refused + 1
        elif attempt.progress:
            needed = min(needed, pool)
    return Calibration(
        belief=belief,
        unit=capacity,
        # A refusal does not say how much is missing: each one doubles what is added.
        pool_tokens=max(needed, failed_pool * (1 + _POOL_ERROR * 2 ** max(0, refused - 1))),
        moved=moved,
        completed=completed(
            profile,
            [in_phase(a, moved[a.number]) if a.number in moved else a for a in attempts],
            estimate,
            evidence.longest,
        ),
    )


def _floors(
    attempts: Sequence[Attempt], grown: Sequence[dict[str, Growth]], *, longest: bool
) -> dict[Knobs, dict[str, float]]:
    """Return `settled_peaks` of the attempts whose responses were, or were not, forced to full length."""
    alike = [place for place, attempt in enumerate(attempts) if attempt.longest is longest]
    return settled_peaks([attempts[place] for place in alike], [grown[place] for place in alike])


def in_phase(attempt: Attempt, phase: Phase) -> Attempt:
    """Return an attempt as one that failed in another phase."""
    assert attempt.diagnosis is not None
    return msgspec.structs.replace(attempt, diagnosis=msgspec.structs.replace(attempt.diagnosis, phase=phase))


def predicted(calibration: Calibration, estimate: Estimates, *, late: bool = True) -> Prediction:
    """Return the calibrated estimates of many configurations."""
    mean, covariance = calibration.belief.mean, calibration.belief.covariance
    gpu, gpu_error, host, host_error = [], [], [], []
    least = 0.003 * calibration.unit
    for place, phase in enumerate(PHASES):
        parts = estimate.gpu_parts[place]
        terms = [parts, scaled(parts)[None, :], estimate.lengths[place][None, :]]
        columns = [*PART_COLUMNS[place], INDEX[f"{phase.value}.scale"], INDEX[LENGTHS]]
        if late:
            terms.append(np.full((1, parts.shape[1]), calibration.unit))
            columns.append(INDEX[f"{phase.value}.late"])
        rows = np.concatenate(terms)
        gpu.append(np.maximum(0.4 * parts.sum(axis=0), parts.sum(axis=0) + mean[columns] @ rows))
        gpu_error.append(_spread(covariance[np.ix_(columns, columns)], rows, least))
        rows = estimate.host_parts[place]
        host.append(np.maximum(0.4 * rows.sum(axis=0), rows.sum(axis=0) + mean[HOST_COLUMNS] @ rows))
        host_error.append(_spread(covariance[np.ix_(HOST_COLUMNS, HOST_COLUMNS)], rows, least))
    pool = (estimate.pool_tokens - calibration.pool_tokens) / (
        _POOL_ERROR * max(1.0, calibration.pool_tokens)
    )
    # An engine without a known limit has enough memory.
    pool = np.where(np.isinf(estimate.gpu_capacity[PHASES.index(Phase.ROLLOUT)]), np.inf, pool)
    return Prediction(
        gpu=np.stack(gpu),
        gpu_error=np.stack(gpu_error),
        certainty=certainty(estimate, calibration.completed),
        host=np.stack(host),
        host_error=np.stack(host_error),
        pool=pool,
    )


def learned(run: Run) -> Learned | None:
    """Return the factors that a run determined more precisely than the prior.

    None without a known model, if more than the configuration decided the use of memory (growth,
    fragmentation, or other programs on a GPU), or if the belief does not reproduce the run's own peaks.
    """
    job, profile = run.accepted.job, run.accepted.profile
    if job.shape is None or any(_is_disturbed(attempt) for attempt in run.attempts):
        return None
    calibration = calibrated(run, job.shape)
    if not _reproduces(run, job.shape, calibration):
        return None
    after = calibration.belief
    estimate = estimates(profile, run.accepted.cluster, job.shape, (profile.knobs,), steps=job.goal.steps)
    before = prior(estimate, None)
    factors = {}
    for name, column in INDEX.items():
        was, now = before.covariance[column, column] ** 0.5, after.covariance[column, column] ** 0.5
        if name != LENGTHS and not name.endswith((".late", ".scale")) and now < 0.9 * was:
            factors[name] = Factor(mean=round(1 + float(after.mean[column]), 4), error=round(float(now), 4))
    return Learned(kind=kind_of(run), factors=factors, runs=1)


def _is_disturbed(attempt: Attempt) -> bool:
    """Return whether growth, fragmentation or memory of others affected an attempt."""
    diagnosis = attempt.diagnosis
    if diagnosis is not None and (diagnosis.fragmentation or diagnosis.facts.held_by_others_bytes):
        return True
    return (
        attempt.growth is not None
        or attempt.foregone
        or any(
            grew.grown_bytes > LATE_ERROR * _capacity(attempt, name)
            for name, grew in growths(attempt).items()
        )
    )


def _capacity(attempt: Attempt, name: str) -> int:
    """Return the device's capacity in bytes, from the latest peak of a phase."""
    return next(
        event.peaks[name].capacity_bytes for event in reversed(attempt.progress) if name in event.peaks
    )


def _reproduces(run: Run, model: Model, calibration: Calibration) -> bool:
    """Return whether the belief agrees with the largest peaks that the run's attempts reported."""
    attempts = [attempt for attempt in run.attempts if attempt.progress]
    if not attempts:
        return True
    estimate = estimates(
        run.accepted.profile,
        run.accepted.cluster,
        model,
        [attempt.knobs for attempt in attempts],
        steps=run.accepted.job.goal.steps,
    )
    gpu = predicted(calibration, estimate, late=False).gpu
    for column, floor in enumerate(settled_peaks([attempt], [{}]) for attempt in attempts):
        for name, peak in floor[attempts[column].knobs].items():
            if abs(float(gpu[PHASES.index(Phase(name)), column]) - peak) > _REPRODUCED * calibration.unit:
                return False
    return True


def kind_of(run: Run) -> Kind:
    """Return the kind of jobs with which a run shares factors."""
    accepted = run.accepted
    model, profile = accepted.job.shape, accepted.profile
    shape = "" if model is None else f"{model.family}-{model.layers}x{model.hidden}-{model.vocab}"
    return Kind(
        model=shape,
        gpu=accepted.cluster.gpu_name,
        framework=f"{profile.framework}/{profile.layout.strategy}/{profile.engine}",
        version=accepted.versions.get(profile.framework, ""),
        placement=profile.placement.value,
    )


def _spread(covariance: Floats, rows: Floats, least: float) -> Floats:
    result: Floats = np.sqrt(np.maximum(0.0, (rows * (covariance @ rows)).sum(axis=0)) + least**2)
    return result
