"""`autotune fix`."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework
from autotune.orchestrator import messages
from autotune.orchestrator.cli.init import SourceCommand, drafted, source_options
from autotune.orchestrator.cli.plan import cards_of, with_cards
from autotune.orchestrator.cli.shared.options import Options, given, global_options
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config.loader import expected_cluster, parse_unfinished, read_text, written
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import ExitCode, Failure, reason_of
from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.headline import headline
from autotune.orchestrator.explain.reader import STDIN, check, read
from autotune.orchestrator.init.draft import Draft
from autotune.orchestrator.init.job_text import job_text, with_variables
from autotune.orchestrator.init.script_edit import edited_script, is_same_job
from autotune.orchestrator.planner import Repair, repair
from autotune.orchestrator.run import calibration_cache, directory
from autotune.orchestrator.terminal.widgets import echo
from autotune.orchestrator.units import show_gib, show_value
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    a change is printed that should cure the failure
  1    the log has no known failure, or nothing is left to change
  2    the log, the file or an option is wrong
  101  a bug in autotune"""
_UNCOUNTED = "the estimate does not count what this change frees"
_NEAR = 0.85  # share of the GPU below which a predicted peak cannot belong to the log's failure
_ROWS = {"forward": "train", "backward": "train", "optimizer": "train"}  # phase -> row of predicted peaks


class PredictedPeak(Value, frozen=True, kw_only=True):
    """The predicted peak of a phase on its GPU, before and after the change."""

    phase: str
    before_bytes: float
    after_bytes: float
    capacity_bytes: float | None  # null: unknown


class FixDocument(Value, frozen=True, kw_only=True):
    """The answer of `autotune fix --json`."""

    schema: int = 1
    log: str
    line: int | None = None  # line of the log with the failure; null: none
    cause: str  # of the failure
    phase: str
    step: int | None  # that failed; null: unknown
    rank: int | None
    headline: str  # what died, in one line
    remedy: str = ""  # empty: no change is left
    reason: str = ""
    effect: Effect | None = None  # on the numbers of the training
    slows: str = ""
    at_least: tuple[str, ...] = ()  # why the new values may go no lower
    changes: dict[str, tuple[Setting, Setting]] = {}  # by knob: before and after
    settings: dict[str, Any] = {}  # of the framework, with their new values
    file: str = ""  # the file of the diff; empty: the command
    diff: str = ""  # unified; empty: the file cannot be edited, and `words` must be added to the command
    words: tuple[str, ...] = ()  # of the changed settings on the command line
    is_written: bool = False
    peaks: tuple[PredictedPeak, ...] = ()
    note: str = ""  # why there is no prediction
    write: str = ""  # the command that writes the change; empty: already written, or there is no file
    with_autotune: str = ""  # the command that starts the changed job
    without_autotune: str = ""


