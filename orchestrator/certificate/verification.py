"""Whether a certificate is true, judged by its content, the files next to it and a replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from autotune.launchers.base import Framework, refusals
from autotune.orchestrator.certificate import reading
from autotune.orchestrator.certificate.replay import replayed
from autotune.orchestrator.run import certificate as composing
from autotune.orchestrator.run.export import stable_knobs, with_units
from autotune.policies.certificate.comparison import (
    Derived,
    declared,
    deviations,
    differences,
    unequal,
    words,
)
from autotune.policies.certificate.contents import Certificate, Change, Replayed, Stability, Training
from autotune.policies.values.events import History
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Job
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

# What code that expects a checked job raises for values that no job has.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FILES = {"job.yaml": "before", "stable.yaml": "after"}


class Verification(Value, frozen=True, kw_only=True):
    """What was found."""

    certificate: Certificate
    differences: tuple[str, ...]  # a sentence each
    compared: tuple[str, ...]  # the files beside it
    missing: tuple[str, ...]
    replayed: Replayed
    replay: str  # in words
    by: str  # update: one was computed twice; losses: those of steps that attempts repeated


class VerificationDocument(Value, frozen=True, kw_only=True):
    """What `autotune verify --json` prints."""

    schema: int = 1
    run: str
    agrees: bool
    differences: tuple[str, ...]
    replayed: Replayed
    replay: str
    replayed_by: str  # update | losses
    compared: tuple[str, ...]
    missing: tuple[str, ...]
    changes: tuple[Change, ...]
    training: Training
    stable: Stability
    versions: dict[str, str]


def document(verification: Verification) -> VerificationDocument:
    """Return what was found as it is printed."""
    certificate = verification.certificate
    return VerificationDocument(
        run=certificate.run,
        agrees=not verification.differences,
        differences=verification.differences,
        replayed=verification.replayed,
        replay=verification.replay,
        replayed_by=verification.by,
        compared=verification.compared,
        missing=verification.missing,
        changes=certificate.changes,
        training=certificate.training,
        stable=certificate.stable,
        versions=certificate.versions,
    )


def verify(path: Path) -> Verification:
    """Return what contradicts a certificate; raises Failure if it, or a file next to it, is unusable.

    Nothing that the files name is run, opened or loaded.
    """
    certificate = reading.certificate_in(path)
    framework = reading.framework_of(certificate, path)
    try:
        before = msgspec.structs.replace(certificate.job, settings=certificate.before)
        after = msgspec.structs.replace(certificate.job, settings=certificate.after)
        differences = [*_contradictions(certificate, framework, before, after, path)]
        history = reading.journal_beside(path)
        if history is not None:
            differences += _against_journal(certificate, framework, history)
        compared, missing = ["events.jsonl"] * (history is not None), ["events.jsonl"] * (history is None)
        for name, part in _FILES.items():
            job = reading.job_beside(path, name)
            (missing if job is None else compared).append(name)
            if job is not None:
                differences += _against_job(before if part == "before" else after, job, name, framework)
    except RecursionError:
        raise reading.unusable(path, "its values are nested too deeply") from None
    except _UNREADABLE as error:
        raise reading.unusable(path, f"its values make no sense: {type(error).__name__}: {error}") from None
    result, reason, by = certificate.replayed, certificate.replay, "losses"
    if differences:
        result, reason = Replayed.NOT_RUN, "what was declared is not so"
    elif (updated := replayed(framework, before, after)) is not None:
        if updated[0] is not Replayed.NOT_RUN or result is Replayed.NOT_RUN:
            (result, reason), by = updated, "update"
        if result is Replayed.DIFFERS:
            differences.append(f"an update with the stable settings is another one: {reason}")
    return Verification(
        certificate=certificate,
        differences=tuple(differences),
        compared=tuple(compared),
        missing=tuple(missing),
        replayed=result,
        replay=reason,
        by=by,
    )


def _contradictions(
    certificate: Certificate, framework: Framework, before: Job, after: Job, path: Path
) -> Iterator[str]:
    """Yield where the framework and the certificate disagree on the settings."""
    for problem in refusals(framework.check(before)):
        key = ".".join(map(str, problem.path))
        raise reading.unusable(path, f"`{key}` of the job: {problem.message}", hint=problem.hint)
    refused = [
        f"`{'.'.join(map(str, p.path))}` of the stable settings: {p.message}"
        for p in refusals(framework.check(after))
    ]
    yield from refused
    profile = framework.profile(before, certificate.cluster)
    try:
        knobs = declared(certificate, profile)
    except msgspec.ValidationError as error:
        raise reading.unusable(path, f"a declared change has no fit value: {error}") from None
    derived = Derived(
        profile=profile,
        settings=framework.settings(before, knobs),
        before=framework.training(before),
        after=framework.training(before if refused else after),
    )
    yield from differences(certificate, derived)


def _against_journal(certificate: Certificate, framework: Framework, history: History) -> tuple[str, ...]:
    """Return in what a certificate differs from the one that the journal gives for the same moment."""
    last = max((n for n, event in enumerate(history) if event.at == certificate.at), default=None)
    if last is None:
        return (f"`at` is {certificate.at}, when nothing happened according to events.jsonl",)
    history = history[: last + 1]
    knobs = stable_knobs(RunView(history))
    if knobs is None or accepted_of(history).job.framework != framework.name:
        return ("events.jsonl shows no stable configuration at that time",)
    return deviations(certificate, composing.compose(history, framework, knobs), source="events.jsonl")


def _against_job(claimed: Job, job: Job, name: str, framework: Framework) -> Iterator[str]:
    """Yield in what a job file differs from the job of the certificate, as far as it may concern training."""
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
        if key not in sizes or there != sizes[key]:  # the same size with its unit is no difference
            yield f"`{key}` is {words(here)} in the certificate and {words(there)} in {name}"
