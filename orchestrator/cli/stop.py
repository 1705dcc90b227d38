"""`autotune stop`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.options import given, global_options, run_ids

_CODES = """\b
Exit codes:
  0    no process of the run is left
  2    there is no such run, or an option is wrong
  3    the run's driver or its cluster does not respond"""


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
    from autotune.orchestrator.cli import stopping
    from autotune.orchestrator.run import directory

    options = given(context)
    stopping.stop(directory.find(options.runs_dir, run), options=options)
