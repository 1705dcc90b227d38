"""`autotune status`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.options import given, global_options, run_ids

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such run, or an option is wrong"""


@click.command("status", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option(
    "--watch", is_flag=True, show_envvar=True, help="Refresh every two seconds until the run is over."
)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, watch: bool) -> None:
    """List all runs, or the attempts of one. RUN is an id or the start of one.

    \b
    Example:
      autotune status 7c1e --watch
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import standing

    standing.print_status(given(context), prefix=run, watch=watch)
