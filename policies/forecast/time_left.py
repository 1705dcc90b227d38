"""Estimate the time left of a run, as a range: the remaining steps times the measured step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from itertools import islice, pairwise, takewhile
from statistics import fmean, linear_regression, median, stdev

from autotune.policies.values.events import SURE
from autotune.policies.values.history import seconds_between
from autotune.policies.values.job import Then
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

_RECENT = 100  # latest step times of an attempt; older ones predict little
_FEWEST = 3  # step times, without the first, which includes the warm-up
_TOGETHER_S = 0.1  # steps that a driver reads together after its absence follow each other faster than this
_AWAY_S = 5.0  # between wall clock and a driver's time: no driver was at work, or the clock was set
_Z = 1.282  # quantile of the normal distribution that leaves 10 % on each side
_FEW = 0.95  # Student's t exceeds _Z by about this share divided by the degrees of freedom
# Share by which the mean may move later, for each time that the rest is as long as the measured steps; at
# most.
_DRIFT, _MOST_DRIFT = 0.02, 0.2
_TREND, _CLEARLY = 30, 2.0  # step times, and standard errors, from which on their slope counts
_START = 0.25  # share by which a start may take longer or shorter than the measured ones
# Shares by which a remedy may change the time of a step: a larger micro-batch saves some percent, and
# recomputation, the slowest, adds a forward pass to a forward and a backward pass of twice its cost.
_FASTER, _SLOWER = 0.1, 0.35


class Until(StrEnum):
    """Where the time that is left ends."""

    END = "end"  # of the training, or of the search
    GOAL = "goal"  # where the job stops
    TRIALS = "trials"  # the first run of a search is over


class TimeLeft(Value, frozen=True, kw_only=True):
    """Seconds that are left; four of five runs should end within the range."""

    least_s: float  # 0: only a limit is known
    most_s: float  # upper end of the range, in seconds
    until: Until = Until.END


def time_left(view: RunView, *, last_step: int | None, now: float) -> TimeLeft | None:
    """Return the time left of a launch at `now` (Unix seconds), until its goal if the job stops there.

    `last_step`: the last step of the training, if the job's settings give it. An expected failure counts with
    its relaunch and the steps repeated after it. None if too little is known or nothing is left to do.
    """
    accepted, latest = view.accepted, view.latest
    if accepted is None or latest is None or view.finished or not latest.started.trains:
        return None
    goal, searches, running = accepted.job.goal, accepted.mode == "search", latest.ended is None
    if latest.stop if running else searches:
        return None
    last = latest.last if running else None
    total = (last and last.of) or (goal.steps if searches else last_step)
    if last is not None:
        done = last.step
    else:
        resumes = latest.started.resume if running else accepted.profile.resumable
        done = max((each.saved or 0 for each in view.training), default=0) if resumes else 0
    ends = [] if total is None else [total - done]
    if goal.then is Then.STOP and not (running and latest.goal):
        ends.append(goal.steps - (0 if last is None else _in_a_row(latest, most=goal.steps)))
    if min(ends, default=0) <= 0:
        return None
    result = _left(view, latest, min(ends), resumable=accepted.profile.resumable, now=now)
    until = Until.TRIALS if searches else Until.GOAL if goal.then is Then.STOP else Until.END
    return result and TimeLeft(least_s=result[0], most_s=result[1], until=until)


def step_seconds(attempt: AttemptView) -> tuple[float, ...]:
    """Return the latest step times of an attempt in seconds, without the first."""
    rows = zip(attempt.steps[-_RECENT - 1 :], attempt.stepped_s[-_RECENT - 1 :], strict=True)
    gaps = ((after - before, one.at, other.at) for (one, before), (other, after) in pairwise(rows))
    return tuple(s for s, a, b in gaps if s > _TOGETHER_S and abs(seconds_between(a, b) - s) < _AWAY_S)


def seconds_of_more(count: int, measured: Sequence[float], *, of: int = 0) -> tuple[float, float]:
    """Return the least and the most seconds of `count` more steps.

    `measured`: at least two step times, the latest of `of`. The range is the 80 % prediction interval of the
    sum of normally distributed times, widened by a share for a later change of their mean. If the times grow
    or shrink, as with the lengths of responses, it also includes that trend continued to the end.
    """
    size, mean, deviation = len(measured), fmean(measured), stdev(measured)
    error = _Z * (1 + _FEW / (size - 1)) * deviation * math.sqrt(count * count / size + count)
    error += min(_MOST_DRIFT, _DRIFT * count / max(size, of)) * count * mean
    least, most = count * mean - error, count * mean + error
    if size >= _TREND:
        slope = linear_regression(range(size), measured).slope
        if abs(slope) > _CLEARLY * deviation * math.sqrt(12 / size**3):
            more = slope * count * (size + count) / 2
            least, most = least + min(0.0, more), most + max(0.0, more)
    return max(least, count * min(measured) / 2), most


def _left(
    view: RunView, latest: AttemptView, count: int, *, resumable: bool, now: float
) -> tuple[float, float] | None:
    """Return the least and the most seconds of `count` steps, with the attempt's start if it is pending."""
    training = _since_edited(view)
    before = next((each for each in reversed(training) if len(step_seconds(each)) >= _FEWEST), None)
    if before is None:
        return None
    seconds, running = step_seconds(before), latest.ended is None
    changed = not running or latest.knobs != before.knobs
    if not changed and latest is not before:
        seconds = (*seconds, *step_seconds(latest))
    size = len(before.steps)

    def of_steps(number: int) -> tuple[float, float]:
        least, most = seconds_of_more(number, seconds, of=size)
        return (least * (1 - _FASTER), most * (1 + _SLOWER)) if changed else (least, most)

    starts = [each.stepped_s[0] - each.started_s for each in training if each.stepped_s][-8:]
    start = ((1 - _START) * min(starts), (1 + _START) * max(starts))  # the first step included
    if running and latest.last is not None:
        passed_s = min(max(0.0, now - unix_seconds(latest.last.at)), median(seconds))
        least, most = of_steps(count)
        least, most = max(0.0, least - passed_s), max(most - passed_s, most / count)
        again = _steps_to_repeat(latest, count, resumable=resumable)
        return (least, most) if again is None else (least + start[0], most + start[1] + of_steps(again)[1])
    waited_s = now - unix_seconds(latest.started.at) if running else 0.0
    wait_s = 0.0
    if not running and latest.next is not None:
        wait_s = max(0.0, latest.next.not_before_s - (now - unix_seconds(latest.next.at)))
    if start[1] < waited_s:
        return None
    least, most = of_steps(count - 1)
    return wait_s + max(0.0, start[0] - waited_s) + least, wait_s + start[1] - waited_s + most


