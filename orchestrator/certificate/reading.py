"""Certificates and the files next to them, as data that anybody may have written: bounded, never executed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework
from autotune.orchestrator.config.loader import written
from autotune.orchestrator.config.yaml_nodes import LARGEST_BYTES
from autotune.orchestrator.errors import ExitCode, Failure, reason_of
from autotune.orchestrator.run import journal
from autotune.policies.certificate.contents import SCHEMA, Certificate
from autotune.policies.values.events import Accepted, History
from autotune.policies.values.job import Job

MOST_BYTES = 16 << 20  # of a certificate: 10,000 overlapping steps are about 1 MiB
MOST_JOURNAL_BYTES = 1 << 30
_HINT = "name the certificate.json of a run"


def certificate_in(path: Path) -> Certificate:
    """Return the certificate in a file; raises Failure with exit code 2 where it is none."""
    data = _bytes(path, most=MOST_BYTES)
    try:
        certificate = msgspec.json.decode(data, type=Certificate)
    except msgspec.ValidationError as error:
        raise unusable(path, f"not a certificate of this version: {error}", hint=_HINT) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        hint = f"{_HINT}; `autotune resume RUN` writes it again"
        raise unusable(path, "not whole JSON", hint=hint) from None
    if certificate.schema != SCHEMA:
        hint = "use the newer autotune that wrote it"
        raise unusable(path, f"schema {certificate.schema}; this autotune knows {SCHEMA}", hint=hint)
    return certificate


def framework_of(certificate: Certificate, path: Path) -> Framework:
    """Return the framework of a certificate's job; raises Failure for one that is not known."""
    try:
        return frameworks.find(certificate.job.framework)
    except KeyError:
        name = certificate.job.framework
        raise unusable(path, f"its framework `{name}` is not known") from None


def journal_beside(path: Path) -> History | None:
    """Return the recorded events next to a certificate, None if there are none; raises Failure."""
    file = path.with_name("events.jsonl")
    if not _exists(file):
        return None
    _bytes(file, most=MOST_JOURNAL_BYTES, whole=False)
    history = journal.read(file)
    if not history or not isinstance(history[0], Accepted):
        raise unusable(file, "it does not begin with an accepted job")
    return history


def job_beside(path: Path, name: str) -> Job | None:
    """Return the job in a file next to a certificate, None if there is none; raises Failure."""
    file = path.with_name(name)
    if not _exists(file):
        return None
    try:
        job = written(_bytes(file, most=LARGEST_BYTES).decode("utf-8-sig"))
    except (UnicodeDecodeError, RecursionError):
        job = None
    if job is None:
        raise unusable(file, "it is no job")
    return job


def unusable(path: Path, why: str, *, hint: str = "") -> Failure:
    """Return the failure of a file that cannot be used."""
    return Failure(f"cannot use `{path}`: {why}", hint=hint, code=ExitCode.USAGE)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _bytes(path: Path, *, most: int, whole: bool = True) -> bytes:
    """Return a regular file's bytes, none of them unless `whole`; no pipe or device is waited for."""
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
