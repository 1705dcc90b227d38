"""`autotune remove`."""

from __future__ import annotations

import sys
import time

import click

from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.cli.stop import is_gone
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.errors import Failure, UserError, reason_of
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.lock import Lock, owner
from autotune.orchestrator.terminal.widgets import say
from autotune.orchestrator.units import counted, duration_s

_CODES = """\b
Exit codes:
  0    the folders are removed, or no run is so old
  1    no, at the question
  2    a run is not over, there is no such run, or an option is wrong
  3    a folder could not be removed"""
_OWN = ("attempts", "drivers")  # folders created by autotune in a run's folder


def removable(options: Options, *, older_than_s: float) -> list[directory.RunFolder]:
    """Return the readable runs that are over and whose last event is older, oldest first."""
    over = []
    for run in directory.runs(options.runs_dir):
        try:
            history = run.history()
        except Failure:
            continue  # damaged
        if not history or owner(run.path) is not None or not is_gone(history):
            continue
        if time.time() - seconds_of(history[-1].at) > older_than_s:
            over.append(run)
    return over


def remove(run: directory.RunFolder) -> None:
    """Remove a run's folder.

    Raises Failure if the run has a driver, if a process of it may be left, if its folder contains folders
    that autotune did not create, such as checkpoints, or if it cannot be removed.
    """
    lock = Lock(run.path)
    try:
        history = run.history()
        if history and not is_gone(history):
            hint = f"`{run.call('stop')}` ends it first"
            raise UserError(f"processes of run {run.id} may be left", hint=hint)
        others = sorted(each.name for each in run.path.iterdir() if each.is_dir() and each.name not in _OWN)
        if others:
            names = ", ".join(others)
            hint = f"move them, or remove `{run.path}` by hand"
            raise UserError(f"run {run.id} holds folders that autotune did not make: {names}", hint=hint)
        directory.delete(run)
    except OSError as error:
        raise Failure(f"cannot remove `{run.path}`: {reason_of(error)}") from None
    finally:
        lock.release()


def _age_s(text: str) -> float:
    try:
        age_s = duration_s(text)
    except ValueError:
        age_s = None
    if age_s is None or text.strip().isdigit():  # a number without a unit
        hint = "--older-than takes one such as 12h or 30d"
        raise UserError(f"`{text}` is no age", hint=hint)
    return age_s


@click.command("remove", epilog=_CODES)
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=run_ids)
@click.option("--older-than", metavar="AGE", help="All runs that ended so long ago, such as 30d.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@global_options
@click.pass_context
def command(context: click.Context, runs: tuple[str, ...], older_than: str | None, yes: bool) -> None:
    """Remove the folders of runs that are over. Checkpoints stay.

    \b
    Example:
      autotune remove 7c1e
      autotune remove --older-than 30d
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    if bool(runs) == bool(older_than):
        raise UserError("name runs, or --older-than AGE", hint="`autotune status` lists the runs")
    if older_than:
        chosen = removable(options, older_than_s=_age_s(older_than))
    else:
        chosen = list(
            {run.id: run for run in (directory.find(options.runs_dir, each) for each in runs)}.values()
        )
    if not chosen:
        say(f"no run in `{options.runs_dir}` ended more than {older_than} ago")
        return
    if not yes:
        say("\n".join(str(run.path) for run in chosen))
        if not sys.stdin.isatty():
            raise UserError("nothing was removed", hint="--yes removes without a question")
        click.confirm(f"Remove {counted(len(chosen), 'run')}?", abort=True, err=True)
    for run in chosen:
        remove(run)
        say(f"removed {run.path}")
