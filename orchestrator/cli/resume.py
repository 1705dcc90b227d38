"""`autotune resume`."""

from __future__ import annotations

import click

from orchestrator.cli.launch import CODES
from orchestrator.cli.options import given, global_options, run_ids


@click.command("resume", short_help="Continue an interrupted run.", epilog=CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None) -> None:
    """Continue an interrupted run; RUN is an id or its beginning, by default the latest.

    \b
    Example:
      autotune resume 7c1e
    """  # noqa: D301 - click reads the backspace
    from orchestrator import runs
    from orchestrator.cli import driving

    options = given(context)
    found = runs.find(options.runs_dir, run)
    context.exit(driving.drive(found, options=options))