def render_fix(answer: FixDocument, *, named: str = "") -> str:
    """Return the answer of `autotune fix` as text; `named` is the user's word for the log or its run."""
    where = answer.log if answer.line is None else f"{answer.log}:{answer.line}"
    facts = [f"step {answer.step}" if answer.step else ""]
    facts += [f"rank {answer.rank}"] if answer.rank is not None else []
    details = ", ".join(each for each in (where, *facts) if each)
    lines = [f"error[{answer.cause}]: {answer.headline}", f"  {details}", ""]
    if not answer.remedy:
        is_memory = Cause(answer.cause).is_oom
        why = "nothing is left to change" if is_memory else "no memory ran out, so nothing is changed"
        return "\n".join([*lines, why, f"hint: autotune explain {shlex.quote(named or answer.log)}"])
    changes = (messages.arrow(knob, *values) for knob, values in answer.changes.items())
    slows = f"; slows {answer.slows}" if answer.slows and not answer.slows.startswith("nothing") else ""
    lines += [f"change: {', '.join(changes)} ({answer.effect}{slows})"]
    lines += [*_indented([answer.reason, *answer.at_least]), ""]
    lines += [answer.diff, ""] if answer.diff else []
    if not answer.diff:
        lines += ["the value is calculated or set elsewhere; add to the command:"]
        lines += [*_indented(answer.words), ""]
    lines += [_peak(each) for each in answer.peaks]
    lines += [f"no predicted peaks: {answer.note}"] if answer.note else []
    lines += ["", "write the change", f"  {answer.write}"] if answer.write else [""]
    lines += ["start it with autotune", *_indented(answer.with_autotune.splitlines())]
    lines += ["or without", *_indented([answer.without_autotune])] if answer.without_autotune else []
    if answer.is_written:
        lines += ["", f"{answer.file} is changed"]
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _peak(peak: PredictedPeak) -> str:
    of = ""
    if peak.capacity_bytes:
        share = peak.after_bytes / peak.capacity_bytes
        of = f" of {show_gib(peak.capacity_bytes, digits=1)} ({share:.0%})"
    before, after = (show_gib(size, digits=1) for size in (peak.before_bytes, peak.after_bytes))
    change = f"{before} → {after}" if before != after else f"still {after}"
    return f"predicted peak of {peak.phase}: {change}{of}"


class Target(Value, frozen=True, kw_only=True):
    """The job file, script or command to change."""

    name: str  # of the file; empty: a command
    text: str
    job: Job
    draft: Draft | None = None  # of a script or a command
    source: tuple[str, ...] = ()  # the words that `init` would read it by
    knobs: Knobs | None = None  # of the failed attempt; None: those of the job as written


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
    named, (log, source, knobs) = log, _of_run(log, source, options)
    check((log,))
    explanation = explain(read(log), framework=None, model=None)
    if not source:
        raise click.UsageError("pass the script, the job file, or `--` and the command that wrote the log")
    target = _target(source, log=log, gpus=gpus)
    target = msgspec.structs.replace(target, knobs=knobs)
    answer, after = _answer(log, explanation, target, gpus=gpus, write=write)
    if write and after and target.name and answer.diff:
        _write(Path(target.name), after)
        answer = msgspec.structs.replace(answer, is_written=True)
    elif answer.diff and answer.file:
        answer = msgspec.structs.replace(answer, write=again)
    if options.json:
        click.echo(msgspec.json.encode(answer))
    else:
        echo(render_fix(answer, named=named), color=options.color)
    return ExitCode.OK if answer.remedy else ExitCode.NO


def _of_run(log: str, source: tuple[str, ...], options: Options) -> tuple[str, tuple[str, ...], Knobs | None]:
    """Return the log of a run's last failure with its job and knobs if a run is named; else the arguments."""
    run = None if log == STDIN else directory.named(options.runs_dir, log)
    if run is None:
        if Path(log).is_dir():
            message, hint = f"`{log}` is a folder, and no run of autotune", "name the log in it"
            raise Failure(message, hint=hint, code=ExitCode.USAGE)
        if log != STDIN and not Path(log).exists():
            hint = "name a log, or a run by its id or folder"
            raise Failure(f"no such log: {log}", hint=hint, code=ExitCode.USAGE)
        return log, source, None
    file = run.request.job_file
    own = file if file and Path(file).is_file() else str(run.path / "job.yaml")
    path, attempt = run.last_failure()
    return str(path), source or (own,), attempt.knobs


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
    is_command = draft.source == "a command line"
    text = shlex.join(source) if is_command else Path(file).read_text()
    of_draft = job_text(with_variables(draft), gpus=cards_of(gpus))
    job, _ = parse_unfinished(of_draft, file=file, lookup=lambda name: os.environ.get(name) or name)
    return Target(name="" if is_command else file, text=text, job=job, draft=draft, source=source)


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
        rank=diagnosis.rank,
        headline=headline(explanation),
    )
    if not diagnosis.cause.is_oom:
        return answer, ""
    framework = frameworks.find(job.framework)
    job, _ = with_cards(job, cards_of(gpus))
    if not job.cluster.gpu_memory_bytes and not job.cluster.gpu and diagnosis.facts.capacity_bytes:
        spec = msgspec.structs.replace(job.cluster, gpu_memory_bytes=diagnosis.facts.capacity_bytes)
        job = msgspec.structs.replace(job, cluster=spec)
    cluster = expected_cluster(job)
    job = with_gpu_memory(job, cluster)
    result = repair(job, framework, cluster, diagnosis, knobs=target.knobs, recall=calibration_cache.recall)
    remedy = result.remedy
    if remedy is None:
        return msgspec.structs.replace(answer, note=result.note), ""
    knobs = remedy.apply(result.before)
    settings = framework.settings(job, knobs)
    words = {name: _word(framework, name, value) for name, value in settings.items()}
    after = _edited(target, settings, words, why=f"{remedy.name}: {remedy.reason}") if settings else ""
    peaks, note = _peaks(result, diagnosis, cluster.host_memory_bytes)
    started, alone = _commands(target, words, changed(result.before, knobs), after=after, write=write)
    return msgspec.structs.replace(
        answer,
        remedy=remedy.name,
        reason=remedy.reason,
        effect=remedy.effect,
        slows=remedy.slows,
        at_least=result.at_least,
        changes=changed(result.before, knobs),
        settings=settings,
        file=target.name,
        diff=_diff(target, after),
        words=tuple(words.values()),
        peaks=peaks,
        note=note,
        with_autotune=started,
        without_autotune=alone,
    ), after


