"""`autotune status`."""

from __future__ import annotations

import os
import re
import sys
import time
from statistics import median

import click
import msgspec
from msgspec.structs import replace

from autotune.orchestrator import messages
from autotune.orchestrator.calls import option_of
from autotune.orchestrator.cli.shared.options import Options, given, global_options, option, run_ids
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.config.loader import written
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.lock import owner
from autotune.orchestrator.run.memory_record import MemorySpan, so_far
from autotune.orchestrator.run_states import DISPLAYS
from autotune.orchestrator.terminal import widgets
from autotune.orchestrator.terminal.standard_streams import was_left
from autotune.orchestrator.terminal.widgets import rendered
from autotune.orchestrator.units import show_duration, show_gib
from autotune.policies.forecast.time_left import TimeLeft
from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Diagnosed,
    Edited,
    Ended,
    Event,
    Finished,
    Foreseen,
    History,
    Progressed,
    Started,
    Tried,
)
from autotune.policies.values.history import accepted_of, settled
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.state import RunState, attended, state_of
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such run, or an option is wrong"""
_REPEAT_S = 2.0
_HEARTBEAT_S = 60.0  # where the table cannot be redrawn
_STEPS = 24  # of the running attempt, in the picture of its step times
_HEAD = ("RUN", "NAME", "FRAMEWORK", "CLUSTER", "SUBMITTED", "TOTAL", "RUNNING", "#ATTEMPTS", "STATUS")


class AttemptStatus(Value, frozen=True, kw_only=True):
    """One attempt in `autotune status`."""

    attempt: int
    change: str
    seconds: float
    status: str
    cured: tuple[CuredInPlace, ...] = ()  # failures after which the job itself went on
    foreseen: tuple[Foreseen, ...] = ()  # memories that are expected to run out in it
    memory: tuple[MemorySpan, ...] = ()  # of each node, from its start to now; for one run alone


class TrialStatus(Value, frozen=True, kw_only=True):
    """One trial of a search in `autotune status`."""

    trial: int
    change: str
    seconds: float
    status: str


class RunStatus(Value, frozen=True, kw_only=True):
    """One run in `autotune status`."""

    run: str
    name: str = ""
    framework: str = ""
    cluster: str = ""
    submitted: str = ""
    total_s: float = 0.0
    running_s: float = 0.0
    status: str = "STARTING"
    running: bool = False  # a driver is at work on it
    attempts: tuple[AttemptStatus, ...] = ()  # without those of a search's trials
    trials: tuple[TrialStatus, ...] = ()  # of a search
    edits: tuple[str, ...] = ()  # what the user changed in the job since the launch
    problem: str = ""  # why its journal cannot be read
    left: TimeLeft | None = None  # while it runs, once enough is known
    step_s: tuple[float, ...] = ()  # latest step times of the only attempt that runs, without its first


def standing(run: directory.RunFolder, *, now: float, memory: bool = False) -> RunStatus:
    """Return the status of a run; with `memory` that of its attempts is read too.

    One whose journal cannot be read has a problem instead.
    """
    driven = owner(run.path) is not None
    try:
        history = run.history()
    except Failure as failure:
        return RunStatus(
            run=run.id, status=DISPLAYS[RunState.UNREADABLE].word, running=driven, problem=failure.message
        )
    if not history or not isinstance(history[0], Accepted):
        job = _job_of(run)
        return RunStatus(
            run=run.id,
            name=job.name if job is not None else "",
            framework=job.framework if job is not None else "",
            status=DISPLAYS[attended(RunState.NOT_STARTED, driven=driven)].word,
            running=driven,
        )
    first, accepted = history[0].profile.knobs, accepted_of(history)
    over = isinstance(history[-1], Finished)
    end = seconds_of(history[-1].at) if over or not driven else now
    started = [e for e in history if isinstance(e, Started)]
    attempts = _attempts(history, [e for e in started if e.trial is None], first, now=end)
    trial_attempts = _attempts(history, [e for e in started if e.trial is not None], first, now=end)
    if memory:
        attempts = tuple(replace(a, memory=so_far(run.attempt(a.attempt).path)) for a in attempts)
    left, step_s = _time_left(history, now=now) if driven and not over else (None, ())
    return RunStatus(
        run=run.id,
        name=accepted.job.name,
        framework=accepted.job.framework,
        cluster=_short_place(accepted),
        submitted=accepted.at,
        total_s=max(0.0, end - seconds_of(accepted.at)),
        running_s=sum(a.seconds for a in (*attempts, *trial_attempts)),
        status=DISPLAYS[state_of(history, driven=driven)].word,
        running=driven and not over,
        attempts=attempts,
        trials=_trials(history, trial_attempts, accepted.profile.knobs),
        edits=tuple(messages.edits(e) for e in history if isinstance(e, Edited)),
        left=left,
        step_s=step_s,
    )


def _time_left(history: History, *, now: float) -> tuple[TimeLeft | None, tuple[float, ...]]:
    from autotune.orchestrator.terminal.live_view import view_of

    view = view_of(history)
    return view.time_left(now=now), view.step_seconds()


def _job_of(run: directory.RunFolder) -> Job | None:
    try:
        return written(run.job_text)
    except (OSError, UnicodeDecodeError):
        return None


def print_status(options: Options, *, prefix: str | None, watch: bool) -> None:
    """Print the table of runs, or one run with its attempts; with `watch` until no run is at work.

    Where it cannot be redrawn, as in a file, it is printed again when an attempt or a trial begins or ends
    and once a minute.
    """
    redrawn = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    before, printed_at = "", 0.0
    while True:
        now = time.time()
        chosen = (
            (directory.find(options.runs_dir, prefix),) if prefix else directory.runs(options.runs_dir)[::-1]
        )
        standings = [standing(run, now=now, memory=bool(prefix)) for run in chosen]
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
            none = f"no runs yet: `autotune launch job.yaml{option_of(options.runs_dir)}` starts one"
            widgets.echo(shown_runs if standings else none, color=options.color)
        if not watch or was_left(sys.stdout) or not any(run.running for run in standings):
            return
        time.sleep(_REPEAT_S)


def _course(standings: list[RunStatus], *, attempts: bool) -> str:
    """Return what of a table is news: all but times and steps."""
    parts = [f"{run.run} {run.status} {len(run.attempts)}" for run in standings]
    if attempts:
        parts += [attempt.status for run in standings for attempt in run.attempts]
        parts += [trial.status for run in standings for trial in run.trials]
    return re.sub(r"RUNNING step \S+", "RUNNING", "\n".join(parts))


def table(standings: list[RunStatus], *, now: float, attempts: bool, width: int | None = None) -> str:
    """Return runs as a table in `width` columns, None does not wrap; with `attempts` those of the first."""
    rows = [
        (
            run.run,
            run.name,
            run.framework,
            run.cluster,
            _ago(now - seconds_of(run.submitted)) if run.submitted else "-",
            show_duration(run.total_s),
            show_duration(run.running_s),
            str(len(run.attempts)),
            run.status,
        )
        for run in standings
    ]
    text = rendered(widgets.table(rows, head=_HEAD, wrap={1: 12, 4: 6}), width=width)
    if not attempts:
        return text
    run, parts = standings[0], [text]
    if run.attempts:
        parts.append(
            _below([(f"  ↳{a.attempt}", a.change, a.seconds, a.status) for a in run.attempts], width)
        )
    parts += [f"  attempt #{a.attempt}: {messages.cured(e)}" for a in run.attempts for e in a.cured]
    parts += _left(run)
    parts += [f"  forecast: {messages.forecast(e)}" for a in run.attempts[-1:] for e in a.foreseen]
    measured = next((a for a in reversed(run.attempts) if a.memory), None)
    if measured is not None:
        parts += [f"peak memory of attempt #{measured.attempt}", *_memory(measured.memory)]
    if run.trials:
        parts.append(
            _below([(f"  trial {t.trial}", t.change, t.seconds, t.status) for t in run.trials], width)
        )
    parts += [f"  edited: {edit}" for edit in run.edits]
    parts += [f"  {run.problem}"] if run.problem else []
    return "\n".join(parts)


def _left(run: RunStatus) -> list[str]:
    """Return how long a run still takes and how long its latest steps took, as far as that is known."""
    said = [] if run.left is None else [messages.time_left(run.left)]
    if run.step_s:
        picture = widgets.sparkline(run.step_s[-_STEPS:])
        said.append(f"{show_duration(median(run.step_s))} a step {picture}".rstrip())
    return [f"  {'   '.join(said)}"] if said else []


def _memory(nodes: tuple[MemorySpan, ...]) -> list[str]:
    """Return the most memory in use on each node so far: of the host, and of the attempt's cards."""
    lines = []
    for node in nodes:
        cards = [card for card in node.gpus if card.of_attempt] or list(node.gpus)
        shown = [f"host {show_gib(node.host.most)} of {show_gib(node.host_total_bytes)}"]
        shown += [f"GPU {c.index} {show_gib(c.used.most)} of {show_gib(c.total_bytes)}" for c in cards]
        lines += [f"  {node.node}  {part}" for part in shown]
    return lines


