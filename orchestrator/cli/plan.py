"""`autotune plan`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.orchestrator.cli.options import given, global_options

_CODES = """\b
Exit codes:
  0    the plan is printed
  2    the job file or an option is wrong"""


@click.command("plan", epilog=_CODES)
@click.argument("job_file", metavar="job.yaml", type=click.Path(path_type=Path))
@global_options
@click.pass_context
def command(context: click.Context, job_file: Path) -> None:
    """Show the predicted memory peaks, the first command and the remedies in order; start nothing.

    \b
    Example:
      autotune plan job.yaml -v
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import planning

    planning.show(job_file, options=given(context))
