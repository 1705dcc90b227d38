"""`autotune rehearse`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.shared.launch_options import LaunchOptions, launching
from autotune.orchestrator.cli.shared.options import given, global_options

_CODES = """\b
Exit codes:
  0    the job got through; `rehearsed.yaml` is the job with what that took
  1    no configuration gets through, or the job itself failed (code, configuration, disk)
  2    the job file or an option is wrong, or the job cannot be rehearsed
  3    infrastructure failed: the cluster, its memory or the run's folder; later, `autotune resume`
  101  a bug in autotune
  130  interrupted; 143 terminated; `autotune resume` continues the run"""


@click.command("rehearse", epilog=_CODES)
@launching("rehearse")
@global_options
@click.pass_context
def command(context: click.Context, launch_options: LaunchOptions) -> None:
    """Meet in five steps what fails late: full length, checkpoint, validation, reload; cure it.

    \b
    Example:
      autotune rehearse job.yaml
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared import start

    context.exit(start.begin(launch_options, options=given(context)))
