"""Detect a trend in a series with one value per step, by robust slopes since its last break."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.policies.estimate.belief.gaussian import Floats

_MEDIAN_TO_SIGMA = 1.4826  # standard deviation of a normal distribution per median absolute deviation
_TAIL, _TAIL_SIGMAS = 0.95, 1.645
_OUTLIER = 3.0  # standard deviations


def clipped(residuals: Floats) -> Floats:
    """Return the residuals, with outliers clipped to three standard deviations."""
    most = _OUTLIER * spread_of(residuals)
    return np.clip(residuals, -most, most)


def spread_of(residuals: Floats) -> float:
    """Return the standard deviation of residuals by their upper side, without single peaks."""
    ordered = np.sort(residuals)
    usual = _MEDIAN_TO_SIGMA * middle(np.sort(np.abs(ordered - middle(ordered))))
    return max(usual, quantile(ordered, _TAIL) / _TAIL_SIGMAS if len(ordered) >= 20 else 0.0)


def middle(ordered: Floats) -> float:
    """Return the median of values in ascending order."""
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (float(ordered[half - 1]) + float(ordered[half])) / 2


def quantile(ordered: Floats, share: float) -> float:
    """Return a quantile of values in ascending order, interpolated as numpy does by default."""
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 2)
    return float(ordered[below]) + (place - below) * (float(ordered[below + 1]) - float(ordered[below]))


# ---- the drift of a series and its error, when its level may also wander without a drift

# Autocorrelation of the noise of consecutive steps, in the models without a random walk.
_LEFT = np.array([[0.3], [0.6]])
# Variance of the random walk per step, as a share of the variance of a step's noise.
_SHARES = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
# Standard errors from which on a slope is significant: 5 % false alarms, one-sided, of a series that is
# tested repeatedly, as at ten equally spaced looks (Pocock 1977; Jennison and Turnbull 2000, table 2.1).
SURE = 2.27
_KEPT = 128  # cached designs: one per number of steps in a window, 14 MiB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """The regression of a slope on some steps, in a basis that makes noise and random walk independent."""

    slope: Floats  # weights of ordinary least squares
    basis: Floats  # orthonormal, orthogonal to every line
    powers: Floats  # variance of the random walk along each basis vector
    along: Floats  # covariance of the random walk along each with the slope
    own: float  # variance of the slope by the random walk


def drift(steps: Floats, values: Floats, *, resembling: bool = True) -> tuple[float, float, float]:
    """Return a series' slope, its standard error, and the standard deviation per step of its random walk.

    The model is a local level with a constant drift (Harvey 1989, chapter 2.3), estimated by generalized
    least squares. With `resembling`, autocorrelated noise without a random walk, as of a sawtooth, is an
    alternative. The share of the random walk and the autocorrelation are averaged over their restricted
    likelihood (Patterson and Thompson 1971). The error is widened by Student's t for the few steps.
    """
    run, values = steps - steps[0], clipped(values)
    models = [_walking(run, values)]
    if resembling:
        models.append(_resembling(run - run.mean(), values))
    slopes, errors, likelihoods, walks = (np.concatenate(each) for each in zip(*models, strict=True))
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    slope = float(weights @ slopes)
    error = math.sqrt(max(0.0, float(weights @ (errors + (slopes - slope) ** 2))))
    return slope, error * _student(len(run) - 2), math.sqrt(float(weights @ walks))


def _student(free: int) -> float:
    """Return Student's quantile divided by the normal one (Abramowitz and Stegun 1964, 26.7.5)."""
    return 1 + (SURE**2 + 1) / (4 * free) + (5 * SURE**4 + 16 * SURE**2 + 3) / (96 * free**2)


