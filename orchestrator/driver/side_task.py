"""Background work of a run, such as notifications, that never delays or fails the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Journal
from autotune.policies.explain.secrets import one_line
from autotune.policies.values.events import Event
from autotune.policies.values.job import Job

LIMIT_S = 30.0  # for all background work at the end of a driver
HURRIED_S = 3.0  # the same after SIGTERM: Slurm and Kubernetes kill 30 s later
_POLL_S = 0.05
_LONGEST = 300  # characters of an error


class SideTask:
    """One kind of background work in its own threads; the driver's thread calls these methods."""

    label = ""  # prefix of its warnings

    def __init__(
        self, run: directory.RunFolder, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        """Create background work of `run`; `warn` is called once per fault."""
        self.run, self.say, self.warn = run, say, warn
        self.journal: Journal | None = None
        self._warned: set[str] = set()

    def begin(self, job: Job) -> None:
        """Begin to work for a job, first on what a dead driver left undone."""

    def take(self, event: Event) -> None:
        """Begin the work that a row of the journal requires, and report finished work."""

    def failed(self, reason: str) -> None:
        """Begin the work that is required when the driver ends before the run."""

    @property
    def pending(self) -> bool:
        """Whether work is pending."""
        return False

    def settle(self) -> None:
        """Report the results of all work at the end of the driver; pending work is dropped."""

    # ------------------------------------------------------------------ faults

    def guarded(self, call: Callable[[], None]) -> None:
        """Run something whose errors must not fail the run."""
        try:
            call()
        except Failure as failure:
            self.fault(failure.message)
        except Exception as error:
            self.fault(f"{type(error).__name__}: {error}")

    def fault(self, text: str) -> None:
        """Warn of a fault of the work as a whole."""
        self.warn_once(text, f"{self.label}: {one_line(text, longest=_LONGEST)}")

    def warn_once(self, key: str, text: str) -> None:
        """Warn once per key."""
        if key not in self._warned:
            self._warned.add(key)
            self.warn(f"{text}; the run is unaffected")

    @property
    def has_warned(self) -> bool:
        """Whether there was a warning."""
        return bool(self._warned)


class SideTasks:
    """All background work of a run while its driver runs."""

    def __init__(self, *tasks: SideTask) -> None:
        self._tasks = tasks

    @contextmanager
    def at_work(self, journal: Journal) -> Iterator[None]:
        """Work from the first row to the last; also after an error, about which a person is notified."""
        for task in self._tasks:
            task.journal = journal
        try:
            yield
        except Failure as failure:
            if failure.code is ExitCode.INFRASTRUCTURE:
                self._fail(failure.message)
            raise
        except Exception as error:
            self._fail(f"autotune failed: {type(error).__name__}: {error}")
            raise

    @contextmanager
    def outlasting(self, interrupts: Interrupts) -> Iterator[None]:
        """Wait for pending work at the end, once the journal is closed and unlocked."""
        try:
            yield
        finally:
            self._wait(interrupts)

    def begin(self, job: Job) -> None:
        """Work for a job from now on."""
        for task in self._tasks:
            task.guarded(partial(task.begin, job))

    def after(self, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return a function that is called with each row: `tell`, then every task."""

        def take(event: Event) -> None:
            tell(event)
            for task in self._tasks:
                task.guarded(partial(task.take, event))

        return take

    def _fail(self, reason: str) -> None:
        for task in self._tasks:
            task.guarded(partial(task.failed, reason))

    def _wait(self, interrupts: Interrupts) -> None:
        """Wait for pending work, within one limit for all, and report it."""
        begun = time.monotonic()
        while any(task.pending for task in self._tasks):
            limit_s = HURRIED_S if interrupts.by else LIMIT_S
            if interrupts.impatient or time.monotonic() - begun >= limit_s:
                break
            time.sleep(_POLL_S)
        for task in self._tasks:
            task.guarded(task.settle)
