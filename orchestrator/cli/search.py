"""`autotune search`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.launch import CODES, COMPLETE, HANDED_OVER
from autotune.orchestrator.cli.shared.launch_options import LaunchOptions, launching
from autotune.orchestrator.cli.shared.options import global_options

_FOUND = "the search is over; `stable.yaml` is the fastest configuration that it proved stable, or the start"
_CODES = CODES.replace(COMPLETE, _FOUND + HANDED_OVER).replace("fits, or", "fits, no trial succeeded, or")


def _with_unit(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a bare number: as seconds, which a job file means by it, it leaves no trial."""
    if value is not None and value.strip().isdecimal():
        raise click.BadParameter(f"{value} has no unit: {value}h, {value}m or {value}s")
    return value


@click.command("search", epilog=_CODES)
@launching("search")
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of trials.",
)
@click.option(
    "--duration",
    metavar="D",
    callback=_with_unit,
    help="Time limit for the search, such as 8h.",
)
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Start with a rehearsal, if the job allows one: a few steps that test what fails late.",
)
@global_options
def command(call: LaunchOptions) -> None:
    """Make the job stable, then find the fastest configuration within the budget.

    \b
    Example:
      autotune search job.yaml --trials 40 --duration 8h
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared import start

    click.get_current_context().exit(start.begin(call))
