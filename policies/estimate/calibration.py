"""A job's estimate, moved by what its own attempts and earlier jobs of its kind showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.gaussian import Belief, Floats, at_least, at_most, doubted, measured
from autotune.policies.estimate.growth import growth
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, Estimates, estimates
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.model import Model
from autotune.policies.values.observation import Peak
from autotune.policies.values.priors import Factor, Kind, Learned

# Phases that run the same code share the factors of their parts.
_GROUPS = {
    Phase.INIT: "start",
    Phase.ROLLOUT_INIT: "engine",
    Phase.ROLLOUT: "engine",
    Phase.LOG_PROB: "score",
    Phase.FORWARD: "train",
    Phase.BACKWARD: "train",
    Phase.OPTIMIZER: "update",
    Phase.WEIGHT_SYNC: "sync",
    Phase.CHECKPOINT: "start",
}
_GROUP_NAMES = tuple(dict.fromkeys(_GROUPS.values()))
_HOST = "host"


@dataclass(frozen=True, slots=True)
class _Doubt:
    """How far a part's factor may be off, and how much that is the same in every group of phases."""

    error: float
    shared: float


# Weights and state follow from shapes; what a pass keeps depends on kernels and on how full a batch is;
# graphs, residue and contexts are averages over published logs (policies/estimate/constants.py names them).
_DOUBTS = {
    "weights": _Doubt(0.03, 0.9),
    "gradients": _Doubt(0.05, 0.9),
    "optimizer": _Doubt(0.04, 0.9),
    "activations": _Doubt(0.16, 0.5),
    "logits": _Doubt(0.14, 0.6),
    "kv_pool": _Doubt(0.03, 0.9),
    "buffers": _Doubt(0.35, 0.3),
    "graphs": _Doubt(0.40, 0.95),
    "residue": _Doubt(0.50, 0.95),
    "outside": _Doubt(0.25, 0.8),
}
_HOST_ERROR = 0.20  # processes, page cache and pinned pools vary more than device tensors
_SCALE_SHARE = 0.5  # of the estimate's own error that is one factor on a whole phase
_SCALE_SHARED = 0.3
# Growth late in a run, as a share of the capacity: NeMo-RL, SkyRL and verl threads report 1 to 8 % a day.
_LATE_MEAN, _LATE_ERROR, _LATE_SHARED = 0.004, 0.012, 0.8
_LATE_MOST = 0.2  # share of the capacity that is kept for growth; against more only restarts help
_LATE_FAILED = 0.06  # share of the capacity that growth may be where it already made a run fail
_LATE_STEP = 4  # a failure at this step of an attempt or later may be growth
_READING = 0.006  # share by which a reported peak may differ from the next run's
_BEYOND = (
    0.08  # share of the capacity that a phase needs beyond its first failed request, where nothing tells
)
_MESSAGE = 0.004  # share of the capacity by which a message's figures are off
_POOL_ERROR = 0.10
_BEFORE_STATE = frozenset(
    {Phase.INIT, Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD}
)

