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
from msgspec.structs import replace

from autotune.orchestrator import messages
from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.clock import seconds_of, timestamp
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory, summary, waiting
from autotune.orchestrator.run.journal import Tail
from autotune.orchestrator.run.lock import Owner, Watch
from autotune.orchestrator.run.memory_record import MemorySpan, so_far
from autotune.orchestrator.run.waiting import Waiting
from autotune.orchestrator.run_states import DISPLAYS
from autotune.orchestrator.terminal import widgets
from autotune.orchestrator.terminal.standard_streams import was_left
from autotune.orchestrator.terminal.widgets import rendered, say
from autotune.orchestrator.units import show_ago, show_duration, show_gib
from autotune.policies.forecast.time_left import TimeLeft, step_seconds
from autotune.policies.values.events import Accepted, CuredInPlace, Foreseen, Started, Tried
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import MemoryGrowth
from autotune.policies.values.run.state import RunState, with_driver
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

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


class AttemptStatus(Value, frozen=True, kw_only=True):
    """One attempt in `autotune status`."""

    attempt: int  # number of the attempt in the run, from 1
    change: str  # knobs changed since the previous attempt, e.g. `microbatch_size 8 → 4`; or `as written`
    seconds: float | None  # None: unknown
    status: str  # state or end, e.g. `RUNNING step 3/20`, `training complete` or `✗` and the failure
    cause: str | None = None  # of its failure; None: it has none
    phase: str | None = None  # phase in which it failed, or `none` if that is unknown; null: no failure
    unwatched: bool = False  # no driver observed its end: it ran for `seconds` or longer
    cured: tuple[CuredInPlace, ...] = ()  # failures that the job itself survived
    foreseen: tuple[Foreseen, ...] = ()  # memories that are forecast to run out in it
    memory: tuple[MemorySpan, ...] = ()  # per node, from its start to now; only for a single run
    growth: MemoryGrowth | None = None  # because of which the same settings were started again


class TrialStatus(Value, frozen=True, kw_only=True):
    """One trial of a search in `autotune status`."""

    trial: int  # number of the trial in the search, from 0
    change: str  # knobs that differ from the job, e.g. `microbatch_size 8 → 4`; `as written` if none do
    seconds: float | None  # without a result: as in `AttemptStatus`
    status: str  # result, or the state of its running attempt, in words
    unwatched: bool = False  # no driver observes it: it ran for `seconds` or longer


class RunStatus(Value, frozen=True, kw_only=True):
    """One run in `autotune status`."""

    run: str  # id of the run, also the name of its folder
    name: str = ""  # name of the job; empty: unknown
    framework: str = ""  # name of the framework, e.g. `verl`, as in the job file; empty: unknown
    cluster: str = ""  # its GPUs, e.g. `8×H100`, or nodes without GPUs, e.g. `1×CPU`; empty: unknown
    submitted: str = ""  # when the job was accepted: UTC, ISO 8601; empty: not accepted yet
    total_s: float = 0.0  # seconds from acceptance of the job to now, or without a driver to the last event
    running_s: float = 0.0  # seconds that attempts ran, summed over all of them, also those of trials
    # NOT STARTED | STARTING | WAITING n/m nodes | REHEARSING | RUNNING | RECOVERING | STABLE |
    # SEARCHING | COMPLETED | REHEARSED | GAVE UP | FAILED | LOST | STOPPED | INTERRUPTED | DAMAGED
    status: str = "STARTING"
    running: bool = False  # it has a driver, as far as can be detected
    driver: str = ""  # description of a driver on another machine, or that cannot be read
    attempts: tuple[AttemptStatus, ...] = ()  # without those of a search's trials
    trials: tuple[TrialStatus, ...] = ()  # of a search
    edits: tuple[str, ...] = ()  # the user's changes of the job since the launch
    problem: str = ""  # why its journal cannot be read
    waiting: Waiting | None = None  # for nodes of the cluster; without a driver: it waited in vain
    left: TimeLeft | None = None  # while it runs, once enough is known
    step_s: tuple[float, ...] = ()  # latest step times of the only running attempt, without its first
    tokens_per_second: float | None = None  # in its last step
    scores: dict[str, float] = {}  # `loss` and `reward` of its last step, if the log prints them


