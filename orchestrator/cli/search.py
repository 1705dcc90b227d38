"""`autotune search`."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.launch import CODES, launching
from orchestrator.cli.options import given, global_options


@click.command("search", short_help="Among the configurations that fit, find the fastest.", epilog=CODES)
@launching
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    envvar="AUTOTUNE_TRIALS",
    show_envvar=True,
    help="Most configurations to run.",
)
@click.option(
    "--duration",
    metavar="D",
    envvar="AUTOTUNE_DURATION",
    show_envvar=True,
    help="Longest time, such as 8h.",
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
    trials: int | None,
    duration: str | None,
) -> None:
    """Make the job stable, then try what is faster until the budget is spent.

    \b
    Example:
      autotune search job.yaml --trials 40 --duration 8h
    """  # noqa: D301 - click reads the backspace
    from orchestrator import runs
    from orchestrator.cli import starting

    wish = starting.Wish(
        overrides=overrides,
        relaunches=relaunches,
        trials=trials,
        duration=duration,
        asked=runs.Asked(mode="search", policy=policy),
    )
    prepared = starting.prepare(job_file, wish)
    code = starting.begin(prepared, dry_run=dry_run, detach_=detach, submit_=submit, options=given(context))
    context.exit(code)
