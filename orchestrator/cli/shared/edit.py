"""A job that the user changed after its run ended: find the change, and check it against the run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from autotune.launchers.frameworks.dialects.settings import flat
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import parse, parse_elsewhere, read_text, written
from autotune.orchestrator.config.overrides import override, with_edits
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.config.yaml_nodes import Document
from autotune.orchestrator.errors import ExitCode, Failure, UserError
from autotune.orchestrator.run import directory
from autotune.orchestrator.run_states import display_of
from autotune.policies.values.events import (
    GaveUp,
    History,
    Rehearsed,
    Stable,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Profile
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

_OPTIONS = (("recovery", "relaunches"), ("search", "trials"), ("search", "duration"))  # of the command line


class RequestedJob(Value, frozen=True, kw_only=True):
    """A job requested by the user: a new one, or a changed one that a run continues with."""

    text: str  # of its file, with command-line options applied
    job: Job
    request: directory.RunRequest
    file: str = ""  # the file of a change; empty: a new job
    changes: dict[str, tuple[Any, Any]] = {}  # dotted key of job.yaml -> value in the run and now


def digest(text: str) -> str:
    """Return the digest of a job file."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity(text: str, job: Job) -> str:
    """Return the identity of a job: a digest of its file and of the files of its `config:`.

    `text` is the file's text with command-line options applied, `job` its parsed content. Comments, the order
    of keys and the values of variables are ignored.
    """
    stated = Document(text, "", literal=LITERAL).value
    return digest(json.dumps(_sorted([stated, job.document]), default=str))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted(([str(key), _sorted(each)] for key, each in value.items()), key=lambda item: item[0])
    return [_sorted(each) for each in value] if isinstance(value, list) else value


def with_options(
    text: str,
    *,
    file: str,
    request: directory.RunRequest,
    lookup: secrets.Lookup = os.environ.get,
    elsewhere: bool = False,
) -> tuple[str, Job]:
    """Return a job file's text with command-line options applied, and its job.

    `lookup` returns the values of the variables that it names; `elsewhere`: its files need not be here.
    """
    if elsewhere:
        job, missing = parse_elsewhere(text, file=file, lookup=lookup)
        job = job.with_notes(*missing)
    else:
        job = parse(text, file=file, lookup=lookup)
    edits = [
        Edit(("settings", key), value, "--set") for key, value in override(job, request.overrides).items()
    ]
    edits += [
        Edit((section, key), value, f"--{key}")
        for section, key in _OPTIONS
        if (value := getattr(request, key)) is not None
    ]
    changed = msgspec.structs.replace(with_edits(job, edits), variables=job.variables)
    return edited(text, edits, literal=LITERAL), changed


def changed_job(run: directory.RunFolder, *, job_file: Path | None = None) -> RequestedJob | None:
    """Return the changed job of a run: from `job_file`, an earlier edit, the launched file or its copy.

    On a terminal, an unchanged copy is opened in the user's editor. None if nothing differs.
    """
    history, request = run.history(), run.request
    if job_file is not None:
        return _edit_from(history, job_file, request=request)
    for name, known in ((request.edited_file, request.edited_digest), (request.job_file, request.job_digest)):
        if name and _digest_of(name, known) != known:
            result = _edit_from(history, Path(name), request=request)
            if result is not None:
                return result
    copy = str(run.path / "job.yaml")
    result = _edit(history, run.job_text, file=copy, request=request, options=False)
    if result is None and sys.stdin.isatty() and sys.stderr.isatty():
        text = click.edit(run.job_text, extension=".yaml")
        if text is not None:
            return _edit(history, text, file=copy, request=request, options=False)
    return result


def check(edit: RequestedJob | None, run: directory.RunFolder) -> None:
    """Raise Failure for an edit that the run cannot continue with."""
    view = RunView(run.history())
    verdict = view.verdict
    file = run.request.job_file or run.path / "job.yaml"
    launch_again = f"`autotune {run.request.mode} {file}` starts a new run"
    if edit is None:
        if isinstance(verdict, GaveUp):
            raise UserError(
                f"nothing differs from the job with which run {run.id} gave up: {verdict.reason}",
                hint=f"change {_where(run)}, or name another file: `{run.call('resume', '--job FILE')}`",
            )
        return
    if left := view.unended:
        raise UserError(
            f"attempt #{left[-1]} of run {run.id} may still run with the previous job",
            hint=f"`{run.call('stop')}`, then try again",
        )
    if view.trial_rows and concerns_trials(edit.changes):
        raise UserError(
            f"run {run.id} compares trials of one job; only `search`, `goal`, `recovery`, `notify` and"
            " `annotate` can change",
            hint=launch_again,
        )
    if isinstance(verdict, (TrainingCompleted, Stable, Rehearsed)) and not view.trial_rows:
        raise UserError(f"run {run.id} is complete", hint=launch_again)
    if view.accepted is not None and edit.job.framework != view.accepted.job.framework:
        raise UserError("`framework` cannot change within a run", hint=launch_again)


def how_to_go_on(run: directory.RunFolder) -> str:
    """Return how a user can continue a failed run."""
    change = f"fix the cause or change {_where(run)}"
    if run.request.mode is directory.Mode.SEARCH:
        change = f"fix the cause, or allow more in `search.duration` and `search.trials` of {_where(run)}"
    return f"{change}, then `{run.call('resume', '--edit')}`"


