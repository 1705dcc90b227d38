"""The commands of `autotune`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import IO, Any

import click
import msgspec

from autotune.launchers import packages
from autotune.launchers.likeness import nearest
from autotune.orchestrator.cli.shared.options import Options, given, global_options, hand_on_nothing
from autotune.orchestrator.driver.signals import outlive_terminal
from autotune.orchestrator.errors import (
    ErrorDocument,
    ExitCode,
    Failure,
    JobErrors,
    UserError,
    lacking,
    reason_of,
)
from autotune.orchestrator.terminal import standard_streams

# In the order of use, with its line in `autotune --help`; a command's module is imported when called.
COMMANDS: Mapping[str, str] = {
    "init": "Create a job file from an existing command, script or config.",
    "launch": "Run the training to its end, recovering from memory failures.",
    "rehearse": "Test what fails late in a few steps, and fix it before the training.",
    "search": "Find the fastest configuration that fits.",
    "plan": "Show what launch would do and why, without starting anything.",
    "doctor": "Check the machine, the cluster and the job before a launch.",
    "explain": "Explain why a job died from its log, and what would fix it.",
    "fix": "Show the change of a script or job that cures the failure in a log.",
    "status": "List the runs, or the attempts of one run.",
    "attach": "Show a run that another terminal or host drives, until it ends.",
    "logs": "Print the log of the running or last attempt.",
    "report": "Write a run's report as one HTML file.",
    "resume": "Continue an interrupted run.",
    "stop": "Stop a run cleanly, from any terminal or host.",
    "remove": "Remove the folders of runs that are over.",
    "verify": "Check a certificate: whether the training matches the job.",
    "remedies": "List every remedy for a framework: setting, limits, cost.",
    "skill": "Write instructions for coding agents (Agent Skills format).",
}
BESIDE: Mapping[str, str] = {"rehearse": "launch", "search": "launch"}  # commands in the module of another
DRIVING = frozenset({"launch", "rehearse", "resume", "search"})
ALIASES: Mapping[str, str] = {"ladder": "remedies", "list": "status", "ls": "status", "ps": "status"}


# Hints for missing arguments, by their names in the help.
_MISSING: Mapping[str, str] = {
    "job.yaml | -- COMMAND...": "`autotune init` creates a job file from a script or command",
    "FRAMEWORK": "for example `autotune remedies verl`",
    "FILE": "for example `autotune verify runs/7c1e/certificate.json`",
}


class Misuse(click.UsageError):
    """A wrong option, argument or command, printed like all other errors."""

    hint = ""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the usage and the error on stderr."""
        from autotune.orchestrator.terminal.widgets import say

        if self.ctx is not None:
            help_option = f"{self.ctx.command_path} --help"
            say(f"{self.ctx.get_usage()}\nTry '{help_option}' for help.\n")
        say(f"error: {self.format_message()}")
        if self.hint:
            say(f"hint: {self.hint}")
        if self.ctx is not None and (given(self.ctx).json or "--json" in (self.ctx.obj or ())):
            _print_document(UserError(self.format_message(), hint=self.hint))


@contextlib.contextmanager
def _misuse() -> Iterator[None]:
    """Turn click's usage errors into `Misuse`."""
    try:
        yield
    except (Misuse, click.exceptions.NoArgsIsHelpError):
        raise
    except click.UsageError as error:
        message = error.format_message().replace("a valid integer range", "a whole number")
        misuse = Misuse(message, ctx=error.ctx)
        if isinstance(error, click.MissingParameter) and error.param is not None:
            misuse.hint = _MISSING.get(error.param.human_readable_name, "")
        raise misuse from None


class _HelpFormatter(click.HelpFormatter):
    """Wraps also the examples and exit codes of a help page."""

    def getvalue(self) -> str:
        """Return the page."""
        from autotune.orchestrator.terminal.widgets import folded

        return folded(super().getvalue(), self.width)