def _steps_to_repeat(latest: AttemptView, count: int, *, resumable: bool) -> int | None:
    """Return the steps that the relaunch after an expected failure repeats; None: none is expected."""
    due = [
        each.step
        for each in latest.forecasts.values()
        if each.holds and not each.upper_bound and each.step is not None and each.chance >= SURE
    ]
    if min(due, default=math.inf) > (latest.step or 0) + count:
        return None
    saves = dict.fromkeys(row.saved for row in latest.steps[-_RECENT:] if row.saved is not None)
    every = max((after - before for before, after in pairwise(saves)), default=0)
    return min(every or min(due), min(due)) if resumable else min(due)


def _since_edited(view: RunView) -> list[AttemptView]:
    """Return the attempts at the training since the user changed what is trained."""
    edited = max((each.at for each in view.edits if each.forgets), default="")
    return [each for each in view.training if each.started.at >= edited]


def _in_a_row(attempt: AttemptView, *, most: int) -> int:
    """Return the number of consecutive steps up to the latest, which count towards the goal."""
    pairs = pairwise(islice(reversed(attempt.steps), most + 1))
    return 1 + sum(1 for _ in takewhile(lambda pair: pair[0].step == pair[1].step + 1, pairs))


def unix_seconds(stamp: str) -> float:
    """Return a row's time in Unix seconds; 0 if it has none or an invalid one."""
    try:
        return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    except ValueError:
        return 0.0