def _below(rows: list[tuple[str, str, float, str]], width: int | None) -> str:
    cells = [(name, change, show_duration(seconds), status) for name, change, seconds, status in rows]
    return rendered(widgets.table(cells, right=(2,), wrap={1: 32, 3: 20}), width=width)


def _attempts(
    history: History, started: list[Started], first: Knobs, *, now: float
) -> tuple[AttemptStatus, ...]:
    attempts = []
    before = first
    went_on = {e.attempt: e.knobs for e in settled(history) if isinstance(e, Started)}
    for start in started:
        rows = tuple(e for e in history if e.attempt == start.attempt)
        ended = next((e for e in rows if isinstance(e, Ended)), None)
        change = messages.attempt(start, before=before, first=first)
        seconds = ended.seconds if ended is not None else max(0.0, now - seconds_of(start.at))
        attempts.append(
            AttemptStatus(
                attempt=start.attempt,
                change=change,
                seconds=seconds,
                status=_attempt_status(rows, ended, rehearsal=start.rehearsal is not None),
                foreseen=_foreseen(rows) if ended is None else (),
                cured=tuple(e for e in rows if isinstance(e, CuredInPlace)),
            )
        )
        before = went_on[start.attempt]
    return tuple(attempts)


def _foreseen(rows: tuple[Event, ...]) -> tuple[Foreseen, ...]:
    """Return what was said last of each memory that is expected to run out."""
    last = {e.memory: e for e in rows if isinstance(e, Foreseen)}
    return tuple(event for event in last.values() if event.holds)


