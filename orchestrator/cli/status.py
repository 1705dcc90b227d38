"""`autotune status`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import click
import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.cli.shared.run_status import AttemptStatus, RunReader, RunStatus, TrialStatus
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory, waiting
from autotune.orchestrator.run.memory_record import MemorySpan
from autotune.orchestrator.terminal import widgets
from autotune.orchestrator.terminal.standard_streams import was_left
from autotune.orchestrator.terminal.widgets import rendered, say
from autotune.orchestrator.units import show_ago, show_duration, show_gib
from autotune.policies.values.run.view import RunView

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such run, or an option is wrong"""
_REPEAT_S = 2.0
_HEARTBEAT_S = 60.0  # interval of repeated output if the table cannot be redrawn
_STEPS = 24  # of the running attempt, in the sparkline of step times
_HEAD = ("RUN", "NAME", "FRAMEWORK", "CLUSTER", "SUBMITTED", "TOTAL", "IN ATTEMPTS", "#ATTEMPTS", "STATUS")
_NAME = 24  # columns
_LEAST_NEEDED = ("IN ATTEMPTS", "FRAMEWORK", "SUBMITTED", "CLUSTER")  # dropped if the table is too wide


def print_status(options: Options, *, prefix: str | None, watch: bool) -> None:
    """Print the table of runs, or one run with its attempts; with `watch`, repeat until no run is running.

    If it cannot be redrawn, as in a file, it is printed again when an attempt or a trial begins or ends, and
    once a minute.
    """
    redrawn = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    before, printed_at = "", 0.0
    readers: dict[Path, RunReader] = {}
    while True:
        now = time.time()
        chosen = (
            (directory.find(options.runs_dir, prefix),) if prefix else directory.runs(options.runs_dir)[::-1]
        )
        readers = {run.path: readers.get(run.path) or RunReader(run) for run in chosen}
        standings = [reader.look(now=now, memory=bool(prefix)) for reader in readers.values()]
        if options.json:
            click.echo(msgspec.json.encode(standings[0] if prefix else standings))
        elif (
            redrawn or _course(standings, attempts=bool(prefix)) != before or now - printed_at >= _HEARTBEAT_S
        ):
            if watch and redrawn:
                click.clear()
            before, printed_at = _course(standings, attempts=bool(prefix)), now
            width = widgets.width_of(sys.stdout)
            shown_runs = table(standings, now=now, attempts=bool(prefix), width=width)
            none = f"no runs yet in {options.runs_dir.absolute()}: `--runs-dir` names another folder"
            widgets.echo(shown_runs if standings else none, color=options.color)
        if not watch or was_left(sys.stdout) or not any(run.running for run in standings):
            break
        time.sleep(_REPEAT_S)
    if prefix and not (options.json or options.quiet or standings[0].running):
        _hint_next(chosen[0])


def _hint_next(run: directory.RunFolder) -> None:
    from autotune.orchestrator.cli.shared.edit import what_next  # slow to import; a list needs none

    with suppress(Failure):  # the table already shows what is wrong with the run
        view = RunView(run.history())
        if view.accepted is not None:
            say(f"hint: {what_next(run, view.verdict)}")


def _course(standings: list[RunStatus], *, attempts: bool) -> str:
    """Return a fingerprint of the table that ignores times and steps."""
    parts = [f"{run.run} {run.status} {len(run.attempts)}" for run in standings]
    if attempts:
        parts += [attempt.status for run in standings for attempt in run.attempts]
        parts += [trial.status for run in standings for trial in run.trials]
    return re.sub(r"RUNNING step \S+", "RUNNING", "\n".join(parts))


