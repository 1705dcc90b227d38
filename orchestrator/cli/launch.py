"""`autotune launch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

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


_F = TypeVar("_F", bound=Callable[..., Any])


def launching(command: _F) -> _F:
    """Add what `launch` and `search` share."""
    for decorator in reversed(
        (
            click.argument("job_file", metavar="job.yaml", type=click.Path(path_type=Path)),
            click.option(
                "-n",
                "--dry-run",
                is_flag=True,
                envvar="AUTOTUNE_DRY_RUN",
                show_envvar=True,
                help="Print the first command; start nothing.",
            ),
            click.option(
                "--detach",
                is_flag=True,
                envvar="AUTOTUNE_DETACH",
                show_envvar=True,
                help="Return at once; the run goes on without the terminal.",
            ),
            click.option(
                "--submit",
                metavar="URL",
                envvar="AUTOTUNE_SUBMIT",
                show_envvar=True,
                help="Run as a Ray job of the cluster whose dashboard is URL.",
            ),
            click.option(
                "--set",
                "overrides",
                metavar="knob=value",
                multiple=True,
                envvar="AUTOTUNE_SET",
                show_envvar=True,
                help="Change a knob of the job.",
            ),
            click.option(
                "--relaunches",
                type=click.IntRange(min=0),
                metavar="N",
                envvar="AUTOTUNE_RELAUNCHES",
                show_envvar=True,
                help="Most relaunches after failures of the job.",
            ),
            click.option(
                "--policy",
                type=click.Choice(["estimate", "ladder"]),
                default="estimate",
                envvar="AUTOTUNE_POLICY",
                show_envvar=True,
                help="How a cure is chosen: by predicted memory, or by the ladder's order alone.",
            ),
        )
    ):
        command = decorator(command)
    return command


@click.command(
    "launch", short_help="Run the training to its end, recovering from memory failures.", epilog=CODES
)
@launching
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
    from orchestrator import runs
    from orchestrator.cli import starting

    wish = starting.Wish(overrides=overrides, relaunches=relaunches, asked=runs.Asked(policy=policy))
    prepared = starting.prepare(job_file, wish)
    code = starting.begin(prepared, dry_run=dry_run, detach_=detach, submit_=submit, options=given(context))
    context.exit(code)
