"""`autotune status`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.options import given, global_options, run_ids

_CODES = """\b
Exit codes:
  0    the question is answered
  2    there is no such run"""


@click.command("status", short_help="Table of runs, or one run's attempts.", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option(
    "--watch", is_flag=True, envvar="AUTOTUNE_WATCH", help="Repeat every two seconds until the run is over."
)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, watch: bool) -> None:
    """Show every run, or the attempts of one.

    \b
    Example:
      autotune status 7c1e --watch
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import standing

    standing.show(given(context), prefix=run, watch=watch)
