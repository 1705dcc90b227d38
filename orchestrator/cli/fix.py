"""`autotune fix`."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from autotune import configs
from autotune.launchers import frameworks
from autotune.orchestrator.cli.init import SourceCommand, drafted, source_options
from autotune.orchestrator.cli.plan import cards_of, with_cards
from autotune.orchestrator.cli.shared.fix_text import FixDocument, PredictedPeak, render_fix
from autotune.orchestrator.cli.shared.options import Options, given, global_options
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config.loader import expected_cluster, parse_unfinished, read_text, written
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import ExitCode, Failure, UserError, reason_of
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.details import step_text
from autotune.orchestrator.explain.headline import headline, on_budget
from autotune.orchestrator.explain.reader import STDIN, check, read
from autotune.orchestrator.init.documents import Kind, kind_of
from autotune.orchestrator.init.draft import Draft
from autotune.orchestrator.init.job_text import job_text, with_variables
from autotune.orchestrator.init.script_edit import edited_script, is_same_job
from autotune.orchestrator.planner import ROWS, Repair, repair
from autotune.orchestrator.run import calibration_cache, directory
from autotune.orchestrator.terminal.widgets import echo, width_of
from autotune.orchestrator.units import show_value
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import GaveUp
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Run, fold
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    a change is printed that should cure the failure
  1    the log has no known failure, or nothing is left to change
  2    the log, the file or an option is wrong
  101  a bug in autotune"""
_UNCOUNTED = "the estimate does not count what this change frees"
_KEPT = "as before; it would follow the other setting"  # why a setting is written that does not change
_NEAR = 0.85  # share of the GPU below which a predicted peak cannot belong to the log's failure
_ROW_OF = {phase.value: row for row, phases in ROWS.items() for phase in phases}


class Target(Value, frozen=True, kw_only=True):
    """The job file, script or command to change."""

    name: str  # of the file; empty: a command
    text: str
    job: Job
    draft: Draft | None = None  # of a script or a command
    source: tuple[str, ...] = ()  # the words that `init` would read it by
    run: Run | None = None  # of autotune, until it failed; None: the log is of no run
    resume: str = ""  # the command that continues the run with the changed file; empty: it did not give up


def fix(
    log: str,
    source: tuple[str, ...],
    *,
    gpus: str | None,
    write: bool,
    options: Options,
) -> ExitCode:
    """Print what died and the smallest change that should cure it; with `write` change the file.

    Raises Failure for a log or a file that cannot be read.
    """
    again = shlex.join(["autotune", "fix", log, *source, *(["--gpus", gpus] if gpus else []), "-w"])
    named, (log, source, run, resume) = log, _of_run(log, source, options)
    check((log,))
    if source == (log,):
        raise click.UsageError("the log is given twice; pass the script, job file or command that wrote it")
    explanation = explain(read(log), framework=None, model=None, run=run)
    if not source:
        raise click.UsageError("pass the script, the job file, or `--` and the command that wrote the log")
    target = _target(source, log=log, gpus=gpus)
    target = msgspec.structs.replace(target, run=run, resume=resume)
    answer, after = _answer(log, explanation, target, gpus=gpus, write=write)
    if write and after and target.name and answer.diff:
        _write(Path(target.name), after)
        answer = msgspec.structs.replace(answer, is_written=True)
    elif answer.diff and answer.file:
        answer = msgspec.structs.replace(answer, write=again)
    if options.json:
        click.echo(msgspec.json.encode(answer))
    else:
        text = render_fix(answer, named=named, width=width_of(sys.stdout))
        echo(text, color=options.color, folds=False)
    return ExitCode.OK if answer.remedy else ExitCode.NO