_NAMES = (
    *(f"{group}.{part}" for group in _GROUP_NAMES for part in PARTS),
    *(f"{_HOST}.{part}" for part in PARTS),
    *(f"{phase.value}.scale" for phase in PHASES),
    *(f"{phase.value}.late" for phase in PHASES),
)
_INDEX = {name: number for number, name in enumerate(_NAMES)}
_PART_COLUMNS = np.array([[_INDEX[f"{_GROUPS[phase]}.{part}"] for part in PARTS] for phase in PHASES])
_HOST_COLUMNS = np.array([_INDEX[f"{_HOST}.{part}"] for part in PARTS])
_POOL, _OPTIMIZER = PARTS.index("kv_pool"), PARTS.index("optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is believed of one job's memory."""

    belief: Belief
    unit: float  # bytes of one unit of the late terms: a share of the capacity
    pool_tokens: float  # that the estimate must show for the engine to start
    slower: float | None = None  # measured seconds of a step over predicted ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Peaks of many configurations with their standard deviations, (phase, configuration)."""

    gpu: Floats
    gpu_error: Floats
    host: Floats
    host_error: Floats
    pool: Floats  # (configuration,): standard deviations by which the engine's pool is large enough


def calibrated(run: Run, model: Model) -> Calibration:
    """Return the belief after all attempts of a run."""
    profile, cluster = run.accepted.profile, run.accepted.cluster
    attempts = [a for a in run.attempts if a.progress or a.ended is not None or a.diagnosis is not None]
    knobs = [profile.knobs, *(a.knobs for a in attempts)]
    estimate = estimates(profile, cluster, model, knobs)
    capacity = float(profile.trainer_budget_bytes or cluster.gpu_memory_bytes or 1)
    belief = _prior(estimate, run.accepted.learned)
    needed = float(profile.longest_sequence or 1)
    failed_pool, refused, seconds = 0.0, 0, []
    for column, attempt in enumerate(attempts, start=1):
        belief = _shown(belief, estimate, column, attempt, capacity)
        pool = float(estimate.pool_tokens[column])
        if attempt.diagnosis is not None and attempt.diagnosis.cause is Cause.POOL_TOO_SMALL:
            failed_pool, refused = max(failed_pool, pool), refused + 1
        elif attempt.progress:
            needed = min(needed, pool)
        timed = [p.seconds for p in attempt.progress if p.seconds]
        if timed and estimate.step_s[column] > 0:
            seconds.append(sorted(timed)[len(timed) // 2] / float(estimate.step_s[column]))
    return Calibration(
        belief=belief,
        unit=capacity,
        # A refusal does not say how much more it takes: each one doubles what is added.
        pool_tokens=max(needed, failed_pool * (1 + _POOL_ERROR * 2 ** max(0, refused - 1))),
        slower=sorted(seconds)[len(seconds) // 2] if seconds else None,
    )


def predicted(calibration: Calibration, estimate: Estimates, *, late: bool = True) -> Prediction:
    """Return what the calibrated estimate says of many configurations."""
    mean, covariance = calibration.belief.mean, calibration.belief.covariance
    gpu, gpu_error, host, host_error = [], [], [], []
    least = 0.003 * calibration.unit
    for place, phase in enumerate(PHASES):
        parts = estimate.gpu_parts[place]
        terms = [parts, _scaled(parts)[None, :]]
        columns = [*_PART_COLUMNS[place], _INDEX[f"{phase.value}.scale"]]
        if late:
            terms.append(np.full((1, parts.shape[1]), calibration.unit))
            columns.append(_INDEX[f"{phase.value}.late"])
        rows = np.concatenate(terms)
        gpu.append(np.maximum(0.4 * parts.sum(axis=0), parts.sum(axis=0) + mean[columns] @ rows))
        gpu_error.append(_spread(covariance[np.ix_(columns, columns)], rows, least))
        rows = estimate.host_parts[place]
        host.append(np.maximum(0.4 * rows.sum(axis=0), rows.sum(axis=0) + mean[_HOST_COLUMNS] @ rows))
        host_error.append(_spread(covariance[np.ix_(_HOST_COLUMNS, _HOST_COLUMNS)], rows, least))
    pool = (estimate.pool_tokens - calibration.pool_tokens) / (
        _POOL_ERROR * max(1.0, calibration.pool_tokens)
    )
    # An engine without a known limit has room.
    pool = np.where(np.isinf(estimate.gpu_capacity[PHASES.index(Phase.ROLLOUT)]), np.inf, pool)
    return Prediction(
        gpu=np.stack(gpu),
        gpu_error=np.stack(gpu_error),
        host=np.stack(host),
        host_error=np.stack(host_error),
        pool=pool,
    )


def learned(run: Run) -> Learned | None:
    """Return the factors that a run showed beyond what was known before; None without a known model."""
    job, profile = run.accepted.job, run.accepted.profile
    if job.shape is None:
        return None
    after = calibrated(run, job.shape).belief
    estimate = estimates(profile, run.accepted.cluster, job.shape, (profile.knobs,))
    before = _prior(estimate, None)
    factors = {}
    for name, column in _INDEX.items():
        was, now = before.covariance[column, column] ** 0.5, after.covariance[column, column] ** 0.5
        if not name.endswith((".late", ".scale")) and now < 0.9 * was:
            factors[name] = Factor(mean=round(1 + float(after.mean[column]), 4), error=round(float(now), 4))
    return Learned(kind=kind_of(run), factors=factors, runs=1)


def kind_of(run: Run) -> Kind:
    """Return which jobs a run teaches and learns from."""
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


def _prior(estimate: Estimates, known: Learned | None) -> Belief:
    mean = np.zeros(len(_NAMES))
    covariance = np.zeros((len(_NAMES), len(_NAMES)))
    for part in PARTS:
        doubt = _DOUBTS[part]
        _block(
            covariance,
            [_INDEX[f"{g}.{part}"] for g in _GROUP_NAMES],
            [doubt.error] * len(_GROUP_NAMES),
            doubt.shared,
        )
    _block(covariance, list(_HOST_COLUMNS), [_HOST_ERROR] * len(PARTS), 0.2)
    scales = [_SCALE_SHARE * float(error) for error in estimate.error]
    _block(covariance, [_INDEX[f"{p.value}.scale"] for p in PHASES], scales, _SCALE_SHARED)
    growing = [_INDEX[f"{phase.value}.late"] for phase in PHASES]
    _block(covariance, growing, [_LATE_ERROR] * len(PHASES), _LATE_SHARED)
    mean[growing] = _LATE_MEAN
    factors = {} if known is None else known.factors
    errors = np.sqrt(np.diag(covariance))
    for name, factor in factors.items():
        column = _INDEX.get(name)
        if column is not None and errors[column] > 0:
            mean[column] = factor.mean - 1
            narrower = min(1.0, factor.error / errors[column])
            covariance[column, :] *= narrower
            covariance[:, column] *= narrower
    return Belief(mean=mean, covariance=covariance)


def _block(covariance: Floats, columns: Sequence[int], errors: Sequence[float], shared: float) -> None:
    block = shared * np.outer(errors, errors)
    np.fill_diagonal(block, np.square(errors))
    covariance[np.ix_(columns, columns)] = block


def _shown(belief: Belief, estimate: Estimates, column: int, attempt: Attempt, unit: float) -> Belief:
    """Return the belief after one attempt: its peaks, the phases it passed, and where it failed."""
    diagnosis = attempt.diagnosis
    fresh = not attempt.progress or attempt.progress[0].step <= 1
    steady = [event for event in attempt.progress if event.step > 1 or not fresh]
    failing = diagnosis is not None and diagnosis.phase in PHASES
    for place, phase in enumerate(PHASES):
        name, capacity = phase.value, float(estimate.gpu_capacity[place, column])
        peak = _largest([e.peaks[name] for e in steady if name in e.peaks])
        if peak is None and attempt.progress and attempt.ended is not None:
            peak = attempt.ended.peaks.get(name)
        if peak is not None:
            belief = _read(belief, estimate, place, column, attempt, peak, unit)
        elif steady:
            row = _row(estimate, place, column, unit, late=False)
            belief = _under(belief, row, capacity - _total(estimate, place, column), capacity)
        else:
            first = _row(estimate, place, column, unit, late=False, state=phase not in _BEFORE_STATE)
            peak = _first_peak(attempt, name)
            if peak is not None and not peak.upper_bound:
                value = peak.used_bytes - _total(estimate, place, column, state=phase not in _BEFORE_STATE)
                belief = measured(belief, first, value, error=3 * _READING * peak.used_bytes)
            elif attempt.progress or (failing and _passed(attempt, phase)):
                base = _total(estimate, place, column, state=phase not in _BEFORE_STATE)
                belief = _under(belief, first, capacity - base, capacity)
    if diagnosis is not None and diagnosis.cause is Cause.GPU_OOM and diagnosis.phase in PHASES:
        belief = _overflowed(belief, estimate, column, attempt, unit)
    return _host_shown(belief, estimate, column, attempt)


def _read(
    belief: Belief, estimate: Estimates, place: int, column: int, attempt: Attempt, peak: Peak, unit: float
) -> Belief:
    """Return the belief after a phase's peak was reported."""
    row = _row(estimate, place, column, unit, late=False)
    total = _total(estimate, place, column)
    if peak.upper_bound:
        return _under(belief, row, peak.used_bytes - total, float(peak.used_bytes))
    grew = growth(attempt.progress, PHASES[place].value)
    used = float(peak.used_bytes) if grew is None else grew.settled_bytes
    belief = measured(belief, row, used - total, error=_READING * used)
    if grew is not None and grew.expected_bytes > _LATE_ERROR * unit:
        column = _INDEX[f"{PHASES[place].value}.late"]
        expected = min(grew.expected_bytes, _LATE_MOST * unit)
        late = np.zeros(len(_NAMES))
        late[column] = unit
        belief = doubted(belief, column, expected / unit)
        belief = measured(belief, late, expected, error=min(grew.error_bytes, 0.3 * expected) + 0.002 * unit)
    return belief


def _overflowed(belief: Belief, estimate: Estimates, column: int, attempt: Attempt, unit: float) -> Belief:
    """Return the belief after a phase ran out: what was in use and what was asked for did not fit."""
    diagnosis = attempt.diagnosis
    assert diagnosis is not None
    place, facts = PHASES.index(diagnosis.phase), diagnosis.facts
    capacity = float(estimate.gpu_capacity[place, column])
    bound = float(facts.capacity_bytes or capacity)
    if not np.isfinite(capacity):
        return belief
    if facts.free_bytes is not None and facts.requested_bytes is not None:
        bound += max(0, facts.requested_bytes - facts.free_bytes)
    done = len(attempt.progress)
    fresh = not done or (attempt.progress[0].step <= 1 and done < 1)
    state = not (fresh and diagnosis.phase in _BEFORE_STATE)
    late = done + 1 >= _LATE_STEP
    if late:  # what held for steps and then did not is growth, or a batch that had not come before
        belief = doubted(belief, _INDEX[f"{diagnosis.phase.value}.late"], _LATE_FAILED)
    row = _row(estimate, place, column, unit, late=late, state=state)
    value = bound - _total(estimate, place, column, state=state)
    return at_least(belief, row, value, error=_MESSAGE * bound, beyond=_BEYOND * capacity)


def _host_shown(belief: Belief, estimate: Estimates, column: int, attempt: Attempt) -> Belief:
    totals = estimate.host[:, column]
    limit = HOST_LIMIT * estimate.host_capacity
    if not np.isfinite(limit):
        return belief
    place = int(totals.argmax())
    diagnosis = attempt.diagnosis
    if diagnosis is not None and diagnosis.cause is Cause.HOST_OOM:
        if diagnosis.phase in PHASES and diagnosis.phase is not Phase.INIT:
            place = PHASES.index(diagnosis.phase)
        row = _host_row(estimate, place, column)
        return at_least(belief, row, limit - totals[place], error=0.02 * limit, beyond=_BEYOND * limit)
    if not attempt.progress and diagnosis is not None and diagnosis.phase in PHASES:
        # What came before the failure passed on the host too.
        place = int(totals[: PHASES.index(diagnosis.phase) + 1].argmax())
    elif not attempt.progress:
        return belief
    return at_most(belief, _host_row(estimate, place, column), limit - totals[place], error=0.02 * limit)


def _under(belief: Belief, row: Floats, value: float, scale: float) -> Belief:
    if not np.isfinite(scale):
        return belief
    return at_most(belief, row, value, error=_MESSAGE * scale)


def _passed(attempt: Attempt, phase: Phase) -> bool:
    """Return whether an attempt that failed in its first step had this phase behind it."""
    diagnosis = attempt.diagnosis
    if diagnosis is None or diagnosis.phase not in PHASES or phase is Phase.CHECKPOINT:
        return False
    return PHASES.index(phase) < PHASES.index(diagnosis.phase)


def _first_peak(attempt: Attempt, name: str) -> Peak | None:
    """Return a phase's peak where only the first step met it."""
    peaks = [event.peaks[name] for event in attempt.progress if name in event.peaks]
    if not attempt.progress and attempt.ended is not None and name in attempt.ended.peaks:
        peaks.append(attempt.ended.peaks[name])
    return _largest(peaks)


def _largest(peaks: Sequence[Peak]) -> Peak | None:
    return max(peaks, key=lambda peak: peak.used_bytes) if peaks else None


def _row(
    estimate: Estimates, place: int, column: int, unit: float, *, late: bool, state: bool = True
) -> Floats:
    """Return what each deviation adds to one phase's peak of one configuration, in bytes."""
    row = np.zeros(len(_NAMES))
    parts = estimate.gpu_parts[place][:, column].copy()
    if not state:
        parts[_OPTIMIZER] = 0.0
    row[_PART_COLUMNS[place]] = parts
    row[_INDEX[f"{PHASES[place].value}.scale"]] = float(_scaled(parts))
    if late:
        row[_INDEX[f"{PHASES[place].value}.late"]] = unit
    return row


def _host_row(estimate: Estimates, place: int, column: int) -> Floats:
    row = np.zeros(len(_NAMES))
    row[_HOST_COLUMNS] = estimate.host_parts[place][:, column]
    return row


def _total(estimate: Estimates, place: int, column: int, *, state: bool = True) -> float:
    parts = estimate.gpu_parts[place][:, column]
    return float(parts.sum() - (0.0 if state else parts[_OPTIMIZER]))


def _scaled(parts: Floats) -> Floats:
    """Return the bytes that a phase's own factor multiplies: all but the pool, whose size is set."""
    result: Floats = parts.sum(axis=0) - parts[_POOL]
    return result


def _spread(covariance: Floats, rows: Floats, least: float) -> Floats:
    result: Floats = np.sqrt(np.maximum(0.0, (rows * (covariance @ rows)).sum(axis=0)) + least**2)
    return result
