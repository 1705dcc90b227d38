"""`autotune explain`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.orchestrator.cli.options import given, global_options

_CODES = """\b
Exit codes:
  0    every log got a cause
  1    a log shows no failure that a rule knows
  2    a log cannot be read, or an option is wrong
  101  a bug in autotune"""


@click.command("explain", short_help="Say why a log's job died and what would cure it.", epilog=_CODES)
@click.argument("logs", metavar="[LOG...|-]", nargs=-1)
@click.option(
    "--model",
    metavar="PATH",
    type=click.Path(path_type=Path),
    envvar="AUTOTUNE_MODEL",
    help="The model's config.json or its folder: tells what a request was.",
)
@click.option(
    "--framework",
    metavar="NAME",
    envvar="AUTOTUNE_FRAMEWORK",
    help="The framework that wrote the logs (default: recognised).",
)
@click.option(
    "--rule",
    metavar="ID",
    envvar="AUTOTUNE_RULE",
    help="Explain a rule or a cause instead of a log.",
)
@global_options
@click.pass_context
def command(
    context: click.Context,
    logs: tuple[str, ...],
    model: Path | None,
    framework: str | None,
    rule: str | None,
) -> None:
    """Say why a log's job died and what would cure it; needs no job, no cluster and no GPU.

    \b
    Example:
      autotune explain run.log
      kubectl logs trainer-0 | autotune explain -
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import explaining

    options = given(context)
    if rule is not None and logs:
        raise click.UsageError("--rule explains a rule; leave out the logs")
    if rule is not None:
        explaining.show_rule(rule, options=options)
    elif not logs:
        raise click.UsageError("name a log, or `-` for standard input")
    else:
        context.exit(explaining.show(logs, model=model, framework=framework, options=options))
