"""A trend in a series with one value per step: robust slopes since its last break."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.policies.estimate.belief.gaussian import Floats

_MEDIAN_TO_SIGMA = 1.4826  # of a normal distribution, from its median absolute deviation
_TAIL, _TAIL_SIGMAS = 0.95, 1.645
_OUTLIER = 3.0  # standard deviations


def clipped(residuals: Floats) -> Floats:
    """Return residuals whose outliers are moved to three standard deviations."""
    most = _OUTLIER * spread_of(residuals)
    return np.clip(residuals, -most, most)


def spread_of(residuals: Floats) -> float:
    """Return the standard deviation of residuals that their upper side shows, single peaks left out."""
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


# ---- how surely a memory drifts, when what it holds may also wander from step to step without a drift

# How much of a step's noise is left in the next one, in the models without a random walk.
_LEFT = np.array([[0.3], [0.6]])
# Variance of a step of the random walk, as a share of the variance of a single step's noise.
_SHARES = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
# Standard errors by which a slope differs from none: 5 % false alarms, one-sided, of a series that is tested
# again and again, as at ten equally spaced looks (Pocock 1977; Jennison and Turnbull 2000, table 2.1).
SURE = 2.27
_KEPT = 128  # designs: one for each number of steps in a window, 14 MiB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """Steps by which a slope is estimated, in the basis in which noise and random walk are independent."""

    slope: Floats  # weights of ordinary least squares
    basis: Floats  # orthonormal, orthogonal to every line
    powers: Floats  # variance of the random walk along each of them
    along: Floats  # its covariance with the slope
    own: float  # its variance of the slope


def drift(steps: Floats, values: Floats, *, resembling: bool = True) -> tuple[float, float, float]:
    """Return a series' slope, its standard error, and the standard deviation of a step of its random walk.

    It is the local level model with a constant drift (Harvey 1989, chapter 2.3), by generalized least
    squares. With `resembling` it may as well be noise that resembles that of the step before, as a sawtooth
    does, and wanders nowhere. The share of the random walk and what is left of noise are averaged over their
    restricted likelihood (Patterson and Thompson 1971). The error is widened, since few steps tell it.
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
    """Return Student's quantile as a share of the normal one (Abramowitz and Stegun 1964, 26.7.5)."""
    return 1 + (SURE**2 + 1) / (4 * free) + (5 * SURE**4 + 16 * SURE**2 + 3) / (96 * free**2)


def _walking(run: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return slope, its variance, likelihood and variance of a step of the walk, by share of the walk."""
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
    """Return the same without a walk, by what is left of a step's noise in the next one."""
    kept = _LEFT ** np.maximum(1.0, np.diff(run))
    new = np.sqrt(1 - kept**2)

    def alone(series: Floats) -> Floats:
        """Return what each step adds to those before it, in standard deviations of its noise."""
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


# ---- a trend in a series with one value per step: robust slopes since its last break

FEWEST = 8  # steps after the last break before anything is said of their trend
WINDOW = 120  # latest steps that are looked at
# SURE by how often a series was cut at a break: tests of its pieces share the 5 %.
_SURE_AFTER = (SURE, 2.56, 2.70, 2.81)
_DIFFER = 2.0  # standard errors by which growth slows down or speeds up
_GOES_ON = 1.0  # and by which the latest half of growth that slows down still grows
_LEAST = 0.003  # share of the level: growth over the seen steps that is not worth a word
_FLOOR = 0.001  # share of the level: the least spread of single steps
_BREAK_COST = 12.0  # of the log-likelihood ratio that a break must gain beside 3 log n
_MOST_BREAKS = 3
_PLACES = 40  # at which a break is looked for
_MOST_CORRELATED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How a series grows at its end."""

    since: float  # the step of its last break
    now: float  # the last step
    count: int  # values since the break
    level: float  # usual value at `now`
    rate: float  # growth of a step at `now`
    error: float  # standard error of it
    decay: float  # factor of the growth from one stretch of steps to the next; 1: it goes on
    stretch: float  # steps
    spread: float  # standard deviation of single steps, their upper side
    walk: float = 0.0  # standard deviation of a step's lasting change

    def grown(self, ahead: Floats, rate: float | Floats) -> Floats:
        """Return the growth over so many further steps at a present rate."""
        if self.decay >= 1.0:
            return np.asarray(rate * ahead)
        slowing = -math.log(max(self.decay, 1e-6)) / self.stretch
        return np.asarray(rate * -np.expm1(-slowing * ahead) / slowing)


def trend(steps: Floats, values: Floats, *, resembling: bool = True) -> Trend | None:
    """Return the growth that a series shows at its end; None if it surely shows none.

    A slope begins at the median of the slopes of all pairs (Theil 1950, Sen 1968), which one-off peaks do not
    move. What is left, and its error, is that of a drift beside noise and a random walk. Only what came after
    the last break counts: a jump upwards, or where growth set in.
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
        if slows and late < early:  # a geometric series: each half adds the same share of the one before
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
    """Return the places of all pairs of a series."""
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
    # Few pairs end before one standard error does: what the residuals say is the least.
    own = spread_of(residuals) * _widened(residuals) / (float(np.std(steps)) * math.sqrt(count))
    return slope, max((high - low) / 2, own), residuals


def _bend(steps: Floats, residuals: Floats) -> float:
    """Return by how many standard errors growth speeds up within a series; negative: it slows down."""
    run = steps - steps.mean()
    curve = _without_line(run[:, None] ** 2, run)[:, 0]
    rest = _without_line(clipped(residuals)[:, None], run)[:, 0]
    power = float(curve @ curve)
    bend = float(curve @ rest) / power
    left = rest - bend * curve
    error = math.sqrt(float(left @ left) / (len(steps) - 3) / power) * _widened(left)
    return bend / error if error > 0.0 else 0.0


def _widened(residuals: Floats) -> float:
    """Return by what factor an error grows because a residual resembles the one before."""
    usual = clipped(residuals)
    power = float(usual @ usual)
    if power <= 0.0:
        return 1.0
    follows = min(_MOST_CORRELATED, max(0.0, float(usual[1:] @ usual[:-1]) / power))
    return math.sqrt((1 + follows) / (1 - follows))


def _last_break(steps: Floats, values: Floats) -> tuple[int, int]:
    """Return from where a series follows one line, after its last jump or bend upwards, and how many."""
    first = 0
    for breaks in range(_MOST_BREAKS):
        place = _break(steps[first:], _without_peaks(values[first:]))
        if place is None:
            return first, breaks
        first += place
    return first, _MOST_BREAKS


def _break(steps: Floats, values: Floats) -> int | None:
    """Return where a jump or a bend upwards explains a series better than a line, if anywhere."""
    count = len(values)
    if count < 2 * FEWEST:
        return None
    run = steps - steps.mean()
    # A jump of the last few steps is one from which nothing can be told yet.
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
    """Return what a line over the steps leaves of each column."""
    columns = columns - columns.mean(axis=0)
    return np.asarray(columns - np.outer(run, (run @ columns) / float(run @ run)))


def _without_peaks(values: Floats) -> Floats:
    """Return running medians of three: one-off peaks are gone, jumps and ramps stay."""
    ends = np.concatenate([values[:1], values, values[-1:]])
    before, own, after = ends[:-2], ends[1:-1], ends[2:]
    return np.asarray(np.maximum(np.minimum(before, own), np.minimum(np.maximum(before, own), after)))
