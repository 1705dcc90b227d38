"""Events -> the terminal: a live region and permanent lines on a TTY, a dated line per event elsewhere."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, assert_never

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.text import Text

from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.widgets import (
    PIPED_WIDTH,
    ascii_text,
    memory_bar,
    supports_unicode,
    truncated,
    two_ends,
    wants_color,
)
from autotune.orchestrator.units import show_duration, show_gib, show_rate
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    FailureSeen,
    Finished,
    GaveUp,
    GoalReached,
    Interrupted,
    NeedsHuman,
    Progressed,
    Result,
    Stable,
    Started,
    StopRequested,
    TrainingCompleted,
    Tried,
    Unit,
)
from autotune.policies.values.evidence import Cancelled, Completed, Lost, Remedy
from autotune.policies.values.types import Knobs, Phase

_HEARTBEAT_S = 60.0
_STEP_LINES_S = 10.0


class Console:
    """Tells the story of one run on a stream."""

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
        self._live_wanted = stream.isatty() and os.environ.get("TERM") != "dumb" and not quiet
        self._ascii = not supports_unicode(stream)
        colored = wants_color(color, stream)
        self._terminal = Terminal(
            file=stream,
            force_terminal=colored or self._live_wanted,
            color_system="standard" if colored else None,
            no_color=not colored,
            width=width or (None if stream.isatty() else PIPED_WIDTH),
            highlight=False,
            soft_wrap=True,
        )
        self._runs_dir, self._quiet, self._verbose, self._now = runs_dir, quiet, verbose, now
        self._live: Live | None = None
        self._run = ""
        self._first: Knobs | None = None
        self._knobs: Knobs | None = None
        self._title = ""
        self._number = self._speaking_of = 0
        self._titles: dict[int, str] = {}  # of attempts: a search may run several at once
        self._started_at = 0.0
        self._accepted_at = 0.0
        self._gpus = 0
        self._goal: GoalReached | None = None
        self._last: Progressed | None = None
        self._trained = False
        self._said_at = self._stepped_at = 0.0

    # ------------------------------------------------------------------ what is told

    def replay(self, events: tuple[Event, ...]) -> None:
        """Remember events that were told before, silently."""
        quiet, self._quiet = self._quiet, True
        for event in events:
            self.tell(event)
        self._quiet = quiet

    def tell(self, event: Event) -> None:  # noqa: C901 - one branch per kind of event
        """Say what an event means."""
        self._speaking_of = event.attempt or self._number
        match event:
            case Accepted():
                self._accepted(event)
            case Started():
                self._started(event)
            case Progressed():
                self._progressed(event)
            case FailureSeen():
                self._dated(f"failure seen: {messages.seen(event.finding)}")
            case GoalReached():
                self._goal = event
                self._dated(self._goal_line(event), style="yellow" if event.marginal else "green")
            case StopRequested():
                reason = f": {event.reason}" if event.reason and event.by != "failure" else ""
                self._dated(f"stopping{reason}")
                if self._live_wanted and event.by == "user":
                    self._line(Text(f"^C  stopping attempt #{event.attempt} …", style="yellow"))
            case Ended():
                self._ended(event)
            case Diagnosed():
                self._diagnosed(event)
            case Decided():
                self._decided(event)
            case Tried():
                self._tried(event)
            case Finished():
                self._finished(event)
            case _:
                assert_never(event)

    def say(self, text: str) -> None:
        """Say something beside the events."""
        self._line(Text(text))

    def watch(self, progress: Progress, *, now: float) -> None:
        """Show where the running attempt is."""
        if self._quiet:
            return
        if self._live_wanted:
            if self._live is None:
                self._live = Live(console=self._terminal, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._region(progress, now), refresh=True)
        elif now - self._said_at >= _HEARTBEAT_S:
            step = "no step yet" if progress.step is None else f"step {progress.step}{_of(progress.of)}"
            phase = "" if progress.phase is Phase.NONE else f", {progress.phase}"
            self._dated(
                f"running for {show_duration(now - self._started_at)}: {step}{phase}{_memory(progress)}"
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------------ events

    def _accepted(self, event: Accepted) -> None:
        for warning in event.profile.warnings:
            self._line(Text(f"warning: {warning}", style="yellow"))
        self._run, self._accepted_at = event.run, seconds_of(event.at)
        self._knobs = self._first = event.profile.knobs
        self._gpus = event.cluster.nodes * event.cluster.gpus_per_node
        self._line(
            Text.assemble(
                "run ",
                (event.run, "bold"),
                f" · {event.job.name} · {event.job.framework} on ray · {messages.place(event.cluster)}\n",
            )
        )

    def _started(self, event: Started) -> None:
        self._number, self._started_at = event.attempt, seconds_of(event.at)
        # Trials are no steps of one another: each is compared with the job as written.
        before = (self._first if event.trial is not None else self._knobs) or event.knobs
        self._title = messages.setting_changes(before, event.knobs) or (
            "as written" if event.knobs == self._first else "same settings again"
        )
        self._titles[event.attempt] = self._title
        self._knobs, self._goal, self._last = event.knobs, None, None
        # A job that resumes has a checkpoint from the start; any other only after a step.
        continues = event.resume and (self._trained or event.attempt == 1)
        self._dated(f"started: {self._title}" + (", from the last checkpoint" if continues else ""))

    def _progressed(self, event: Progressed) -> None:
        self._last, self._trained = event, True
        due = self._verbose or self._now() - self._stepped_at >= _STEP_LINES_S
        if due or event.resumed_from is not None:
            self._stepped_at = self._now()
            resumed = "" if event.resumed_from is None else f" (continued after step {event.resumed_from})"
            took = "" if event.seconds is None else f" in {show_duration(event.seconds)}"
            self._dated(f"step {event.step}{_of(event.of)}{took}{resumed}")

    def _ended(self, event: Ended) -> None:
        self.close()
        words = messages.outcome(event.outcome)
        last = "" if event.step is None else f", last step {event.step}"
        if not self._live_wanted:
            self._dated(f"{words}{last}, after {show_duration(event.seconds)}")
        else:
            title = f"#{event.attempt}  {self._titles.get(event.attempt, self._title)}"
            self._line(two_ends(title, show_duration(event.seconds), width=self._terminal.width))
            if self._goal is not None:
                self._line(
                    Text(
                        f"    {self._goal_line(self._goal)}",
                        style="yellow" if self._goal.marginal else "green",
                    )
                )
            if isinstance(event.outcome, Completed):
                self._line(Text(f"    ✓ {words}{last}{_speed(self._last)}", style="green"))
            elif isinstance(event.outcome, Lost):
                self._line(Text(f"    ! {words}{last}", style="yellow"))
            elif isinstance(event.outcome, Cancelled) and event.outcome.by == "user":
                took = "" if event.stop_s is None else f" in {show_duration(event.stop_s)}"
                self._line(Text(f"    {words}{took}{last}", style="dim"))
        if event.held:
            self._point(Text(f"✗ memory did not come back: {event.held}", style="red"))

    def _diagnosed(self, event: Diagnosed) -> None:
        line = event.evidence[0].line if event.evidence else None
        log = self._log(event.attempt, line)
        self._point(Text.assemble((f"✗ {messages.where(event)}", "red"), "   ", (log, "cyan")))
        numbers = messages.figures(event.facts)
        detail = numbers or (event.evidence[0].text.strip()[:160] if event.evidence else "")
        if detail:
            self._detail(detail)
        if self._verbose and event.evidence:
            self._detail("\n".join(f"line {found.line}: {found.text.strip()}" for found in event.evidence))

    def _decided(self, event: Decided) -> None:
        if event.remedy is not None and self._knobs is not None:
            changes = messages.setting_changes(self._knobs, event.remedy.apply(self._knobs))
            self._point(Text.assemble((f"→ {event.remedy.name}", "bold"), f"   {changes}"))
            costs = messages.remedy_costs(event.remedy)
            self._detail(f"{event.remedy.reason}{f'; {costs}' if costs else ''}")
        else:
            wait = f", in {show_duration(event.not_before_s)}" if event.not_before_s else ""
            self._point(Text(f"→ {event.reason}{wait}"))
        if self._live_wanted:
            self._line(Text(""))

    def _tried(self, event: Tried) -> None:
        self.close()
        good = event.result is Result.FITS
        mark = "✓" if good else "–" if event.result in (Result.GATED, Result.SLOW) else "✗"
        words = messages.tried(event, before=self._first)
        self._line(Text(f"{mark} trial {event.trial}  {words}", style="green" if good else ""))

    def _finished(self, event: Finished) -> None:
        self.close()
        seconds = max(0.0, seconds_of(event.at) - self._accepted_at)
        words = messages.verdict(event.verdict, attempts=self._number, seconds=seconds)
        self._line(Text(""))
        match event.verdict:
            case TrainingCompleted(marginal=marginal) | Stable(marginal=marginal):
                hours = f" ({self._gpus * seconds / 3600:.1f} GPU-hours)" if self._gpus else ""
                self._line(
                    Text(
                        f"{'!' if marginal else '✓'} {words}{hours}.", style="yellow" if marginal else "green"
                    )
                )
                self._offer(event.verdict.faster)
            case GaveUp(nearest=nearest, would_help=help_):
                self._line(Text(f"✗ {words}", style="red"))
                if nearest:
                    self._line(Text(f"  {nearest}"))
                if help_:
                    self._line(
                        Text("  would fit, but changes training or the cluster, so it is yours to decide:")
                    )
                    self._line(Text(f"    {' · '.join(help_)}"))
            case NeedsHuman(diagnosis=diagnosis):
                self._line(Text(f"✗ {words}", style="red"))
                for line in diagnosis.evidence[:3]:
                    self._line(
                        Text.assemble(
                            "  ", (self._log(self._number, line.line), "cyan"), f"  {line.text[:160]}"
                        )
                    )
            case Interrupted():
                self._line(Text(f"! {words}", style="yellow"))
                self._hint(f"continues at attempt #{self._number + 1}")
            case _:
                self._line(Text(f"✗ {words}", style="red"))
                self._line(Text("  The run is safe; nothing was lost."))
                self._hint("goes on from here")

    def _offer(self, faster: Remedy | None) -> None:
        """Say what the memory that stayed free would allow."""
        if faster is not None:
            self._line(
                Text.assemble(
                    "  faster    ", ("recovery: {climb: true}", "cyan"), f" would try: {faster.reason}"
                )
            )

    def summary(self, rows: list[tuple[str, str, str]], *, stable: str) -> None:
        """Show what changed from the job, and what can be done with it."""
        if rows:
            self._line(Text("Changed from your job:"))
            widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
            for knob, change, setting in rows:
                self._line(
                    Text.assemble(
                        f"  {knob.ljust(widths[0])}   {change.ljust(widths[1])}   ", (setting, "dim")
                    )
                )
        else:
            self._line(Text("Nothing was changed from your job."))
        self._line(Text.assemble("  reuse     ", (f"autotune launch {stable}", "cyan")))

    # ------------------------------------------------------------------ layout

    def _hint(self, what: str) -> None:
        self._line(Text.assemble("  hint: ", (f"`autotune resume {self._run}`", "cyan"), f" {what}"))

    def _goal_line(self, event: GoalReached) -> str:
        mark, word = ("!", "marginal") if event.marginal else ("✓", "stable")
        parts = [f"{mark} {word} at step {event.step}", messages.peaks(event.peaks)]
        if any(peak.capacity_bytes for peak in event.peaks.values()):
            parts.append(f"{event.headroom:.1%} free")
        if event.tokens_per_second:
            parts.append(show_rate(event.tokens_per_second, Unit.TOKENS))
        return "   ".join(part for part in parts if part)

    def _log(self, attempt: int, line: int | None) -> str:
        path = self._runs_dir / self._run / "attempts" / f"{attempt:04d}" / "run.log"
        return f"{path}:{line}" if line else str(path)

    def _region(self, progress: Progress, now: float) -> Group:
        lines = [
            two_ends(
                f"#{self._number}  {self._title}",
                show_duration(now - self._started_at),
                width=self._terminal.width,
            )
        ]
        phases = [messages.peaks(progress.peaks)] if progress.peaks else []
        phases += [f"{progress.phase} …"] if progress.phase is not Phase.NONE else []
        step = "" if progress.step is None else f"step {progress.step}{_of(progress.of)}"
        lines.append(Text(f"    {'   '.join([*phases, step])}"))
        if self._goal is not None:
            lines.append(Text(f"    {self._goal_line(self._goal)}", style="green"))
        sample = progress.sample
        if sample:
            cards = [c for c in sample.gpus if c.of_attempt] or sample.gpus
            lines += [
                memory_bar(f"GPU {c.index}", used_bytes=c.used_bytes, total_bytes=c.total_bytes)
                for c in cards[:2]
            ]
            used, total = sample.host_used_bytes, sample.host_total_bytes
            lines.append(memory_bar("host", used_bytes=used, total_bytes=total))
        return Group(*(self._plain(truncated(line, width=self._terminal.width)) for line in lines[:6]))

    def _point(self, text: Text) -> None:
        """Say a point of an attempt's story: indented on a terminal, dated elsewhere."""
        if self._live_wanted:
            self._line(Text.assemble("    ", text))
        else:
            self._dated(text.plain.strip(), style=str(text.style))

    def _detail(self, words: str) -> None:
        """Explain a point: wrapped under it on a terminal, dated elsewhere."""
        if not self._live_wanted:
            self._dated(words)
            return
        for line in textwrap.wrap(words, width=max(40, min(self._terminal.width, PIPED_WIDTH) - 6)):
            self._line(Text(f"      {line}"))

    def _dated(self, words: str, *, style: str = "") -> None:
        self._said_at = self._now()
        if self._live_wanted:
            return
        stamp = datetime.fromtimestamp(self._said_at, UTC).strftime("%H:%M:%SZ")
        attempt = f"#{self._speaking_of} " if self._speaking_of else ""
        self._line(Text(f"{stamp} {attempt}{words}", style=style))

    def _line(self, text: Text) -> None:
        if not self._quiet:
            self._terminal.print(self._plain(text))

    def _plain(self, text: Text) -> Text:
        return ascii_text(text) if self._ascii else text


def _of(of: int | None) -> str:
    return f"/{of}" if of else ""


def _speed(event: Progressed | None) -> str:
    return f", {show_rate(event.tokens_per_second, Unit.TOKENS)}" if event and event.tokens_per_second else ""


def _memory(progress: Progress) -> str:
    sample = progress.sample
    if sample is None:
        return ""
    return f", host {show_gib(sample.host_used_bytes)} of {show_gib(sample.host_total_bytes)}"
