"""Annotates attempts during a run, in a thread and processes of its own: the run never waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator.annotate.annotation import Annotation, annotation, ended, markdown
from autotune.orchestrator.annotate.child import Child, absent, environment, here, lacks, pythons
from autotune.orchestrator.annotate.tracker_runs import places
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.config import secrets
from autotune.orchestrator.driver.side_task import SideTask
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.script import command_of
from autotune.policies.explain.secrets import is_secret_variable, one_line
from autotune.policies.values.events import Decided, Event, Finished, History, Interrupted, Started
from autotune.policies.values.job import Job, Tracker
from autotune.policies.values.run.view import RunView

_LONGEST = 300  # characters of what a library says
_UNKNOWN = "cannot identify the tracker run: neither the log nor the job names it"


class _Attempt(NamedTuple):
    """An attempt that is over, and what is known of it."""

    number: int
    job: Job
    history: History


class _News(NamedTuple):
    """What became of an attempt in a tracker."""

    tracker: Tracker
    number: int  # of the attempt; 0: before the first
    where: str = ""
    nothing: str = ""  # why there is nothing to annotate, such as an attempt that failed before its tracker
    error: str = ""


class Annotator(SideTask):
    """Annotates the attempts of one run."""

    label = "annotate"

    def __init__(
        self, run: directory.RunFolder, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        """Annotate attempts of `run`; `warn` is called once per tracker that does not work."""
        super().__init__(run, say=say, warn=warn)
        self._job: Job | None = None
        self._begun: set[int] = set()
        self._child = Child()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[_News | str] = queue.SimpleQueue()
        self._given = self._done = 0  # tasks
        self._worker: threading.Thread | None = None
        self._sought = False  # whether an attempt was to be annotated
        self._written: set[Tracker] = set()
        self._nothing: dict[Tracker, str] = {}

    # ------------------------------------------------------------------ in the driver's thread

    def begin(self, job: Job) -> None:
        """Annotate in the trackers of a job from now on, first what a driver before may have left."""
        if job.annotate == "none" or self.journal is None:
            return
        self._job = job
        view = self.journal.view
        over = [attempt.number for attempt in ended(view)]
        whole = view.verdict is not None and not isinstance(view.verdict, Interrupted)
        self._begun = set(over if whole else over[:-1])
        if job.annotate != "auto":
            self._give(partial(self._check, job))
        self._annotate(job)

    def take(self, event: Event) -> None:
        """Annotate what has ended once what follows it is known, and report what was written."""
        if self._job is None:
            return
        self._report()
        if isinstance(event, Decided | Started | Finished):
            self._annotate(self._job)

    @property
    def pending(self) -> bool:
        """Whether something is not written yet."""
        return self._done < self._given

    def settle(self) -> None:
        """Report what became of every attempt."""
        if self._job is None:
            return
        if self.pending:
            self.fault("some annotations were still pending at the end of the run and were dropped")
        self._child.close()
        self._report()
        if (
            self._job.annotate == "auto"
            and self._sought
            and not (self._written or self._nothing or self.has_warned)
        ):
            self.fault(f"no tracker was found: {_UNKNOWN}")
        for tracker, reason in self._nothing.items():
            if tracker not in self._written:
                self._tell(tracker, f"nothing was annotated: {reason}")

    def _annotate(self, job: Job) -> None:
        """Give what has ended to the worker."""
        assert self.journal is not None
        for attempt in ended(self.journal.view):
            if attempt.number not in self._begun:
                self._begun.add(attempt.number)
                self._sought = True
                self._give(partial(self._write, _Attempt(attempt.number, job, self.journal.history())))

    def _give(self, task: Callable[[], None]) -> None:
        self._given += 1
        self._tasks.put(task)
        if self._worker is None:
            # A daemon: one that hangs does not keep the driver's process alive.
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()

    def _report(self) -> None:
        """Report what the worker has done since the last call."""
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, str):
                self.fault(news)
            elif news.where:
                self._written.add(news.tracker)
                self.say(f"annotated attempt #{news.number} in {news.tracker}: {news.where}")
            elif news.nothing:
                self._nothing[news.tracker] = news.nothing
            else:
                what = f"attempt #{news.number} was not annotated" if news.number else "cannot annotate"
                self._tell(news.tracker, f"{what}: {news.error}")

    def _tell(self, tracker: Tracker, words: str) -> None:
        self.warn_once(tracker, f"annotate.{tracker}: {words}")

    # ------------------------------------------------------------------ in the worker's thread

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except Exception as error:
                self._news.put(f"{type(error).__name__}: {error}")
            self._done += 1

    def _check(self, job: Job) -> None:
        for tracker, words in absent(job, _named(job), self._child):
            self._news.put(_News(tracker, 0, error=words))

    def _write(self, attempt: _Attempt) -> None:
        """Write an attempt, and those before it, into every tracker that has its run."""
        number, job, history = attempt
        view = RunView(history)  # as of now; the journal's own grows in the driver's thread
        start = view.attempts[number].started
        over = [attempt.number for attempt in ended(view) if attempt.number <= number]
        documents = [annotation(self.run, view, each) for each in over]
        framework = frameworks.find(job.framework)
        command = command_of(
            framework,
            job,
            start.knobs,
            history=history,
            run=self.run.id,
            attempt=number,
            resume=start.resume,
        )
        variables = {**job.env, **command.env}
        exact, vague = places(
            self.run.attempt(number).log,
            framework.tracked(job, run=self.run.id),
            variables,
            folder=job.workdir,
        )
        named = _named(job)
        for tracker in vague if job.annotate == "auto" else (each for each in named if each not in exact):
            self._news.put(_News(tracker, number, nothing=_UNKNOWN))
        asked: dict[str, Any] = {"run": self.run.id, "attempts": [_masked(each, job) for each in documents]}
        known: dict[str, Any] = {
            "since": seconds_of(start.at),
            "until": seconds_of(documents[-1].ended),
            "scratch": str(Path(self.run.path, "annotations").absolute()),
        }
        for tracker, place in exact.items():
            if tracker in named:
                whole = {**asked, "tracker": tracker, "place": {**place, **known}}
                self._news.put(self._ask(attempt, tracker, whole, variables))

    def _ask(
        self, attempt: _Attempt, tracker: Tracker, asked: Mapping[str, Any], variables: Mapping[str, str]
    ) -> _News:
        job, env = attempt.job, environment(variables)
        answer = self._child.ask(pythons(job), asked, cwd=here(job), env=env)
        if "missing" in answer:
            return _News(tracker, attempt.number, error=lacks(job, answer["missing"]))
        words = {
            kind: one_line(_hidden(answer.get(kind, ""), job, env), longest=_LONGEST)
            for kind in ("where", "nothing", "error")
        }
        return _News(tracker, attempt.number, **words)


def _named(job: Job) -> tuple[Tracker, ...]:
    """Return the trackers in which a job may be annotated."""
    return tuple(Tracker) if isinstance(job.annotate, str) else job.annotate


def _masked(document: Annotation, job: Job) -> dict[str, Any]:
    """Return an attempt as the writer takes it, without any secret of the job."""
    values = {
        "attempt": document.attempt,
        "failed": document.failed,
        "text": document.text,
        "markdown": markdown(document),
        "document": msgspec.to_builtins(document),
    }
    masked: dict[str, Any] = _without(values, tuple(secrets.values_of(job)))
    return masked


def _hidden(text: str, job: Job, env: Mapping[str, str]) -> str:
    """Return a library's output without values that only its environment holds."""
    known = [value for name, value in env.items() if is_secret_variable(name) and len(value) >= _SHORTEST]
    return str(_without(text, (*secrets.values_of(job), *sorted(known, key=len, reverse=True))))


_SHORTEST = 4  # characters of a secret; a shorter text is part of everything


def _without(value: Any, hidden: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, dict):
        return {name: _without(each, hidden) for name, each in value.items()}
    return [_without(each, hidden) for each in value] if isinstance(value, list | tuple) else value
