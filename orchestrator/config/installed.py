"""The version of a framework that a job would run, found in files, and what only an older one accepts.

Nothing is imported or started.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import msgspec
from packaging.version import Version

from autotune.launchers.base import Framework, Problem
from autotune.launchers.frameworks.core.versions import choose
from autotune.orchestrator.config.yaml_nodes import Path as KeyPath
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


def accepted_before(job: Job, framework: Framework) -> Mapping[KeyPath, str]:
    """Return each setting that the job's release refuses, with the newest older release that accepts it.

    A setting that every known release refuses is left out. Without a version of its own, the job is checked
    against the release that its settings imply, else against the newest known.
    """
    if len(framework.releases) < 2:
        return {}
    present = _present(job, framework)
    refused = _refused(job, framework, present)
    found: dict[KeyPath, str] = {}
    for older in sorted((v for v in map(Version, framework.releases) if v < present), reverse=True):
        left = refused - found.keys()
        if not left:
            break
        found |= dict.fromkeys(left - _refused(job, framework, older), str(older))
    return found


def with_releases(job: Job, framework: Framework) -> Job:
    """Return the job with a note on the settings that only an older release than the newest accepts.

    Only where the version of its framework is not known: settings that nobody knows are then passed on.
    """
    if job.framework_version:
        return job
    older = accepted_before(job, framework)
    notes = []
    for release in sorted(set(older.values()), key=Version):
        names = [".".join(map(str, path[1:])) for path, accepts in older.items() if accepts == release]
        notes.append(
            f"{framework.name} {_present(job, framework)} does not accept {', '.join(sorted(names))},"
            f" but {framework.name} {release} does: set `framework_version: {release}` if you run it"
        )
    return msgspec.structs.replace(job, notes=(*job.notes, *notes)) if notes else job


def hinted(problem: Problem, older: Mapping[KeyPath, str], job: Job, framework: Framework) -> Problem:
    """Return a problem whose hint names the older release that accepts the setting, if there is one."""
    release = older.get(problem.path)
    if release is None:
        return problem
    hint = f"{framework.name} {release} accepts it"
    if not job.framework_version:
        hint += f": set `framework_version: {release}` if you run it"
    return msgspec.structs.replace(problem, hint=f"{hint}; {problem.hint}" if problem.hint else hint)


def _found(job: Job, framework: Framework) -> tuple[str, str]:
    """Return a version and where it was found; a checkout in `workdir` goes first, as in Python."""
    if framework.version_file and Path(job.workdir, framework.modules[0]).is_dir():
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


def _present(job: Job, framework: Framework) -> Version:
    wanted = job.framework_version or framework.release_by_settings(job)
    return Version(choose(wanted, framework.releases).version)


def _refused(job: Job, framework: Framework, release: Version) -> set[KeyPath]:
    own = msgspec.structs.replace(job, framework_version=str(release))
    return {problem.path for problem in framework.check(own) if len(problem.path) > 1}
