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
_ENGINES = ("sglang", "vllm")
_FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


def with_version(job: Job, framework: Framework) -> Job:
    """Return the job with the versions that it would run, and a note where it names another one."""
    job = msgspec.structs.replace(job, engine_versions=_engines(job))
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
    version = _installed(framework.distribution, job.python) if framework.distribution else ""
    return (version, f"installed for {_interpreter(job.python)}") if version else ("", "")


def _engines(job: Job) -> dict[str, str]:
    """Return the versions of the inference engines that are installed where the job runs."""
    found = {name: _installed(name, job.python) for name in _ENGINES}
    return {name: version for name, version in found.items() if version}


def _installed(distribution: str, python: str | None) -> str:
    """Return the version of a distribution for an interpreter, empty if there is none."""
    root = _interpreter(python).parent.parent
    places = sys.path if python is None else [str(each) for way in _FOLDERS for each in root.glob(way)]
    return next((each.version[:_LONGEST] for each in distributions(name=distribution, path=places)), "")


def _interpreter(python: str | None) -> Path:
    if python is None:
        return Path(sys.executable)
    return Path(shutil.which(python) or python).expanduser()