def _of_run(
    log: str, source: tuple[str, ...], options: Options
) -> tuple[str, tuple[str, ...], Run | None, str]:
    """Return the log of a run's last failure, its job, its history and how it goes on if a run is named.

    Otherwise the arguments, None and no command.
    """
    run = None if log == STDIN else directory.named(options.runs_dir, log)
    if run is None:
        if Path(log).is_dir():
            message, hint = f"`{log}` is a folder, and no run of autotune", "name the log in it"
            raise UserError(message, hint=hint)
        if log != STDIN and not Path(log).exists():
            hint = "name a log, or a run by its id or folder"
            raise UserError(f"no such log: {log}", hint=hint)
        return log, source, None, ""
    file = run.request.job_file
    own = file if file and Path(file).is_file() else str(run.path / "job.yaml")
    path, failed = run.until_failure()
    gave_up = isinstance(fold(run.history()).finished, GaveUp)
    resume = run.call("resume", "--edit") if gave_up and not source else ""
    return str(path), source or (own,), failed, resume


def _target(source: tuple[str, ...], *, log: str, gpus: str | None) -> Target:
    if len(source) > 1 and Path(source[0]).name in ("bash", "sh") and Path(source[1]).is_file():
        source = source[1:]
    file = source[0]
    if len(source) > 1 and file.endswith((".yaml", ".yml")):
        raise click.UsageError(f"Got unexpected extra argument ({' '.join(source[1:])})")
    if file.endswith((".yaml", ".yml")):
        text = read_text(file)
        if written(text) is not None or re.search(r"^framework:", text, re.MULTILINE):
            job, _ = parse_unfinished(text, file=file)
            return Target(name=file, text=text, job=job)
    try:
        draft = drafted(source, otherwise=f"name the log first: `autotune fix {file} {log}`")
    except Failure as failure:
        hint = failure.hint.replace("autotune init --", f"autotune fix {log} --")
        raise Failure(failure.message, hint=hint, code=failure.code) from None
    script = os.path.relpath(draft.file) if draft.file else ""
    text = Path(script).read_text() if script else shlex.join(source)
    of_draft = job_text(with_variables(draft), gpus=cards_of(gpus))
    job, _ = parse_unfinished(of_draft, file=file, lookup=lambda name: os.environ.get(name) or name)
    return Target(name=script, text=text, job=job, draft=draft, source=source)


def _answer(
    log: str, explanation: Explanation, target: Target, *, gpus: str | None, write: bool
) -> tuple[FixDocument, str]:
    """Return the answer and the changed text; the text is empty if the file cannot be edited."""
    diagnosis, job = explanation.diagnosis, target.job
    answer = FixDocument(
        log=log,
        line=explanation.main_line.line if diagnosis.evidence else None,
        cause=diagnosis.cause.value,
        phase=diagnosis.phase.value,
        step=diagnosis.step,
        step_text=step_text(explanation),
        rank=diagnosis.rank,
        headline=headline(explanation),
    )
    if not diagnosis.cause.is_oom:
        return answer, ""
    framework = frameworks.find(job.framework)
    job, _ = with_cards(job, cards_of(gpus))
    capacity = diagnosis.facts.capacity_bytes
    if not job.cluster.gpu_memory_bytes and not job.cluster.gpu and capacity and not on_budget(explanation):
        spec = msgspec.structs.replace(job.cluster, gpu_memory_bytes=capacity)
        job = msgspec.structs.replace(job, cluster=spec)
    run = target.run
    cluster = expected_cluster(job) if run is None else run.accepted.cluster
    job = with_gpu_memory(job, cluster)
    result = repair(job, framework, cluster, explanation.failure, run=run, recall=calibration_cache.recall)
    remedy = result.remedy
    if remedy is None:
        helping = tuple(hint.text for hint in explanation.hints)
        return msgspec.structs.replace(answer, note=result.note, would_help=helping), ""
    knobs = remedy.apply(result.before)
    settings = framework.settings(job, knobs)
    words = {name: framework.word(name, value) for name, value in settings.items()}
    after, kept = "", list[str]()
    if settings:
        variables, why = framework.environment_settings, dict.fromkeys(settings, _after(diagnosis, answer))
        offered = framework.profile(job, cluster).supported
        same = {offered[knob].setting for knob in offered.keys() - changed(result.before, knobs).keys()}
        kept = sorted(same & settings.keys())
        after = _edited(target, settings, words, variables=variables, why=why | dict.fromkeys(kept, _KEPT))
    peaks, note = _peaks(result, diagnosis, cluster.host_memory_bytes)
    started, alone = _commands(target, words, changed(result.before, knobs), after=after, write=write)
    return msgspec.structs.replace(
        answer,
        remedy=remedy.name,
        reason=remedy.reason,
        effect=remedy.effect,
        slows=remedy.slows,
        at_least=result.at_least,
        for_speed=result.for_speed,
        differs=_changed_since(explanation, result.before) if run is None else {},
        changes=changed(result.before, knobs),
        settings=settings,
        kept=tuple(kept),
        file=target.name,
        diff=_diff(target, after),
        words=tuple(words.values()),
        peaks=peaks,
        note=note,
        with_autotune=started,
        without_autotune=alone,
    ), after