def _walking(run: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return slope, its variance, log-likelihood and the walk's variance per step, for each of _SHARES."""
    design = _design(tuple(run.tolist()))
    projected, free = design.basis.T @ values, len(design.powers)
    powers = 1 + _SHARES[:, None] * design.powers
    noise = np.maximum((projected**2 / powers).sum(axis=1) / free, np.finfo(float).tiny)
    slopes = design.slope @ values - _SHARES * (design.along * projected / powers).sum(axis=1)
    errors = noise * (
        float(design.slope @ design.slope)
        + _SHARES * design.own
        - _SHARES**2 * (design.along**2 / powers).sum(axis=1)
    )
    likelihoods = -0.5 * (np.log(powers).sum(axis=1) + free * np.log(noise))
    return slopes, errors, likelihoods, noise * _SHARES


def _resembling(run: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the same without a random walk, for each autocorrelation in _LEFT."""
    kept = _LEFT ** np.maximum(1.0, np.diff(run))
    new = np.sqrt(1 - kept**2)

    def alone(series: Floats) -> Floats:
        """Return the innovation of each step, in standard deviations of the noise."""
        first = np.full_like(_LEFT, series[0])
        return np.concatenate([first, (series[1:] - kept * series[:-1]) / new], axis=1)

    level, line, own = alone(np.ones_like(run)), alone(run), alone(values)
    ones, both, lines = (level**2).sum(axis=1), (level * line).sum(axis=1), (line**2).sum(axis=1)
    on_level, on_line = (level * own).sum(axis=1), (line * own).sum(axis=1)
    power, free = ones * lines - both**2, len(run) - 2
    slopes = (ones * on_line - both * on_level) / power
    levels = (lines * on_level - both * on_line) / power
    rest = own - levels[:, None] * level - slopes[:, None] * line
    noise = np.maximum((rest**2).sum(axis=1) / free, np.finfo(float).tiny)
    plain = math.log(len(run) * float(run @ run))
    spread = 2 * np.log(new).sum(axis=1) + np.log(power) - plain
    return slopes, noise * ones / power, -0.5 * (spread + free * np.log(noise)), np.zeros(len(_LEFT))


@lru_cache(maxsize=_KEPT)
def _design(steps: tuple[float, ...]) -> _Design:
    run = np.array(steps)
    line = np.stack([np.ones_like(run), run - run.mean()], axis=1)
    slope = line[:, 1] / float(line[:, 1] @ line[:, 1])
    complement = np.linalg.qr(line, mode="complete")[0][:, 2:]
    walk = np.minimum.outer(run, run)
    powers, vectors = np.linalg.eigh(complement.T @ walk @ complement)
    basis = complement @ vectors
    return _Design(
        slope=slope,
        basis=basis,
        powers=np.maximum(powers, 0.0),
        along=slope @ walk @ basis,
        own=float(slope @ walk @ slope),
    )


# ---- the trend at the end of a series, since its last break

FEWEST = 8  # steps after the last break that a trend needs
WINDOW = 120  # latest steps that are considered
# SURE by the number of breaks at which a series was split: the tests of its parts share the 5 %.
_SURE_AFTER = (SURE, 2.56, 2.70, 2.81)
_DIFFER = 2.0  # standard errors by which growth slows down or speeds up
_GOES_ON = 1.0  # and by which the latest half of growth that slows down still grows
_LEAST = 0.003  # share of the level: growth over the measured steps that is negligible
_FLOOR = 0.001  # share of the level: the least spread of single steps
_BREAK_COST = 12.0  # log-likelihood ratio that a break must gain, in addition to 3 log n
_MOST_BREAKS = 3
_PLACES = 40  # candidate places of a break
_MOST_CORRELATED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a series grows at its end."""

    since: float  # the step of its last break
    now: float  # the last step
    count: int  # values since the break
    level: float  # usual value at `now`
    rate: float  # growth per step at `now`
    error: float  # standard error of it
    decay: float  # factor of the growth from one stretch of steps to the next; 1: it is constant
    stretch: float  # steps
    spread: float  # standard deviation of single steps, their upper side
    walk: float = 0.0  # standard deviation of the random walk per step

    def grown(self, ahead: Floats, rate: float | Floats) -> Floats:
        """Return the growth over `ahead` further steps at a present `rate`."""
        if self.decay >= 1.0:
            return np.asarray(rate * ahead)
        slowing = -math.log(max(self.decay, 1e-6)) / self.stretch
        return np.asarray(rate * -np.expm1(-slowing * ahead) / slowing)


def trend(steps: Floats, values: Floats, *, resembling: bool = True) -> Trend | None:
    """Return the growth at the end of a series; None if it has no significant growth.

    The slope is the median slope of all pairs (Theil 1950, Sen 1968), which single peaks do not change, plus
    the drift of its residuals, whose error allows for noise and a random walk (`drift`). Only steps after
    the last break count: a jump upwards, or the start of growth.
    """
    steps, values = steps[-WINDOW:], values[-WINDOW:]
    first, breaks = _last_break(steps, values)
    steps, values = steps[first:], values[first:]
    count = len(values)
    if count < FEWEST:
        return None
    slope, _, residuals = _slope(steps, values)
    more, error, walk = drift(steps, residuals, resembling=resembling)
    slope += more
    level = abs(float(np.median(values)))
    span = float(steps[-1] - steps[0])
    if slope <= _SURE_AFTER[breaks] * error or slope * span <= _LEAST * level:
        return None
    half = count // 2
    early, early_error, _ = _slope(steps[: count - half], values[: count - half])
    late, late_error, late_residuals = _slope(steps[count - half :], values[count - half :])
    rate, decay, stretch = slope, 1.0, span / 2
    apart, unsure = late - early, math.hypot(early_error, late_error)
    slows = apart < -_DIFFER * unsure or _bend(steps, residuals) < -_DIFFER
    if slows and late <= _GOES_ON * late_error:
        return None
    if slows or apart > _DIFFER * unsure:
        rate, error, residuals = late, late_error, late_residuals
        if slows and late < early:  # a geometric series: each half adds the same share of the previous one
            decay = late / early
            rate *= math.sqrt(decay)  # from the middle of the latest half to its end
    spread = max(spread_of(residuals), _FLOOR * level)
    return Trend(
        since=float(steps[0]),
        now=float(steps[-1]),
        count=count,
        level=float(np.median((values - rate * (steps - steps[-1]))[-max(FEWEST, half) :])),
        rate=rate,
        error=error,
        decay=decay,
        stretch=stretch,
        spread=spread,
        walk=walk,
    )


@lru_cache(maxsize=WINDOW)
def _pairs(count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices of all pairs in a series."""
    return np.triu_indices(count, 1)


def slope_of(steps: Floats, values: Floats) -> tuple[float, float]:
    """Return the median slope of the pairs of a series and its standard error."""
    slope, error, _ = _slope(steps, values)
    return slope, error


def _slope(steps: Floats, values: Floats) -> tuple[float, float, Floats]:
    """Return the median slope, its standard error and the residuals."""
    one, other = _pairs(len(steps))
    run = steps[other] - steps[one]
    apart = run != 0
    rises = (values[other] - values[one])[apart] / run[apart]
    if not rises.size:
        return 0.0, math.inf, np.zeros_like(values)
    rises = np.sort(rises)
    slope = middle(rises)
    residuals = values - slope * steps
    residuals = residuals - middle(np.sort(residuals))
    count = len(steps)
    pairs = math.sqrt(count * (count - 1) * (2 * count + 5) / 18) * _widened(residuals)
    low, high = (
        quantile(rises, min(1.0, max(0.0, 0.5 + side / max(1, rises.size - 1)))) for side in (-pairs, pairs)
    )
    # Few pairs underestimate the error: that of the residuals is the minimum.
    own = spread_of(residuals) * _widened(residuals) / (float(np.std(steps)) * math.sqrt(count))
    return slope, max((high - low) / 2, own), residuals


def _bend(steps: Floats, residuals: Floats) -> float:
    """Return the acceleration of growth within a series, in standard errors; negative: it slows down."""
    run = steps - steps.mean()
    curve = _without_line(run[:, None] ** 2, run)[:, 0]
    rest = _without_line(clipped(residuals)[:, None], run)[:, 0]
    power = float(curve @ curve)
    bend = float(curve @ rest) / power
    left = rest - bend * curve
    error = math.sqrt(float(left @ left) / (len(steps) - 3) / power) * _widened(left)
    return bend / error if error > 0.0 else 0.0


def _widened(residuals: Floats) -> float:
    """Return the factor by which autocorrelation of the residuals increases an error."""
    usual = clipped(residuals)
    power = float(usual @ usual)
    if power <= 0.0:
        return 1.0
    follows = min(_MOST_CORRELATED, max(0.0, float(usual[1:] @ usual[:-1]) / power))
    return math.sqrt((1 + follows) / (1 - follows))


def _last_break(steps: Floats, values: Floats) -> tuple[int, int]:
    """Return the index of a series' last break (a jump or bend upwards) and the number of breaks."""
    first = 0
    for breaks in range(_MOST_BREAKS):
        place = _break(steps[first:], _without_peaks(values[first:]))
        if place is None:
            return first, breaks
        first += place
    return first, _MOST_BREAKS


def _break(steps: Floats, values: Floats) -> int | None:
    """Return the index at which a jump or bend upwards fits a series better than a line, if any."""
    count = len(values)
    if count < 2 * FEWEST:
        return None
    run = steps - steps.mean()
    # A jump in the last few steps cannot be judged yet.
    places = np.unique(np.linspace(3, count - 3, min(_PLACES, count - 5)).astype(int))
    jumps = (np.arange(count)[:, None] >= places[None, :]).astype(float)
    bends = np.maximum(0.0, steps[:, None] - steps[places][None, :])
    columns = _without_line(np.concatenate([jumps, bends], axis=1), run)
    rest = _without_line(values[:, None], run)[:, 0]
    power = float(rest @ rest)
    if power <= (1e-9 * float(np.abs(values).max())) ** 2 * count:
        return None
    sizes = np.maximum((columns * columns).sum(axis=0), 1e-12)
    along = rest @ columns
    explained = np.where(along > 0, along**2 / sizes, 0.0)
    best = int(explained.argmax())
    gain = count * math.log(power / max(power - float(explained[best]), 1e-9 * power))
    return int(places[best % len(places)]) if gain > _BREAK_COST + 3 * math.log(count) else None


def _without_line(columns: Floats, run: Floats) -> Floats:
    """Return the residuals of each column from its line over the steps."""
    columns = columns - columns.mean(axis=0)
    return np.asarray(columns - np.outer(run, (run @ columns) / float(run @ run)))


def _without_peaks(values: Floats) -> Floats:
    """Return running medians of three, which remove single peaks and keep jumps and ramps."""
    ends = np.concatenate([values[:1], values, values[-1:]])
    before, own, after = ends[:-2], ends[1:-1], ends[2:]
    return np.asarray(np.maximum(np.minimum(before, own), np.minimum(np.maximum(before, own), after)))
