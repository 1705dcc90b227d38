"""What is known or assumed about a job beyond its settings: its release, its program, its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.versions import is_before
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Alternative, Profile
from autotune.policies.values.provenance import Fact, Origin

RELEASE = "release"


def facts_of(name: str, config: DeclaredSettings, job: Job, releases: tuple[str, ...]) -> Iterator[Fact]:
    """Yield the facts and assumptions behind a job's profile."""
    yield _release(name, config, job, releases)
    for about, value, resolve in _guesses(name, config, job):
        yield Fact(name=about, value=value, origin=Origin.ASSUMED, resolve=resolve, is_open=True)


def has_alternatives(fact: Fact) -> bool:
    """Return whether a fact is an assumed release with plausible alternatives on record."""
    return fact.name == RELEASE and fact.is_assumed and not fact.is_open


def alternatives(profile: Profile, others: Iterable[Profile]) -> tuple[Alternative, ...]:
    """Return the profiles of other releases under which the job would use memory differently."""
    different = (
        Alternative(fact=RELEASE, knobs=other.knobs, placement=other.placement, layout=other.layout)
        for other in others
        if (other.knobs, other.placement, other.layout) != (profile.knobs, profile.placement, profile.layout)
    )
    result: list[Alternative] = []
    for each in different:
        result += [] if each in result else [each]
    return tuple(result)


def is_of_release(problem: Problem) -> bool:
    """Return whether a problem depends on the release: one of a setting, by a rule on record."""
    inside = problem.path[:1] == ("settings",) or (problem.path[:1] == ("config",) and len(problem.path) > 1)
    return inside and problem.origin is Origin.EXACT


def _release(name: str, config: DeclaredSettings, job: Job, releases: tuple[str, ...]) -> Fact:
    """Return the fact which release's settings, defaults and memory use stand for the job's.

    Its alternatives are the releases on record, unless the job's own release is known to differ from them.
    """
    own, recorded = job.framework_version or "", config.release.version
    if config.knows_release:
        return Fact(name=RELEASE, value=f"{name} {own}", origin=Origin.EXACT)
    if not releases:
        value = f"it uses memory as the {name} on record does"
        return Fact(name=RELEASE, value=value, origin=Origin.ASSUMED, is_open=True)
    if not own:
        return Fact(
            name=RELEASE,
            value=f"it uses memory as {name} {recorded} does",
            origin=Origin.ASSUMED,
            resolve="set framework_version",
            is_open=len(releases) == 1 or config.is_of_earlier,
        )
    forks = own == recorded or (config.code is not None and bool(config.code.defaults))
    nearest = "later releases do" if own in config.older else f"{recorded} does, the nearest on record"
    value = f"{name} {own} uses memory as {nearest}"
    if own == recorded:
        value = f"the job's own code or configuration file has the defaults of {name} {own}"
    return Fact(
        name=RELEASE,
        value=value,
        origin=Origin.ASSUMED,
        is_open=forks or is_before(own, releases[0]),
    )


def _guesses(name: str, config: DeclaredSettings, job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield further assumptions about a job, whose alternatives cannot be listed.

    Each is the name of a fact, its value, and what would make it known.
    """
    if not config.is_own:
        yield "program", f"the program of the job has the defaults of {name}'s own", ""
    if job.launcher.is_assumed:
        yield "layout", f"the trainer's layout is what the name of {job.launcher.source} says", ""
    if job.assumes_shape:
        yield "model", f"the model's shape is {job.shape_from.partition(':')[0]}", "set `model:`"
    if job.unfilled:
        names = ", ".join(f"`{each}`" for each in job.unfilled)
        yield "settings", f"what nobody filled in has {name}'s default: {names}", "write the values"
    for value, resolve in config.guesses():
        yield "layout", value, resolve
