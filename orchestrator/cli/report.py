"""`autotune report`."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path

import click
import msgspec

from autotune.orchestrator.cli.shared.options import given, global_options, run_ids
from autotune.orchestrator.run import directory
from autotune.orchestrator.terminal.widgets import say
from autotune.policies.values.run.view import RunView

_CODES = """\b
Exit codes:
  0    the report is written; its path is on stdout
  2    there is no such run, it has nothing to report yet, or an option is wrong
  3    the file cannot be written"""


@click.command("report", epilog=_CODES)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
@click.option("--open", "opened", is_flag=True, help="Open it in the browser.")
@click.option("--force", is_flag=True, help="Replace a report.html that autotune did not write.")
@global_options
@click.pass_context
def command(context: click.Context, run: str | None, opened: bool, force: bool) -> None:
    """Write a run's report as one HTML file: verdict, story, memory, search, evidence.

    Every launch and search writes it at its end, as report.html in the run's folder; for a search,
    study.journal is written too. RUN is an id or the start of one; the latest by default.

    \b
    Example:
      autotune report 7c1e --open
    """  # noqa: D301 - click reads the backspace
    from autotune.orchestrator.cli.shared.run_status import RunReader
    from autotune.orchestrator.report.page import NAME, write_new
    from autotune.orchestrator.report.search_story import write_study

    options = given(context)
    result = directory.find(options.runs_dir, run)
    report = write_new(result, force=force)
    write_study(result, RunView(result.history()))
    path = result.path / NAME
    RunReader(result).look(now=time.time())  # stores the summary of a finished run, for the next `status`
    click.echo(msgspec.json.encode(report) if options.json else str(path))
    if opened and not opens(path):
        say(f"hint: no browser was found; open {path.resolve()} in one")


def opens(path: Path) -> bool:
    """Open a file in the browser; return whether one was found."""
    return webbrowser.open(path.resolve().as_uri())
