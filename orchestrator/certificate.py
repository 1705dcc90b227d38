"""Verify a certificate: read it within limits, compare it with the files next to it, and replay an update.

A certificate and the files next to it are untrusted data: read within limits and never executed.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, refusals
from autotune.orchestrator.config.loader import written
from autotune.orchestrator.config.yaml_nodes import LARGEST_BYTES
from autotune.orchestrator.errors import Failure, UserError, reason_of
from autotune.orchestrator.run import journal
from autotune.orchestrator.run.export import compose_certificate, stable_knobs, with_units
from autotune.policies.certificate.comparison import (
    Derived,
    declared,
    deviations,
    differences,
    unequal,
    words,
)
from autotune.policies.certificate.contents import (
    SCHEMA,
    UPDATE_LIMIT,
    Certificate,
    Change,
    Comparison,
    Replayed,
    Stability,
    Training,
)
from autotune.policies.values.events import Accepted, History
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Job
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

# Raised by code that expects a checked job, for values that no job has.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FILES = {"job.yaml": "before", "stable.yaml": "after"}


class VerificationDocument(Value, frozen=True, kw_only=True):
    """What `autotune verify --json` prints."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    run: str  # id of the run that wrote the certificate
    name: str  # name of the job
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    agrees: bool  # whether no difference was detected
    differences: tuple[str, ...]  # what is not as the certificate declares, one sentence each
    replayed: Replayed
    replay: str  # result of the replay, or why there is none, in words
    replayed_by: str  # update | losses
    compared: tuple[str, ...]  # files next to the certificate that were compared with it, e.g. `events.jsonl`
    missing: tuple[str, ...]  # files to compare that are not next to the certificate
    changes: tuple[Change, ...]
    training: Training
    stable: Stability
    versions: dict[str, str]  # package -> its version in the run


def verify(path: Path) -> VerificationDocument:
    """Verify a certificate; raises Failure if it, or a file next to it, is unusable.

    Nothing that the files name is run, opened or loaded.
    """
    certificate = certificate_in(path)
    framework = framework_of(certificate, path)
    try:
        before = msgspec.structs.replace(certificate.job, settings=certificate.before)
        after = msgspec.structs.replace(certificate.job, settings=certificate.after)
        differences = [*_contradictions(certificate, framework, before, after, path)]
        history = journal_beside(path)
        if history is not None:
            differences += _against_journal(certificate, framework, history)
        compared, missing = ["events.jsonl"] * (history is not None), ["events.jsonl"] * (history is None)
        for name, part in _FILES.items():
            job = job_beside(path, name)
            (missing if job is None else compared).append(name)
            if job is not None:
                differences += _against_job(before if part == "before" else after, job, name, framework)
    except RecursionError:
        raise unusable(path, "its values are nested too deeply") from None
    except _UNREADABLE as error:
        raise unusable(path, f"its values make no sense: {type(error).__name__}: {error}") from None
    result, reason, by = certificate.replayed, certificate.replay, "losses"
    if differences:
        result, reason = Replayed.NOT_RUN, "what was declared is not so"
    elif (updated := replayed(framework, before, after)) is not None:
        if updated[0] is not Replayed.NOT_RUN or result is Replayed.NOT_RUN:
            (result, reason), by = updated, "update"
        if result is Replayed.DIFFERS:
            differences.append(f"an update with the stable settings is another one: {reason}")
    return VerificationDocument(
        run=certificate.run,
        name=certificate.job.name,
        framework=certificate.job.framework,
        agrees=not differences,
        differences=tuple(differences),
        replayed=result,
        replay=reason,
        replayed_by=by,
        compared=tuple(compared),
        missing=tuple(missing),
        changes=certificate.changes,
        training=certificate.training,
        stable=certificate.stable,
        versions=certificate.versions,
    )


def _contradictions(
    certificate: Certificate, framework: Framework, before: Job, after: Job, path: Path
) -> Iterator[str]:
    """Yield the differences between the certificate's settings and the framework's."""
    for problem in refusals(framework.check(before)):
        key = ".".join(map(str, problem.path))
        raise unusable(path, f"`{key}` of the job: {problem.message}", hint=problem.hint)
    refused = [
        f"`{'.'.join(map(str, p.path))}` of the stable settings: {p.message}"
        for p in refusals(framework.check(after))
    ]
    yield from refused
    profile = framework.profile(before, certificate.cluster)
    try:
        knobs = declared(certificate, profile)
    except msgspec.ValidationError as error:
        raise unusable(path, f"a declared change has no fit value: {error}") from None
    derived = Derived(
        profile=profile,
        settings=framework.settings(before, knobs),
        before=framework.training(before),
        after=framework.training(before if refused else after),
    )
    yield from differences(certificate, derived)


def _against_journal(certificate: Certificate, framework: Framework, history: History) -> tuple[str, ...]:
    """Return the differences between a certificate and the one made from the journal for the same time."""
    last = max((n for n, event in enumerate(history) if event.at == certificate.at), default=None)
    if last is None:
        return (f"`at` is {certificate.at}, when nothing happened according to events.jsonl",)
    history = history[: last + 1]
    knobs = stable_knobs(RunView(history))
    if knobs is None or accepted_of(history).job.framework != framework.name:
        return ("events.jsonl shows no stable configuration at that time",)
    return deviations(certificate, compose_certificate(history, framework, knobs), source="events.jsonl")


