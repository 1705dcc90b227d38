"""How long a run still takes: against runs whose rest is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from autotune.policies.forecast.time_left import TimeLeft, seconds_of_more, time_left
from autotune.policies.values.events import (
    Decided,
    Ended,
    Event,
    Finished,
    Foreseen,
    GoalReached,
    Progressed,
    Started,
    StopRequested,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Goal, Then
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Crashed
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.run.view import RunView
from tests.policies.stories import accepted, profile

EPOCH = 1_800_000_000.0
SLOW, FAST = Knobs(tokens_per_microbatch=8), Knobs(tokens_per_microbatch=16)


class Story:
    """A run as its journal tells it, seconds after its beginning."""

    def __init__(
        self,
        *,
        last: int | None = 100,
        resumable: bool = True,
        goal: Goal | None = None,
        mode: str = "launch",
    ) -> None:
        self.now, self.last = 0.0, last
        of = replace(profile(), resumable=resumable)
        first = replace(accepted(of, goal=goal or Goal(steps=20)), at=stamp(0.0), mode=mode)
        self.view = RunView([first])

    def then(self, event: Event, *, after: float, driven: float | None = None) -> Story:
        self.now += after
        row = replace(event, at=stamp(self.now), after_s=after if driven is None else driven)
        self.view.take(row)
        return self

    def steps(self, *numbers: int, each: float = 10.0, attempt: int = 1, saved: int | None = None) -> Story:
        for number in numbers:
            self.then(Progressed(attempt=attempt, step=number, saved=saved), after=each)
        return self

    def starts(self, attempt: int, knobs: Knobs = FAST, *, resume: bool = False) -> Story:
        return self.then(Started(attempt=attempt, knobs=knobs, resume=resume), after=0.0)

    def left(self, *, later: float = 0.0) -> TimeLeft | None:
        return time_left(self.view, last_step=self.last, now=EPOCH + self.now + later)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(EPOCH + seconds, UTC).isoformat()


def middle(result: TimeLeft | None) -> float:
    assert result is not None and result.most_s / result.least_s < 1.51
    return pytest.approx((result.least_s + result.most_s) / 2)


def test_nothing_is_said_until_enough_is_known() -> None:
    story = Story().starts(1)
    assert story.left() is None
    story.then(Progressed(attempt=1, step=1), after=60.0).steps(2, 3)
    assert story.left() is None
    assert middle(story.steps(4).left()) == 960.0
    assert middle(story.left(later=4.0)) == 956.0
    slow = story.left(later=40.0)  # the step takes longer than any before
    assert middle(slow) == 950.0


def test_a_run_without_a_known_end_has_no_time_left() -> None:
    assert Story(last=None).starts(1).steps(1, 2, 3, 4, 5).left() is None


def test_a_job_that_stops_at_its_goal_ends_there_or_with_its_training() -> None:
    stop = Goal(steps=10, then=Then.STOP)
    story = Story(last=None, goal=stop).starts(1).steps(1, 2, 3, 4)
    assert middle(story.left()) == 60.0
    assert middle(Story(last=6, goal=stop).starts(1).steps(1, 2, 3, 4).left()) == 20.0
    ends = story.left()
    assert ends is not None and ends.until == "goal"
    story.then(StopRequested(attempt=1, by="goal"), after=60.0)
    assert story.left() is None
    goal = GoalReached(attempt=1, step=20, marginal=False, headroom=0.5)
    beyond = Story(goal=Goal(steps=20)).starts(1).steps(*range(1, 21)).then(goal, after=0.0)
    assert middle(beyond.left()) == 800.0


def test_the_first_run_of_a_search_ends_with_its_steps() -> None:
    story = Story(last=None, goal=Goal(steps=10), mode="search").starts(1)
    result = story.steps(1, 2, 3, 4).left()
    assert middle(result) == 60.0 and result is not None and result.until == "trials"
    story.then(Started(attempt=2, knobs=FAST, trial=0), after=0.0)
    assert story.left() is None


def test_a_relaunch_is_counted_with_what_it_repeats() -> None:
    story = Story().starts(1).then(Progressed(attempt=1, step=1), after=60.0)
    story.steps(*range(2, 31), saved=20)
    story.then(Ended(attempt=1, outcome=Crashed(exit_code=1), saved=20), after=20.0)
    story.then(Decided(attempt=1, not_before_s=30.0), after=0.0)
    between = story.left()
    least, most = seconds_of_more(79, [10.0] * 29, of=30)
    assert between is not None
    assert between.least_s == pytest.approx(30 + 60 * 0.75 + least * 0.9)
    assert between.most_s == pytest.approx(30 + 60 * 1.25 + most * 1.35)
    starting = story.then(Started(attempt=2, knobs=FAST, resume=True), after=30.0).left(later=20.0)
    assert starting == TimeLeft(least_s=pytest.approx(25 + least), most_s=pytest.approx(55 + most))
    assert story.left(later=80.0) is None  # no start took so long
    story.then(Progressed(attempt=2, step=21, resumed_from=20), after=60.0)
    assert middle(story.left()) == 790.0


def test_other_knobs_make_the_range_wide_until_they_are_measured() -> None:
    story = Story().starts(1).steps(*range(1, 12)).then(Ended(attempt=1, outcome=Crashed()), after=0.0)
    story.starts(2, SLOW).steps(1, attempt=2, each=30.0)
    least, most = seconds_of_more(99, [10.0] * 10, of=11)
    assert story.left() == TimeLeft(least_s=pytest.approx(least * 0.9), most_s=pytest.approx(most * 1.35))
    assert middle(story.steps(2, 3, 4, attempt=2, each=12.0).left()) == 96 * 12.0


def test_steps_towards_the_goal_count_anew_after_a_relaunch() -> None:
    story = Story(last=None, goal=Goal(steps=10, then=Then.STOP)).starts(1).steps(*range(1, 9))
    story.then(Ended(attempt=1, outcome=Crashed(), saved=5), after=0.0).starts(2, resume=True)
    assert middle(story.steps(6, 7, attempt=2).left()) == 80.0


def test_a_rehearsal_is_no_part_of_the_training() -> None:
    story = Story().then(Started(attempt=1, knobs=FAST, rehearsal=Part.WORST), after=0.0)
    story.steps(1, 2, 3, 4, 5, saved=2)
    assert story.left() is None
    story.then(Ended(attempt=1, outcome=Completed(), saved=5), after=1.0)
    assert story.left() is None
    story.starts(2).steps(1, 2, 3, 4, attempt=2)
    assert middle(story.left()) == 960.0


def test_what_cannot_resume_begins_anew() -> None:
    story = (
        Story(resumable=False)
        .starts(1)
        .steps(*range(1, 51))
        .then(Ended(attempt=1, outcome=Crashed()), after=0.0)
    )
    left = story.starts(2).left()
    assert middle(left) == 1000.0


def test_the_time_without_a_driver_and_a_set_clock_are_no_step_times() -> None:
    story = Story().starts(1).steps(1, 2, 3, 4, 5)
    story.then(Progressed(attempt=1, step=6), after=3600.0, driven=2.0)
    for number in range(7, 60):
        story.then(Progressed(attempt=1, step=number), after=0.001)
    assert middle(story.left()) == 410.0
    story.steps(60)
    assert middle(story.left()) == 400.0


def test_a_relaunch_that_is_expected_is_counted() -> None:
    story = Story().starts(1).steps(*range(1, 11), saved=10).steps(*range(11, 21), saved=20)
    ahead = Foreseen(
        attempt=1, cause=Cause.HOST_OOM, phase=Phase.NONE, seen_at=20, step=60, earliest=50, chance=0.99
    )
    assert middle(story.left()) == 800.0
    story.then(ahead, after=0.0)
    usual, repeated = (seconds_of_more(count, [10.0] * 19, of=20) for count in (80, 10))
    assert story.left() == TimeLeft(
        least_s=pytest.approx(usual[0] + 7.5),
        most_s=pytest.approx(usual[1] + 12.5 + repeated[1]),
    )
    story.then(replace(ahead, holds=False, step=None), after=0.0)
    assert middle(story.left()) == 800.0


def test_a_run_that_is_over_has_no_time_left() -> None:
    story = Story().starts(1).steps(*range(1, 50)).then(Finished(verdict=TrainingCompleted()), after=0.0)
    assert story.left() is None


def noisy(dice: random.Random) -> Iterator[float]:
    while True:
        yield dice.lognormvariate(3.0, 0.3)


def saving(dice: random.Random) -> Iterator[float]:
    while True:
        for place in range(10):
            yield dice.gauss(20.0, 1.0) + (30.0 if place == 9 else 0.0)


def lengthening(dice: random.Random) -> Iterator[float]:
    mean = 20.0
    while True:
        mean += 0.05
        yield dice.gauss(mean, 1.0)


@pytest.mark.parametrize("kind", [noisy, saving, lengthening])
def test_most_runs_end_within_the_range(kind: Callable[[random.Random], Iterator[float]]) -> None:
    dice = random.Random(7)
    within, widths = [], []
    for _ in range(60):
        course = kind(dice)
        took: Sequence[float] = [next(course) for _ in range(200)]
        for past in (30, 60, 100, 180):
            least, most = seconds_of_more(200 - past, took[max(0, past - 100) : past], of=past)
            rest = sum(took[past:])
            within.append(least <= rest <= most)
            widths.append((most - least) / rest)
    assert sum(within) / len(within) >= 0.75
    assert sorted(widths)[len(widths) // 2] < 0.35


def test_the_range_begins_no_earlier_than_with_half_the_shortest_step() -> None:
    least, most = seconds_of_more(1000, [1.0, 1.0, 100.0])
    assert 1000 * 1.0 / 2 == least < most
