"""`autotune launch`."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.options import given, global_options

CODES = """\b
Exit codes:
  0    the training is complete, or `then: stop` was reached
  1    gave up, or the job failed by itself (code, configuration, disk)
  2    the job file or an option is wrong
  3    infrastructure: the cluster, its memory, or the run's folder; `autotune resume`, later
  101  a bug in autotune
  130  interrupted, 143 terminated; `autotune resume` continues"""


@click.command(
    "launch", short_help="Run the training to its end, recovering from memory failures.", epilog=CODES
)
@click.argument("job_file", metavar="job.yaml", type=click.Path(path_type=Path))
@click.option(
    "-n", "--dry-run", is_flag=True, envvar="AUTOTUNE_DRY_RUN", help="Print the first command; start nothing."
)
@click.option(
    "--detach",
    is_flag=True,
    envvar="AUTOTUNE_DETACH",
    help="Return at once; the run goes on without the terminal.",
)
@click.option(
    "--submit",
    metavar="URL",
    envvar="AUTOTUNE_SUBMIT",
    help="Run as a Ray job of the cluster whose dashboard is URL.",
)
@click.option(
    "--set",
    "overrides",
    metavar="knob=value",
    multiple=True,
    envvar="AUTOTUNE_SET",
    help="Change a knob of the job.",
)
@click.option(
    "--relaunches",
    type=click.IntRange(min=0),
    metavar="N",
    envvar="AUTOTUNE_RELAUNCHES",
    help="Most relaunches after failures of the job.",
)
@click.option(
    "--policy",
    type=click.Choice(["ladder"]),
    default="ladder",
    envvar="AUTOTUNE_POLICY",
    help="How a cure is chosen.",
)
@global_options
@click.pass_context
def command(
    context: click.Context,
    job_file: Path,
    dry_run: bool,
    detach: bool,
    submit: str | None,
    overrides: tuple[str, ...],
    relaunches: int | None,
    policy: str,
) -> None:
    """Run the training to its end, recovering from memory failures.

    \b
    Example:
      autotune launch job.yaml --set tokens_per_microbatch=16384
    """  # noqa: D301 - click reads the backspace
    from orchestrator.cli import starting

    options = given(context)
    if submit and detach:
        raise click.UsageError("--submit runs elsewhere already; leave out --detach")
    prepared = starting.prepare(job_file, overrides=overrides, relaunches=relaunches)
    if dry_run:
        starting.show(prepared, as_json=options.json)
    elif submit:
        starting.submit(prepared, url=submit, options=options)
    elif detach:
        starting.detach(prepared, options=options)
    else:
        context.exit(starting.launch(prepared, options=options))