def table(standings: list[RunStatus], *, now: float, attempts: bool, width: int | None = None) -> str:
    """Return runs as a table; None: unlimited `width`; with `attempts`, also those of the first run."""
    rows: list[tuple[str, ...]] = [
        (
            run.run,
            run.name if width is None else "\n".join(textwrap.wrap(run.name, _NAME)),
            run.framework,
            run.cluster,
            show_ago(now - seconds_of(run.submitted)) if run.submitted else "-",
            show_duration(run.total_s),
            messages.lasted(run.running_s, at_least=_is_open_ended(run)),
            str(len(run.attempts)),
            run.status if attempts else _progress(run),
        )
        for run in standings
    ]
    text = _fitting(rows, width)
    if not attempts:
        return text
    run, parts = standings[0], [text]
    if run.attempts:
        parts.append(_below([(f"  ↳{a.attempt}", a.change, _took(a), a.status) for a in run.attempts], width))
    parts += [f"  attempt #{a.attempt}: {messages.cured(e)}" for a in run.attempts for e in a.cured]
    parts += [f"  driver: {run.driver}"] if run.driver else []
    if run.waiting is not None:
        parts.append(f"  {waiting.sentence(run.waiting, now=now if run.running else None)}")
    parts += _left(run)
    grown = next((a.growth for a in reversed(run.attempts) if a.growth is not None), None)
    parts += [f"  growth: {grown.text}"] if grown is not None else []
    parts += [f"  forecast: {messages.forecast(e)}" for a in run.attempts[-1:] for e in a.foreseen]
    measured = next((a for a in reversed(run.attempts) if a.memory), None)
    if measured is not None:
        parts += [f"peak memory of attempt #{measured.attempt}", *_memory_lines(measured.memory)]
    if run.trials:
        parts.append(
            _below([(f"  trial {t.trial}", t.change, _took(t), t.status) for t in run.trials], width)
        )
    parts += [f"  edited: {edit}" for edit in run.edits]
    parts += [f"  {run.problem}"] if run.problem else []
    return "\n".join(parts)


def _memory_lines(nodes: tuple[MemorySpan, ...]) -> list[str]:
    """Return the peak memory of each node so far: of the host, and of the attempt's GPUs."""
    lines = []
    for node in nodes:
        cards = [card for card in node.gpus if card.of_attempt] or list(node.gpus)
        parts = [f"host {show_gib(node.host.most)} of {show_gib(node.host_total_bytes)}"]
        parts += [f"GPU {c.index} {show_gib(c.used.most)} of {show_gib(c.total_bytes)}" for c in cards]
        lines += [f"  {node.node}  {part}" for part in parts]
    return lines


def _fitting(rows: list[tuple[str, ...]], width: int | None) -> str:
    """Return the table without the columns, and then without the time left, for which there is no room."""
    columns = list(_HEAD)
    for name in ("", *_LEAST_NEEDED, _HEAD[-1]):
        if name == _HEAD[-1]:
            rows = [(*row[:-1], row[-1].split(",")[0]) for row in rows]
        else:
            columns = [each for each in columns if each != name]
        cells = [[row[_HEAD.index(each)] for each in columns] for row in rows]
        text = rendered(widgets.table(cells, head=columns), width=None)
        if width is None or max(map(len, text.splitlines())) <= width:
            break
    return text


def _progress(run: RunStatus) -> str:
    """Return the state of a run; while an attempt is running also its step and the time left, if known."""
    if not run.running or not run.attempts or not run.attempts[-1].status.startswith(f"{run.status} step"):
        return run.status
    left = f", {messages.time_left(run.left)}" if run.left is not None else ""
    return f"{run.attempts[-1].status}{left}"


def _left(run: RunStatus) -> list[str]:
    """Return the remaining time of a run, its latest step times, speed, loss and reward, if known."""
    parts = [] if run.left is None else [messages.time_left(run.left)]
    if run.step_s:
        parts.append(f"{show_duration(fmean(run.step_s))} a step")
        picture = widgets.sparkline(run.step_s[-_STEPS:])
        parts += [f"step times {picture}"] if picture else []
    parts += messages.figures_of_step(run.tokens_per_second, run.scores)
    return [f"  {'   '.join(parts)}"] if parts else []


def _below(rows: list[tuple[str, str, str, str]], width: int | None) -> str:
    return rendered(widgets.table(rows, right=(2,), wrap={1: 30, 3: 20}), width=width)


def _took(part: AttemptStatus | TrialStatus) -> str:
    if isinstance(part, TrialStatus) and part.seconds == 0.0:  # it did not run: the stable start, or gated
        return ""
    return messages.lasted(part.seconds, at_least=part.unwatched)


def _is_open_ended(run: RunStatus) -> bool:
    return any(a.unwatched for a in run.attempts) or any(t.unwatched for t in run.trials)


@click.command("status", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option("--watch", is_flag=True, help="Refresh every two seconds until the run is over.")
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, watch: bool) -> None:
    """List all runs, or the attempts of one. RUN is an id or the start of one.

    TOTAL is the time since the launch, IN ATTEMPTS the part of it in which an attempt ran.

    \b
    Example:
      autotune status 7c1e --watch
    """  # noqa: D301 - click reads the backspace
    print_status(given(context), prefix=run, watch=watch)
