"""Stops a run: through its driver, or, where that died, by ending what it left behind."""

from __future__ import annotations

import os
import signal
import time

import click

from autotune.orchestrator.cli import run as driving
from autotune.orchestrator.cli.options import Options
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import Owner, owner
from autotune.policies.values.events import Finished, Interrupted

_STOP_S = 120.0  # the grace period, the last log lines and the drain gate
_POLL_S = 0.2


def stop(run: directory.Run, *, options: Options) -> None:
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
        driving.end(run, options=options)
    last = run.history()[-1:]
    if last and isinstance(last[0], Finished) and not isinstance(last[0].verdict, Interrupted):
        click.echo(f"run {run.id} finished before it could be stopped", err=True)
        return
    click.echo(f"run {run.id} is stopped; `autotune resume {run.id}` continues it", err=True)


def _ask(run: directory.Run, driver: Owner) -> None:
    """Ask a driver to stop and wait until it has; raises Failure after two minutes."""
    directory.write_private(run.path / "stop", b"")
    if driver.is_here:
        try:
            os.kill(driver.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise Failure(f"run {run.id} belongs to another user (pid {driver.pid})") from None
    until = time.monotonic() + _STOP_S
    while owner(run.path) is not None:
        if time.monotonic() > until:
            raise Failure(
                f"the driver of run {run.id} (pid {driver.pid} on {driver.host}) does not stop",
                hint=f"on {driver.host} run `kill -9 {driver.pid}`, then `autotune stop {run.id}` again",
            )
        time.sleep(_POLL_S)
