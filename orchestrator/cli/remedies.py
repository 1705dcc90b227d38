"""`autotune remedies`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.shared.options import framework_names, given, global_options

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such framework, or an option is wrong"""


@click.command("remedies", epilog=_CODES)
@click.argument("framework", metavar="FRAMEWORK", shell_complete=framework_names)
@global_options
@click.pass_context
def command(context: click.Context, framework: str) -> None:
    """List what autotune may change in a framework's job when memory runs out (alias: ladder).

    \b
    Example:
      autotune remedies verl
    """  # noqa: D301 - click reads the backspace
    import sys

    import msgspec

    from autotune.launchers import frameworks
    from autotune.launchers.likeness import suggestion
    from autotune.orchestrator.errors import ExitCode, Failure
    from autotune.orchestrator.terminal import remedy_table
    from autotune.orchestrator.terminal.widgets import echo, width_of

    try:
        adapter = frameworks.find(framework)
    except KeyError:
        names = tuple(frameworks.FRAMEWORKS)
        hint = suggestion(framework, names) or "one of " + ", ".join(f"`{name}`" for name in names)
        raise Failure(f"unknown framework `{framework}`", hint=hint, code=ExitCode.USAGE) from None
    rows = remedy_table.rows(adapter)
    if given(context).json:
        click.echo(msgspec.json.encode(remedy_table.RemedyTable(framework=adapter.name, rows=rows)))
    else:
        text = remedy_table.render_remedies(adapter, rows, width=width_of(sys.stdout))
        echo(text, color=given(context).color)
