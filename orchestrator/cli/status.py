"""`autotune status`."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.cli.options import Options, given, global_options, option, run_ids
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.config.loader import written
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import owner
from autotune.orchestrator.terminal import widgets
from autotune.orchestrator.terminal.widgets import rendered
from autotune.orchestrator.units import show_duration
from autotune.policies.values.events import (
    Accepted,
    Diagnosed,
    Ended,
    Event,
    Finished,
    GaveUp,
    GoalReached,
    History,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Stable,
    Started,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such run, or an option is wrong"""
_REPEAT_S = 2.0
_HEAD = ("RUN", "NAME", "FRAMEWORK", "CLUSTER", "SUBMITTED", "TOTAL", "RUNNING", "#ATTEMPTS", "STATUS")


class AttemptStatus(Value, frozen=True, kw_only=True):
    """One attempt in `autotune status`."""

    attempt: int
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
    attempts: tuple[AttemptStatus, ...] = ()


def standing(run: directory.Run, *, now: float) -> RunStatus:
    """Return the status of a run."""
    history = run.history()
    driven = owner(run.path) is not None
    if not history or not isinstance(history[0], Accepted):
        job = written(run.job_text)
        return RunStatus(
            run=run.id,
            name=job.name if job is not None else "",
            framework=job.framework if job is not None else "",
            status="STARTING" if driven else "NOT STARTED",
            running=driven,
        )
    accepted = history[0]
    over = isinstance(history[-1], Finished)
    end = seconds_of(history[-1].at) if over or not driven else now
    attempts = _attempts(history, accepted.profile.knobs, now=end)
    return RunStatus(
        run=run.id,
        name=accepted.job.name,
        framework=accepted.job.framework,
        cluster=_short_place(accepted),
        submitted=accepted.at,
        total_s=max(0.0, end - seconds_of(accepted.at)),
        running_s=sum(a.seconds for a in attempts),
        status=_status(history, driven=driven),
        running=driven and not over,
        attempts=attempts,
    )


def print_status(options: Options, *, prefix: str | None, watch: bool) -> None:
    """Print the table of runs, or one run with its attempts; with `watch` until no run is driven."""
    while True:
        now = time.time()
        chosen = (
            (directory.find(options.runs_dir, prefix),) if prefix else directory.runs(options.runs_dir)[::-1]
        )
        standings = [standing(run, now=now) for run in chosen]
        if options.json:
            click.echo(msgspec.json.encode(standings[0] if prefix else standings))
        else:
            if watch and sys.stdout.isatty():
                click.clear()
            width = widgets.width_of(sys.stdout)
            widgets.echo(table(standings, now=now, attempts=bool(prefix), width=width), color=options.color)
        if not watch or not any(run.running for run in standings):
            return
        time.sleep(_REPEAT_S)


def table(standings: list[RunStatus], *, now: float, attempts: bool, width: int | None = None) -> str:
    """Return runs as a table in `width` columns, None does not wrap; with `attempts` those of the first."""
    if not standings:
        return "no runs yet: `autotune launch job.yaml` starts one"
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
    if not attempts or not standings[0].attempts:
        return text
    of_run = [
        (f"  ↳{attempt.attempt}", attempt.change, show_duration(attempt.seconds), attempt.status)
        for attempt in standings[0].attempts
    ]
    return f"{text}\n{rendered(widgets.table(of_run, right=(2,), wrap={1: 32, 3: 20}), width=width)}"


def _attempts(history: History, first: Knobs, *, now: float) -> tuple[AttemptStatus, ...]:
    attempts = []
    before = first
    for start in (e for e in history if isinstance(e, Started)):
        rows = tuple(e for e in history if e.attempt == start.attempt)
        ended = next((e for e in rows if isinstance(e, Ended)), None)
        change = messages.setting_changes(before, start.knobs) or (
            "as written" if start.knobs == first else "same settings again"
        )
        seconds = ended.seconds if ended is not None else max(0.0, now - seconds_of(start.at))
        attempts.append(
            AttemptStatus(
                attempt=start.attempt, change=change, seconds=seconds, status=_attempt_status(rows, ended)
            )
        )
        before = start.knobs
    return tuple(attempts)


def _attempt_status(rows: tuple[Event, ...], ended: Ended | None) -> str:
    diagnosed = next((e for e in rows if isinstance(e, Diagnosed)), None)
    if diagnosed is not None:
        return f"✗ {messages.diagnosis(diagnosed)}"
    if ended is not None:
        return messages.outcome(ended.outcome)
    step = next((e for e in reversed(rows) if isinstance(e, Progressed)), None)
    return "RUNNING" if step is None else f"RUNNING step {messages.step_of(step.step, step.of)}"


def _status(history: History, *, driven: bool) -> str:
    last = history[-1]
    if isinstance(last, Finished):
        return _word(last.verdict)
    if not driven:
        return "INTERRUPTED"
    started = [e for e in history if isinstance(e, Started)]
    if any(e.trial is not None for e in started):
        return "SEARCHING"
    if any(isinstance(e, GoalReached) and e.attempt == started[-1].attempt for e in history if started):
        return "STABLE"
    return "RECOVERING" if len(started) > 1 or any(isinstance(e, Ended) for e in history) else "RUNNING"


def _word(verdict: Verdict) -> str:
    match verdict:
        case TrainingCompleted():
            return "COMPLETED"
        case Stable():
            return "STABLE"
        case GaveUp():
            return "GAVE UP"
        case NeedsHuman():
            return "FAILED"
        case Infrastructure():
            return "LOST"
        case Interrupted():
            return "STOPPED"


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
