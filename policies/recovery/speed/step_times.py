"""How fast the configurations of a run are: the roofline, corrected by the step times that were measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.recovery.outlook import Outlook
from autotune.policies.recovery.speed.step_time_model import (
    Axes,
    Offered,
    Pace,
    expected_s,
    offered,
    pace_of,
    slower,
    unmeasured,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import Run
from autotune.policies.values.knobs import Knobs, Setting, new_values
from autotune.policies.values.profile import Placement

_ROLLOUT = PHASES.index(Phase.ROLLOUT)
SURELY = 2.0  # standard deviations beyond which a predicted gain is no error of the prediction
_ONE_STEP = 0.1  # share by which the first step's time, which also warms up, is off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What is believed of the step times around one configuration."""

    view: Outlook
    present: Knobs | None  # None: every prediction of speed is believed
    axes: Axes
    pace: Pace

    def seconds(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Floats:
        """Return the expected seconds of a step."""
        result: Floats = self.pace.scale * expected_s(self.pace, self._offered(estimate, knobs))
        return result

    def sure(self, estimate: Estimates, knobs: Sequence[Knobs], acting: Collection[str]) -> Floats:
        """Return the expected seconds without the gains that may be the prediction's error.

        What a change of a knob that is not among `acting` gains counts only where it exceeds twice the error
        of that difference, which is small between configurations whose step times were measured. It is
        compared beside the other changes, and by itself: they may be slow only without it.
        """
        taken = self.seconds(estimate, knobs)
        if self.present is None:
            return taken
        without = [self.only(k, acting) for k in knobs]
        moved = [place for place, other in enumerate(without) if other != knobs[place]]
        if moved:
            taken[moved] *= self._unsure(
                [knobs[place] for place in moved], [without[place] for place in moved]
            )
        return taken

    def _unsure(self, knobs: Sequence[Knobs], without: Sequence[Knobs]) -> Floats:
        """Return the factors by which seconds grow without a gain over `without` that may be none."""
        assert self.present is not None
        alone = [
            msgspec.structs.replace(self.present, **new_values(before, after))
            for before, after in zip(without, knobs, strict=True)
        ]
        result = np.ones(len(knobs))
        for here, there in ((knobs, without), (alone, [self.present] * len(knobs))):
            gain, error = self.gain(here, there)
            result = np.where((gain > 0) & (gain <= SURELY * error) & (result == 1), 1 / (1 - gain), result)
        return result

    def gain(self, knobs: Sequence[Knobs], others: Sequence[Knobs]) -> tuple[Floats, Floats]:
        """Return how much faster each configuration is than its counterpart, and the error.

        Both are shares of the counterpart's seconds per step, of shape (len(knobs),); negative is slower.
        """
        here = self._offered(self.view.estimates(others), others)
        more, error = slower(self.pace, self._offered(self.view.estimates(knobs), knobs), here)
        return -more, error

    def only(self, knobs: Knobs, acting: Collection[str]) -> Knobs:
        """Return the present configuration with those changes of another one that move `acting` knobs."""
        assert self.present is not None
        changes = new_values(self.present, knobs)
        return msgspec.structs.replace(
            self.present, **{knob: value for knob, value in changes.items() if knob in acting}
        )

    def _offered(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Offered:
        return offered(estimate, knobs, self.axes, rollout_s=self._rollout_s(estimate, knobs))

    def _rollout_s(self, estimate: Estimates, knobs: Sequence[Knobs]) -> Floats:
        """Return seconds of generation which a smaller pool or fewer requests never shorten."""
        rollout: Floats = estimate.seconds[_ROLLOUT].copy()
        if self.present is None:
            return rollout
        fuller = [_fuller(k, self.present) for k in knobs]
        less = [place for place, other in enumerate(fuller) if other is not knobs[place]]
        if less:
            reference = self.view.estimates([fuller[place] for place in less]).seconds[_ROLLOUT]
            rollout[less] = np.maximum(rollout[less], reference)
        return rollout


def step_times(
    view: Outlook, present: Knobs | None, options: Mapping[str, Sequence[Setting]] | None = None
) -> StepTimes:
    """Return what is believed of step times; `options` are the values among which candidates are sought."""
    run = view.run
    overlapped = run.accepted.profile.placement is Placement.ASYNCHRONOUS
    measured = _measured(run)
    axes = {
        knob: _ordered([*values, *(getattr(k, knob) for k in measured)])
        for knob, values in (options or {}).items()
    }
    if measured:
        knobs = list(measured)
        estimate = view.estimates(knobs)
        rates, noises = zip(*measured.values(), strict=True)
        seen = offered(estimate, knobs, axes)
        pace = pace_of(seen, estimate.step_s, rates, noises, overlapped=overlapped)
    else:
        usual = float(view.estimates((present or run.accepted.profile.knobs,)).step_s[0])
        pace = unmeasured(usual, len(axes), overlapped=overlapped)
    return StepTimes(view=view, present=present, axes=axes, pace=pace)


def _measured(run: Run) -> dict[Knobs, tuple[float, float]]:
    """Return the rates of the configurations that ran for a step, with their relative standard errors."""
    taken: dict[Knobs, list[float]] = {}
    for attempt in run.attempts:
        timed = [p.seconds for p in attempt.progress if p.seconds]
        if timed:
            # The first step of an attempt also warms up.
            taken.setdefault(attempt.knobs, []).extend(timed[1:] or timed)
    return {
        knobs: (1 / median(timed), float(np.std(timed, ddof=1)) / median(timed) / len(timed) ** 0.5)
        if len(timed) > 1
        else (1 / timed[0], _ONE_STEP)
        for knobs, timed in taken.items()
    }


def _ordered(values: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return distinct values, numbers in rising order."""
    result = list(dict.fromkeys(values))
    numbers = [v for v in result if isinstance(v, int | float) and not isinstance(v, bool)]
    others = (v for v in result if isinstance(v, bool) or not isinstance(v, int | float))
    return (*sorted(numbers), *others)


def _fuller(knobs: Knobs, present: Knobs) -> Knobs:
    """Return the configuration with no smaller a pool and no fewer requests than the present one has."""
    changes = {
        knob: before
        for knob in ("memory_fraction", "concurrency")
        if (before := getattr(present, knob)) is not None
        and (after := getattr(knobs, knob)) is not None
        and after < before
    }
    return msgspec.structs.replace(knobs, **changes) if changes else knobs
