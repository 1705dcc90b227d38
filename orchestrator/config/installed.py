"""The version of a framework that a job would run, found in files; nothing is imported or started."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from autotune.launchers.base import Framework
from autotune.policies.values.job import Job

_LONGEST = 64  # characters of a version
_FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def with_version(job: Job, framework: Framework) -> Job:
    """Return the job with its framework's version, and a note where it names another than it would run."""
    found, place = _found(job, framework)
    if not job.framework_version:
        return msgspec.structs.replace(job, framework_version=found or None, version_from=place)
    if not found or found == job.framework_version:
        return job
    note = f"framework_version is {job.framework_version}, but {framework.name} {found} would run: {place}"
    return msgspec.structs.replace(job, notes=(*job.notes, note))


def _found(job: Job, framework: Framework) -> tuple[str, str]:
    """Return a version and where it was found; a checkout in `workdir` goes first, as in Python."""
    if framework.version_file:
        file = Path(job.workdir) / framework.version_file
        try:
            version = file.read_text()[:_LONGEST].strip()
        except (OSError, UnicodeDecodeError):
            version = ""
        if version:
            return version, str(file)
    if not framework.distribution:
        return "", ""
    python = _interpreter(job.python)
    places = [str(folder) for pattern in _FOLDERS for folder in python.parent.parent.glob(pattern)]
    for distribution in distributions(
        name=framework.distribution, path=sys.path if job.python is None else places
    ):
        return distribution.version[:_LONGEST], f"installed for {python}"
    return "", ""


def _interpreter(python: str | None) -> Path:
    if python is None:
        return Path(sys.executable)
    return Path(shutil.which(python) or python).expanduser()
