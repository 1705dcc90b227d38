"""`autotune init`."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from autotune.launchers.likeness import MISSPELT, nearest
from autotune.orchestrator.cli.shared.options import Options, card_names, file_names, given, global_options
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors, UserError, reason_of
from autotune.orchestrator.init.bash.state import Note
from autotune.orchestrator.init.draft import Draft, draft_of
from autotune.orchestrator.terminal.widgets import PIPED_WIDTH, say, width_of
from autotune.orchestrator.units import counted
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the job file is written and valid
  1    the job file is written but needs edits, or no training command was found
  2    an option is wrong, or the file already exists"""
_SHOWN = 12  # notes on the terminal; the file has more


_F = TypeVar("_F", bound=Callable[..., Any])


class SourceCommand(click.Command):
    """A command whose last arguments are another command with its own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; raises NoSuchOption for a misspelt option of this command before `--`."""
        known = {name for each in self.params for name in each.opts if name.startswith("--")}
        for word in itertools.takewhile(lambda each: each != "--", args):
            name = word.partition("=")[0]
            near = nearest(name, known, cutoff=MISSPELT) if name not in known else ""
            if near and name.startswith("--"):
                raise click.NoSuchOption(name, possibilities=[near], ctx=ctx)
        return super().parse_args(ctx, args)


def source_options(*, metavar: str, gpus: str) -> Callable[[_F], _F]:
    """Add the argument SOURCE and the option --gpus to a command."""

    def decorate(command: _F) -> _F:
        command = click.option("--gpus", metavar="8xH100", shell_complete=card_names, help=gpus)(command)
        words = click.argument(
            "source", metavar=metavar, nargs=-1, type=click.UNPROCESSED, shell_complete=file_names
        )
        return words(command)

    return decorate


def drafted(
    source: Sequence[str],
    *,
    training: int | None = None,
    texts: Mapping[Path, str] = {},
    otherwise: str = "",
    gpus: int | None = None,
) -> Draft:
    """Return the job of a source; raises Failure if there is none.

    `otherwise` is the hint if the source is a log; `texts` replace the contents of scripts; `gpus` is the
    number of GPUs of a node.
    """
    if source[0].startswith("-") and source[0] != "-":
        hint = "options of a script follow its name; `--help` lists those of this command"
        raise UserError(f"no such option: {source[0]}", hint=hint)
    now = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    try:
        return draft_of(
            source,
            cwd=str(Path.cwd()),
            environment=os.environ,
            now=now,
            training=training,
            texts=texts,
            gpus=gpus,
        )
    except Failure:
        if not _is_log(source[0]):
            raise
        hint = otherwise or f"`autotune explain {shlex.quote(source[0])}` explains it"
        raise UserError(f"`{source[0]}` is a log", hint=hint) from None


def _is_log(name: str) -> bool:
    from autotune.orchestrator.explain.analyze import explain
    from autotune.orchestrator.explain.reader import read

    try:
        return explain(read(name), framework=None, model=None).is_answer
    except Failure:
        return False


