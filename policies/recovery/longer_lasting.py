"""Choose settings with which a process whose memory grows lasts longer, if restarts take much of the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from autotune.policies.estimate.belief.calibration import predicted
from autotune.policies.estimate.belief.gaussian import Floats, exceeded
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.outlook import HEADROOM, Outlook, any_of, chances, outlook
from autotune.policies.recovery.permissions import may_cure
from autotune.policies.recovery.ranking import assess
from autotune.policies.recovery.relief import RISK, SAME, relieving
from autotune.policies.recovery.remedy_text import step, words
from autotune.policies.recovery.step_times import StepTimes, step_times
from autotune.policies.remedies.allow_deny import remedies_of
from autotune.policies.remedies.ladder import order_of_knobs
from autotune.policies.remedies.neighbours import search
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import TRAINER_PHASES, Cause, Phase
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.observation import MemoryGrowth
from autotune.policies.values.remedy import Effect, Remedy

_GAIN = 0.01  # share of the time left that a change must be worth
_EACH = 0.01  # share of it that each further knob must be worth
_MEASURED = 0.005  # least error of a share of the time
_AHEAD = 10  # processes that are considered if the last step is unknown
_PLACES = [PHASES.index(phase) for phase in TRAINER_PHASES]


def longer_lasting(
    run: Run, last: Attempt, grown: MemoryGrowth, *, start_s: float, left: float
) -> Remedy | None:
    """Return the change with which steps and restarts take least time; None without an estimate or a gain.

    `left`: the steps still to be made. A process lasts until growth has filled what the estimate leaves free
    for the trainer. Step times are uncertain until they are measured, by one process: a change is worth what
    it is expected to save then, and what it saves later if it proves to be faster; otherwise it is undone.
    """
    excused = msgspec.structs.replace(last, growth=grown, diagnosis=None)
    run = msgspec.structs.replace(run, attempts=(*run.attempts[:-1], excused))
    view = outlook(run)
    if view is None or not grown.per_step_bytes or grown.memory not in TRAINER_PHASES:
        return None
    failed = Diagnosis(cause=Cause.GPU_OOM, phase=Phase(grown.memory), component=grown.component)
    first = next((each.knobs for each in run.attempts if each.growth is not None), last.knobs)
    relief = relieving(view, first, failed, started=True)
    options = {knob: values for knob, values in relief.options.items() if knob in relief.acting}
    left = min(left, _AHEAD * grown.steps)
    weights = _Weights(step_times(view, first, options), last, grown, start_s=start_s, left=left)
    accepted, present = view.run.accepted, last.knobs
    near, _, _ = search(
        accepted.profile, first, options, weights.score, recovery=accepted.job.recovery, started=True
    )
    every = list(dict.fromkeys([present, *near, first]))
    worth, over = weights.worth(every)
    changes = [new_values(present, knobs) for knobs in every]
    worth = worth - _EACH * np.array([max(0, len(each) - 1) for each in changes])
    host = view.estimates(every).host.max(axis=0)
    fits = (over <= over[0]) & (host <= host[0] * (1 + SAME))
    for n in sorted(np.nonzero((worth >= _GAIN) & fits)[0].tolist(), key=lambda n: -worth[n]):
        numeric = accepted.profile.effect_of(changes[n]) is Effect.NUMERIC
        if not numeric and may_cure(run, present, every[n]):
            return _remedy(view, present, every[n], failed, grown, lasts=weights.lasts(every)[n])
    return None


@dataclass(frozen=True, slots=True)
class _Weights:
    """What weighs the seconds of a step against how long a process lasts."""

    times: StepTimes
    last: Attempt
    grown: MemoryGrowth
    start_s: float
    left: float  # steps

    def score(self, knobs: Sequence[Knobs]) -> tuple[Floats, Floats]:
        """Return the logarithm of the seconds per step with restarts, and the chance beyond the accepted."""
        view = self.times.view
        estimate = view.estimates(knobs)
        again = np.maximum(0.0, 1 / np.maximum(1.0, self.lasts(knobs)) - 1 / self.left)
        risk = any_of(chances(estimate, predicted(view.calibration, estimate)))
        seconds = self.times.seconds(estimate, knobs) + self.start_s * again
        return np.log(seconds), np.maximum(0.0, risk - RISK)

    def worth(self, knobs: Sequence[Knobs]) -> tuple[Floats, Floats]:
        """Return what a change from the first settings is worth, as a share of the time left; and the excess.

        No step counts as shorter than the shortest that was measured. The gain that one process shows is kept
        if there is one (expected improvement: Jones, Schonlau and Welch 1998).
        """
        view = self.times.view
        slow, over = self.score(knobs)
        _, error = self.times.gain(knobs, [knobs[0]] * len(knobs))
        gain, error = 1 - np.exp(slow - slow[0]), np.maximum(error, _MEASURED)
        seconds = self.times.seconds(view.estimates(knobs), knobs)
        tried = {each.knobs for each in view.run.attempts if each.progress}
        ran = np.array([each in tried for each in knobs])
        most = 1 - (seconds[ran].min() + np.exp(slow) - seconds) / np.exp(slow[0])
        beyond = np.where(ran, 0.0, _improvement(gain - most, error))
        first = np.clip(self.lasts(knobs) / self.left, 0.0, 1.0)
        kept = _improvement(gain, error) - beyond
        return np.asarray((gain - beyond) * first + kept * (1 - first)), over

    def lasts(self, knobs: Sequence[Knobs]) -> Floats:
        """Return how many steps a process completes with each of the settings before memory runs out."""
        view = self.times.view
        estimate = view.estimates((self.last.knobs, *knobs))
        capacity = estimate.gpu_capacity * (1 - HEADROOM)
        least = (capacity - predicted(view.calibration, estimate).gpu)[_PLACES].min(axis=0)
        return np.asarray(self.grown.steps + (least[1:] - least[0]) / self.grown.per_step_bytes)


def _improvement(gain: Floats, error: Floats) -> Floats:
    """Return the expected gain where only a positive one is kept."""
    density = np.exp(-0.5 * (gain / error) ** 2) / math.sqrt(2 * math.pi)
    return np.asarray(gain * (1 - exceeded(gain / error)) + error * density)


def _remedy(
    view: Outlook, present: Knobs, chosen: Knobs, failed: Diagnosis, grown: MemoryGrowth, *, lasts: float
) -> Remedy:
    changes = new_values(present, chosen)
    order = order_of_knobs(view.run.accepted.profile, present, failed, started=True)
    first = min(changes, key=lambda knob: order.get(knob, len(order)))
    name = next(remedies_of(first, getattr(present, first), changes[first]), first)
    why = f"{grown.text}; with {words(present, changes)} after about {lasts:.0f}"
    return step(view, present, assess(view, chosen), assess(view, present), name=name, why=why)
