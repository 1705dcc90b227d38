"""`autotune launch`, `autotune rehearse` and `autotune search`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.shared.launch_options import launching
from autotune.orchestrator.cli.shared.options import global_options

_COMPLETE = "the training is complete, or stopped at the goal with `then: stop`"
CODES = f"""\b
Exit codes:
  0    {_COMPLETE}
  1    no configuration fits, or the job itself failed (code, configuration, disk)
  2    the job file or an option is wrong
  3    infrastructure failed: the cluster, its memory or the run folder; `autotune resume` later
  101  a bug in autotune
  130  interrupted; 143 terminated; `autotune resume` continues the run"""
_REHEARSED = "the rehearsal passed; `rehearsed.yaml` is the job with the changes it needed"
_SEARCHED = (
    "the search is over; `stable.yaml` is the fastest configuration that it proved stable, or the start"
)


def _codes(success: str) -> str:
    return CODES.replace(_COMPLETE, f"{success}; with --detach, --submit: it began")


@click.command("launch", epilog=_codes(_COMPLETE))
@launching("launch")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Start with a rehearsal: a few steps, in a separate folder, that test what fails late.",
)
@global_options
def command() -> None:
    """Run the training to its end, recovering from memory failures.

    \b
    Example:
      autotune launch job.yaml --set tokens_per_microbatch=16384
      autotune launch -- bash run_grpo.sh
    """  # noqa: D301 - click reads the backspace


@click.command("rehearse", epilog=_codes(_REHEARSED))
@launching("rehearse")
@global_options
def rehearse() -> None:
    """Test what fails late in a few steps, and fix it: full lengths, checkpoint, validation, reload.

    \b
    Example:
      autotune rehearse job.yaml
    """  # noqa: D301 - click reads the backspace


def _with_unit(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a number without a unit: read as seconds, as in a job file, it would allow no trial."""
    if value is not None and value.strip().isdecimal():
        raise click.BadParameter(f"{value} has no unit: {value}h, {value}m or {value}s")
    return value


@click.command("search", epilog=_codes(_SEARCHED).replace("fits, or", "fits, no trial succeeded, or"))
@launching("search")
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="Maximum number of trials.")
@click.option("--duration", metavar="D", callback=_with_unit, help="Time limit for the search, such as 8h.")
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Start with a rehearsal, if the job allows one: a few steps that test what fails late.",
)
@global_options
def search() -> None:
    """Make the job stable, then find the fastest configuration within the budget.

    \b
    Example:
      autotune search job.yaml --trials 40 --duration 8h
    """  # noqa: D301 - click reads the backspace
