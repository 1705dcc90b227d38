"""What changes for a job with another release of its framework or its inference engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from autotune.launchers.base import DECIDES_MEMORY, Framework
from autotune.launchers.frameworks.core.versions import choose
from autotune.orchestrator.errors import UserError
from autotune.orchestrator.planner import Plan
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Setting
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

_ENGINES = ("sglang", "vllm")
_REQUIREMENT = re.compile(r"\s*([\w.-]+?)\s*==\s*(\S+)\s*")


class PhaseChange(Value, frozen=True, kw_only=True):
    """The predicted peak of a phase with both releases."""

    phase: str  # name of the phase, as in `phases` of a plan
    now_bytes: float  # predicted peak with the job's own release, in bytes
    against_bytes: float  # predicted peak with the other release, in bytes
    capacity_bytes: float | None  # of the device; None: unknown


class OtherRelease(Value, frozen=True, kw_only=True):
    """The answer of `autotune plan job.yaml --against verl==0.8.0`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    package: str  # package whose release differs: the framework or its inference engine, e.g. `verl`
    now: str  # the release of the job as it is; empty: unknown
    against: str  # the other release, as named by the user
    stands_in: str = ""  # the nearest release on record, used if the other one is not on record
    verdict_now: str  # whether the job fits with its own release, in a sentence
    verdict_against: str  # whether the job fits with the other release, in a sentence
    placement: tuple[str, str] | None = None  # of trainer and engines, if it differs
    phases: tuple[PhaseChange, ...] = ()
    knobs: dict[str, tuple[Setting, Setting]] = {}  # with different values because of changed defaults
    defaults: dict[str, tuple[Any, Any]] = {}  # changed defaults of settings that affect memory
    lacking: tuple[str, ...] = ()  # settings of the job that the other release does not have
    refused: tuple[str, ...] = ()  # other problems of the job with the other release
    command: dict[str, tuple[str, ...]] = {}  # words of the command: `removed` and `added`
    remedies_lost: dict[str, str] = {}  # knobs that a launch could no longer change -> reason
    remedies_new: tuple[str, ...] = ()  # knobs that a launch could change only with the other release


def with_release(job: Job, framework: Framework, engine: str, requirement: str) -> tuple[str, str, Job]:
    """Return the package and version in a requirement `verl==0.8.0`, and the job with that release.

    Raises Failure if it names neither the job's framework nor its engine, or no valid version.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    package, version = (match[1].lower(), match[2]) if match else ("", "")
    try:
        Version(version)
    except InvalidVersion:
        package = ""
    if package and package in (framework.name, framework.distribution.lower()) and framework.releases:
        return framework.name, version, msgspec.structs.replace(job, framework_version=version)
    if package == engine and engine in _ENGINES:
        engines = {**job.engine_versions, package: version}
        return package, version, msgspec.structs.replace(job, engine_versions=engines)
    able = [framework.name] if framework.releases else []
    able += [engine] if engine in _ENGINES else []
    if not able:
        raise UserError("--against: no release of this job's framework is on record")
    raise UserError(
        f"--against {requirement}: not a release of the job's {' or '.join(able)}",
        hint=f"write PACKAGE==VERSION, such as {able[0]}=={(framework.releases or ('0.11.0',))[-1]}",
    )


def _options(argv: tuple[str, ...]) -> list[str]:
    """Return the words of a command, with a flag and its value as one."""
    result: list[str] = []
    for word in argv:
        is_value = bool(result) and result[-1].startswith("--") and " " not in result[-1]
        if is_value and not word.startswith("--") and "=" not in result[-1]:
            result[-1] += f" {word}"
        else:
            result.append(word)
    return result


def _changed_defaults(framework: Framework, jobs: tuple[Job, Job]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield settings that affect memory and whose defaults differ, with both defaults; None: no default."""
    here, there = map(framework.defaults, jobs)
    for name in sorted(here.keys() | there.keys()):
        values = here.get(name), there.get(name)
        if values[0] == values[1] or not DECIDES_MEMORY.search(name):
            continue
        # A release without a default for it may not have the setting at all.
        others = (job for job, of in zip(jobs, (here, there), strict=True) if name not in of)
        written = (msgspec.structs.replace(job, settings={**job.settings, name: True}) for job in others)
        if not any(name in framework.lacking(job) for job in written):
            yield name, values


def compared(
    framework: Framework,
    package: str,
    asked: str,
    *,
    jobs: tuple[Job, Job],
    plans: tuple[Plan, Plan],
    profiles: tuple[Profile, Profile],
    verdicts: tuple[str, str],
) -> OtherRelease:
    """Compare a job as it is with the job under the other release; pairs are in that order."""
    now, against = plans
    peaks = {phase.phase: phase for phase in against.phases}
    knobs = (
        (name, getattr(profiles[0].knobs, name), getattr(profiles[1].knobs, name))
        for name in profiles[0].supported.keys() & profiles[1].supported.keys()
    )
    lacking = frozenset(framework.lacking(jobs[0]))
    before = {problem.message for problem in framework.check(jobs[0])}
    lost = sorted(profiles[0].supported.keys() - profiles[1].supported.keys())
    stands_in = ""
    if package == framework.name:
        release = choose(asked, framework.releases)
        stands_in = "" if release.exact else release.version
        name = jobs[0].framework_version or framework.releases[-1]
    else:
        name = profiles[0].engine_version
    words = [{word.lstrip("+"): word for word in _options(plan.command)} for plan in plans]
    return OtherRelease(
        package=package,
        now=name,
        against=asked,
        stands_in=stands_in,
        verdict_now=verdicts[0],
        verdict_against=verdicts[1],
        placement=None
        if profiles[0].placement is profiles[1].placement
        else (profiles[0].placement.value, profiles[1].placement.value),
        phases=tuple(
            PhaseChange(
                phase=phase.phase,
                now_bytes=phase.total_bytes,
                against_bytes=peaks[phase.phase].total_bytes,
                capacity_bytes=phase.capacity_bytes,
            )
            for phase in now.phases
            if phase.phase in peaks
        ),
        knobs={name: (here, there) for name, here, there in sorted(knobs) if here != there},
        defaults=dict(_changed_defaults(framework, jobs)),
        lacking=tuple(name for name in framework.lacking(jobs[1]) if name not in lacking),
        refused=tuple(
            f"{problem.message} ({problem.hint})" if problem.hint else problem.message
            for problem in framework.check(jobs[1])
            if problem.message not in before
        ),
        command={
            "removed": tuple(word for name, word in words[0].items() if name not in words[1]),
            "added": tuple(word for name, word in words[1].items() if name not in words[0]),
        },
        remedies_lost={name: profiles[1].unsupported.get(name, "it has no such setting") for name in lost},
        remedies_new=tuple(sorted(profiles[1].supported.keys() - profiles[0].supported.keys())),
    )
