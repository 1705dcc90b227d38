"""What a cure should do to the peak of the phase that failed, where model and settings are known."""

from __future__ import annotations

import math
import warnings

import msgspec

from autotune.orchestrator.explain.job_context import Context
from autotune.policies.explain.advice import Cure
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.value import Value

_GPUS = 8  # of a node, where the log's settings do not say
_NEAR = 0.85  # of the card: a prediction that sees no failure here is not of this job


class Prediction(Value, frozen=True, kw_only=True):
    """The peak of a phase on its card, before and after a cure."""

    phase: Phase
    before_bytes: float
    after_bytes: float


def predicted(context: Context, diagnosis: Diagnosis, cure: Cure) -> Prediction | None:
    """Return the estimated effect of a remedy; None if too little is known for it."""
    profile, capacity = context.known.profile, diagnosis.facts.capacity_bytes
    phase, model = diagnosis.phase, context.model
    known = profile is not None and context.known.complete and model is not None and capacity is not None
    if not known or not cure.exact or not cure.changes or diagnosis.cause is not Cause.GPU_OOM:
        return None
    assert profile is not None and model is not None and capacity is not None
    from autotune.policies.estimate.peaks import (  # numpy, for the few logs that show so much
        PHASES,
        estimates,
    )

    if phase not in PHASES:
        return None
    cluster = Cluster(
        address="", nodes=1, gpus_per_node=_GPUS, gpu_memory_bytes=capacity, host_memory_bytes=0
    )
    after = msgspec.structs.replace(profile.knobs, **cure.changes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = estimates(profile, cluster, model, (profile.knobs, after))
        peaks: list[float] = result.gpu[PHASES.index(phase)].tolist()
    except Exception:  # a layout that only a broken log can print
        return None
    if not all(math.isfinite(peak) for peak in peaks) or peaks[0] < _NEAR * capacity or peaks[1] >= peaks[0]:
        return None
    return Prediction(phase=phase, before_bytes=peaks[0], after_bytes=peaks[1])
