"""`autotune ladder`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.options import given, global_options

_CODES = """\b
Exit codes:
  0    the question is answered
  2    there is no such framework"""


@click.command("ladder", short_help="Every remedy of a framework, its setting and its price.", epilog=_CODES)
@click.argument("framework", metavar="FRAMEWORK")
@global_options
@click.pass_context
def command(context: click.Context, framework: str) -> None:
    """Show what may change in a framework's job, under which name, within which limits.

    \b
    Example:
      autotune ladder verl
    """  # noqa: D301 - click reads the backspace
    import msgspec

    from autotune.launchers import frameworks
    from autotune.orchestrator.config.fields import suggestion
    from autotune.orchestrator.errors import ExitCode, Failure
    from autotune.orchestrator.terminal import remedy_table
    from autotune.orchestrator.terminal.widgets import echo

    try:
        found = frameworks.find(framework)
    except KeyError:
        names = tuple(frameworks.FRAMEWORKS)
        hint = suggestion(framework, names) or "one of " + ", ".join(f"`{name}`" for name in names)
        raise Failure(f"unknown framework `{framework}`", hint=hint, code=ExitCode.USAGE) from None
    table = remedy_table.rows(found)
    if given(context).json:
        click.echo(msgspec.json.encode({"schema": 1, "framework": found.name, "rows": table}))
    else:
        echo(remedy_table.text(found, table), color=given(context).color)
