"""The stable configuration as files: the job with what changed, a script, the certificate."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from autotune.launchers.base import Framework
from autotune.orchestrator import placeholders
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import assumed, written
from autotune.orchestrator.config.schema import LITERAL, READ_ELSEWHERE
from autotune.orchestrator.config.yaml_edit import Edit, dumped, edited
from autotune.orchestrator.config.yaml_nodes import Document
from autotune.orchestrator.messages import arrow
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.script import command_of, script
from autotune.orchestrator.units import typed_size
from autotune.policies.certificate.compose import certificate_of
from autotune.policies.certificate.contents import Certificate
from autotune.policies.recovery.first_launch import PREFLIGHT
from autotune.policies.recovery.rehearsal import passed
from autotune.policies.search import trials
from autotune.policies.values.events import CuredInPlace, Decided, Diagnosed, History
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import accepted_of, fold
from autotune.policies.values.job import Job
from autotune.policies.values.knob_table import KNOB_TABLE, Unit
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import MemoryGrowth
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.run.view import RunView

STABLE = "stable.yaml"
SCRIPT = "launch.sh"
CERTIFICATE = "certificate.json"
REHEARSED = "rehearsed.yaml"  # a rehearsal is no proof of a training
_RESTARTED = ": a launch restarts it from its checkpoints."
# Of the run whose stable job this one starts from.
_ORIGIN = re.compile(rf"\A# Written by autotune run .*\n(?:# .*{re.escape(_RESTARTED)}\n)?")


def stable_knobs(view: RunView) -> Knobs | None:
    """Return the knobs of the last attempt that is proven, or of a search's best; None: none is."""
    start = next((attempt.knobs for attempt in reversed(view.training) if attempt.proven), None)
    if not view.tried or view.accepted is None:
        return start
    best = trials.winner(tuple(view.tried), view.accepted.job.search, start=start)
    return start if best is None else best.knobs


def proven(history: History) -> tuple[str, Knobs] | None:
    """Return the file of a run's proven configuration, and its knobs."""
    stable = stable_knobs(RunView(history))
    if stable is not None:
        return STABLE, stable
    rehearsed = passed(fold(history)) if accepted_of(history).mode == directory.Mode.REHEARSE else None
    return None if rehearsed is None else (REHEARSED, rehearsed.knobs)


def changes(history: History, knobs: Knobs) -> list[tuple[str, str, str]]:
    """Return the differences from the job as written: knob, change, framework setting."""
    accepted = accepted_of(history)
    offered = accepted.profile.supported
    before = accepted.profile.knobs
    rows = []
    for name, (old, new) in changed(before, knobs).items():
        setting = offered[name].setting if name in offered else ""
        rows.append(
            (name, arrow(name, old, new).removeprefix(f"{name} "), "" if setting == name else setting)
        )
    return rows


def write(
    run: directory.RunFolder,
    history: History,
    framework: Framework,
    job: Job,
    knobs: Knobs,
    *,
    name: str = STABLE,
) -> None:
    """Write the job with proven knobs, and launch.sh of a stable one."""
    text = stable_text(run.job_text, history, framework, job, knobs)
    origin = _origin(run.id, history, knobs)
    head = "".join(f"# {line}\n" for line in origin.splitlines())
    directory.write_private(run.path / name, f"{head}{_ORIGIN.sub('', text)}".encode())
    if name != STABLE:
        return
    command = command_of(
        framework, job, knobs, history=history, run=f"{run.id}-stable", attempt=1, resume=False
    )
    alone = "without autotune" if _growth(history) is None else "without autotune and its restarts"
    comments = (f"{origin}\nStarts at step 0, {alone}.",)
    text = script(command, job, comments=comments)
    directory.write_private(run.path / SCRIPT, text.encode(), executable=True)


def withdraw(run: directory.RunFolder) -> None:
    """Remove the files of a configuration that is proven no longer."""
    for name in (STABLE, SCRIPT, CERTIFICATE):
        (run.path / name).unlink(missing_ok=True)


def _origin(run: str, history: History, knobs: Knobs) -> str:
    """Return a comment with the run that a configuration comes from, and how far it got."""
    attempts = [a for a in RunView(history).training if a.proven and a.knobs == knobs]
    if not attempts or attempts[-1].step is None:
        return f"Written by autotune run {run}."
    goal = attempts[-1].goal
    free = (
        f", {goal.headroom:.0%} of the fullest memory free" if goal is not None and goal.headroom < 1 else ""
    )
    reached = f"Written by autotune run {run}: step {attempts[-1].step} reached"
    if (growth := _growth(history)) is not None:
        return f"{reached}{free}.\n{growth.text[0].upper()}{growth.text[1:]}{_RESTARTED}"
    return f"{reached} without a failure{free}."