class RunReader:
    """Follows one run; a finished run is read once, other runs incrementally."""

    def __init__(self, run: directory.RunFolder, *, keeps: bool = True) -> None:
        """Follow `run`; `keeps` allows storing a summary next to the journal of a finished run."""
        self.run, self._keeps = run, keeps
        self._watch = Watch(run.path)
        self._tail = Tail(run.path / "events.jsonl")
        self._stamp: summary.Stamp | None = None
        self._over: RunStatus | None = None  # as of `_stamp`

    def look(self, *, now: float, memory: bool = False) -> RunStatus:
        """Return the status of the run; with `memory`, also the memory of its attempts.

        If the journal cannot be read, the status has a `problem`.
        """
        stamp = summary.stamp_of(self.run.path)
        if stamp is None or stamp != self._stamp:
            self._stamp, self._over = stamp, None
            if stamp is not None and self._keeps:
                kept = summary.read(self.run.path, RunStatus, stamp=stamp)
                self._over = kept and replace(kept, run=self.run.id)  # the folder may be a copy
        status = self._over or self._read(now=now)
        if self._over is None and self._tail.view.state.is_terminal:
            self._over = status
            self._tail = Tail(self._tail.path)  # drop the events, only the status is needed
            if stamp is not None and self._keeps:
                summary.keep(self.run.path, status, stamp=stamp)
        if memory:
            folders = {a.attempt: self.run.attempt(a.attempt).path for a in status.attempts}
            attempts = tuple(replace(a, memory=so_far(folders[a.attempt])) for a in status.attempts)
            status = replace(status, attempts=attempts)
        return awaiting(self.run, status)

    def _read(self, *, now: float) -> RunStatus:
        holder = self._watch.owner()
        driven = holder is not None
        try:
            self._tail.update()
        except Failure as failure:
            damaged = DISPLAYS[RunState.UNREADABLE].word
            return RunStatus(run=self.run.id, status=damaged, running=driven, problem=failure.message)
        view = self._tail.view
        if view.accepted is None:
            return _not_accepted(self.run, driven=driven)
        status = _status_of(self.run, view, driven=driven, now=now)
        if not status.running:
            return status
        if holder is not None and not holder.can_be_signalled:
            status = replace(status, driver=_elsewhere(holder, beat_at=self._watch.beat_at))
        from autotune.orchestrator.terminal.live_view import time_left_of

        status = replace(status, left=time_left_of(view, now=now))
        if len(view.unended) != 1:
            return status
        attempt = view.attempts[view.unended[0]]
        if (last := attempt.last) is not None:
            status = replace(status, tokens_per_second=last.tokens_per_second, scores=last.scores)
        return replace(status, step_s=step_seconds(attempt))


def awaiting(run: directory.RunFolder, status: RunStatus) -> RunStatus:
    """Return the status of a run with the nodes that it waits for or waited for in vain."""
    row = waiting.read(run.path) if status.running or not status.attempts else None
    if row is None:
        return status
    word = f"{DISPLAYS[RunState.WAITING].word} {row.nodes}/{row.wanted} nodes"
    return replace(status, status=word if status.running else status.status, waiting=row)


def _elsewhere(holder: Owner, *, beat_at: float) -> str:
    """Describe a driver that cannot be checked from here; the reader has to judge whether it is alive."""
    if not holder.is_known:
        return "whether one is at work cannot be read"
    return f"pid {holder.pid} on {holder.host}, last heartbeat {timestamp(beat_at)} (file server's clock)"


def _not_accepted(run: directory.RunFolder, *, driven: bool) -> RunStatus:
    job = _job_of(run)
    return RunStatus(
        run=run.id,
        name=job.name if job is not None else "",
        framework=job.framework if job is not None else "",
        status=DISPLAYS[with_driver(RunState.NOT_STARTED, driven=driven)].word,
        running=driven,
    )