class JobDraft(Value, frozen=True, kw_only=True):
    """The answer of `autotune init --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    file: str  # the written file
    framework: str  # framework of the written job, e.g. `verl`; `command`: any other program
    recognised: str  # the framework, even without an adapter; empty: none
    settings: int  # number of settings taken from the source
    checked_against: str = ""  # the release of the framework, and why that one; empty: it has no releases
    notes: list[Note]
    errors: list[str]  # to be corrected before a launch
    warnings: list[str] = []  # problems only with the newest release, and files that are not here


@click.command("init", cls=SourceCommand, epilog=_CODES, context_settings={"ignore_unknown_options": True})
@source_options(
    metavar="SCRIPT.sh | CONFIG.yaml | -- COMMAND...",
    gpus="GPUs of the cluster, for the prediction; for two nodes: 2x8xH100-80GB.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("job.yaml"),
    help="File to write (default: job.yaml); - is stdout.",
)
@click.option("--training", type=int, metavar="N", help="The Nth training that the script starts.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@global_options
@click.pass_context
def command(
    context: click.Context,
    source: tuple[str, ...],
    output: Path,
    gpus: str | None,
    training: int | None,
    force: bool,
) -> None:
    """Create a job file from an existing command, launch script or framework config. Runs nothing.

    \b
    Example:
      autotune init run_grpo.sh
      autotune init -- trl grpo --config grpo.yaml
    """  # noqa: D301 - click reads the backspace
    if not source:
        raise click.UsageError("pass a script, a configuration file, or `--` and a command")
    context.exit(
        write(source, output=output, gpus=gpus, training=training, force=force, options=given(context))
    )


def write(
    source: tuple[str, ...],
    *,
    output: Path,
    gpus: str | None,
    training: int | None = None,
    force: bool,
    options: Options,
) -> ExitCode:
    """Write the job file of a source, and print its content in short or as JSON; raises Failure."""
    from autotune.orchestrator.cli.plan import cards_of
    from autotune.orchestrator.config.loader import parse_unfinished, unfilled
    from autotune.orchestrator.init.job_text import job_text, with_variables

    source = source[1:] if source[0] == "--" else source
    if not source:
        raise click.UsageError("`--` is followed by no command")
    cards = cards_of(gpus)
    per_node = cards.per_node if cards is not None else None
    draft = with_variables(drafted(source, training=training, gpus=per_node))
    checked = _checked_against(job_text(draft, gpus=cards))
    text = job_text(draft, gpus=cards, checked=checked)
    to_stdout = str(output) == "-"
    if not to_stdout:
        _put(output, text, force=force)
    errors: JobErrors | None = None
    try:
        job, missing = parse_unfinished(text, file=str(output), lookup=lambda name: name)
    except JobErrors as error:
        errors, job, missing = error, None, ()
    edits = unfilled(text, file=str(output))
    if edits:
        places = {(each.line, each.column) for each in edits}
        others = [c for c in errors.complaints if (c.line, c.column) not in places] if errors else []
        errors = JobErrors((*edits, *others))
    warnings = (*(job.notes if job is not None else ()), *missing)
    if options.json:
        result = JobDraft(
            file=str(output),
            framework=draft.framework,
            recognised=draft.other or (draft.framework if draft.framework != "command" else ""),
            settings=len(draft.settings),
            checked_against=checked,
            notes=list(draft.notes),
            errors=[c.message for c in errors.complaints] if errors else [],
            warnings=list(warnings),
        )
        click.echo(msgspec.json.encode(result))
    else:
        call = f"autotune plan {shlex.quote(str(output))}"
        tell(draft, output=output, checked=checked, warnings=warnings, options=options)
        if job is not None:
            call = _predict(job, output, options, needs_edit=errors is not None)
        click.echo(text if to_stdout else str(output), nl=not to_stdout)
    if errors is not None:
        if not options.json:
            say(f"\n{errors.message}\n")
            say(f"The file is written. Correct these errors in it, then: {call}")
        return ExitCode.NO
    return ExitCode.OK


def _checked_against(text: str) -> str:
    """Return, in words, the framework release that the settings of a job file are checked against."""
    from autotune.launchers import frameworks
    from autotune.orchestrator.config.installed import with_version
    from autotune.orchestrator.config.loader import written
    from autotune.orchestrator.planner import settings_of

    job = written(text)
    if job is None:
        return ""
    framework = frameworks.find(job.framework)
    return settings_of(with_version(job, framework), framework)


def _put(output: Path, text: str, *, force: bool) -> None:
    mode = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(output, mode, 0o644), "w") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"`{output}` already exists", hint="pass -o OTHER.yaml, or --force to overwrite it"
        ) from None
    except OSError as error:
        reason, folder = reason_of(error), output.parent
        hint = "pass -o FILE in a folder that you can write, or -o - for stdout"
        if isinstance(error, FileNotFoundError):
            hint = f"`mkdir -p {shlex.quote(str(folder))}`, or pass -o FILE in another folder"
        raise UserError(f"cannot write `{output}`: {reason}", hint=hint) from None


def tell(
    draft: object, *, output: Path | str, checked: str = "", warnings: tuple[str, ...] = (), options: Options
) -> None:
    """Print what a job was made from, and notes on what was left out or assumed."""
    from autotune.orchestrator.init.draft import Draft
    from autotune.orchestrator.init.job_text import place

    assert isinstance(draft, Draft)
    what = draft.framework
    if draft.framework == "command":
        what = (
            f"{draft.other}: no adapter yet, so autotune runs it as a plain command"
            if draft.other
            else "no framework recognised, so autotune runs it as a plain command"
        )
        what += " and can change nothing in it until you put {knob} placeholders there"
    count = len(draft.settings)
    kept = f", {counted(count, 'setting')} kept" if count else ""
    say(f"{output}: {what}{kept}")
    if options.quiet:
        return
    if checked:
        say(f"settings checked against {checked}")
    listed = draft.notes if options.verbose else draft.notes[:_SHOWN]
    for note in listed:
        say(f"  {place(note)}: {note.message}")
    if len(listed) < len(draft.notes):
        say(f"  and {len(draft.notes) - len(listed)} more at the top of the file")
    for warning in warnings:
        say(f"  warning: {warning}")


def _predict(job: object, output: Path, options: Options, *, needs_edit: bool) -> str:
    """Print the prediction for a job, and return the command that shows more."""
    from autotune.orchestrator.cli.plan import outcome_of
    from autotune.orchestrator.terminal.plan_table import gpus_option, summary
    from autotune.policies.values.job import Job

    assert isinstance(job, Job)
    plan = outcome_of(job, remedies=False)
    if not options.quiet:
        say("\n" + "\n".join(summary(plan, width_of(sys.stderr) or PIPED_WIDTH)))
    file = "job.yaml" if str(output) == "-" else shlex.quote(str(output))
    call = f"autotune plan {file} {gpus_option(plan)}".rstrip()
    if not needs_edit:
        say(f"\nnext: {call}   or   autotune launch {file}")
    return call
