"""The slope of a memory that also wanders, and how sure it is."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from autotune.policies.forecast.trend import clipped, drift

STEPS = np.arange(40.0)


def wandering(seed: int, *, steps: int = 40) -> list[float]:
    rng, at, result = Random(seed), 0.0, []
    for _ in range(steps):
        at += rng.gauss(0, 1)
        result.append(at + rng.gauss(0, 0.3))
    return result


def noisy(seed: int, *, steps: int = 40) -> list[float]:
    rng = Random(seed)
    return [rng.gauss(0, 1) for _ in range(steps)]


def ordinary(values: list[float]) -> tuple[float, float]:
    """Return the slope and its error as if every step were independent of the one before."""
    run = STEPS - STEPS.mean()
    slope = float(run @ values) / float(run @ run)
    rest = np.array(values) - np.mean(values) - slope * run
    return slope, float(np.sqrt(rest @ rest / (len(values) - 2) / (run @ run)))


def test_memory_that_only_wanders_seldom_seems_to_drift() -> None:
    cases = [np.array(wandering(seed)) for seed in range(200)]
    sure = [slope > 2.27 * error for slope, error, _ in (drift(STEPS, case) for case in cases)]
    naive = [slope > 2.27 * error for slope, error in map(ordinary, (list(case) for case in cases))]
    assert sum(sure) <= 0.05 * len(cases)
    assert sum(naive) > 0.3 * len(cases)


def test_noise_alone_seldom_seems_to_drift() -> None:
    sure = [
        slope > 2.27 * error for slope, error, _ in (drift(STEPS, np.array(noisy(s))) for s in range(200))
    ]
    assert sum(sure) <= 0.05 * len(sure)


@pytest.mark.parametrize("series", [noisy, wandering])
def test_error_covers_the_true_slope(series: Callable[[int], list[float]]) -> None:
    off = []
    for seed in range(200):
        slope, error, _ = drift(STEPS, np.array(series(seed)) + 0.5 * STEPS)
        off.append(abs(slope - 0.5) / error)
    assert np.mean(np.array(off) < 2.0) > 0.85


def test_a_drift_through_noise_is_as_sure_as_the_noise_allows() -> None:
    for seed in range(20):
        values = np.array(noisy(seed))
        slope, error, _ = drift(STEPS, values + 0.3 * STEPS)
        assert slope == pytest.approx(0.3, abs=5 * error)
        assert slope > 4 * error


def test_steps_may_be_missing() -> None:
    steps = np.array([each for each in range(60) if each % 7 not in (2, 3)], dtype=float)
    slope, error, _ = drift(steps, 2.0 * steps + np.array(noisy(3, steps=len(steps))))
    assert slope == pytest.approx(2.0, abs=4 * error)


def test_outliers_count_as_three_standard_deviations() -> None:
    values = np.array(noisy(5))
    values[10] = 1000.0
    assert clipped(values).max() < 10
    assert drift(STEPS, values)[1] < 0.2


def test_exact_line_has_no_error() -> None:
    slope, error, _ = drift(STEPS, np.zeros_like(STEPS))
    assert (slope, error) == (0.0, pytest.approx(0.0, abs=1e-100))


def test_the_random_walk_is_told_from_noise() -> None:
    walks = [drift(STEPS, np.array(wandering(seed)))[2] for seed in range(50)]
    still = [drift(STEPS, np.array(noisy(seed)))[2] for seed in range(50)]
    assert 0.8 < np.median(walks) < 1.2
    assert np.median(still) < 0.3


def test_the_slope_of_a_sawtooth_is_as_sure_as_its_teeth_allow() -> None:
    teeth = np.array([0.1 * (step % 8) for step in range(40)])
    slope, error, _ = drift(STEPS, teeth + 0.03 * STEPS)
    assert 0.01 < slope < 0.05 and slope > 2.5 * error


def test_noise_that_resembles_the_step_before_seldom_seems_to_drift() -> None:
    def resembling(seed: int) -> list[float]:
        rng, at, result = Random(seed), 0.0, []
        for _ in range(40):
            at = 0.7 * at + rng.gauss(0, 1)
            result.append(at)
        return result

    sure = [
        slope > 2.5 * error for slope, error, _ in (drift(STEPS, np.array(resembling(s))) for s in range(200))
    ]
    assert sum(sure) <= 0.07 * len(sure)