def _changed_since(explanation: Explanation, knobs: Knobs) -> dict[str, tuple[Setting, Setting]]:
    """Return the knobs that the log shows with another value than the file has now."""
    known = explanation.context.known
    if not known.complete or known.profile is None:
        return {}
    return changed(known.profile.knobs, knobs)


def _after(diagnosis: Diagnosis, answer: FixDocument) -> str:
    """Return the reason of a change, for a comment in the job file."""
    phase = "" if diagnosis.phase is Phase.NONE else f" in {answer.phase}"
    line = "" if answer.line is None else f":{answer.line}"
    return f"after {answer.cause}{phase} ({answer.log}{line})"


def _edited(
    target: Target,
    settings: Mapping[str, Any],
    words: Mapping[str, str],
    *,
    variables: tuple[str, ...],
    why: Mapping[str, str],
) -> str:
    """Return the text of the target with the changed settings; empty if it cannot be edited."""
    draft = target.draft
    if draft is None:
        edits = [Edit(("settings", name), value, why[name]) for name, value in settings.items()]
        return edited(target.text, edits)
    source = target.source

    def read_again(text: str) -> Draft:
        if not target.name:
            return drafted(shlex.split(text))
        return drafted(source, texts={Path(draft.file): text})

    return edited_script(target.text, draft, settings, words, variables=variables, read=read_again) or ""


def _diff(target: Target, after: str) -> str:
    if not after:
        return ""
    name = target.name or "command"
    split: Callable[[str], list[str]] = str.splitlines if target.name else shlex.split
    before = split(target.text)
    lines = difflib.unified_diff(before, split(after), fromfile=name, tofile=name, lineterm="", n=1)
    return "\n".join(lines)


def _commands(
    target: Target,
    words: Mapping[str, str],
    changes: Mapping[str, tuple[Setting, Setting]],
    *,
    after: str,
    write: bool,
) -> tuple[str, str]:
    """Return the commands that start the changed job with autotune, and without it (empty if unknown)."""
    sets = [part for knob, (_, value) in changes.items() for part in ("--set", f"{knob}={show_value(value)}")]
    if target.resume and after:
        return target.resume, ""
    if target.draft is None:
        launch = ["launch", target.name, *([] if after and write else sets)]
        return shlex.join(["autotune", *launch]), f"{shlex.join(['autotune', *launch, '-n'])} | bash"
    if not target.name and after:
        return f"autotune init -- {after}\nautotune launch job.yaml", after
    if after:
        called = shlex.join(target.source)
        is_slurm = "#SBATCH" in read_text(target.source[0])
        start = _in_allocation(target) if is_slurm else "autotune launch job.yaml"
        is_script = kind_of(Path(target.source[0])) is Kind.SHELL  # not a task file
        alone = f"{'sbatch' if is_slurm else 'bash'} {called}" if is_script else ""
        return f"autotune init {called}\n{start}", alone
    added = (*target.source, *(part for word in words.values() for part in shlex.split(word)))
    call = shlex.join(["autotune", "launch", "job.yaml", *sets])
    start = f"autotune init {'' if target.name else '-- '}{shlex.join(target.source)}\n{call}"
    try:
        wanted = msgspec.structs.replace(target.draft, settings={**target.draft.settings, **_values(words)})
        passes = is_same_job(drafted(added), wanted)
    except Failure:
        passes = False
    return start, f"{'bash ' if target.name else ''}{shlex.join(added)}" if passes else ""


