"""`autotune stop`."""

from __future__ import annotations

import os
import signal
import time

import click

from autotune.orchestrator.cli.shared import drive
from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.lock import Owner, owner
from autotune.policies.values.events import Finished, Interrupted

_CODES = """\b
Exit codes:
  0    no process of the run is left
  2    there is no such run, or an option is wrong
  3    the run's driver or its cluster does not respond"""
_STOP_S = 120.0  # the grace period, the last log lines and the drain gate
_POLL_S = 0.2


def stop(run: directory.RunFolder, *, options: Options) -> None:
    """Stop a run and everything it started; raises Failure where the driver does not respond."""
    driver = owner(run.path)
    if driver is not None:
        _ask(run, driver)
    else:
        history = run.history()
        if not history or isinstance(history[-1], Finished):
            what = "has already finished" if history else "has not started"
            click.echo(f"run {run.id} {what}", err=True)
            return
        drive.end(run, options=options)
    last = run.history()[-1:]
    if last and isinstance(last[0], Finished) and not isinstance(last[0].verdict, Interrupted):
        click.echo(f"run {run.id} finished before it could be stopped", err=True)
        return
    click.echo(f"run {run.id} is stopped; `{run.call('resume')}` continues it", err=True)


def _ask(run: directory.RunFolder, driver: Owner) -> None:
    """Ask a driver to stop and wait until it has; raises Failure after two minutes.

    It reads the request in the run's folder; the signal only makes that quicker.
    """
    directory.write_private(run.path / "stop", b"")
    if driver.can_be_signalled:
        try:
            os.kill(driver.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            click.echo(
                f"pid {driver.pid} belongs to another user and was not signalled; "
                f"the request is in `{run.path / 'stop'}`, waiting for the driver to read it",
                err=True,
            )
    container = driver.is_here and not driver.can_be_signalled
    place = f"in its container on {driver.host}" if container else f"on {driver.host}"
    until = time.monotonic() + _STOP_S
    while owner(run.path) is not None:
        if time.monotonic() > until:
            raise Failure(
                f"the driver of run {run.id} (pid {driver.pid} on {driver.host}) does not stop",
                hint=f"{place} run `kill -9 {driver.pid}`, then `{run.call('stop')}` again",
            )
        time.sleep(_POLL_S)


@click.command("stop", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None) -> None:
    """Stop a run cleanly. RUN is an id or the start of one; default: the latest run.

    \b
    Example:
      autotune stop 7c1e
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    stop(directory.find(options.runs_dir, run), options=options)
