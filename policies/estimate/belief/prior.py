"""The belief about the estimate's errors before a job has run: factors of parts and phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.belief.gaussian import Belief, Floats, within
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.values.failure import Phase
from autotune.policies.values.priors import Learned

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
LENGTHS = "lengths"  # of this job's sequences: their mean, in standard deviations of its uncertainty


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The standard deviation of a part's factor, and its correlation between groups of phases."""

    error: float
    shared: float


# Weights and state follow from shapes; activations depend on kernels and on how full a micro-batch is;
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
_SCALE_SHARE = 0.5  # share of the estimate's own error that is one factor on a whole phase
_SCALE_SHARED = 0.3
# Growth late in a run, as a share of the capacity: NeMo-RL, SkyRL and verl threads report 1 to 8 % a day.
_LATE_MEAN, LATE_ERROR, _LATE_SHARED = 0.004, 0.012, 0.8

NAMES = (
    *(f"{group}.{part}" for group in _GROUP_NAMES for part in PARTS),
    *(f"{_HOST}.{part}" for part in PARTS),
    *(f"{phase.value}.scale" for phase in PHASES),
    *(f"{phase.value}.late" for phase in PHASES),
    LENGTHS,
)
INDEX = {name: number for number, name in enumerate(NAMES)}
PART_COLUMNS = np.array([[INDEX[f"{_GROUPS[phase]}.{part}"] for part in PARTS] for phase in PHASES])
RESIDUE_COLUMNS = [INDEX[f"{group}.residue"] for group in _GROUP_NAMES]
HOST_COLUMNS = np.array([INDEX[f"{_HOST}.{part}"] for part in PARTS])
_BOUNDS = (
    (".scale", -0.25, 1.5),
    (".late", 0.0, 1.0),  # shares of the capacity
    (LENGTHS, -np.inf, np.inf),
    (f"{_HOST}.", -0.7, 19.0),  # what a program itself loads is often more than all that the job needs
    # A part of memory is never negative; ten times its estimate is not what the estimate is about.
    ("", -0.9, 9.0),
)


def _bounds(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value of a deviation."""
    return next((least, most) for text, least, most in _BOUNDS if text in name)


LEAST, MOST = np.array([_bounds(name) for name in NAMES]).T
_POOL, OPTIMIZER = PARTS.index("kv_pool"), PARTS.index("optimizer")


def prior(estimate: Estimates, known: Learned | None) -> Belief:
    """Return the belief before a job's first attempt, with the known factors of earlier jobs of its kind."""
    mean = np.zeros(len(NAMES))
    covariance = np.zeros((len(NAMES), len(NAMES)))
    for part in PARTS:
        doubt = _DOUBTS[part]
        _block(
            covariance,
            [INDEX[f"{g}.{part}"] for g in _GROUP_NAMES],
            [doubt.error] * len(_GROUP_NAMES),
            doubt.shared,
        )
    _block(covariance, list(HOST_COLUMNS), [_HOST_ERROR] * len(PARTS), 0.2)
    scales = [_SCALE_SHARE * float(error) for error in estimate.error.max(axis=1)]
    _block(covariance, [INDEX[f"{p.value}.scale"] for p in PHASES], scales, _SCALE_SHARED)
    growing = [INDEX[f"{phase.value}.late"] for phase in PHASES]
    _block(covariance, growing, [LATE_ERROR] * len(PHASES), _LATE_SHARED)
    mean[growing] = _LATE_MEAN
    covariance[INDEX[LENGTHS], INDEX[LENGTHS]] = 1.0
    factors = {} if known is None else known.factors
    errors = np.sqrt(np.diag(covariance))
    for name, factor in factors.items():
        column = INDEX.get(name)
        if column is not None and errors[column] > 0:
            mean[column] = factor.mean - 1
            narrower = min(1.0, factor.error / errors[column])
            covariance[column, :] *= narrower
            covariance[:, column] *= narrower
    return within(Belief(mean=mean, covariance=covariance), LEAST, MOST)


def _block(covariance: Floats, columns: Sequence[int], errors: Sequence[float], shared: float) -> None:
    block = shared * np.outer(errors, errors)
    np.fill_diagonal(block, np.square(errors))
    covariance[np.ix_(columns, columns)] = block


def scaled(parts: Floats) -> Floats:
    """Return the bytes that a phase's own factor multiplies: all but the pool, whose size is set."""
    result: Floats = parts.sum(axis=0) - parts[_POOL]
    return result