def _word(framework: Framework, name: str, value: Any) -> str:
    """Return a setting as written on the command line."""
    (word, *_) = framework.words({name: value}) or (f"--{name} {value}",)
    is_whole = re.fullmatch(rf"[+-]*{re.escape(name.lstrip('+-'))}([=\s].*)?", word, re.DOTALL)
    return word if is_whole and not word.startswith(name + " ") else f"--{name} {show_value(value)}"


def _edited(target: Target, settings: Mapping[str, Any], words: Mapping[str, str], *, why: str) -> str:
    """Return the text of the target with the changed settings; empty if it cannot be edited."""
    if target.draft is None:
        edits = [Edit(("settings", name), value, why) for name, value in settings.items()]
        return edited(target.text, edits)
    source = target.source

    def read_again(text: str) -> Draft:
        return drafted(source, text=text) if target.name else drafted(shlex.split(text))

    return edited_script(target.text, target.draft, settings, words, read=read_again) or ""


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
    if target.draft is None:
        launch = ["launch", target.name, *([] if after and write else sets)]
        return shlex.join(["autotune", *launch]), f"{shlex.join(['autotune', *launch, '-n'])} | bash"
    if not target.name:
        return f"autotune init -- {after}\nautotune launch job.yaml", after
    if after:
        called, shell = shlex.join(target.source), "sbatch" if "#SBATCH" in after else "bash"
        return f"autotune init {called}\nautotune launch job.yaml", f"{shell} {called}"
    added = (*target.source, *(part for word in words.values() for part in shlex.split(word)))
    call = shlex.join(["autotune", "launch", "job.yaml", *sets])
    start = f"autotune init {shlex.join(target.source)}\n{call}"
    try:
        wanted = msgspec.structs.replace(target.draft, settings={**target.draft.settings, **_values(words)})
        passes = is_same_job(drafted(added), wanted)
    except Failure:
        passes = False
    return start, f"bash {shlex.join(added)}" if passes else ""


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
    own = _ROWS.get(diagnosis.phase.value, diagnosis.phase.value)
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
        raise Failure(f"cannot write `{path}`: {reason_of(error)}", code=ExitCode.USAGE) from None


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
      autotune fix run.log -- python3 -m verl.trainer.main_ppo data.train_batch_size=512
    """  # noqa: D301 - click reads the backspace
    source = source[1:] if source[:1] == ("--",) else source
    context.exit(fix(log, source, gpus=gpus, write=write, options=given(context)))