def _trials(history: History, attempts: tuple[AttemptStatus, ...], first: Knobs) -> tuple[TrialStatus, ...]:
    """Return the trials of a search with their last results; those under way by their running attempts."""
    by_attempt = {a.attempt: a for a in attempts}
    found: dict[int, TrialStatus] = {}
    for event in history:
        if isinstance(event, Started) and event.trial is not None:
            running = by_attempt[event.attempt]
            found[event.trial] = TrialStatus(
                trial=event.trial,
                change=_change(first, event.knobs),
                seconds=running.seconds,
                status=running.status,
            )
        elif isinstance(event, Tried):
            found[event.trial] = TrialStatus(
                trial=event.trial,
                change=_change(first, event.knobs),
                seconds=event.seconds,
                status=messages.trial_result(event),
            )
    return tuple(found[number] for number in sorted(found))


def _change(first: Knobs, knobs: Knobs) -> str:
    return messages.setting_changes(first, knobs) or "as written"


def _attempt_status(rows: tuple[Event, ...], ended: Ended | None, *, rehearsal: bool) -> str:
    diagnosed = next((e for e in rows if isinstance(e, Diagnosed)), None)
    if diagnosed is not None:
        return f"✗ {messages.diagnosis(diagnosed)}"
    if ended is not None:
        return messages.outcome(ended.outcome, rehearsal=rehearsal)
    step = next((e for e in reversed(rows) if isinstance(e, Progressed)), None)
    return "RUNNING" if step is None else f"RUNNING step {messages.step_of(step.step, step.of)}"


def _short_place(accepted: Accepted) -> str:
    cluster = accepted.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    return f"{gpus}×{cluster.gpu_name or 'GPU'}" if gpus else f"{cluster.nodes}×CPU"


def _ago(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hr", 3600), ("min", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


@click.command("status", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@option("--watch", is_flag=True, help="Refresh every two seconds until the run is over.")
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, watch: bool) -> None:
    """List all runs, or the attempts of one. RUN is an id or the start of one.

    \b
    Example:
      autotune status 7c1e --watch
    """  # noqa: D301 - click reads the backspace
    print_status(given(context), prefix=run, watch=watch)
