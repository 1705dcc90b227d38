"""The commands of `autotune`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any

import click

from autotune.orchestrator.cli.options import given, global_options
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors

# In the order of use; each command is imported only when it is called or listed.
COMMANDS = ("launch", "search", "plan", "explain", "status", "resume", "stop", "ladder")


class Commands(click.Group):
    """Imports its commands when they are needed, and turns failures into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"autotune.orchestrator.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called; a misspelt one is answered with the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            if not near or "Did you mean" in error.format_message():
                raise
            message = f"{error.format_message().rstrip('.')}. Did you mean '{near[0]}'?"
            raise click.UsageError(message, ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; say failures without a traceback and bugs with one."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Failure as failure:
            _say(ctx, failure)
            ctx.exit(failure.code)
        except KeyboardInterrupt:
            ctx.exit(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(ExitCode.OK)
        except Exception:
            traceback.print_exc()
            click.echo("autotune: this is a bug in autotune; please report the lines above", err=True)
            ctx.exit(ExitCode.BUG)


def _say(ctx: click.Context, failure: Failure) -> None:
    from autotune.orchestrator.terminal.widgets import echo

    if isinstance(failure, JobErrors):
        text = failure.message
    else:
        text = f"error: {failure.message}"
        text += f"\nhint: {failure.hint}" if failure.hint else ""
    echo(text, color=given(ctx).color, err=True)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Documentation: README.md. Shell completion: _AUTOTUNE_COMPLETE=bash_source autotune",
)
@global_options
def main() -> None:
    """Run an LLM reinforcement-learning job, cure its out-of-memory failures, keep what holds.

    \b
    Example:
      autotune launch job.yaml
    """  # noqa: D301
