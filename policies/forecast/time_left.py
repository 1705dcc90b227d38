"""How long a run still takes, as a range: what is left to do times the step times that were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median

from msgspec.structs import replace

from autotune.policies.values.events import (
    SURE,
    Accepted,
    Decided,
    Edited,
    Ended,
    Event,
    Finished,
    Foreseen,
    GoalReached,
    Progressed,
    Started,
    StopRequested,
)
from autotune.policies.values.job import Job, Then
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.value import Value

_KEPT = 100  # latest step times of an attempt; older ones say little of what comes
_ENOUGH = 3  # step times without the first, which also warms up
_Z = 1.282  # quantile of the normal distribution that leaves 10 % on each side
_FEW = 0.95  # Student's t exceeds it by about this share divided by the degrees of freedom
_TREND = 30  # step times, from which on a trend among them is looked for
_CLEARLY = 1.5  # standard errors by which a slope differs from none
# Share by which the mean may move later: for every time that the rest is as long as what was seen, at most.
_UNSEEN, _UNSEEN_MOST = 0.02, 0.2
_AWAY_S = 5.0  # between the clock on the wall and a driver's time: nobody was there, or the clock was set
_AT_ONCE_S = 0.1  # steps that are read together after an absence follow each other faster than this
_START = 0.25  # share by which a start may take longer or shorter than those that were measured
# Shares by which a remedy may change the time of a step: a larger micro-batch saves some percent, and
# recomputation, the slowest, adds a forward pass to a forward and a backward one of twice its cost.
_FASTER, _SLOWER = 0.1, 0.35


class Until(StrEnum):
    """Where the time that is left ends."""

    END = "end"  # of the training, or of the search
    GOAL = "goal"  # where the job stops
    TRIALS = "trials"  # the first run of a search is over


class TimeLeft(Value, frozen=True, kw_only=True):
    """Seconds that are left; four of five runs should end within the range."""

    least_s: float  # 0: only a limit is known
    most_s: float
    until: Until = Until.END


class Leg(Value, frozen=True, kw_only=True):
    """An attempt that runs, as far as its time is concerned."""

    attempt: int
    knobs: Knobs
    trial: int | None = None
    begun_at: float = 0.0  # Unix seconds
    begun_s: float = 0.0  # on the driver's time
    stepped_at: float = 0.0  # the same of its last step
    stepped_s: float = 0.0
    step: int | None = None
    of: int | None = None
    since: int = 0  # the step that it continues, as expected until it says so
    in_a_row: int = 0  # consecutive steps, which count towards the goal
    saves: tuple[int, ...] = ()  # steps of its checkpoints
    step_s: tuple[float, ...] = ()  # the latest, without the first
    away: bool = False  # what was missed while no driver was there is being read
    goal: bool = False
    stopping: bool = False
    foreseen: tuple[Foreseen, ...] = ()


class Course(Value, frozen=True, kw_only=True):
    """A run as far as its time is concerned, and what its attempts so far teach."""

    job: Job
    search: bool = False
    last_step: int | None = None  # by the job's settings
    resumable: bool = False
    at: float = 0.0  # Unix seconds of the last event
    driven_s: float = 0.0  # in which a driver was at work
    legs: tuple[Leg, ...] = ()  # that run
    knobs: Knobs | None = None  # of the steps in `step_s`
    step_s: tuple[float, ...] = ()  # of the last attempt that showed enough of them
    starts_s: tuple[float, ...] = ()  # from the start of an attempt to the end of its first step
    saved: int = 0  # step of the last checkpoint
    wait_s: float = 0.0  # from the last event to the next attempt
    begun: bool = False
    over: bool = False


def begin(accepted: Accepted, *, last_step: Callable[[Job], int | None]) -> Course:
    """Return the course of a run that starts; `last_step` reads the end of the training from a job."""
    return Course(
        job=accepted.job,
        search=accepted.mode == "search",
        last_step=last_step(accepted.job),
        resumable=accepted.profile.resumable,
        at=_unix(accepted.at),
    )


def follow(course: Course, event: Event, *, last_step: Callable[[Job], int | None]) -> Course:
    """Return the course after an event."""
    at = _unix(event.at) or course.at
    passed = event.after_s if event.after_s is not None else max(0.0, at - course.at)
    course = replace(course, at=at, driven_s=course.driven_s + passed)
    match event:
        case Started(rehearsal=Part()):  # no part of the training: its steps and checkpoints do not count
            return replace(course, wait_s=0.0)
        case Started():
            leg = Leg(
                attempt=event.attempt,
                knobs=event.knobs,
                trial=event.trial,
                begun_at=at,
                begun_s=course.driven_s,
                since=course.saved if event.resume else 0,
            )
            return replace(course, legs=(*course.legs, leg), wait_s=0.0, begun=True, over=False)
        case Decided():
            return replace(course, wait_s=event.not_before_s, over=False)
        case Edited():
            changed = replace(course, job=event.job, last_step=last_step(event.job), over=False)
            return replace(changed, step_s=(), starts_s=()) if event.forgets else changed
        case Finished():
            return replace(course, over=True, legs=())
        case Ended():
            ended = next((leg for leg in course.legs if leg.attempt == event.attempt), None)
            left = tuple(leg for leg in course.legs if leg.attempt != event.attempt)
            counts = ended is not None and ended.trial is None
            saved = max(course.saved, event.saved or 0) if counts else course.saved
            return replace(course, legs=left, saved=saved)
        case Progressed():
            return _stepped(course, event)
        case GoalReached():
            return _changed(course, event.attempt, lambda leg: replace(leg, goal=True))
        case StopRequested():
            return _changed(course, event.attempt, lambda leg: replace(leg, stopping=True))
        case Foreseen():
            return _changed(course, event.attempt, lambda leg: _expecting(leg, event))
        case _:
            return course


def time_left(course: Course, *, now: float) -> TimeLeft | None:
    """Return how long a launch still takes at `now`, in Unix seconds: to its goal where the job ends there.

    What is to be repeated after a relaunch is counted, and so is the relaunch itself. None: not enough is
    known, or there is nothing left to do.
    """
    if course.over or not course.begun or any(leg.trial is not None for leg in course.legs):
        return None
    result = _leg_left(course, course.legs[0], now=now) if course.legs else _before_a_start(course, now)
    until = Until.TRIALS if course.search else Until.GOAL if course.job.goal.then is Then.STOP else Until.END
    return None if result is None else replace(result, until=until)


def _leg_left(course: Course, leg: Leg, *, now: float) -> TimeLeft | None:
    left = _steps_left(course, leg)
    if leg.stopping or left is None or left <= 0:
        return None
    known = _step_s(course, leg)
    if known is None:
        return None
    if leg.step is None:
        started = _start_left(course, waited_s=now - leg.begun_at)
        return None if started is None else _sum(started, _steps(left - 1, known))
    rest = _steps(left, known)
    under_way_s = min(max(0.0, now - leg.stepped_at), median(known.step_s))
    rest = TimeLeft(
        least_s=max(0.0, rest.least_s - under_way_s),
        most_s=max(rest.most_s - under_way_s, rest.most_s / left),
    )
    return _sum(rest, _relaunch(course, leg, left, known))


def _steps_left(course: Course, leg: Leg) -> int | None:
    """Return the number of remaining steps of an attempt; None if its last step is unknown."""
    goal = course.job.goal
    total = leg.of or (goal.steps if course.search else course.last_step)
    done = leg.since if leg.step is None else leg.step
    ends = [] if total is None else [total - done]
    if goal.then is Then.STOP and not leg.goal:
        ends.append(goal.steps - leg.in_a_row)
    return min(ends, default=None)


# ---------------------------------------------------------------------- what is known of step times


class _Known(Value, frozen=True, kw_only=True):
    """Step times, and by which shares others may be shorter or longer."""

    step_s: tuple[float, ...]
    shown: int = 0  # of how many they are the latest
    faster: float = 0.0
    slower: float = 0.0


def _step_s(course: Course, leg: Leg) -> _Known | None:
    """Return the step times of an attempt, or of the one before it until it has shown enough of its own."""
    if len(leg.step_s) >= _ENOUGH:
        return _Known(step_s=leg.step_s, shown=leg.in_a_row)
    if len(course.step_s) < _ENOUGH:
        return None
    if leg.knobs == course.knobs:
        return _Known(step_s=(*course.step_s, *leg.step_s))
    return _Known(step_s=course.step_s, faster=_FASTER, slower=_SLOWER)


def _steps(count: int, known: _Known) -> TimeLeft:
    result = sum_of(count, known.step_s, shown=known.shown)
    return TimeLeft(least_s=result.least_s * (1 - known.faster), most_s=result.most_s * (1 + known.slower))


def sum_of(count: int, seen: Sequence[float], *, shown: int = 0) -> TimeLeft:
    """Return how long so many more take as those that were seen, the latest of `shown`, at least two of them.

    It is the prediction interval of their sum, 80 % of a normal distribution, and a share for what the rest
    may be that was not seen yet. Where they seem to grow or to shrink, as with the lengths of responses, it
    reaches to where that would go on to the end.
    """
    if count <= 0:
        return TimeLeft(least_s=0.0, most_s=0.0)
    size = len(seen)
    t, mean = _Z * (1 + _FEW / (size - 1)), fmean(seen)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in seen) / (size - 1))
    error = t * deviation * math.sqrt(count * count / size + count)
    error += min(_UNSEEN_MOST, _UNSEEN * count / max(size, shown)) * count * mean
    least_s, most_s = max(count * mean - error, count * min(seen) / 2), count * mean + error
    trend = _trend(seen)
    if trend is None:
        return TimeLeft(least_s=least_s, most_s=most_s)
    slope, slope_error, now, noise = trend
    error = t * noise * math.sqrt(4 * count * count / size + count)
    more = (slope + math.copysign(_Z * slope_error, slope)) * count * count / 2
    lower_s = max(count * now + min(0.0, more) - error, count * min(seen) / 2)
    return TimeLeft(least_s=min(least_s, lower_s), most_s=max(most_s, count * now + max(0.0, more) + error))


def _trend(seen: Sequence[float]) -> tuple[float, float, float, float] | None:
    """Return the slope of a line through times, its error, its end and the noise; None without a slope."""
    size = len(seen)
    if size < _TREND:
        return None
    middle, mean, across = (size - 1) / 2, fmean(seen), size * (size * size - 1) / 12
    slope = math.fsum((x - middle) * y for x, y in enumerate(seen)) / across
    off = math.fsum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(seen))
    noise = math.sqrt(off / (size - 2))
    error = noise / math.sqrt(across)
    if abs(slope) <= _CLEARLY * error:
        return None
    return slope, error, mean + slope * middle, noise


def _start_left(course: Course, *, waited_s: float) -> TimeLeft | None:
    """Return how long a start still takes, its first step included; None if none is like it."""
    if not course.starts_s:
        return None
    most = max(course.starts_s) * (1 + _START) - waited_s
    if most < 0:
        return None
    return TimeLeft(least_s=max(0.0, min(course.starts_s) * (1 - _START) - waited_s), most_s=most)


def _before_a_start(course: Course, now: float) -> TimeLeft | None:
    """Return how long a run takes whose next attempt is about to start; its knobs may be others."""
    since = course.saved if course.resumable else 0
    leg = Leg(attempt=0, knobs=Knobs(), since=since)
    left, started = _steps_left(course, leg), _start_left(course, waited_s=0.0)
    if course.search or left is None or left <= 0 or started is None or len(course.step_s) < _ENOUGH:
        return None
    wait_s = max(0.0, course.wait_s - (now - course.at))
    wait = TimeLeft(least_s=wait_s, most_s=wait_s)
    rest = _steps(left - 1, _Known(step_s=course.step_s, faster=_FASTER, slower=_SLOWER))
    return _sum(_sum(wait, started), rest)


def _relaunch(course: Course, leg: Leg, left: int, known: _Known) -> TimeLeft:
    """Return what the relaunch costs that follows a failure which is expected before the end."""
    none = TimeLeft(least_s=0.0, most_s=0.0)
    end = (leg.step or 0) + left
    due = [
        e for e in leg.foreseen if e.holds and not e.upper_bound and e.step is not None and e.chance >= SURE
    ]
    ahead = min((e.step or 0 for e in due), default=end + 1)
    started = _start_left(course, waited_s=0.0)
    if ahead > end or started is None:
        return none
    every = max((b - a for a, b in pairwise(leg.saves)), default=0)
    repeated = min(every or ahead, ahead) if course.resumable else ahead
    return TimeLeft(least_s=started.least_s, most_s=started.most_s + _steps(repeated, known).most_s)


def _sum(one: TimeLeft, other: TimeLeft) -> TimeLeft:
    return TimeLeft(least_s=one.least_s + other.least_s, most_s=one.most_s + other.most_s)


# ---------------------------------------------------------------------- events


def _stepped(course: Course, event: Progressed) -> Course:
    leg = next((leg for leg in course.legs if leg.attempt == event.attempt), None)
    if leg is None:
        return course
    starts_s = course.starts_s
    step_s, away = leg.step_s, leg.away
    if leg.step is None:
        took, past = course.driven_s - leg.begun_s, course.at - leg.begun_at
        away = abs(past - took) > _AWAY_S
        starts_s = starts_s if away else (*starts_s[-7:], took)
    else:
        took, past = course.driven_s - leg.stepped_s, course.at - leg.stepped_at
        missed = abs(past - took) > _AWAY_S
        away = missed or (away and took < _AT_ONCE_S)
        step_s = step_s if away else (*step_s[1 - _KEPT :], took)
    follows = leg.step is not None and event.step == leg.step + 1
    saves = leg.saves if event.saved is None else tuple(dict.fromkeys((*leg.saves, event.saved)))
    leg = replace(
        leg,
        step=event.step,
        of=event.of,
        in_a_row=leg.in_a_row + 1 if follows else 1,
        stepped_at=course.at,
        stepped_s=course.driven_s,
        saves=saves[-_KEPT:],
        step_s=step_s,
        away=away,
    )
    course = replace(course, starts_s=starts_s)
    if len(step_s) >= _ENOUGH:
        course = replace(course, knobs=leg.knobs, step_s=step_s)
    if event.saved is not None and leg.trial is None:
        course = replace(course, saved=max(course.saved, event.saved))
    return _changed(course, event.attempt, lambda _: leg)


def _expecting(leg: Leg, event: Foreseen) -> Leg:
    others = tuple(each for each in leg.foreseen if each.memory != event.memory)
    return replace(leg, foreseen=(*others, event))


def _changed(course: Course, attempt: int, change: Callable[[Leg], Leg]) -> Course:
    legs: Sequence[Leg] = course.legs
    return replace(course, legs=tuple(change(leg) if leg.attempt == attempt else leg for leg in legs))


def _unix(stamp: str) -> float:
    """Return the Unix seconds of a row's time, 0 if it has none that can be read."""
    try:
        return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    except ValueError:
        return 0.0
