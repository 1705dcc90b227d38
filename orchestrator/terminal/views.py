"""Output and files of a run in addition to its journal. A failing view never ends a run."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TextIO

from autotune.orchestrator.driver.context import Observer
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.errors import Failure, reason_of
from autotune.orchestrator.metrics import Metrics
from autotune.orchestrator.run.driver_log import DriverLog
from autotune.orchestrator.run.journal import encode
from autotune.orchestrator.terminal import standard_streams
from autotune.orchestrator.terminal.console import Console
from autotune.policies.values.events import CuredInPlace, Event, Finished, GoalReached, History

_STDOUT, _STDERR = 1, 2


class Views(Observer):
    """The console, the events on stdout and the files of one run."""

    def __init__(
        self,
        console: Console,
        log: DriverLog,
        *,
        as_json: bool = False,
        exported: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """Show events on `console`, and as JSON on stdout; `exported` writes the files of the stable job."""
        self.console, self.log = console, log
        self._json, self._exported = as_json, exported
        self._metrics = Metrics()
        self._noted: set[str] = set()
        self._hung_up = False

    # ------------------------------------------------------------------ what happens

    def tell(self, event: Event) -> None:
        """Show a recorded event."""
        if self._json:
            self._print_json(event)
        self._show(lambda: self.console.print_event(event))
        self.write_view("metrics", lambda: self._metrics.take(event))
        if isinstance(event, CuredInPlace | GoalReached):  # a cure may come after the goal
            self.export()

    def replay(self, events: History) -> None:
        """Process the events of an earlier driver without showing them."""
        self._show(lambda: self.console.replay(events))
        for event in events:
            self._metrics.note(event)

    def watch(self, running: Mapping[int, Progress], *, now: float) -> None:
        """Show the progress of the running attempts, by number."""
        self._show(lambda: self.console.watch(running, now=now))
        self.write_view("metrics", self._metrics.settle)

    def say(self, text: str) -> None:
        """Show a message."""
        self._show(lambda: self.console.say(text))

    def warn(self, text: str) -> None:
        """Show a warning, even with --quiet, and write it to driver.log."""
        if not self.log.is_stream(_STDERR):
            self.log.note(text)
        self._show(lambda: self.console.warn(text))

    def show_end(self, finished: Finished) -> None:
        """Show again the end of a finished run."""
        self._show(lambda: self.console.print_event(finished))

    def hint(self, text: str) -> None:
        """Show what the user can do, even with --quiet."""
        self._show(lambda: self.console.hint(text))

    def summary(self, rows: list[tuple[str, str, str]], *, stable: str) -> None:
        """Show the changes from the user's job."""
        self._show(lambda: self.console.summary(rows, stable=stable))

    def close(self) -> None:
        """Remove the live region."""
        self._show(self.console.close)

    # ------------------------------------------------------------------ what is written

    def export(self) -> None:
        """Write the stable configuration and its certificate."""
        for name, write in self._exported.items():
            self.write_view(name, write)

    def write_view(self, name: str, write: Callable[[], None]) -> None:
        """Write a file of the run that can be recreated from its journal; failures are only noted."""
        try:
            write()
        except Failure as failure:
            self._note(name, failure.message)
        except Exception as error:
            self._note(name, f"cannot write {name}: {_words(error)}", error)

    def print_line(self, text: str) -> None:
        """Print a line of the result on stdout."""
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            _check(sys.stdout)
        except (OSError, ValueError) as error:
            self._lose_stdout(error)

    # ------------------------------------------------------------------ what fails

    def hang_up(self) -> None:
        """Continue without the terminal and print to driver.log; safe in a signal handler."""
        self._hung_up = True
        self.log.take_over(_STDOUT, _STDERR)

    def _show(self, call: Callable[[], None]) -> None:
        try:
            if self._hung_up:
                self._hung_up = False
                self.console.leave_terminal()
                self._note("terminal", "terminal disconnected; the run continues")
            call()
            _check(self.console.stream)
        except OSError as error:
            self.log.take_over(_STDERR)
            self._note("console", f"cannot print: {_words(error)}; the run continues", error)
            with contextlib.suppress(Exception):
                self.console.leave_terminal()
        except Exception as error:
            self._note("console", f"cannot print: {_words(error)}; the run continues", error)

    def _print_json(self, event: Event) -> None:
        try:
            sys.stdout.buffer.write(encode(event) + b"\n")
            sys.stdout.buffer.flush()
            _check(sys.stdout)
        except (OSError, ValueError) as error:
            self._lose_stdout(error)

    def _lose_stdout(self, error: Exception) -> None:
        """Stop printing on stdout after an error."""
        self._json = False
        self._note("stdout", f"cannot write to stdout: {_words(error)}; the run continues without it")

    def _note(self, view: str, text: str, error: Exception | None = None) -> None:
        """Note once per view that it failed: in driver.log, and on stderr if possible."""
        if view in self._noted:
            return
        self._noted.add(view)
        if error is not None:
            self.log.note("".join(traceback.format_exception(error)).rstrip())
        if not self.log.is_stream(_STDERR):
            self.log.note(text)
        with contextlib.suppress(Exception):
            self.console.warn(text)


def _check(stream: TextIO) -> None:
    """Raise the error after which a stream discards output."""
    if (error := standard_streams.failure(stream)) is not None:
        raise error


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return reason_of(error)
    return f"{type(error).__name__}: {error}"
