"""`autotune doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from autotune.orchestrator.cli.shared.options import Options, given, global_options
from autotune.orchestrator.errors import ExitCode

if TYPE_CHECKING:
    from autotune.orchestrator.doctor.check import Examined

_CODES = """\b
Exit codes:
  0    no check failed; there may be warnings
  1    a check failed: a launch would not start, or would fail
  2    the job file or an option is wrong
  3    no cluster answers
  101  a bug in autotune"""


def examine(job_file: Path | None, *, options: Options) -> ExitCode:
    """Print all checks of this machine, its cluster and a job file; returns the exit code."""
    from autotune.orchestrator.config.loader import load
    from autotune.orchestrator.doctor.check import render
    from autotune.orchestrator.doctor.examine import examine_all
    from autotune.orchestrator.terminal.widgets import echo

    job = load(job_file) if job_file is not None else None
    result = _printable(examine_all(job, runs_dir=options.runs_dir))
    if options.json:
        click.echo(msgspec.json.encode(result))
    else:
        text = render(result, quiet=bool(options.quiet), verbose=bool(options.verbose))
        if text:
            echo(text, color=options.color)
    return result.code


def _printable(examined: Examined) -> Examined:
    """Return the checks sanitized for printing: names of processes and errors are untrusted text."""
    from autotune.orchestrator.explain.sanitize import plain

    checks = (
        msgspec.structs.replace(check, what=plain(check.what), hint=plain(check.hint))
        for check in examined.checks
    )
    return msgspec.structs.replace(examined, checks=tuple(checks))


@click.command("doctor", epilog=_CODES)
@click.argument("job_file", metavar="[job.yaml]", required=False, type=click.Path(path_type=Path))
@global_options
@click.pass_context
def command(context: click.Context, job_file: Path | None) -> None:
    """Check this machine, its cluster and a job before a launch. Starts nothing on the GPUs.

    \b
    Example:
      autotune doctor job.yaml
    """  # noqa: D301 - click reads the backspace
    context.exit(examine(job_file, options=given(context)))
