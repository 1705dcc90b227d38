"""The version and code of a framework that a job would run, and settings that only older releases accept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from packaging.version import Version

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, Problem
from autotune.launchers.frameworks.core.versions import choose
from autotune.orchestrator.config import own_code
from autotune.orchestrator.config.yaml_nodes import Path as KeyPath
from autotune.orchestrator.containers import is_container
from autotune.policies.values.job import Job

_ENGINES = ("sglang", "vllm")
_ENOUGH = 3  # settings needed to recognise a framework
_MOST = 0.8  # share of the settings
_TAKE_OTHERS = ("builtin", "command")  # without releases on record


def with_version(job: Job, framework: Framework) -> Job:
    """Return the job with the versions and code that it would run, and a note if it names another version."""
    job = msgspec.structs.replace(job, engine_versions=_engines(job))
    query = framework.code_query(job)
    code = own_code.Code() if query is None else own_code.find(job, framework)
    version = job.framework_version or code.version
    is_recorded = bool(framework.releases) and choose(version, framework.releases).exact
    program = None if query is None or not query.program else Path(job.workdir, query.program)
    if query is not None and program is not None and own_code.is_file(program):
        job = msgspec.structs.replace(job, own_code=own_code.read(query, program))
    elif query is not None and code.package is not None and not (is_recorded and code.is_installed):
        job = msgspec.structs.replace(job, own_code=own_code.read(query, code.package))
    if not job.framework_version:
        return msgspec.structs.replace(
            job, framework_version=code.version or None, version_from=code.place if code.version else ""
        )
    if not code.version or code.version == job.framework_version:
        return job
    return job.with_notes(
        f"framework_version is {job.framework_version}, but {framework.name} {code.version} would run:"
        f" {code.place}"
    )


def accepted_before(job: Job, framework: Framework) -> Mapping[KeyPath, str]:
    """Return each setting that the job's release refuses, with the newest older release that accepts it.

    Settings that every known release refuses are left out. If the job names no version, it is checked against
    the release that its settings imply, otherwise against the newest known.
    """
    if len(framework.releases) < 2:
        return {}
    present = _present(job, framework)
    refused = _refused(job, framework, present)
    result: dict[KeyPath, str] = {}
    for older in sorted((v for v in map(Version, framework.releases) if v < present), reverse=True):
        left = refused - result.keys()
        if not left:
            break
        result |= dict.fromkeys(left - _refused(job, framework, older), str(older))
    return result


def with_releases(job: Job, framework: Framework) -> Job:
    """Return the job with notes on the settings that only an older release accepts.

    Only if the framework's version is unknown: unknown settings are then passed on to the framework.
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
    return job.with_notes(*notes)


def hinted(problem: Problem, older: Mapping[KeyPath, str], job: Job, framework: Framework) -> Problem:
    """Return a problem whose hint names the older release that accepts the setting, if there is one."""
    release = older.get(problem.path)
    if release is None:
        return problem
    hint = f"{framework.name} {release} accepts it"
    if not job.framework_version:
        hint += f": set `framework_version: {release}` if you run it"
    return msgspec.structs.replace(problem, hint=f"{hint}; {problem.hint}" if problem.hint else hint)


def doubt(problem: Problem, job: Job, framework: Framework) -> str:
    """Return a note on a rule of another release than the job's, which may not apply to the job.

    The rule's hint is left out, except a name that may be meant: the job's own release may not support it.
    """
    own = job.framework_version or framework.release_by_settings(job)
    release = choose(own or None, framework.releases).version if framework.releases else ""
    setting = ".".join(map(str, problem.path[1:]))
    at = "" if setting in problem.message else f"{setting}: "
    whose = f"the job's own release is {own or 'not known'}"
    if own and own == release:
        whose = "the job has code or a configuration file of its own"
    near = f" ({problem.hint})" if problem.hint.startswith("did you mean") else ""
    what = f"{at}{problem.message}{near}"
    return f"{framework.name} {release}".rstrip() + f" would refuse {what}; {whose}"


def of_another_framework(job: Job, framework: Framework) -> Problem | None:
    """Return the problem of a job whose settings are those of another framework; None if they are not."""
    if len(job.settings) < _ENOUGH or len(framework.lacking(job)) < _MOST * len(job.settings):
        return None
    owners = [name for name in frameworks.FRAMEWORKS if name not in _TAKE_OTHERS and _has(name, job)]
    if not owners:
        return None
    message = f"the settings are those of {' or '.join(owners)}, not of {job.framework}"
    return Problem(path=("framework",), message=message, hint=f"write `framework: {owners[0]}`")


def _engines(job: Job) -> dict[str, str]:
    """Return the versions of the inference engines that are installed where the job runs."""
    if is_container(job.command):
        return {}
    result = {name: own_code.installed_version(name, job.python) for name in _ENGINES}
    return {name: version for name, version in result.items() if version}


def _present(job: Job, framework: Framework) -> Version:
    wanted = job.framework_version or framework.release_by_settings(job)
    return Version(choose(wanted, framework.releases).version)


def _refused(job: Job, framework: Framework, release: Version) -> set[KeyPath]:
    own = msgspec.structs.replace(job, framework_version=str(release))
    return {problem.path for problem in framework.check(own) if len(problem.path) > 1}


def _has(name: str, job: Job) -> bool:
    """Return whether a framework has more than the share `_MOST` of a job's settings."""
    theirs = msgspec.structs.replace(job, framework=name, framework_version=None)
    return len(frameworks.find(name).lacking(theirs)) < (1 - _MOST) * len(job.settings)
