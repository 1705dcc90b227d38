"""Peaks of all phases and attempts: predicted before each attempt, and measured."""

from __future__ import annotations

import math

from autotune.orchestrator import messages
from autotune.orchestrator.report.document import (
    AttemptMemory,
    Comparison,
    Factor,
    Forecast,
    Memory,
    Reading,
    ends_of,
)
from autotune.orchestrator.report.story import Past
from autotune.policies.estimate.belief.calibration import learned, predicted
from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.outlook import Outlook
from autotune.policies.remedies.step_size import needed_bytes
from autotune.policies.search.trials import highest
from autotune.policies.values.events import Policy
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Run, accepted_of
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.view import AttemptView, RunView

_FIRST, _LAST = 2, 10  # shown attempts
_LADDER = "The estimate is shown for comparison: this run used `--policy ladder`."
_UNKNOWN = "No estimate: the model's shape, or the size of a device, is not known."


def memory_of(past: Past, view: RunView) -> Memory:
    """Return the peaks of a launch's attempts, of at most twelve of them."""
    launched = ends_of(view.launched, _FIRST, _LAST)
    accepted = accepted_of(past.history)
    known = past.is_modelled()
    attempts, previous = [], accepted.profile.knobs
    for attempt in launched:
        attempts.append(_attempt(past.view(attempt.place), attempt, previous))
        previous = attempt.started.knobs
    present = {phase for a in attempts for phase in (*a.predicted, *a.measured, *a.needed)}
    order = [phase.value for phase in PHASES]
    return Memory(
        note="" if known and accepted.policy is not Policy.LADDER else _LADDER if known else _UNKNOWN,
        phases=(*(p for p in order if p in present), *sorted(present - set(order))),
        parts=PARTS if known else (),
        attempts=tuple(attempts),
        chosen=_chosen(view),
        comparisons=tuple(
            Comparison(
                attempt=attempt.number,
                phase=phase,
                predicted=forecast.bytes,
                error=forecast.error,
                measured=attempt.measured[phase].bytes,
            )
            for attempt, begun in zip(attempts, launched, strict=True)
            for phase, forecast in attempt.predicted.items()
            if phase in attempt.measured
            and not attempt.measured[phase].upper_bound
            and _is_comparable(phase, begun)
        ),
        factors=_factors(past.whole()),
        calibrated_by=accepted.learned.runs if accepted.learned is not None else 0,
    )


def _is_comparable(phase: str, attempt: AttemptView) -> bool:
    """Return whether a phase's prediction counts what the attempt held in it.

    The start of an attempt that resumes holds the checkpoint as well. The phases of a step are predicted with
    the optimizer's state, which the first step of a training creates.
    """
    if phase == Phase.INIT.value:
        return bool(attempt.steps) and attempt.steps[0].resumed_from is None
    return phase == Phase.ROLLOUT_INIT.value or any(step.step > 1 for step in attempt.steps)


def _chosen(view: RunView) -> int:
    """Return the number of the last attempt that reached the goal, otherwise of the last one; 0 if none."""
    launched = view.launched
    reached = [attempt for attempt in launched if attempt.goal is not None]
    return (reached or launched)[-1].number if launched else 0


def _attempt(outlook: Outlook | None, attempt: AttemptView, previous: Knobs) -> AttemptMemory:
    started, diagnosed = attempt.started, attempt.diagnosed
    ends = [row.peaks for row in (attempt.goal, attempt.ended) if row is not None]
    peaks = highest(*(done.peaks for done in attempt.steps), *ends)
    needed = {}
    if diagnosed is not None and diagnosed.cause is Cause.GPU_OOM:
        size = needed_bytes(diagnosed.facts)
        if size is not None:
            needed[diagnosed.phase.value] = size
    return AttemptMemory(
        number=started.attempt,
        change=messages.setting_changes(previous, started.knobs) or "as before",
        predicted=_forecasts(outlook, started.knobs),
        measured={
            str(phase): Reading(
                bytes=peak.used_bytes,
                capacity=peak.capacity_bytes or None,
                upper_bound=peak.upper_bound,
            )
            for phase, peak in peaks.items()
            if peak.used_bytes
        },
        needed=needed,
    )


def _forecasts(view: Outlook | None, knobs: Knobs) -> dict[str, Forecast]:
    """Return the estimate of a configuration at the time of `view`."""
    if view is None:
        return {}
    estimate = view.estimates((knobs,))
    prediction = predicted(view.calibration, estimate)
    calibrated = bool(view.run.attempts) or view.run.accepted.learned is not None
    errors = prediction.gpu_error[:, 0] * (constant("interval") if calibrated else 0.0)
    result = {}
    for place, phase in enumerate(PHASES):
        total, capacity = float(prediction.gpu[place, 0]), float(estimate.gpu_capacity[place, 0])
        if total > 0:
            result[phase.value] = Forecast(
                bytes=round(total),
                error=round(float(errors[place])),
                capacity=capacity if math.isfinite(capacity) else None,
                parts={
                    part: round(size)
                    for part, size in zip(PARTS, estimate.gpu_parts[place, :, 0].tolist(), strict=True)
                    if size > 0
                },
            )
    return result


def _factors(run: Run) -> tuple[Factor, ...]:
    """Return the run's corrections of the estimate's parts."""
    result = learned(run)
    if result is None:
        return ()
    return tuple(
        Factor(name=name, mean=factor.mean, error=factor.error)
        for name, factor in sorted(result.factors.items())
    )
