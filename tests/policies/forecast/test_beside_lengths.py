"""A drift is told from lengths that make a step's peak larger or smaller."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from autotune.policies.forecast.foresee import Measured, adjusted, foresee
from autotune.policies.forecast.trend import trend
from autotune.policies.values.observation import Peak

CARD = 1 << 36
LENGTH = "response_length/max"
STEPS = np.arange(1.0, 61.0)


def varying(seed: int) -> np.ndarray:
    rng = Random(seed)
    return np.array([rng.uniform(400, 1200) for _ in STEPS])


@pytest.mark.parametrize("seed", range(3))
def test_the_slope_is_that_of_the_lengths_whatever_drifts(seed: int) -> None:
    lengths = varying(seed)
    for drift in (0.0, 500.0, -500.0):
        result = adjusted(STEPS, 1e5 + 70 * lengths + drift * STEPS, {LENGTH: lengths})
        assert result is not None and result.slope == pytest.approx(70, rel=0.1)


def test_lengths_that_peaks_do_not_follow_are_left_out() -> None:
    rng = Random(4)
    used = np.array([1e6 + rng.gauss(0, 1e4) for _ in STEPS])
    assert adjusted(STEPS, used, {LENGTH: varying(5)}) is None


def test_of_two_lengths_the_one_that_explains_more_counts() -> None:
    longest, mean = varying(6), varying(7)
    result = adjusted(STEPS, 1e5 + 70 * longest + 10 * mean, {"mean": mean, LENGTH: longest})
    assert result is not None and np.array_equal(result.lengths, longest)


def test_steps_without_lengths_are_left_out() -> None:
    lengths = varying(8)
    used = 1e5 + 70 * lengths
    lengths[[3, 40]] = np.nan
    result = adjusted(STEPS, used, {LENGTH: lengths})
    assert result is not None and len(result.steps) == len(STEPS) - 2


def test_the_growth_beside_lengths_varies_with_them() -> None:
    lengths = varying(9)
    result = adjusted(STEPS, 1e5 + 70 * lengths + 300 * STEPS, {LENGTH: lengths})
    assert result is not None
    grows = result.trend()
    assert grows is not None and grows.rate == pytest.approx(300, rel=0.1)
    assert grows.spread > 0.5 * 70 * float(np.std(lengths))


def measured(seed: int, *, leak: float, known: bool) -> list[Measured]:
    """Return steps of which the lengths move the peak by a sixth of the device, and a leak beside them."""
    rows = []
    for step, length in zip(STEPS, varying(seed), strict=True):
        share = 0.5 + 0.0002 * length + leak * step
        peak = Peak(used_bytes=int(share * CARD), capacity_bytes=CARD)
        lengths = {LENGTH: float(length)} if known else {}
        rows.append(Measured(step=int(step), peaks={"backward": peak}, lengths=lengths))
    return rows


def first_told(rows: list[Measured]) -> int | None:
    return next((n for n in range(1, len(rows) + 1) if foresee(rows[:n], last={}, of=200)), None)


def test_a_leak_under_varying_lengths_is_forecast_earlier_with_them() -> None:
    earlier = []
    for seed in range(12):
        forecasts = first_told(measured(seed, leak=0.004, known=True))
        without = first_told(measured(seed, leak=0.004, known=False)) or len(STEPS) + 1
        assert forecasts is not None
        earlier.append(without - forecasts)
    assert sum(earlier) >= 5 * len(earlier)
    assert sum(steps >= 0 for steps in earlier) >= 0.75 * len(earlier)


@pytest.mark.parametrize("seed", range(4))
def test_lengths_that_only_vary_are_no_alarm(seed: int) -> None:
    assert first_told(measured(seed, leak=0.0, known=True)) is None


def test_what_lengths_leave_is_no_sawtooth() -> None:
    lengths = varying(10)
    teeth = 400.0 * (np.arange(len(STEPS)) % 8) + 90 * STEPS
    result = adjusted(STEPS, 1e5 + 70 * lengths + teeth, {LENGTH: lengths})
    assert result is not None
    assert trend(STEPS, result.rest) is not None and result.trend() is None
