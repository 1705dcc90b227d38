"""`autotune plan`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.orchestrator.cli.options import given, global_options

_CODES = """\b
Exit codes:
  0    the question is answered
  2    the job file is wrong"""


@click.command("plan", short_help="What launch would do, and why; no effects.", epilog=_CODES)
@click.argument("job_file", metavar="job.yaml", type=click.Path(path_type=Path))
@global_options
@click.pass_context
def command(context: click.Context, job_file: Path) -> None:
    """Show predicted peaks, the first command and the ladder that would be climbed; starts nothing.

    \b
    Example:
      autotune plan job.yaml -v
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import planning

    planning.show(job_file, options=given(context))
