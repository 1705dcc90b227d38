"""`autotune explain`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.orchestrator.cli.options import given, global_options

_CODES = """\b
Exit codes:
  0    a cause was found in every log
  1    a log has no failure that a rule recognises
  2    a log cannot be read, or an option is wrong
  101  a bug in autotune"""


@click.command("explain", epilog=_CODES)
@click.argument("logs", metavar="[LOG...|-]", nargs=-1)
@click.option(
    "--model",
    metavar="PATH",
    type=click.Path(path_type=Path),
    show_envvar=True,
    help="The model's config.json or its folder: explains what the failed allocation was for.",
)
@click.option(
    "--framework",
    metavar="NAME",
    show_envvar=True,
    help="The framework that wrote the logs (default: detected).",
)
@click.option(
    "--rule",
    metavar="ID",
    show_envvar=True,
    help="Explain a rule or a cause, not a log.",
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
    """Explain why a job died from its log, and what would fix it. Needs no job, cluster or GPU.

    \b
    Example:
      autotune explain run.log
      kubectl logs trainer-0 | autotune explain -
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli import explaining

    options = given(context)
    if rule is not None and logs:
        raise click.UsageError("--rule takes no logs")
    if rule is not None:
        explaining.print_rule(rule, options=options)
    elif not logs:
        raise click.UsageError("no log given; name one, or `-` for standard input")
    else:
        context.exit(explaining.explain_logs(logs, model=model, framework=framework, options=options))
