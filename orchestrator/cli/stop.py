"""`autotune stop`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.options import given, global_options, run_ids

_CODES = """\b
Exit codes:
  0    nothing of the run is left
  2    there is no such run
  3    its driver or its cluster does not answer"""


@click.command("stop", short_help="End a run cleanly, from another terminal or host.", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None) -> None:
    """End a run cleanly; RUN is an id or its beginning, by default the latest.

    \b
    Example:
      autotune stop 7c1e
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import stopping
    from autotune.orchestrator.run import directory

    options = given(context)
    stopping.stop(directory.find(options.runs_dir, run), options=options)
