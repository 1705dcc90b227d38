"""`autotune resume`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.launch import CODES
from autotune.orchestrator.cli.options import given, global_options, run_ids


@click.command("resume", epilog=CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None) -> None:
    """Continue an interrupted run. RUN is an id or the start of one; default: the latest run.

    \b
    Example:
      autotune resume 7c1e
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import drive
    from autotune.orchestrator.run import directory

    options = given(context)
    run_folder = directory.find(options.runs_dir, run)
    context.exit(drive.drive(run_folder, options=options))
