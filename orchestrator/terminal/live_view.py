"""Texts about the running attempts: the live region, the heartbeat of a plain log, the time left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import IO, TypeAlias

from rich.console import Console
from rich.text import Text

from autotune.launchers import frameworks
from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.widgets import PIPED_WIDTH, bar, memory_bar, two_ends
from autotune.orchestrator.units import show_duration, show_gib, show_rate
from autotune.policies.forecast.time_left import TimeLeft, step_seconds, time_left
from autotune.policies.values.events import GoalReached
from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import GpuMemory, Sample
from autotune.policies.values.run.view import RunView


class LiveView:
    """The running attempts of one run."""

    def __init__(self) -> None:
        self.run = RunView()
        self._titles: dict[int, str] = {}  # attempt -> title

    def name(self, number: int, title: str) -> None:
        """Set the title of an attempt."""
        self._titles[number] = title

    def title(self, number: int) -> str:
        """Return the title of an attempt."""
        return self._titles.get(number, "")

    def _seconds(self, number: int, *, now: float) -> float:
        attempt = self.run.attempts.get(number)
        return now - (seconds_of(attempt.started.at) if attempt is not None else 0.0)

    def left(self, *, now: float) -> str:
        """Return `9m to 11m left` or, for a search, `at most 2h 05m left`; empty while unknown."""
        try:
            result = time_left_of(self.run, now=now)
        except Exception:  # the rest of the line must still be printed
            return ""
        return messages.time_left(result) if result is not None else ""

    def lines(self, running: Mapping[int, Progress], *, now: float, width: int) -> list[Line]:
        """Return at most six lines on the running attempts, given by number."""
        if len(running) == 1:
            ((number, progress),) = running.items()
            attempt = self.run.attempts.get(number)
            return live_lines(
                progress,
                title=self._title(number),
                seconds=self._seconds(number, now=now),
                goal=attempt.goal if attempt is not None else None,
                width=width,
                step_s=step_seconds(attempt) if attempt is not None else (),
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
        """Return a line on the running attempts and their progress."""
        left = self.left(now=now)
        if len(running) == 1:
            ((number, progress),) = running.items()
            return heartbeat(progress, seconds=self._seconds(number, now=now), left=left)
        return many_running(running, budget=self._budget(), left=left)

    def _title(self, number: int) -> str:
        attempt = self.run.attempts.get(number)
        trial = attempt.started.trial if attempt is not None else None
        name = f"#{number}" if trial is None else f"#{number} trial {trial}"
        return f"{name}  {self.title(number)}"

    def _budget(self) -> str:
        """Return `7 of 40 trials` for a search with results; otherwise empty."""
        if self.run.accepted is None or not self.run.tried:
            return ""
        from autotune.policies.search.schedule import count

        return f"{count(self.run.tried)} of {self.run.accepted.job.search.trials} trials"

    def _best(self) -> str:
        if not self.run.tried:
            return ""
        from autotune.policies.search.trials import fastest

        best = fastest(self.run.tried)
        return "" if best is None else f"best {show_rate(best.rate, best.unit)} (trial {best.trial})"


def time_left_of(view: RunView, *, now: float) -> TimeLeft | None:
    """Return the remaining time of a run at `now`, in Unix seconds; None if unknown."""
    accepted = view.accepted
    if accepted is None:
        return None
    if view.tried or view.trials:
        from autotune.policies.search.schedule import time_left as of_search

        return of_search(view, now=now)
    adapter = frameworks.FRAMEWORKS.get(accepted.job.framework)
    last_step = adapter.last_step(accepted.job) if adapter is not None else None
    return time_left(view, last_step=last_step, now=now)


Line: TypeAlias = Text

_LINES = 6
_ELSEWHERE = 14  # minimum columns of a title


def live_lines(
    progress: Progress,
    *,
    title: str,
    seconds: float,
    goal: GoalReached | None,
    width: int,
    step_s: Sequence[float] = (),
    left: str = "",
    budget: str = "",
) -> list[Text]:
    """Return at most six lines: title and time, phases, step and time left, goal, memory bars.

    `step_s` are the latest step times in seconds; `left` is the time left, `budget` the number of trials.
    """
    time = show_duration(seconds)
    room = max(_ELSEWHERE, min(width, PIPED_WIDTH) - len(time) - 3)
    lines = [two_ends(_shortened(title, room), time, width=width)]
    phases = _phases(progress)
    if phases:
        lines.append(Text(f"    {phases}"))
    pace = [f"{show_duration(fmean(step_s))} a step"] if step_s else []
    pace += messages.figures_of_step(progress.tokens_per_second, progress.scores)
    parts = [_done(progress), left, *pace, budget]
    summary = "   ".join(part for part in parts if part)
    if summary:
        lines.append(Text(f"    {summary}"))
    if goal is not None:
        lines.append(Text(f"    {messages.goal(goal)}", style=goal_style(goal)))
    return [*lines, *_memory(progress.samples, rows=_LINES - len(lines))]


def trial_lines(
    rows: Sequence[tuple[str, Progress, float]], *, head: str, seconds: float, width: int
) -> list[Text]:
    """Return at most six lines on several attempts, each given as title, progress and seconds."""
    lines = [two_ends(head or f"{len(rows)} trials", show_duration(seconds), width=width)]
    most = _LINES - 1
    listed = rows if len(rows) <= most else rows[: most - 1]
    for title, progress, taken_s in listed:
        parts = [_step(progress)]
        parts += [f"{progress.phase} …"] if progress.phase is not Phase.NONE else []
        fullest = _cards(progress.samples)[:1]
        parts += [show_gib(card.used_bytes, digits=1) for _, card in fullest]
        behind = "  ".join(parts)
        time = show_duration(taken_s)
        room = max(_ELSEWHERE, min(width, PIPED_WIDTH) - len(behind) - len(time) - 8)
        named = _shortened(title, room).ljust(room)
        lines.append(two_ends(f"    {named}  {behind}", time, width=width, style=""))
    if len(rows) > len(listed):
        others = " ".join(title.split("  ")[0] for title, *_ in rows[len(listed) :])
        lines.append(Text(f"    and {len(rows) - len(listed)} more: {others}"))
    return lines


def goal_style(goal: GoalReached) -> str:
    """Return the colour of a goal: green, yellow if marginal."""
    return "yellow" if goal.marginal else "green"


def heartbeat(progress: Progress, *, seconds: float, left: str = "") -> str:
    """Return `running for 6m 12s: step 3/20, backward, host 213.00 GiB of 940.00 GiB, 9m to 11m left`."""
    parts = [_step(progress), "" if progress.phase is Phase.NONE else str(progress.phase)]
    for name, used, total in _fullest(progress.samples):
        parts.append(f"{name} {show_gib(used)} of {show_gib(total)}")
    summary = ", ".join(part for part in (*parts, left) if part)
    return f"running for {show_duration(seconds)}: {summary}"


def many_running(running: Mapping[int, Progress], *, budget: str = "", left: str = "") -> str:
    """Return `2 trials running: #9 step 3/5, #10 no step yet; 7 of 40 trials, at most 2h 05m left`."""
    summary = ", ".join(f"#{number} {_step(progress)}" for number, progress in running.items())
    rest = ", ".join(part for part in (budget, left) if part)
    return f"{len(running)} trials running: {summary}{f'; {rest}' if rest else ''}"


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _step(progress: Progress) -> str:
    return "no step yet" if progress.step is None else f"step {messages.step_of(progress.step, progress.of)}"


def _done(progress: Progress) -> str:
    """Return `step 5/20 ██████░░░░░░░░░░░░░░░░░░ 25%`; no bar if the total is unknown."""
    if progress.step is None:
        return ""
    if not progress.of:
        return _step(progress)
    share = progress.step / progress.of
    return f"{_step(progress)} {bar(share)} {share:.0%}"


def _phases(progress: Progress) -> str:
    """Return the peaks of the completed phases, and the current memory of the running phase."""
    parts = [messages.peaks(progress.peaks, mark="✓ ")] if progress.peaks else []
    if progress.phase is not Phase.NONE:
        now = [show_gib(card.used_bytes) for _, card in _cards(progress.samples)[:1]]
        parts.append(" ".join((str(progress.phase), "…", *now)))
    elif progress.step is None:
        parts.append("starting …")
    return "   ".join(parts)


def _memory(samples: Mapping[str, Sample], *, rows: int) -> list[Text]:
    """Return bars of the fullest GPUs and of the fullest host, at most `rows` lines."""
    if rows <= 0 or not samples:
        return []
    limited = _limited(samples)[: rows - 1]
    cards = _cards(samples)[: rows - 1 - len(limited)]
    bars = [*((_card_name(node, card, samples), card.used_bytes, card.total_bytes) for node, card in cards)]
    bars += [*limited, _host(samples)]
    wide = max(len(name) for name, *_ in bars)
    return [memory_bar(name.ljust(wide), used_bytes=used, total_bytes=total) for name, used, total in bars]


def _limited(samples: Mapping[str, Sample]) -> list[tuple[str, int, int]]:
    """Return the process that is nearest to a limit of its own (`ulimit -v`), with that limit, if any."""
    every = [p for sample in samples.values() for p in sample.processes if p.limit_bytes]
    every.sort(key=lambda process: -process.limited_bytes / process.limit_bytes)
    return [(process.name, process.limited_bytes, process.limit_bytes) for process in every[:1]]


def _fullest(samples: Mapping[str, Sample]) -> list[tuple[str, int, int]]:
    if not samples:
        return []
    cards = [
        (_card_name(node, card, samples), card.used_bytes, card.total_bytes)
        for node, card in _cards(samples)[:1]
    ]
    return [*cards, _host(samples)]


def _cards(samples: Mapping[str, Sample]) -> list[tuple[str, GpuMemory]]:
    """Return the attempt's GPUs, or all if those are unknown, fullest first."""
    cards = [(node, card) for node, sample in samples.items() for card in sample.gpus]
    ours = [(node, card) for node, card in cards if card.of_attempt] or cards
    return sorted(ours, key=lambda each: each[1].used_bytes / max(1, each[1].total_bytes), reverse=True)


def _host(samples: Mapping[str, Sample]) -> tuple[str, int, int]:
    fullest = max(samples.values(), key=lambda each: each.host_used_bytes / max(1, each.host_total_bytes))
    return _name("host", fullest.node, samples), fullest.host_used_bytes, fullest.host_total_bytes


def _card_name(node: str, card: GpuMemory, samples: Mapping[str, Sample]) -> str:
    return _name(f"GPU {card.index}", node, samples)


def _name(what: str, node: str, samples: Mapping[str, Sample]) -> str:
    return what if len(samples) == 1 else f"{what} of {node}"


class _Terminal(Console):
    """Rich's console, except that a broken pipe raises instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Raise the error being handled."""
        raise


def terminal(stream: IO[str], *, live: bool, colored: bool, width: int | None) -> Console:
    """Return a console for a stream."""
    return _Terminal(
        file=stream,
        force_terminal=colored or live,
        color_system="standard" if colored else None,
        no_color=not colored,
        width=width,
        highlight=False,
        soft_wrap=True,
    )