def _growth(history: History) -> MemoryGrowth | None:
    """Return the growth of memory for which attempts were started again with the same settings."""
    decided = (attempt.next for attempt in reversed(RunView(history).training))
    return next((each.growth for each in decided if each is not None and each.growth is not None), None)


def _marked(text: str, job: Job) -> str:
    """Return a job file that marks placeholder-like values as intended, as the original job does."""
    document, lines = Document(text, "", literal=LITERAL), text.split("\n")
    for path, _ in placeholders.unfilled(msgspec.structs.replace(job, literals=())):
        at = document.entry(path).value.line
        if placeholders.dotted(path) in job.literals and placeholders.LITERAL not in lines[at]:
            lines[at] += f"  {placeholders.LITERAL}"
    return "\n".join(lines)


def stable_text(job_text: str, history: History, framework: Framework, job: Job, knobs: Knobs) -> str:
    """Return the user's job with the changed settings in place; it loads as the stable job."""
    settings = with_units(framework.settings(job, knobs), framework, job)
    reasons = _reasons(history)
    by_setting = {support.setting: name for name, support in accepted_of(history).profile.supported.items()}
    edits = [
        Edit(
            ("settings", key),
            value,
            reasons.get(by_setting.get(key, key), "part of the stable configuration"),
            moves_remark=True,
        )
        for key, value in settings.items()
    ]
    base = written(job_text)
    if base is None or base.workdir != job.workdir:
        edits.append(Edit(("workdir",), job.workdir, "where the job was launched"))
    masked_job = secrets.masked(job)
    if base is None or secrets.masked(base) != _as_written(masked_job, base):
        # The run's copy of the job is outdated.
        job_text = _marked(dumped(secrets.job_values(masked_job)), job)
    return edited(job_text, edits, literal=LITERAL)


def with_units(settings: dict[str, Any], framework: Framework, job: Job) -> dict[str, Any]:
    """Return settings of a job, with sizes in bytes written as `24MiB` if the framework accepts both."""
    plain = msgspec.structs.replace(job, settings={**job.settings, **settings})
    if framework.check(plain):
        return settings
    cluster = assumed(job)
    plain = with_gpu_memory(plain, cluster)
    profile = framework.profile(plain, cluster)
    sizes = {
        support.setting
        for name, support in profile.supported.items()
        if KNOB_TABLE[name].unit is Unit.BYTES and isinstance(settings.get(support.setting), int)
    }
    if not sizes:
        return settings
    typed = {**settings, **{key: typed_size(settings[key]) for key in sizes}}
    same = msgspec.structs.replace(job, settings={**job.settings, **typed})
    is_read = (
        not framework.check(same) and framework.profile(with_gpu_memory(same, cluster), cluster) == profile
    )
    return typed if is_read else settings


def _as_written(job: Job, base: Job) -> Job:
    """Return the job as the user wrote it, without derived fields."""
    stated = {name: getattr(base, name) for name in ("framework_version", "workdir", "cluster")}
    return msgspec.structs.replace(job, **stated, **{name: getattr(base, name) for name in READ_ELSEWHERE})


def _reasons(history: History) -> dict[str, str]:
    """Return, by knob, the failure after which it was last changed, or else why."""
    out: dict[str, str] = {}
    failures: dict[int, Diagnosed] = {}
    for event in history:
        match event:
            case Diagnosed(attempt=number):
                failures[number] = event
            case Decided(remedy=Remedy() as remedy, attempt=number):
                out |= dict.fromkeys(remedy.changes, reason_of(remedy, failures.get(number)))
            case CuredInPlace():
                out[event.knob] = f"cured in place: {event.phase} ran out of memory in step {event.step}"
            case _:
                pass
    return out


def reason_of(remedy: Remedy, failure: Diagnosed | None) -> str:
    """Return after which failure a remedy was taken; without one its name, if it has one, and why."""
    if failure is not None:
        where = "" if failure.phase is Phase.NONE else f" in {failure.phase.value}"
        return f"after {failure.cause.value}{where} of attempt {failure.attempt}"
    name = "before the first launch" if remedy.name == PREFLIGHT else remedy.name
    return f"{name}: {remedy.reason.split('; ')[0]}"


def write_certificate(run: directory.RunFolder, history: History, framework: Framework, knobs: Knobs) -> None:
    """Write the certificate of a run's stable knobs."""
    directory.write_json(run.path / CERTIFICATE, compose_certificate(history, framework, knobs))


def compose_certificate(history: History, framework: Framework, knobs: Knobs) -> Certificate:
    """Return the certificate of knobs; secrets of the recorded job are masked."""
    job = accepted_of(history).job
    return certificate_of(
        history,
        knobs=knobs,
        settings=framework.settings(job, knobs),
        training=framework.training(job),
    )
