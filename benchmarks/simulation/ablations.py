"""Our own policy without one of its parts, so that a table shows what the part is worth."""

from __future__ import annotations

from unittest import mock

import msgspec
import numpy as np

from autotune.policies.estimate.belief.calibration import Calibration, calibrated
from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.recovery import by_estimate, outlook, ranking, relief, step_times
from autotune.policies.recovery.decide import decide
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.events import Diagnosed, History, Launch
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs


def no_calibration(history: History) -> Launch | None:
    """Decide with the estimate as it is before any attempt."""
    with mock.patch.object(outlook, "calibrated", _as_before_any_attempt):
        return _decided(history)


def no_figures(history: History) -> Launch | None:
    """Decide as if no message of a failure had figures."""
    return _decided(
        tuple(
            msgspec.structs.replace(event, facts=Facts()) if isinstance(event, Diagnosed) else event
            for event in history
        )
    )


def no_speeds(history: History) -> Launch | None:
    """Decide as if every configuration took the same time for a step."""
    with mock.patch.object(step_times, "expected_s", _the_usual):
        return _decided(history)


def no_relief(history: History) -> Launch | None:
    """Decide as if every knob acted on every memory that fails."""
    with (
        mock.patch.object(ranking, "relieving", _everything_acts),
        mock.patch.object(by_estimate, "relieving", _everything_acts),
    ):
        return _decided(history)


def _the_usual(pace: step_times.Pace, candidates: step_times.Offered) -> Floats:
    return np.full(len(candidates.rows), pace.usual_s)


def _everything_acts(
    view: outlook.Outlook, present: Knobs, diagnosis: Diagnosis | None, *, started: bool
) -> relief.Relief:
    options = relief.singles(view, present, started=started)
    return relief.Relief(acting=frozenset(options), idle=frozenset(), options=options)


def _as_before_any_attempt(run: Run, model: Model) -> Calibration:
    return calibrated(msgspec.structs.replace(run, attempts=()), model)


def _decided(history: History) -> Launch | None:
    action = decide(history)
    return action if isinstance(action, Launch) else None
