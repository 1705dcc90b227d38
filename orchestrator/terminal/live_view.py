"""What the live view shows of attempts in addition to progress: titles, step times, and how long is left."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.launchers import frameworks
from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.live_region import Line, heartbeat, live_lines, many_running, trial_lines
from autotune.orchestrator.units import show_rate
from autotune.policies.forecast import time_left
from autotune.policies.forecast.time_left import Course, TimeLeft
from autotune.policies.values.events import Accepted, Event
from autotune.policies.values.job import Job
from autotune.policies.values.run.view import RunView


class LiveView:
    """The running attempts of one run."""

    def __init__(self) -> None:
        self.run = RunView()  # what of a run any view shows
        self._titles: dict[int, str] = {}  # of attempts
        self._course: Course | None = None

    def take(self, event: Event) -> None:
        """Update the view with the next event of the history."""
        self.run.take(event)
        try:
            self._course = self._follow(event)
        except Exception:  # the event itself is still to be printed
            self._course = None

    def name(self, number: int, title: str) -> None:
        """Set the title of an attempt."""
        self._titles[number] = title

    def title(self, number: int) -> str:
        """Return the title of an attempt."""
        return self._titles.get(number, "")

    def _seconds(self, number: int, *, now: float) -> float:
        attempt = self.run.attempts.get(number)
        return now - (seconds_of(attempt.started.at) if attempt is not None else 0.0)

    def _follow(self, event: Event) -> Course | None:
        if isinstance(event, Accepted):
            return time_left.begin(event, last_step=_last_step)
        return self._course and time_left.follow(self._course, event, last_step=_last_step)

    def left(self, *, now: float) -> str:
        """Return `9m to 11m left` or, of a search, `at most 2h 05m left`; empty while too little is known."""
        result = self.time_left(now=now)
        return messages.time_left(result) if result is not None else ""

    def time_left(self, *, now: float) -> TimeLeft | None:
        """Return how long the run still takes at `now`, in Unix seconds, if that is known."""
        if self._course is None:
            return None
        if self._course.search and (self.run.tried or self._trials):
            from autotune.policies.search.time_left import time_left as of_search

            return of_search(self._course, self.run.tried, now=now)
        return time_left.time_left(self._course, now=now)

    def step_seconds(self) -> tuple[float, ...]:
        """Return the latest step times of the attempt that runs, without its first; empty of several."""
        legs = self._course.legs if self._course is not None else ()
        return legs[0].step_s if len(legs) == 1 else ()

    def lines(self, running: Mapping[int, Progress], *, now: float, width: int) -> list[Line]:
        """Return at most six lines on the attempts that run, by number."""
        if len(running) == 1:
            ((number, progress),) = running.items()
            attempt = self.run.attempts.get(number)
            return live_lines(
                progress,
                title=self._title(number),
                seconds=self._seconds(number, now=now),
                goal=attempt.goal if attempt is not None else None,
                width=width,
                step_s=self._step_s(number),
                left=self.left(now=now),
                budget=self._budget(),
            )
        rows = [
            (self._title(number), progress, self._seconds(number, now=now))
            for number, progress in running.items()
        ]
        accepted_at = seconds_of(self.run.first.at) if self.run.first is not None else 0.0
        head = "   ".join(part for part in (self._budget(), self._best(), self.left(now=now)) if part)
        return trial_lines(rows, head=head, seconds=now - accepted_at, width=width)

    def heartbeat(self, running: Mapping[int, Progress], *, now: float) -> str:
        """Return a line on attempts that continue and their progress."""
        left = self.left(now=now)
        if len(running) == 1:
            ((number, progress),) = running.items()
            return heartbeat(progress, seconds=self._seconds(number, now=now), left=left)
        return many_running(running, budget=self._budget(), left=left)

    @property
    def _trials(self) -> bool:
        return self._course is not None and any(leg.trial is not None for leg in self._course.legs)

    def _title(self, number: int) -> str:
        legs = self._course.legs if self._course is not None else ()
        trial = next((leg.trial for leg in legs if leg.attempt == number), None)
        name = f"#{number}" if trial is None else f"#{number} trial {trial}"
        return f"{name}  {self.title(number)}"

    def _step_s(self, number: int) -> tuple[float, ...]:
        legs = self._course.legs if self._course is not None else ()
        return next((leg.step_s for leg in legs if leg.attempt == number), ())

    def _budget(self) -> str:
        """Return `7 of 40 trials` of a search, once one is over."""
        if self._course is None or not self.run.tried:
            return ""
        from autotune.policies.search.schedule import count

        return f"{count(self.run.tried)} of {self._course.job.search.trials} trials"

    def _best(self) -> str:
        if not self.run.tried:
            return ""
        from autotune.policies.search.trials import fastest

        best = fastest(self.run.tried)
        return "" if best is None else f"best {show_rate(best.rate, best.unit)} (trial {best.trial})"


def _last_step(job: Job) -> int | None:
    """Return the step that completes the training, where the job's settings name it."""
    adapter = frameworks.FRAMEWORKS.get(job.framework)
    return adapter.last_step(job) if adapter is not None else None
