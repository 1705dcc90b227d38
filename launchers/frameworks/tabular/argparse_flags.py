"""Base adapter of a framework whose settings are argparse flags, with facts for each release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
from packaging.version import Version

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.data import document, package_of
from autotune.launchers.frameworks.core.renames import Renamed, names_in
from autotune.launchers.frameworks.core.versions import Release, choose
from autotune.launchers.frameworks.dialects import flag_facts
from autotune.launchers.frameworks.dialects.flags import (
    bare,
    flags_of,
    printed_flags,
    printed_namespace,
    spelled,
)
from autotune.launchers.frameworks.tabular.declared import Facts
from autotune.launchers.frameworks.tabular.flags import FlagFramework, FlagSettings
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import Profile
from autotune.policies.values.provenance import Origin
from autotune.policies.values.rehearsing import Part

_FLAG = re.compile(r"--([a-z][\w.]*\w)")  # in a sentence
_NONE: frozenset[str] = frozenset()  # of the flags has a --no- form


def flags(package: str, version: str) -> flag_facts.FlagFacts:
    """Return the flags of a known release of a framework."""
    return flag_facts.flag_facts(package, f"facts/{version}.json")


@cache
def declared(package: str, version: str, renamed: tuple[Renamed, ...] = ()) -> Facts:
    """Return the flags of a known release, with the defaults that the adapter reads.

    `defaults.yaml` lists these; its values replace defaults that a parser does not give as a literal.
    """
    known, names = flags(package, version).flags, names_in(renamed, version)
    off = {name: False for name, flag in known.items() if flag.action == "store_true"}
    read = {names.get(n, n): v for n, v in document(package, "defaults.yaml", dict[str, Any]).items()}
    read |= {name: known[name].default for name in read if name in known and known[name].default is not None}
    return Facts(
        types={name: "bool" if name in off else flag.type for name, flag in known.items()},
        defaults=off | {name: value for name, value in read.items() if value is not None},
    )


class ArgparseSettings(FlagSettings):
    """A job's resolved flags; a value that argparse refuses counts as absent."""

    def __init__(self, job: Job, package: str, releases: tuple[str, ...], *, entry: str) -> None:
        self.flags = flags_of(job.settings, negatable=_NONE)
        version = self.release_of(job, self.flags, releases).version
        self.known = flags(package, version)
        facts = declared(package, version, self.renamed)
        super().__init__(job, package, releases, entry=entry, declared=facts, given=self.flags)
        read = {
            name: flag_facts.value_of(self.known.flags.get(name), value) for name, value in self.flags.items()
        }
        self._values = {name: value for name, value in read.items() if value is not None}
        self.job = job

    @classmethod
    def release_of(cls, job: Job, given: Iterable[str], releases: tuple[str, ...]) -> Release:
        """Return the release of the job's version, otherwise the newest that knows most of its flags."""
        if job.framework_version:
            return choose(job.framework_version, releases, cls.older)
        package, names = cls.__module__.rpartition(".")[0], list(given)
        best = max(
            sorted((*cls.older, *releases), key=Version, reverse=True),
            key=lambda version: sum(name in flags(package, version).flags for name in names),
        )
        return Release(best, Origin.ASSUMED)

    def worded(self, text: str) -> str:
        """Return a text with flags named as in the job's release."""
        return _FLAG.sub(lambda match: f"--{self.named(match[1])}", text)

    def key(self, name: str) -> str:
        """Return a flag as the job spells it, otherwise with the job's kind of dashes."""
        return next(iter(spelled(self.job.settings, {self.named(name): True}, negatable=_NONE)))

    def as_written(self, name: str) -> str:
        """Return a flag as the job spells it, otherwise its bare name."""
        own = self.named(name)
        return self.key(name) if own in self.given else own


C = TypeVar("C", bound=ArgparseSettings)


class ArgparseFramework(FlagFramework[C]):
    """A framework with `defaults.yaml` in its folder, whose program refuses unknown flags."""

    older: ClassVar[tuple[str, ...]] = ()  # releases with only names and defaults on record

    def bare(self, key: str) -> str:
        """Return today's name of a flag, without dashes."""
        return {row.old: row.new for row in self.table.renamed}.get(bare(key), bare(key))

    def declared(self, version: str) -> Facts:
        """Return the flags of a known release."""
        return declared(package_of(self), version, self.table.renamed)

    def mistakes_of(self, config: C, key: str, value: Any) -> Iterator[Problem]:
        """Yield a problem if a flag is misspelt or its value invalid."""
        exact = config.release.exact and not config.has_own(bare(key))
        return flag_facts.problems_of(key, value, config.known, program=self.name, exact=exact)

    def is_on_record(self, flag: str) -> bool:
        """Return whether a release on record has, or had, a flag."""
        package = package_of(self)
        renamed = {row.old for row in self.table.renamed}
        releases = (*self.older, *self.releases)
        return flag in renamed or any(flag in flags(package, version).flags for version in releases)

    def meant(self, config: C, flag: str) -> str:
        """Return the flag of the job's release that is most similar to an unknown name; empty if none."""
        return flag_facts.meant(flag, config.known)

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps and the flags of `trial.yaml`, named as in the job's release."""
        trial = super().trial(job, folder=folder, steps=steps, longest=longest)
        return msgspec.structs.replace(trial, settings=self._named(self.config(job), trial.settings))

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a part of the job's rehearsal, with flags named as in the job's release."""
        trial = super().rehearsal(job, folder=folder, part=part, longest=longest)
        return msgspec.structs.replace(trial, settings=self._named(self.config(job), trial.settings))

    def printed(self, text: str) -> dict[str, Any]:
        """Return the flags in the namespace printed at the start, or in a command line of a shell trace."""
        known = (frozenset(flags(package_of(self), version).flags) for version in reversed(self.releases))
        result = (
            printed_namespace(text, known=names)
            or printed_flags(text, known=names, inverse={}, negatable=_NONE)
            for names in known
        )
        return max(result, key=len)

    def refused(self, config: C) -> Iterator[Problem]:
        """Yield the flags that the framework refuses at its start, named as in the job's release."""
        for each in super().refused(config):
            message, hint = config.worded(each.message), config.worded(each.hint)
            yield msgspec.structs.replace(each, message=message, hint=hint)

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs and their limits, with flags named as in the job's release."""
        result, config = super().profile(job, cluster), self.config(job)
        return msgspec.structs.replace(
            result,
            unsupported={knob: config.worded(why) for knob, why in result.unsupported.items()},
            warnings=tuple(map(config.worded, result.warnings)),
        )

    def _named(self, config: C, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {config.named(name): value for name, value in settings.items()}

    def _passed_on(self, job: Job, config: C) -> Iterator[str]:
        which = f"{self.name} {config.release.version}, which refuses what it does not know"
        for name, near in flag_facts.unknown(job.settings, config.known, exact=config.release.exact):
            if config.has_own(name):
                continue
            yield f"--{name} is no flag of {which}" + (f" (did you mean --{near}?)" if near else "")
