"""`autotune launch` and `autotune rehearse`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.shared.launch_options import LaunchOptions, launching
from autotune.orchestrator.cli.shared.options import global_options

COMPLETE = "the training is complete, or stopped at the goal with `then: stop`"
CODES = f"""\b
Exit codes:
  0    {COMPLETE}
  1    no configuration fits, or the job itself failed (code, configuration, disk)
  2    the job file or an option is wrong
  3    infrastructure failed: the cluster, its memory or the run folder; `autotune resume` later
  101  a bug in autotune
  130  interrupted; 143 terminated; `autotune resume` continues the run"""

HANDED_OVER = "; with --detach, --submit: it began"
_REHEARSED = "the rehearsal passed; `rehearsed.yaml` is the job with the changes it needed"


@click.command("launch", epilog=CODES.replace(COMPLETE, COMPLETE + HANDED_OVER))
@launching("launch")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Start with a rehearsal: a few steps, in a separate folder, that test what fails late.",
)
@global_options
def command(call: LaunchOptions) -> None:
    """Run the training to its end, recovering from memory failures.

    \b
    Example:
      autotune launch job.yaml --set tokens_per_microbatch=16384
      autotune launch -- bash run_grpo.sh
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared import start

    click.get_current_context().exit(start.begin(call))


@click.command("rehearse", epilog=CODES.replace(COMPLETE, _REHEARSED + HANDED_OVER))
@launching("rehearse")
@global_options
def rehearse(call: LaunchOptions) -> None:
    """Test what fails late in a few steps, and fix it: full lengths, checkpoint, validation, reload.

    \b
    Example:
      autotune rehearse job.yaml
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared import start

    click.get_current_context().exit(start.begin(call))
