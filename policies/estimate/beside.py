"""Memory that the estimate does not count: a skewed term for what trainer and engine leave on a device."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from statistics import NormalDist

import numpy as np

from autotune.policies.estimate.belief.gaussian import exceeded
from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.parts import PARTS, Floats
from autotune.policies.estimate.peaks import OF_PASSES, PHASES, Estimates
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement, Profile

# A Lomax distribution with this index has its median at its scale and its 90th percentile at nine times that:
# a scale of 2 GiB spans the 1 to 2 GiB of vLLM's own figures for a sleeping engine and the 4 to 25 of users'.
_TAIL = 1.0
_TYPICAL = 0.6  # ratio of the scale to the figures below, which are means
_LEFT = 0.1  # share of the other side's peak that stays: gathered weights, blocks, buckets, fragments
_ENGINES = (Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.WEIGHT_SYNC)  # where the trainer leaves something
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_NORMAL, _LEAST = NormalDist(), 1e-9


def scales(profile: Profile, estimate: Estimates) -> Floats:
    """Return the scale of the term in bytes, (phase, configuration); 0 without an engine.

    While the engine sleeps it grows with the engine's weights and captured graphs; while the engine works,
    with the trainer's state in its update and, once it has trained, with what its micro-batches left
    reserved; in both, with the communication of experts. Disaggregated, each side adds only the communicator
    of their weight sync.
    """
    result: Floats = np.zeros(estimate.gpu.shape)
    if profile.engine == "none":
        return result
    shared = profile.placement is Placement.COLOCATED
    engine = shared * _LEFT * _held(estimate, Phase.ROLLOUT_INIT, "weights", "graphs")
    trainer = shared * _LEFT * _held(estimate, Phase.OPTIMIZER, "weights", "gradients", "optimizer")
    blocks = shared * estimate.left * _largest_pass(estimate)
    experts = constant("collectives") * (profile.layout.expert_parallel > 1)
    asleep = constant("residue") if shared else constant("collectives")
    for place, phase in enumerate(PHASES):
        if phase in _ENGINES:
            trained = phase is not Phase.ROLLOUT_INIT
            result[place] = _TYPICAL * (constant("collectives") + trainer + experts) + trained * blocks
        elif phase is not Phase.INIT:
            result[place] = _TYPICAL * (asleep + engine + experts)
    return result


def _largest_pass(estimate: Estimates) -> Floats:
    result: Floats = np.max([_held(estimate, phase, "activations", "logits") for phase in OF_PASSES], axis=0)
    return result


def _held(estimate: Estimates, phase: Phase, *parts: str) -> Floats:
    rows = [PARTS.index(part) for part in parts]
    result: Floats = estimate.gpu_parts[PHASES.index(phase)][rows].sum(axis=0)
    return result


def overflow(room: float, error: float, scale: float) -> float:
    """Return the chance that a normal error plus the skewed term exceed `room`; all are bytes."""
    if scale <= 0:
        return float(exceeded(np.array([room / max(1.0, error)]))[0])
    left = np.maximum(0.0, room - error * _NODES) / scale
    return float(_WEIGHTS @ (1.0 + left) ** -_TAIL)


def of_job(sides: Collection[float]) -> float:
    """Return the chance that a job fails, given that of each side: the trainer's, and any engine's.

    A job with both is a whole RL job, a share of which fails for reasons that no term contains.
    """
    unforeseen = constant("unforeseen") if len(sides) > 1 else 0.0
    return 1 - (1 - unforeseen) * prod(1 - chance for chance in sides)


def spread(share: float, chance: float) -> float:
    """Return the standard deviation, as a share, of a total that overflows with `chance`.

    `share`: the total's share of its limit. 0 if no such deviation exists.
    """
    if not (0 < share < 1 and _LEAST < chance < 0.5):
        return 0.0
    return float(np.log(share) / _NORMAL.inv_cdf(chance))