def _status_of(run: directory.RunFolder, view: RunView, *, driven: bool, now: float) -> RunStatus:
    """Return the status of an accepted run, without the parts that only the live view knows."""
    accepted, last = view.accepted, view.last
    assert view.first is not None and accepted is not None and last is not None
    over = view.state.is_terminal
    end = seconds_of(last.at) if over or not driven else now
    first = view.first.profile.knobs
    return RunStatus(
        run=run.id,
        name=accepted.job.name,
        framework=accepted.job.framework,
        cluster=_short_place(accepted),
        submitted=accepted.at,
        total_s=max(0.0, end - seconds_of(accepted.at)),
        running_s=sum(_seconds(attempt, now=end) or 0.0 for attempt in view.attempts.values()),
        status=DISPLAYS[with_driver(view.state, driven=driven)].word,
        running=driven and not over,
        attempts=tuple(
            AttemptStatus(
                attempt=attempt.number,
                change=messages.attempt(attempt.started, before=attempt.before, first=first),
                seconds=_seconds(attempt, now=end),
                status=_attempt_status(attempt, driven=driven),
                cause=None if attempt.diagnosed is None else attempt.diagnosed.cause,
                phase=None if attempt.diagnosed is None else attempt.diagnosed.phase,
                unwatched=_unwatched(attempt, driven=driven),
                foreseen=_forecasts(attempt),
                growth=None if attempt.next is None else attempt.next.growth,
                cured=tuple(attempt.cures),
            )
            for attempt in view.launched
        ),
        trials=tuple(
            _trial(view, view.trial_rows[trial], first=accepted.profile.knobs, now=end, driven=driven)
            for trial in sorted(view.trial_rows)
        ),
        edits=tuple(messages.edits(edit) for edit in view.edits),
    )


def _job_of(run: directory.RunFolder) -> Job | None:
    from autotune.orchestrator.config.loader import written  # slow, and rarely needed

    try:
        return written(run.job_text)
    except (OSError, UnicodeDecodeError):
        return None


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


def _seconds(attempt: AttemptView, *, now: float) -> float | None:
    """Return the seconds that an attempt took, or has been running until `now`."""
    if attempt.ended is not None:
        return attempt.ended.seconds
    return max(0.0, now - seconds_of(attempt.started.at))


def _unwatched(attempt: AttemptView, *, driven: bool) -> bool:
    return not driven if attempt.ended is None else attempt.ended.unwatched


def _forecasts(attempt: AttemptView) -> tuple[Foreseen, ...]:
    """Return the memories that are forecast to run out in a running attempt."""
    if attempt.ended is not None:
        return ()
    return tuple(forecast for forecast in attempt.forecasts.values() if forecast.holds)


def _trial(view: RunView, row: Started | Tried, *, first: Knobs, now: float, driven: bool) -> TrialStatus:
    """Return the status of a trial, from its result or from its running attempt."""
    assert row.trial is not None
    change = messages.setting_changes(first, row.knobs) or "as written"
    if isinstance(row, Tried):
        status = messages.trial_result(row)
        return TrialStatus(trial=row.trial, change=change, seconds=row.seconds, status=status)
    attempt = view.attempts[row.attempt]
    return TrialStatus(
        trial=row.trial,
        change=change,
        seconds=_seconds(attempt, now=now),
        status=_attempt_status(attempt, driven=driven),
        unwatched=_unwatched(attempt, driven=driven),
    )


def _attempt_status(attempt: AttemptView, *, driven: bool) -> str:
    if attempt.diagnosed is not None:
        return f"✗ {messages.diagnosis(attempt.diagnosed)}"
    if attempt.ended is not None:
        return messages.outcome(attempt.ended.outcome, rehearsal=attempt.started.rehearsal is not None)
    word, last = "RUNNING" if driven else "UNWATCHED", attempt.last
    return word if last is None else f"{word} step {messages.step_of(last.step, last.of)}"


def _short_place(accepted: Accepted) -> str:
    cluster = accepted.cluster
    gpus = cluster.gpus
    return f"{gpus}×{cluster.gpu_name or 'GPU'}" if gpus else f"{cluster.nodes}×CPU"


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