class _Context(click.Context):
    formatter_class = _HelpFormatter


class Commands(click.Group):
    """A group that imports commands when they are called and turns failures into exit codes."""

    context_class = _Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name or alias; None for an unknown one."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        if name in DRIVING and not ctx.resilient_parsing:
            outlive_terminal()  # before the imports, which take seconds
        module = _imported(f"autotune.orchestrator.cli.{BESIDE.get(name, name)}")
        command: click.Command = getattr(module, name if name in BESIDE else "command")
        command.short_help, command.context_class = COMMANDS[name], _Context
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the called command; raises UsageError for an unknown one, with the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = nearest(args[0], (*COMMANDS, *ALIASES), cutoff=0.5)
            if not near or "Did you mean" in error.format_message():
                raise
            message = f"{error.format_message().rstrip('.')}. Did you mean '{near}'?"
            raise click.UsageError(message, ctx=ctx) from None

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command line to its exit."""
        standard_streams.guard()
        return super().main(*arguments, **options)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Return the context of a call; raises Misuse if its options are wrong."""
        words = args[: args.index("--")] if "--" in args else args
        with _misuse():
            return super().make_context(info_name, args, parent, obj=tuple(words), **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a failure is printed without a traceback, a bug with one."""
        try:
            with _misuse(), _printed():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Failure as failure:
            _print_failure(failure, given(ctx))
            ctx.exit(failure.code)
        except KeyboardInterrupt:
            ctx.exit(ExitCode.INTERRUPTED)
        except Exception as error:
            lacks = _missing_extra(error, command=ctx.invoked_subcommand)
            if lacks is not None:
                _print_failure(lacks, given(ctx))
                ctx.exit(lacks.code)
            import traceback  # imported late, because it loads the tokenizer

            with contextlib.suppress(OSError):
                traceback.print_exc()
                click.echo("autotune: this is a bug in autotune; please report the lines above", err=True)
            ctx.exit(ExitCode.BUG)


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """Turn a success whose output could not be written into a failure, unless the reader closed the pipe."""
    try:
        yield
    except click.exceptions.Exit as end:
        if end.exit_code != ExitCode.OK:
            raise
    error = standard_streams.failure(sys.stdout)
    if error is not None and not standard_streams.was_left(sys.stdout):
        raise Failure(f"cannot write to stdout: {reason_of(error)}")


def _imported(name: str) -> ModuleType:
    """Import a module; the objects that this creates are excluded from garbage collection."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _missing_extra(error: Exception, *, command: str | None) -> Failure | None:
    """Return a failure that names the extra to install if an import lacked one of its modules; else None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return lacking(f"`{command}`", [name]) if name is not None and name in packages.EXTRAS else None


def _print_document(failure: Failure) -> None:
    problems = failure.problems() if isinstance(failure, JobErrors) else []
    error = ErrorDocument(
        error="the job file is wrong" if problems else failure.message,
        hint=failure.hint,
        exit_code=failure.code,
        problems=problems,
    )
    click.echo(msgspec.json.encode(error))


def _print_failure(failure: Failure, options: Options) -> None:
    from autotune.orchestrator.terminal.widgets import echo

    if options.json:
        _print_document(failure)

    if isinstance(failure, JobErrors):
        text = failure.message
    else:
        text = f"error: {failure.message}"
        text += f"\nhint: {failure.hint}" if failure.hint else ""
    echo(text, color=options.color, err=True)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="Documentation: README.md and docs/ of the source tree. "
    'Shell completion: eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"',
)
@global_options
def main() -> None:
    """Run LLM reinforcement-learning jobs and recover from their out-of-memory failures.

    \b
    Example:
      autotune explain run.log                   # why a job died
      autotune init run_grpo.sh --gpus 8xH100    # a job file from a script
      autotune launch job.yaml                   # run it and recover it
    """  # noqa: D301
    hand_on_nothing()
