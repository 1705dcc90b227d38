"""`autotune remedies`."""

from __future__ import annotations

import click

from autotune.orchestrator.cli.shared.options import framework_names, given, global_options, known_framework

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
    from autotune.orchestrator.terminal import remedy_table
    from autotune.orchestrator.terminal.widgets import echo, width_of

    adapter = frameworks.find(known_framework(framework))
    rows = remedy_table.rows(adapter)
    if given(context).json:
        click.echo(msgspec.json.encode(remedy_table.RemedyTable(framework=adapter.name, rows=rows)))
    else:
        text = remedy_table.render_remedies(adapter, rows, width=width_of(sys.stdout))
        echo(text, color=given(context).color)
