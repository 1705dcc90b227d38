"""`autotune stop`."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress

import click

from autotune.orchestrator.cli.shared import drive
from autotune.orchestrator.cli.shared.options import Options, given, global_options, run_ids
from autotune.orchestrator.driver.attempt import doubtful
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.directory import REQUEST
from autotune.orchestrator.run.lock import Owner, Watch, last_owner, owner
from autotune.orchestrator.run.storage import is_absent
from autotune.orchestrator.run_states import display_of
from autotune.orchestrator.terminal.widgets import say
from autotune.policies.values.events import Finished, History, Interrupted
from autotune.policies.values.history import accepted_of

_CODES = """\b
Exit codes:
  0    the run is over, and no process of it is left on any node
  2    there is no such run, or an option is wrong
  3    the driver, the cluster or a node does not respond, or a process could not be ended"""
_STOP_S = 120.0  # the grace period, the last log lines and the drain gate
_POLL_S = 0.2


def stop(run: directory.RunFolder, *, options: Options) -> None:
    """Stop a run and everything it started, regardless of who drove it and how its driver ended.

    Raises Failure if that could not be done, or could not be observed.
    """
    try:
        _stop(run, options=options)
    except Failure:
        if not is_absent(run.path):
            raise
        say(f"run {run.id} was refused and removed by its launch before anything was started")


def _stop(run: directory.RunFolder, *, options: Options) -> None:
    driver = owner(run.path)
    if driver is not None:
        _ask(run, driver)
    history = run.history()
    silent = last_owner(run.path)  # a driver on another host that did not respond may start later
    if not history and driver is not None and (silent is None or silent.can_be_signalled):
        _withdraw(run)
        say(f"run {run.id} is stopped before anything was started")
        return
    if not history:
        _request(run)
        say(f"run {run.id} has not started; a driver that is starting now stops at once")
        return
    was_over = driver is None and isinstance(history[-1], Finished)
    if not is_gone(history):
        _require_reachable(run, history, driver or last_owner(run.path))
        drive.end(run, options=options)
        history = run.history()
    if not isinstance(history[-1], Finished):
        raise Failure(f"run {run.id} is not stopped", hint=f"`{run.call('status')}` shows it")
    _withdraw(run)
    stopped = isinstance(history[-1].verdict, Interrupted)
    if was_over and stopped:
        nothing = "no process of it is left"
        say(f"run {run.id} was already stopped; {nothing}; `{run.call('resume')}` continues it")
    elif was_over:
        state = display_of(history[-1].verdict).word
        say(f"run {run.id} has already finished ({state}); no process of it is left")
    elif not stopped:
        say(f"run {run.id} finished before it could be stopped")
    else:
        say(f"run {run.id} is stopped; `{run.call('resume')}` continues it")


def is_gone(history: History) -> bool:
    """Return whether the recorded events show that the run is over and no process of it is left."""
    last = history[-1]
    return isinstance(last, Finished) and (last.gone or not doubtful(history))


def _require_reachable(run: directory.RunFolder, history: History, driver: Owner | None) -> None:
    """Raise Failure if the processes of a run with its own local Ray cannot be observed from here."""
    if accepted_of(history).cluster.address != "local" or driver is None or driver.can_be_signalled:
        return
    if driver.host == socket.gethostname() and not driver.is_here:
        return  # this machine was rebooted since
    container = "in its container " if driver.is_here else ""
    raise Failure(
        f"the driver of run {run.id} ended {container}on {driver.host}, where its processes may be left",
        hint=f"run `{run.call_anywhere('stop')}` {container}on {driver.host}",
    )


def _request(run: directory.RunFolder) -> None:
    directory.write_private(run.path / REQUEST, b"")


def _withdraw(run: directory.RunFolder) -> None:
    with suppress(OSError):  # the next driver removes it, too
        (run.path / REQUEST).unlink(missing_ok=True)


def _ask(run: directory.RunFolder, driver: Owner) -> None:
    """Ask a driver to stop and wait until it has ended; raises Failure after two minutes.

    The driver reads the request in the run's folder; the signal only speeds this up. The request is repeated
    because a starting driver removes existing requests as old.
    """
    _request(run)
    if driver.can_be_signalled:
        try:
            os.kill(driver.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # its lock will be free in a moment
        except PermissionError:
            say(
                f"pid {driver.pid} belongs to another user and was not signalled; "
                f"the request is in `{run.path / REQUEST}`, waiting for the driver to read it"
            )
    container = driver.is_here and not driver.can_be_signalled
    place = f"in its container on {driver.host}" if container else f"on {driver.host}"
    until = time.monotonic() + _STOP_S
    watch = Watch(run.path)
    while watch.owner() is not None:
        if time.monotonic() > until and not driver.is_known:
            raise Failure(
                f"run {run.id} does not stop, and who drives it cannot be read",
                hint=f"`{run.call('stop')}` again once `{run.path}` can be read",
            )
        if time.monotonic() > until:
            raise Failure(
                f"the driver of run {run.id} (pid {driver.pid} on {driver.host}) does not stop",
                hint=f"{place} run `kill -9 {driver.pid}`, then `{run.call('stop')}` again",
            )
        with suppress(OSError):
            if not (run.path / REQUEST).exists():
                _request(run)
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
