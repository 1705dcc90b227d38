"""Print events: a live region and permanent lines on a terminal, one line per event elsewhere."""

from __future__ import annotations

import os
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, assert_never

from rich.console import Group
from rich.live import Live
from rich.text import Text

from autotune.orchestrator import messages
from autotune.orchestrator.calls import call
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.cluster_fit import without_gpus
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.run_states import display_of
from autotune.orchestrator.terminal.live_view import LiveView, goal_style, terminal
from autotune.orchestrator.terminal.widgets import (
    PIPED_WIDTH,
    ascii_text,
    rendered,
    supports_unicode,
    table,
    truncated,
    two_ends,
    wants_color,
    wrapped,
)
from autotune.orchestrator.units import show_duration, show_gpu_time
from autotune.policies.recovery.worst_case import cautions
from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Decided,
    Diagnosed,
    Edited,
    Ended,
    Event,
    FailureSeen,
    Finished,
    Foreseen,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Rehearsed,
    Result,
    Stable,
    Started,
    StopRequested,
    TrainingCompleted,
    Tried,
)
from autotune.policies.values.history import fold
from autotune.policies.values.job import Forecasting
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Lost
from autotune.policies.values.remedy import Remedy

_HEARTBEAT_S = 60.0
_STEP_LINES_S = 10.0
_TONES = {"good": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}  # mark and style


