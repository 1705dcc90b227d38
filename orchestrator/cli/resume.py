"""`autotune resume`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.orchestrator.cli.launch import CODES
from autotune.orchestrator.cli.shared.options import given, global_options, run_ids


@click.command("resume", epilog=CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option(
    "--edit",
    "edit",
    is_flag=True,
    help="Continue after a failure with the edited job file; opens $EDITOR if it is unchanged.",
)
@click.option(
    "--job",
    "job_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Continue with the edited job in this file; implies --edit.",
)
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, edit: bool, job_file: Path | None) -> None:
    """Continue an interrupted run, or a failed one after a fix.

    RUN is an id or the start of one; default: the latest run. A run that failed or gave up continues with
    --edit, which reads the changes from the launched job file or from runs/RUN/job.yaml, or with --job FILE.

    \b
    Example:
      autotune resume 7c1e
      autotune resume 7c1e --edit
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared import drive
    from autotune.orchestrator.run import directory

    options = given(context)
    run_folder = directory.find(options.runs_dir, run)
    context.exit(
        drive.resume(run_folder, options=options, edited=edit or job_file is not None, job_file=job_file)
    )
