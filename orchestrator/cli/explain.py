"""`autotune explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

from autotune.orchestrator.cli.shared.options import (
    Options,
    file_names,
    framework_names,
    given,
    global_options,
    known_framework,
    rule_ids,
)
from autotune.orchestrator.errors import ExitCode, Failure, UserError
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.incident import Read, is_log_name, logs_of, ordered, read_of, summary
from autotune.orchestrator.explain.json_output import document
from autotune.orchestrator.explain.reader import (
    STDIN,
    Reading,
    check,
    first_bytes,
    is_archive,
    is_snapshot,
    read,
    read_members,
)
from autotune.orchestrator.explain.text_output import render_explanation
from autotune.orchestrator.terminal.widgets import echo, width_of
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.history import Run

_CODES = """\b
Exit codes:
  0    a cause was found
  1    no log has a failure that a rule recognises
  2    a log cannot be read, or an option is wrong
  101  a bug in autotune"""
_OWN_LOG = "run.log"  # of an attempt of autotune, and of others
_MAGIC_BYTES = 16
_SOURCE_BYTES = 1 << 20  # maximum size of a job file or a script
_NEAR = 200  # lines above a failure to search for its time


def _shape(model: Path) -> Model:
    """Return the shape of a folder, a config.json or a public model; raises Failure with a hint."""
    # Importing them loads readers of YAML and of packages, a fifth of the program's start time.
    from autotune.orchestrator.config.model_files import find_model, unknown_model

    result, _ = find_model(str(model), ".")
    if result is None:
        raise unknown_model(str(model))
    return result


def explain_logs(
    names: tuple[str, ...],
    *,
    model: Path | None,
    framework: str | None,
    options: Options,
    render: Callable[[Explanation], str],
) -> ExitCode:
    """Print the explanation of a failure from its logs; returns OK if its cause was found, otherwise NO.

    Several logs, or a folder or archive of them, belong to one failure: the log with the first cause is
    explained, the others are counted, or listed in JSON. Raises Failure for a log named by the user that
    cannot be read, and for an unknown framework.
    """
    named = [_named(name, options) for name in names]
    logs = logs_of(name for name, _ in named)
    runs = {log: run for log, run in named if run is not None}
    check(logs)
    wanted = known_framework(framework) if framework is not None else None
    shape = _shape(model) if model is not None else None
    reads: list[Read] = []
    is_answer = False
    for name in logs:
        if is_snapshot(first_bytes(name, _MAGIC_BYTES)):
            text, line, is_known = _explained_snapshot(name)
            is_answer = is_answer or is_known
            if options.json:
                _write(line + b"\n")
            else:
                echo(text, color=options.color)
            continue
        for reading in _readings(name, named=name in names):
            explanation = explain(reading, framework=wanted, model=shape, run=runs.get(name))
            is_answer = is_answer or explanation.is_answer
            at = explanation.main_line.line if explanation.diagnosis.evidence else explanation.lines
            reads.append(read_of(explanation, reading.before(at).split("\n")[-_NEAR:]))
    if not is_answer and len(names) == 1:
        _refuse_source(names[0])
    if reads := ordered(reads):
        if options.json:
            _write(document(reads) + b"\n")
        else:
            text = "\n".join((render(reads[0].explanation), *summary(reads)))
            echo(text, color=options.color)
    return ExitCode.OK if is_answer else ExitCode.NO


def _refuse_source(name: str) -> None:
    """Raise Failure for a job file or a launch script that was passed instead of its log."""
    place = Path(name)
    if name == STDIN or not place.is_file() or place.stat().st_size > _SOURCE_BYTES:
        return
    from autotune.orchestrator.config.loader import written  # not needed for logs
    from autotune.orchestrator.init.documents import Kind, kind_of

    what, call = "", ""
    if first_bytes(name, 2) == b"#!" and kind_of(place) is Kind.SHELL:
        what, call = "a script", "init"
    elif place.suffix in (".yaml", ".yml") and written(place.read_text(errors="replace")) is not None:
        what, call = "a job file", "plan"
    if what:
        message = f"`{name}` is {what}, and no log"
        hint = f"`autotune {call} {name}` reads it; `explain` reads what it printed"
        raise UserError(message, hint=hint)


def _readings(name: str, *, named: bool) -> Iterator[Reading]:
    """Yield a log, or those of an archive; an unreadable log of a folder is skipped."""
    try:
        yield from read_members(name, is_log_name) if is_archive(name) else (read(name),)
    except Failure:
        if named:
            raise


def print_rule(name: str, *, options: Options) -> None:
    """Print what a rule or a cause means; raises Failure for an unknown one."""
    from autotune.orchestrator.explain.rule_page import explain_rule  # not needed for logs

    text = explain_rule(name, as_json=options.json)
    if options.json:
        _write(text.encode() + b"\n")
    else:
        echo(text, color=options.color)


def _explained_snapshot(name: str) -> tuple[str, bytes, bool]:
    from autotune.orchestrator.explain.snapshot import (  # not needed for logs
        explain_snapshot,
        snapshot_document,
        snapshot_text,
    )

    snapshot = explain_snapshot(Path(name))
    return snapshot_text(name, snapshot), snapshot_document(name, snapshot), bool(snapshot.devices)


def _named(name: str, options: Options) -> tuple[str, Run | None]:
    """Return the log that a word names; for a run of autotune, its last failure's log and its history."""
    if name == STDIN or (Path(name).is_file() and Path(name).name != _OWN_LOG):
        return name, None
    from autotune.orchestrator.run import directory  # not needed for other logs

    run = directory.named(options.runs_dir, name)
    if run is None:
        return name, None
    log, failed = run.until_failure()
    return str(log), failed


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


@click.command("explain", epilog=_CODES)
@click.argument("logs", metavar="[LOG|FOLDER|ARCHIVE|RUN...|-]", nargs=-1, shell_complete=file_names)
@click.option(
    "--model",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The model's config.json, folder or hub name: explains what the failed allocation was for.",
)
@click.option(
    "--framework",
    metavar="NAME",
    shell_complete=framework_names,
    help="The framework that wrote the logs (default: detected).",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github"]),
    default="text",
    show_default=True,
    help="`github` prints Markdown for an issue.",
)
@click.option(
    "--rule",
    metavar="ID",
    shell_complete=rule_ids,
    help="Explain a rule or a cause, not a log.",
)
@global_options
@click.pass_context
def command(
    context: click.Context,
    logs: tuple[str, ...],
    model: Path | None,
    framework: str | None,
    form: str,
    rule: str | None,
) -> None:
    """Explain why a job died from its log, and what would fix it. Needs no job, cluster or GPU.

    \b
    Example:
      autotune explain run.log
      autotune explain 7c1e                      # the last failure of a run
      autotune explain /tmp/ray/session_latest/logs
      kubectl logs trainer-0 | autotune explain -
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    if rule is not None and logs:
        raise click.UsageError("--rule takes no logs")
    if rule is not None:
        print_rule(rule, options=options)
    elif not logs:
        raise click.UsageError("no log given; name one, a run of `autotune status`, or `-` for stdin")
    else:
        render: Callable[[Explanation], str] = partial(
            render_explanation, verbose=options.verbose > 0, width=width_of(sys.stdout)
        )
        if form == "github":
            from autotune.orchestrator.explain.github_issue_text import render_github  # not needed for text

            render = render_github
        code = explain_logs(logs, model=model, framework=framework, options=options, render=render)
        context.exit(code)