def _against_job(claimed: Job, job: Job, name: str, framework: Framework) -> Iterator[str]:
    """Yield the differences that may affect training between a job file and a certificate's job."""
    typed = with_units(claimed.settings, framework, claimed)
    sizes = {f"settings.{k}": v for k, v in typed.items() if v != claimed.settings[k]}
    parts = ("framework", "command", "python", "config", "model", "env")
    keys = {part: getattr(claimed, part) for part in parts} | {
        f"settings.{k}": v for k, v in claimed.settings.items()
    }
    other = {part: getattr(job, part) for part in parts} | {
        f"settings.{k}": v for k, v in job.settings.items()
    }
    for key, here, there in unequal(keys, other):
        if key not in sizes or there != sizes[key]:  # the same size written with a unit is equal
            yield f"`{key}` is {words(here)} in the certificate and {words(there)} in {name}"


MOST_BYTES = 16 << 20  # of a certificate: 10,000 overlapping steps take about 1 MiB
MOST_JOURNAL_BYTES = 1 << 30
_HINT = "name the certificate.json of a run"


def certificate_in(path: Path) -> Certificate:
    """Return the certificate in a file; raises Failure with exit code 2 if it is not one."""
    data = _bytes(path, most=MOST_BYTES)
    try:
        certificate = msgspec.json.decode(data, type=Certificate)
    except msgspec.ValidationError as error:
        raise unusable(path, f"not a certificate of this version: {error}", hint=_HINT) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        hint = f"{_HINT}; `autotune resume RUN` writes it again"
        raise unusable(path, "truncated or invalid JSON", hint=hint) from None
    if certificate.schema != SCHEMA:
        hint = "use the newer autotune that wrote it"
        raise unusable(path, f"schema {certificate.schema}; this autotune knows {SCHEMA}", hint=hint)
    return certificate


def framework_of(certificate: Certificate, path: Path) -> Framework:
    """Return the framework of a certificate's job; raises Failure if it is unknown."""
    try:
        return frameworks.find(certificate.job.framework)
    except KeyError:
        name = certificate.job.framework
        raise unusable(path, f"its framework `{name}` is not known") from None


def journal_beside(path: Path) -> History | None:
    """Return the events recorded next to a certificate; None if absent; raises Failure if unusable."""
    file = path.with_name("events.jsonl")
    if not os.path.lexists(file):
        return None
    _bytes(file, most=MOST_JOURNAL_BYTES, whole=False)
    history = journal.read(file)
    if not history or not isinstance(history[0], Accepted):
        raise unusable(file, "it does not begin with an accepted job")
    return history


def job_beside(path: Path, name: str) -> Job | None:
    """Return the job in a file next to a certificate; None if there is none; raises Failure if invalid."""
    file = path.with_name(name)
    if not os.path.lexists(file):
        return None
    try:
        job = written(_bytes(file, most=LARGEST_BYTES).decode("utf-8-sig"))
    except (UnicodeDecodeError, RecursionError):
        job = None
    if job is None:
        raise unusable(file, "it is no job")
    return job


def unusable(path: Path, why: str, *, hint: str = "") -> Failure:
    """Return the failure for an unusable file."""
    return UserError(f"cannot use `{path}`: {why}", hint=hint)


def _bytes(path: Path, *, most: int, whole: bool = True) -> bytes:
    """Return a regular file's bytes, none unless `whole`; never blocks on a pipe or device."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise unusable(path, "it is no file")
            if state.st_size > most:
                raise unusable(path, f"it is larger than {most >> 10:,} KiB")
            data = file.read(most + 1) if whole else b""
    except OSError as error:
        hint = "name the certificate.json in it" if isinstance(error, IsADirectoryError) else ""
        raise unusable(path, reason_of(error), hint=hint) from None
    if len(data) > most:
        raise unusable(path, f"it is larger than {most >> 10:,} KiB")
    return data


TIMEOUT_S = 600.0  # a small update takes seconds, on a slow, busy machine a minute
_CARRIED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


def replayed(framework: Framework, before: Job, after: Job) -> tuple[Replayed, str] | None:
    """Replay one update under both settings; returns outcome and description, None if not supported."""
    command = framework.replay(before, after)
    if command is None:
        return None
    with tempfile.TemporaryDirectory(prefix="autotune-verify-") as folder:
        for file in command.files:
            (Path(folder) / file.name).write_text(file.text)
        argv = [w.replace("{attempt}", folder).replace("{python}", sys.executable) for w in command.argv]
        environment = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        # Hide the GPUs, because a training may run on this node.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        try:
            done = subprocess.run(
                argv,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Replayed.NOT_RUN, f"the replay took longer than {TIMEOUT_S:.0f} s"
        except OSError as error:
            return Replayed.NOT_RUN, f"the replay could not start: {reason_of(error)}"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Replayed.NOT_RUN, f"the replay failed: {last}"
    try:
        return agreement_of(msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Comparison))
    except msgspec.DecodeError:
        return Replayed.NOT_RUN, "the replay printed no result"


def agreement_of(comparison: Comparison) -> tuple[Replayed, str]:
    """Return the outcome of a comparison of two updates, and its description."""
    if comparison.skipped:
        return Replayed.NOT_RUN, comparison.skipped
    what = f"one update of {comparison.samples} samples ({comparison.tokens:,} tokens) in fp32"
    errors = (
        f"loss {comparison.loss_error:.1g}, gradient {comparison.gradient_error:.1g}, "
        f"weights {comparison.update_error:.1g} apart; the limit is {UPDATE_LIMIT:g}"
    )
    return (Replayed.AGREED if comparison.agrees else Replayed.DIFFERS), f"{what}: {errors}"