def _in_allocation(target: Target) -> str:
    """Return the command that launches the job of a Slurm script in an allocation such as its own."""
    if target.job.cluster.nodes == 1:
        header = f"grep -E '^#(!|SBATCH)' {shlex.quote(target.source[0])}"
        return f"({header}; echo autotune launch job.yaml) | sbatch"
    file = Path(configs.__file__).parent / "operations" / "slurm.sbatch"  # it starts Ray on every node
    options = f"--nodes={target.job.cluster.nodes} --export=ALL,JOB=$PWD/job.yaml,RUNS=$PWD/runs"
    return f"sbatch {options} {shlex.quote(str(file))}"


def _values(words: Mapping[str, str]) -> dict[str, str]:
    """Return the values of settings as written on the command line."""
    parts = {name: re.split(r"[=\s]", word, maxsplit=1) for name, word in words.items()}
    return {name: part[1] if len(part) > 1 else "True" for name, part in parts.items()}


def _peaks(cured: Repair, diagnosis: Diagnosis, host_bytes: int) -> tuple[tuple[PredictedPeak, ...], str]:
    """Return the predicted peaks of the failed phase and of the tightest phase afterwards, or why none."""
    if not cured.phases or not cured.after_phases:
        return (), cured.note
    peaks = {
        each.phase: PredictedPeak(
            phase=each.phase,
            before_bytes=each.total_bytes,
            after_bytes=after.total_bytes,
            capacity_bytes=after.capacity_bytes,
        )
        for each, after in zip(cured.phases, cured.after_phases, strict=True)
    }
    own = _ROW_OF.get(diagnosis.phase.value, diagnosis.phase.value)
    if is_host := diagnosis.cause is Cause.HOST_OOM:
        own = "host memory"
        before, after = (max(p.host_bytes for p in each) for each in (cured.phases, cured.after_phases))
        of = host_bytes or None
        peaks = {own: PredictedPeak(phase=own, before_bytes=before, after_bytes=after, capacity_bytes=of)}
    failed = peaks.get(own)
    share = failed.before_bytes / failed.capacity_bytes if failed and failed.capacity_bytes else 1.0
    if share < _NEAR and not is_host:
        return (), f"this job is predicted to use {share:.0%} in {own}: is the log one of it?"
    if failed is not None and failed.after_bytes >= failed.before_bytes:
        return (), _UNCOUNTED
    tightest = max(peaks.values(), key=lambda each: each.after_bytes / (each.capacity_bytes or math.inf))
    return tuple(peaks[name] for name in dict.fromkeys((own, tightest.phase)) if name in peaks), cured.note


def _write(path: Path, text: str) -> None:
    """Replace a file, keeping its permissions; raises Failure if that is not possible."""
    partial = path.resolve().with_name(f".{path.name}.autotune")  # a link may lead to another file system
    try:
        partial.write_text(text)
        shutil.copymode(path, partial)
        partial.replace(path.resolve())
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"cannot write `{path}`: {reason_of(error)}") from None


@click.command("fix", cls=SourceCommand, epilog=_CODES, context_settings={"ignore_unknown_options": True})
@click.argument("log", metavar="LOG | RUN")
@source_options(
    metavar="[SCRIPT.sh | job.yaml | -- COMMAND...]",
    gpus="GPUs of the job, for the prediction (default: as the job and the log say).",
)
@click.option("-w", "--write", is_flag=True, help="Write the change into the file.")
@global_options
@click.pass_context
def command(context: click.Context, log: str, source: tuple[str, ...], write: bool, gpus: str | None) -> None:
    """Show the smallest change of a script, job or command that should cure the failure in a log.

    The change is the one that `launch` would make. Nothing is run, and without -w nothing is written.

    \b
    Example:
      autotune fix slurm-4711.out run_grpo.sh
      autotune fix run.log job.yaml -w
      autotune fix run.log -- trl grpo --config grpo.yaml
    """  # noqa: D301 - click reads the backspace
    source = source[1:] if source[:1] == ("--",) else source
    context.exit(fix(log, source, gpus=gpus, write=write, options=given(context)))