class Console:
    """Prints the events of one run on a stream; with `quiet`, only how the run failed."""

    def __init__(
        self,
        stream: TextIO,
        *,
        runs_dir: Path,
        color: str = "auto",
        quiet: bool = False,
        verbose: bool = False,
        width: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.stream = stream
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb" and not quiet
        self._ascii = not supports_unicode(stream)
        colored = wants_color(color, stream)
        self._terminal = terminal(
            stream,
            live=self._is_live,
            colored=colored,
            width=width or (None if stream.isatty() else PIPED_WIDTH),
        )
        self._runs_dir, self._quiet, self._verbose, self._now = runs_dir, quiet, verbose, now
        self._silent = False
        self._live: Live | None = None
        self._attempt = 0  # the attempt that a line is about; 0: none
        self._view = LiveView()
        self._run = self._view.run
        self._printed_at = self._step_printed_at = 0.0
        self._lacks = ""  # why the cluster cannot train the job

    def replay(self, events: tuple[Event, ...]) -> None:
        """Process the events of an earlier driver without printing them."""
        self._silent = True
        for event in events:
            self.print_event(event)
        self._silent = False

    def print_event(self, event: Event) -> None:  # noqa: C901 - one branch per kind of event
        """Print an event."""
        self._attempt = event.attempt or self._run.last_number
        self._run.take(event)
        match event:
            case Accepted():
                self._accepted(event)
            case Started():
                self._started(event)
            case Progressed():
                self._progressed(event)
            case FailureSeen():
                self._dated(f"failure detected: {messages.failure_line(event.finding)}")
            case Foreseen():
                self._foreseen(event)
            case CuredInPlace():
                self._point(Text(f"! {messages.cured(event)}", style="yellow"))
            case GoalReached():
                self._dated(messages.goal(event), style=goal_style(event))
            case StopRequested():
                reason = f": {event.reason}" if event.reason and event.by != "failure" else ""
                self._dated(f"stopping{reason}")
                if self._is_live and event.by == "user":
                    self._line(Text(f"^C  stopping attempt #{event.attempt} …", style="yellow"))
            case Ended():
                self._ended(event)
            case Diagnosed():
                self._diagnosed(event)
            case Decided():
                self._decided(event)
            case Edited():
                self._point(Text(f"edited: {messages.edits(event)}"))
            case Tried():
                self._tried(event)
            case Finished():
                self._finished(event)
            case _:
                assert_never(event)

    def say(self, text: str) -> None:
        """Print a message."""
        self._line(Text(text))

    def watch(self, running: Mapping[int, Progress], *, now: float) -> None:
        """Show the progress of attempts by number: in the live region, or as one line per minute."""
        if self._quiet or self._silent:
            return
        if self._is_live:
            if self._live is None:
                self._live = Live(console=self._terminal, auto_refresh=False, transient=True)
                self._live.start()
            lines = self._view.lines(running, now=now, width=self._terminal.width)
            self._live.update(Group(*map(self._cut, lines)), refresh=True)
        elif now - self._printed_at >= _HEARTBEAT_S:
            self._attempt = next(iter(running)) if len(running) == 1 else 0
            self._dated(self._view.heartbeat(running, now=now))

    def warn(self, text: str) -> None:
        """Print a warning, even with --quiet."""
        self._line(Text(f"warning: {text}", style="yellow"), error=True)

    def hint(self, text: str) -> None:
        """Print what the user can do, even with --quiet."""
        self._line(Text(f"hint: {text}"), error=True)

    def close(self) -> None:
        """Remove the live region."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def leave_terminal(self) -> None:
        """Print plain lines from now on, because the stream is no longer a terminal."""
        live, self._live, self._is_live = self._live, None, False
        self._terminal = terminal(self._terminal.file, live=False, colored=False, width=PIPED_WIDTH)
        if live is not None:
            live.stop()

    @property
    def _first(self) -> Knobs | None:
        """The knobs of the user's job, with later edits."""
        return self._run.accepted.profile.knobs if self._run.accepted is not None else None

    @property
    def _folder(self) -> Path:
        """The folder of the run."""
        return self._runs_dir / (self._run.first.run if self._run.first is not None else "")

    # ------------------------------------------------------------------ events

    def _accepted(self, event: Accepted) -> None:
        prints = not (self._silent or self._quiet)
        unlikely = cautions(fold((event,)), event.profile.knobs) if prints else ()
        self._lacks = without_gpus(event.job, event.cluster)
        for warning in filter(None, (*event.profile.warnings, *unlikely, self._lacks)):
            self._line(Text(f"warning: {warning}", style="yellow"))
        self._line(
            Text.assemble(
                "run ",
                (event.run, "bold"),
                f" · {event.job.name} · {event.job.framework} on ray · {messages.cluster(event.cluster)}\n",
            )
        )

    def _started(self, event: Started) -> None:
        title = messages.attempt(event, before=self._run.attempts[event.attempt].before, first=self._first)
        self._view.name(event.attempt, title)
        # A job with `resume` has a checkpoint from the start; any other only after a step.
        resumes = event.resume and event.trains and (self._run.step is not None or event.attempt == 1)
        self._dated(f"started: {title}" + (", resuming from the last checkpoint" if resumes else ""))

    def _progressed(self, event: Progressed) -> None:
        due = self._verbose or self._now() - self._step_printed_at >= _STEP_LINES_S
        if due or event.resumed_from is not None:
            self._step_printed_at = self._now()
            resumed = "" if event.resumed_from is None else f" (resumed after step {event.resumed_from})"
            took = "" if event.seconds is None else f" in {show_duration(event.seconds)}"
            left = self._view.left(now=seconds_of(event.at))
            step = f"step {messages.step_of(event.step, event.of)}{took}{messages.speed(event)}{resumed}"
            self._dated(f"{step}, {left}" if left else step)

    def _ended(self, event: Ended) -> None:
        self.close()
        attempt = self._run.attempts.get(event.attempt)
        rehearsal = attempt is not None and attempt.started.rehearsal is not None
        outcome = messages.outcome(event.outcome, rehearsal=rehearsal)
        last = "" if event.step is None else f", last step {event.step}"
        took = messages.lasted(event.seconds, at_least=event.unwatched)
        if not self._is_live:
            self._dated(f"{outcome}{last} ({took})")
        else:
            title = f"#{event.attempt}  {self._view.title(event.attempt)}"
            goal, step = (None, None) if attempt is None else (attempt.goal, attempt.last)
            self._line(two_ends(title, took, width=self._terminal.width))
            if goal is not None:
                self._line(Text(f"    {messages.goal(goal)}", style=goal_style(goal)))
            if isinstance(event.outcome, Completed):
                self._line(Text(f"    ✓ {outcome}{last}{messages.speed(step)}", style="green"))
            elif isinstance(event.outcome, Lost):
                self._line(Text(f"    ! {outcome}{last}", style="yellow"))
            elif isinstance(event.outcome, Cancelled) and event.outcome.by == "user":
                stop = "" if event.stop_s is None else f" in {show_duration(event.stop_s)}"
                self._line(Text(f"    {outcome}{stop}{last}", style="dim"))
        if event.held:
            self._point(Text(f"✗ memory was not released: {event.held}", style="red"))

    def _foreseen(self, event: Foreseen) -> None:
        mark, style = ("!", "yellow") if event.holds else ("–", "")
        self._point(Text(f"{mark} forecast: {messages.forecast(event)}", style=style))
        figures = messages.forecast_figures(event)
        if figures:
            self._detail(figures)
        accepted = self._run.accepted
        if accepted is None or not accepted.profile.resumable:  # no checkpoint helps
            return
        if event.holds and not event.upper_bound and accepted.job.recovery.forecast is Forecasting.TELL:
            self._detail(
                "hint: `recovery: {forecast: act}` applies a remedy at the last checkpoint before it"
            )

    def _diagnosed(self, event: Diagnosed) -> None:
        line = event.evidence[0].line if event.evidence else None
        log = self._log(event.attempt, line)
        self._point(Text.assemble((f"✗ {messages.diagnosis(event)}", "red"), "   ", (log, "cyan")))
        text = event.evidence[0].text.strip()[:160] if event.evidence else ""
        if detail := messages.figures(event.facts) or text:
            self._detail(detail)
        if self._verbose and event.evidence:
            self._detail("\n".join(f"line {line.line}: {line.text.strip()}" for line in event.evidence))

    def _decided(self, event: Decided) -> None:
        if event.remedy is not None:
            present = self._run.knobs
            changes = messages.setting_changes(present, event.remedy.apply(present))
            self._point(Text.assemble((f"→ {event.remedy.name}", "bold"), f"   {changes}"))
            self._detail(messages.why(event.remedy, whole=self._verbose))
        else:
            wait = f", in {show_duration(event.not_before_s)}" if event.not_before_s else ""
            self._point(Text(f"→ {event.reason}{wait}"))
        if self._is_live:
            self._line(Text(""))

    def _tried(self, event: Tried) -> None:
        self.close()
        good = event.result is Result.FITS
        mark = "✓" if good else "–" if event.result in (Result.GATED, Result.SLOW) else "✗"
        result = messages.trial(event, before=self._first)
        self._line(Text(f"{mark} trial {event.trial}  {result}", style="green" if good else ""))

    def _finished(self, event: Finished) -> None:
        self.close()
        run, first = self._run, self._run.first
        seconds = max(0.0, seconds_of(event.at) - (seconds_of(first.at) if first is not None else 0.0))
        gpus = first.cluster.gpus if first is not None else 0
        text = messages.verdict(event.verdict, attempts=run.last_number, seconds=seconds, tried=run.tried)
        self._line(Text(""))
        mark, style = _TONES[display_of(event.verdict).tone]
        match event.verdict:
            case TrainingCompleted() | Stable():
                spent = f" ({show_gpu_time(gpus * seconds / 3600)})" if gpus else ""
                self._line(Text(f"{mark} {text}{spent}.", style=style))
                self._offer(event.verdict.faster)
            case Rehearsed():
                self._line(Text(f"{mark} {text}", style=style))
            case Interrupted():
                self._line(Text(f"{mark} {text}", style=style))
                report = call("report", self._folder, "--open")
                self._line(self._resume_hint(messages.continues(self._run, report=report)))
            case GaveUp() | NeedsHuman() | Infrastructure():
                self._line(Text(f"{mark} {text}", style=style), error=True)
                for line in self._failure_details(event.verdict):
                    self._line(line, error=True)
            case _:
                assert_never(event.verdict)

    def _failure_details(self, verdict: GaveUp | NeedsHuman | Infrastructure) -> Iterator[Text]:
        """Yield details that help the user to continue after a failed run."""
        match verdict:
            case GaveUp(nearest=nearest, would_help=would_help):
                yield from [Text(f"  {nearest}")] if nearest else []
                if would_help:
                    yield Text("  These would help; autotune leaves them to you:")
                    yield from (Text(f"    {each}") for each in would_help)
            case NeedsHuman(diagnosis=diagnosis):
                for line in diagnosis.evidence[:3]:
                    log = self._log(self._run.last_number, line.line)
                    yield Text.assemble("  ", (log, "cyan"), f"  {line.text[:160]}")
                if self._lacks and self._run.step is None:
                    yield Text(f"  {self._lacks}\n  hint: name one with GPUs as `cluster.address` of the job")
            case Infrastructure():
                yield self._resume_hint("continues the run")

    def _offer(self, faster: Remedy | None) -> None:
        """Print a hint at the faster configuration that the free memory allows."""
        if faster is not None:
            hint = ("recovery: {climb: true}", "cyan")
            self._line(Text.assemble("  faster    set ", hint, f" to try: {faster.reason}"))

    def summary(self, rows: list[tuple[str, str, str]], *, stable: str) -> None:
        """Print the changes from the user's job, and the commands that show and reuse them."""
        self._line(Text("Changed from your job:" if rows else "Nothing was changed from your job."))
        if rows:
            indented = [(f"  {knob}", change, setting) for knob, change, setting in rows]
            self._line(Text(rendered(table(indented, gap=3), width=None)))
        report = call("report", self._folder, "--open")
        for name, command in (("report", report), ("reuse", f"autotune launch {shlex.quote(stable)}")):
            self._line(Text.assemble(f"  {name:10}", (command, "cyan")))

    def _resume_hint(self, effect: str) -> Text:
        command = call("resume", self._folder)
        return Text.assemble("  hint: ", (f"`{command}`", "cyan"), f" {effect}")

    def _log(self, attempt: int, line: int | None) -> str:
        path = self._folder / "attempts" / f"{attempt:04d}" / "run.log"
        return f"{path}:{line}" if line else str(path)

    def _point(self, text: Text) -> None:
        """Print a line about an attempt: indented on a terminal, with a timestamp elsewhere."""
        if self._is_live:
            self._line(Text.assemble("    ", text))
        else:
            self._dated(text.plain.strip(), style=str(text.style))

    def _detail(self, text: str) -> None:
        """Print details of the line above: wrapped on a terminal, with a timestamp elsewhere."""
        if not self._is_live:
            self._dated(text)
            return
        for line in textwrap.wrap(text, width=max(40, min(self._terminal.width, PIPED_WIDTH) - 6)):
            self._line(Text(f"      {line}"))

    def _dated(self, text: str, *, style: str = "") -> None:
        self._printed_at = self._now()
        if self._is_live:
            return
        stamp = datetime.fromtimestamp(self._printed_at, UTC).strftime("%H:%M:%SZ")
        attempt = f"#{self._attempt} " if self._attempt else ""
        self._line(Text(f"{stamp} {attempt}{text}", style=style))

    def _line(self, text: Text, *, error: bool = False) -> None:
        if not self._silent and (error or not self._quiet):
            text = ascii_text(text) if self._ascii else text
            self._terminal.print(wrapped(text, width=self._terminal.width) if self._is_live else text)

    def _cut(self, text: Text) -> Text:
        return truncated(text, width=self._terminal.width, unicode=not self._ascii)
