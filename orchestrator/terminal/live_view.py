"""What the live view shows of attempts in addition to progress: titles, step times, and how long is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.launchers import frameworks
from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.live_region import Line, heartbeat, live_lines, many_running, trial_lines
from autotune.orchestrator.units import show_rate
from autotune.policies.forecast import time_left
from autotune.policies.forecast.time_left import Course, TimeLeft
from autotune.policies.values.events import (
    Accepted,
    Event,
    GoalReached,
    History,
    Progressed,
    Started,
    Tried,
)
from autotune.policies.values.job import Job


@dataclass
class Shown:
    """An attempt as it is shown."""

    title: str = ""
    started_at: float = 0.0  # Unix seconds
    goal: GoalReached | None = None
    last: Progressed | None = None


class LiveView:
    """The running attempts of one run."""

    def __init__(self) -> None:
        self._attempts: dict[int, Shown] = {}
        self._results: list[Tried] = []
        self._course: Course | None = None
        self._accepted_at = 0.0

    def take(self, event: Event) -> None:
        """Take note of an event."""
        match event:
            case Accepted():
                self._accepted_at = seconds_of(event.at)
            case Started():
                self.attempt(event.attempt).started_at = seconds_of(event.at)
            case GoalReached():
                self.attempt(event.attempt).goal = event
            case Progressed():
                self.attempt(event.attempt).last = event
            case Tried():
                self._results.append(event)
            case _:
                pass
        try:
            self._course = self._follow(event)
        except Exception:  # the event itself is still to be printed
            self._course = None

    def _follow(self, event: Event) -> Course | None:
        if isinstance(event, Accepted):
            return time_left.begin(event, last_step=_last_step)
        return self._course and time_left.follow(self._course, event, last_step=_last_step)

    def attempt(self, number: int) -> Shown:
        """Return what is shown of an attempt."""
        return self._attempts.setdefault(number, Shown())

    def left(self, *, now: float) -> str:
        """Return `9m to 11m left` or, of a search, `at most 2h 05m left`; empty while too little is known."""
        found = self.time_left(now=now)
        return messages.time_left(found) if found is not None else ""

    def time_left(self, *, now: float) -> TimeLeft | None:
        """Return how long the run still takes at `now`, in Unix seconds, if that is known."""
        if self._course is None:
            return None
        if self._course.search and (self._results or self._trials):
            from autotune.policies.search.time_left import time_left as of_search

            return of_search(self._course, self._results, now=now)
        return time_left.time_left(self._course, now=now)

    def step_seconds(self) -> tuple[float, ...]:
        """Return the latest step times of the attempt that runs, without its first; empty of several."""
        legs = self._course.legs if self._course is not None else ()
        return legs[0].step_s if len(legs) == 1 else ()

    def lines(self, running: Mapping[int, Progress], *, now: float, width: int) -> list[Line]:
        """Return at most six lines on the attempts that run, by number."""
        if len(running) == 1:
            ((number, progress),) = running.items()
            shown = self.attempt(number)
            return live_lines(
                progress,
                title=self._title(number),
                seconds=now - shown.started_at,
                goal=shown.goal,
                width=width,
                step_s=self._step_s(number),
                left=self.left(now=now),
                budget=self._budget(),
            )
        rows = [
            (self._title(number), progress, now - self.attempt(number).started_at, self._step_s(number))
            for number, progress in running.items()
        ]
        head = "   ".join(part for part in (self._budget(), self._best(), self.left(now=now)) if part)
        return trial_lines(rows, head=head, seconds=now - self._accepted_at, width=width)

    def heartbeat(self, running: Mapping[int, Progress], *, now: float) -> str:
        """Return a line on attempts that continue and their progress."""
        left = self.left(now=now)
        if len(running) == 1:
            ((number, progress),) = running.items()
            return heartbeat(progress, seconds=now - self.attempt(number).started_at, left=left)
        return many_running(running, budget=self._budget(), left=left)

    @property
    def _trials(self) -> bool:
        return self._course is not None and any(leg.trial is not None for leg in self._course.legs)

    def _title(self, number: int) -> str:
        legs = self._course.legs if self._course is not None else ()
        trial = next((leg.trial for leg in legs if leg.attempt == number), None)
        name = f"#{number}" if trial is None else f"#{number} trial {trial}"
        return f"{name}  {self.attempt(number).title}"

    def _step_s(self, number: int) -> tuple[float, ...]:
        legs = self._course.legs if self._course is not None else ()
        return next((leg.step_s for leg in legs if leg.attempt == number), ())

    def _budget(self) -> str:
        """Return `7 of 40 trials` of a search, once one is over."""
        if self._course is None or not self._results:
            return ""
        from autotune.policies.search.schedule import count

        return f"{count(self._results)} of {self._course.job.search.trials} trials"

    def _best(self) -> str:
        if not self._results:
            return ""
        from autotune.policies.search.trials import fastest

        best = fastest(self._results)
        return "" if best is None else f"best {show_rate(best.rate, best.unit)} (trial {best.trial})"


def view_of(history: History) -> LiveView:
    """Return the view of a run as its journal tells it."""
    view = LiveView()
    for event in history:
        view.take(event)
    return view


def _last_step(job: Job) -> int | None:
    """Return the step that completes the training, where the job's settings name it."""
    adapter = frameworks.FRAMEWORKS.get(job.framework)
    return adapter.last_step(job) if adapter is not None else None