def what_next(run: directory.RunFolder, verdict: Verdict | None) -> str:
    """Return the commands to use after a run's end, or after its driver's end if there is no verdict."""
    code = ExitCode.INFRASTRUCTURE if verdict is None else display_of(verdict).exit_code
    report = f"`{run.call('report', '--open')}` shows every attempt"
    if code is ExitCode.OK:
        return report
    again = how_to_go_on(run) if code is ExitCode.NO else f"`{run.call('resume')}` continues the run"
    return f"{again}; {report}"


def _where(run: directory.RunFolder) -> str:
    request = run.request
    files = [name for name in (request.edited_file, request.job_file) if name and Path(name).is_file()]
    return f"`{files[0] if files else run.path / 'job.yaml'}`"


def _digest_of(name: str, default: str) -> str:
    """Return the current digest of a file; `default` if it does not exist."""
    path = Path(name)
    return digest(read_text(path)) if name and path.is_file() else default


def _identity_of(name: str, request: directory.RunRequest) -> str:
    """Return the identity of a file's current job; empty if it cannot be read."""
    if not name:
        return ""
    try:
        return identity(*with_options(read_text(name), file=name, request=request))
    except Failure:
        return ""


def changed_file(run: directory.RunFolder) -> str:
    """Return the job file of a run if its job has changed since it was last read; otherwise empty."""
    request = run.request
    name, known, stated = request.job_file, request.job_digest, request.identity
    if request.edited_file:
        name, known, stated = request.edited_file, request.edited_digest, request.edited_identity
    if not Path(name).is_absolute():  # from a Ray job's folder: here it may be another file
        return ""
    states = _identity_of(name, request) if stated else ""
    is_same = states == stated if states else _digest_of(name, known) == known
    return "" if is_same else name


def _edit_from(history: History, path: Path, *, request: directory.RunRequest) -> RequestedJob | None:
    """Return what a file changes; the request keeps its `job_file`, by which `--continue` finds the run."""
    file = str(path.absolute())
    launched = Path(request.job_file) in (path, path.absolute())
    request = msgspec.structs.replace(request, edited_file="" if launched else file)
    return _edit(history, read_text(path), file=file, request=request, options=True)


def _edit(
    history: History,
    text: str,
    *,
    file: str,
    request: directory.RunRequest,
    options: bool,
) -> RequestedJob | None:
    if options:
        with_options(text, file=file, request=request)  # raises if it is not a job
        request = _without_stated(request, text)
        given, job = with_options(text, file=file, request=request)
    else:
        given, job = text, parse(text, file=file, recorded=True)
    return edit_of(history, given, job, file=file, request=request)


def _without_stated(request: directory.RunRequest, text: str) -> directory.RunRequest:
    """Return a request without the options that an edited file sets, because the file is newer."""
    stated = Document(text, "", literal=LITERAL).value
    limits = {key: None for section, key in _OPTIONS if key in (stated.get(section) or {})}
    return msgspec.structs.replace(request, **limits)


def edit_of(
    history: History, given: str, job: Job, *, file: str, request: directory.RunRequest
) -> RequestedJob | None:
    """Return how a job differs from that of a run; None if equal; `given`: its text, options applied."""
    before = accepted_of(history).job
    base = written(given)
    if base is not None and base.workdir == ".":  # the folder of the command: no change of the job
        job = msgspec.structs.replace(job, workdir=before.workdir)
    changes = differences(before, secrets.masked(job))
    if not changes:
        return None
    launched = Path(file).absolute() == Path(request.job_file).absolute()
    known = launched or bool(request.identity)  # a run without an identity is found by the digest
    request = msgspec.structs.replace(
        request,
        job_digest=_digest_of(request.job_file, request.job_digest) if known else request.job_digest,
        # If the edit is in another file, the current content of the launched file was never run.
        identity=(launched and _identity_of(request.job_file, request)) or request.identity,
        edited_digest=_digest_of(request.edited_file, ""),
        edited_identity=_identity_of(request.edited_file, request),
    )
    return RequestedJob(text=given, job=job, file=file, request=request, changes=changes)


# Derived from other keys: a changed model or data shows in the settings or in `model`.
_DERIVED = ("shape", "shape_from", "prompts")
# Keys for how a run is conducted: changing them does not invalidate failures of earlier attempts.
_CONDUCT = ("name", "goal.", "recovery.", "search.", "notify.", "annotate")


def differences(before: Job, after: Job) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of each key that differs, by its dotted path."""
    old, new = map(_flat, (before, after))
    if after.cluster.gpu_memory_bytes is None:  # it was measured, not stated
        old.pop("cluster.gpu_memory_bytes", None)
        new.pop("cluster.gpu_memory_bytes", None)
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def concerns_training(keys: dict[str, tuple[Any, Any]], profile: Profile) -> bool:
    """Return whether anything except knobs and keys of `_CONDUCT` differs."""
    knobs = {f"settings.{support.setting}" for support in profile.supported.values()}
    return any(key not in knobs and not key.startswith(_CONDUCT) for key in keys)


def concerns_trials(keys: dict[str, tuple[Any, Any]]) -> bool:
    """Return whether anything except keys of `_CONDUCT` differs, so that trials are not comparable."""
    return any(not key.startswith(_CONDUCT) for key in keys)


def _flat(job: Job) -> dict[str, Any]:
    values = {key: value for key, value in msgspec.to_builtins(job).items() if key not in _DERIVED}
    return {key: value for key, value in flat(values).items() if value != {}}
