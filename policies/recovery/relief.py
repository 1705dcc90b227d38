"""Estimate how much single changes free of the memory that failed or is predicted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.outlook import Outlook, chances, of_host
from autotune.policies.remedies.neighbours import choices
from autotune.policies.remedies.step_size import missing_bytes
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import ENGINE_PHASES, TRAINER_PHASES, Cause
from autotune.policies.values.knob_table import ENGINE_KNOBS, KNOB_TABLE, Memory, Part
from autotune.policies.values.knobs import Knobs, Setting

# The accepted chance of another failure after a relaunch. A failure costs a relaunch, caution costs speed for
# the rest of the run; measured on the simulated cluster (docs/measured/policies.md).
RISK = 0.2
CLEARLY = 0.01  # share of a memory that a remedy frees at least
SAME = 1e-9  # share by which two sums of one configuration may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """The knobs that act on the failed memory, and the values that each may take."""

    acting: frozenset[str]  # knobs of which some value clearly frees it
    idle: frozenset[str]  # knobs of the side that did not fail, of which no value frees enough of it
    options: dict[str, tuple[Setting, ...]]  # without the values that need more of it


def singles(view: Outlook, present: Knobs, *, started: bool) -> dict[str, tuple[Setting, ...]]:
    """Return the values that each knob may take by itself, its present value first."""
    accepted = view.run.accepted
    return choices(accepted.profile, present, recovery=accepted.job.recovery, started=started)


def relieving(view: Outlook, present: Knobs, diagnosis: Diagnosis | None, *, started: bool) -> Relief:
    """Return the values of each knob that need no more of the failed memory, and the knobs that act on it.

    A value needs more if both the estimate and the knob table say so. A knob of the engine acts in a phase of
    the trainer, and vice versa, if by the estimate it clearly frees memory there. Before the first launch
    every value stays, because no phase has failed.
    """
    options = singles(view, present, started=started)
    moves = [(k, v) for k, values in options.items() for v in values[1:]]
    moved = [msgspec.structs.replace(present, **{k: v}) for k, v in moves]
    shares = freed(view, view.estimates([present, *moved]), diagnosis)
    if not shares.size:
        return Relief(acting=frozenset(options), idle=frozenset(), options=options)
    acting = {knob for (knob, _), most in zip(moves, shares.max(axis=0), strict=True) if most > CLEARLY}
    if diagnosis is None:
        return Relief(acting=frozenset(acting), idle=frozenset(), options=options)
    phase = diagnosis.phase if diagnosis.cause is Cause.GPU_OOM else None
    if phase in ENGINE_PHASES:
        acting |= options.keys() & ENGINE_KNOBS
    elif phase is not None:
        acting |= {knob for knob in options if KNOB_TABLE[knob].part is Part.TRAINER}
    if diagnosis.cause is Cause.POOL_TOO_SMALL:
        # Any knob may give an engine more memory, even if its value alone still leaves none for a token.
        acting = set(options)
    saves = Memory.HOST if diagnosis.cause is Cause.HOST_OOM else Memory.GPU
    heavier = {
        (knob, value)
        for (knob, value), own in zip(moves, shares[0], strict=True)
        if own < -SAME and not KNOB_TABLE[knob].asks_less(saves, getattr(present, knob), value)
    }
    lighter = {
        knob: (values[0], *(value for value in values[1:] if (knob, value) not in heavier))
        for knob, values in options.items()
    }
    return Relief(
        acting=frozenset(acting),
        idle=_idle(view, moves, shares[0], diagnosis),
        options={k: v for k, v in lighter.items() if len(v) > 1},
    )


def _idle(
    view: Outlook, moves: Sequence[tuple[str, Setting]], shares: Floats, diagnosis: Diagnosis
) -> frozenset[str]:
    """Return the knobs of the side that did not fail, of which no value frees enough of a device.

    Enough is the amount missing in the message, at most `CLEARLY`. The estimate may be wrong about the side
    that failed, so each of its knobs may act; fragmentation is not estimated, so the allocator may act too.
    """
    if diagnosis.cause is not Cause.GPU_OOM or diagnosis.phase not in (*TRAINER_PHASES, *ENGINE_PHASES):
        return frozenset()
    other = Part.TRAINER if diagnosis.phase in ENGINE_PHASES else Part.ENGINE
    enough = min(CLEARLY, (missing_bytes(diagnosis.facts) or math.inf) / view.calibration.unit)
    others = {knob for knob, _ in moves if KNOB_TABLE[knob].part is other and knob != "allocator"}
    freeing = {knob for (knob, _), share in zip(moves, shares, strict=True) if share >= enough}
    return frozenset(others - freeing)


def freed(view: Outlook, estimate: Estimates, diagnosis: Diagnosis | None) -> Floats:
    """Return how much each configuration but the first frees, compared to it, of each failed memory.

    Without a diagnosis: of each memory that is predicted to fail. Rows are memories, columns configurations,
    values shares: of the device, of the host's bytes, or of the tokens that an engine's pool holds.
    """
    gpu = (estimate.gpu[:, :1] - estimate.gpu[:, 1:]) / view.calibration.unit
    most = estimate.host.max(axis=0) if diagnosis is None else of_host(estimate.host, diagnosis)
    host = ((most[0] - most[1:]) / max(1.0, float(most[0])))[None, :]
    tokens = np.nan_to_num(estimate.pool_tokens, posinf=0.0)
    pool = ((tokens[1:] - tokens[0]) / max(1.0, float(tokens[0])))[None, :]
    if diagnosis is None:
        chance = chances(estimate, predicted(view.calibration, estimate))[:, 0]
        return np.asarray(np.concatenate([gpu, host, pool])[chance > RISK])
    if diagnosis.cause in (Cause.HOST_OOM, Cause.POOL_TOO_SMALL):
        return np.asarray(host if diagnosis.cause is Cause.HOST_OOM else pool)
    places = [PHASES.index(diagnosis.phase)] if diagnosis.phase in PHASES else []
    return np.asarray(gpu[places])
