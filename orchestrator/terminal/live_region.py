"""A running attempt on a terminal: the lines of the live region, the heartbeat of a plain log."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

from autotune.orchestrator import messages
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.widgets import memory_bar, truncated, two_ends
from autotune.orchestrator.units import show_duration, show_gib
from autotune.policies.values.events import GoalReached
from autotune.policies.values.failure import Phase

_LINES = 6
_CARDS = 2


def live_lines(
    progress: Progress, *, title: str, seconds: float, goal: GoalReached | None, width: int
) -> list[Text]:
    """Return at most six lines of `width` columns: title and time, phases, goal, memory bars."""
    phases = [messages.peaks(progress.peaks)] if progress.peaks else []
    phases += [f"{progress.phase} …"] if progress.phase is not Phase.NONE else []
    phases += [] if progress.step is None else [f"step {messages.step_of(progress.step, progress.of)}"]
    lines = [two_ends(title, show_duration(seconds), width=width), Text(f"    {'   '.join(phases)}")]
    if goal is not None:
        lines.append(Text(f"    {messages.goal(goal)}", style="yellow" if goal.marginal else "green"))
    sample = progress.sample
    if sample is not None:
        cards = [card for card in sample.gpus if card.of_attempt] or sample.gpus
        memories = [(f"GPU {card.index}", card.used_bytes, card.total_bytes) for card in cards[:_CARDS]]
        memories.append(("host", sample.host_used_bytes, sample.host_total_bytes))
        lines += [memory_bar(name, used_bytes=used, total_bytes=total) for name, used, total in memories]
    return [truncated(line, width=width) for line in lines[:_LINES]]


def heartbeat(progress: Progress, *, seconds: float) -> str:
    """Return `running for 6m 12s: step 3/20, backward, host 213.00 GiB of 940.00 GiB`."""
    step = "no step yet" if progress.step is None else f"step {messages.step_of(progress.step, progress.of)}"
    parts = [step, "" if progress.phase is Phase.NONE else str(progress.phase)]
    sample = progress.sample
    if sample is not None:
        parts.append(f"host {show_gib(sample.host_used_bytes)} of {show_gib(sample.host_total_bytes)}")
    return f"running for {show_duration(seconds)}: {', '.join(part for part in parts if part)}"


class _Terminal(Console):
    """Rich's console, which raises what goes wrong instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


def terminal(stream: IO[str], *, live: bool, colored: bool, width: int | None) -> Console:
    """Return the console that prints on a stream."""
    return _Terminal(
        file=stream,
        force_terminal=colored or live,
        color_system="standard" if colored else None,
        no_color=not colored,
        width=width,
        highlight=False,
        soft_wrap=True,
    )
