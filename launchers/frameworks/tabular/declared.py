"""The settings that a framework's release declares, and a job's settings resolved against them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Any, ClassVar

import msgspec
from packaging.version import Version

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.renames import (
    Renamed,
    names_in,
    names_of,
    release_before,
    translated,
)
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.core.versions import Release, choose
from autotune.launchers.frameworks.dialects.hydra import bare, overrides_in, prefix, value_of
from autotune.launchers.frameworks.dialects.settings import Settings, flat
from autotune.launchers.likeness import nearest
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.provenance import Origin, OwnCode
from autotune.policies.values.value import Value

FREE = "any"  # the type of a setting that accepts any value, also a free-form section
SECTION = "section"  # the kind of a name with settings below it


class Facts(Value, frozen=True, dict=True, gc=True):
    """A release's settings: types and defaults by key; defaults of None are left out."""

    types: dict[str, str]
    defaults: dict[str, Any]
    source: str = ""  # where they were read, if not in a package on PyPI
    engines: dict[str, str] = {}  # engine -> the version that the release pins
    sections: frozenset[str] = frozenset()  # sections that one setting may set as a whole

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The types of all settings, and `section` for every name with settings below it."""
        parts = (key.split(".") for key in self.types)
        sections = {".".join(each[:depth]) for each in parts for depth in range(1, len(each))}
        return dict.fromkeys(sections, SECTION) | self.types

    def kind_of(self, key: str) -> str | None:
        """Return the type of a setting, such as `int?`, or `section`; None if the release has neither.

        Empty if the release does not declare a type.
        """
        if key in self.kinds:
            return self.kinds[key]
        parts = key.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        return FREE if any(self.types.get(each) == FREE for each in above) else None

    def __contains__(self, key: object) -> bool:
        """Return whether the release has a setting or section of that name."""
        return isinstance(key, str) and self.kind_of(key) is not None

    def lacking(self, given: Iterable[str]) -> Iterator[str]:
        """Yield the job's settings, as it spells them, that the release does not have."""
        free = tuple(f"{key}." for key, kind in self.types.items() if kind == FREE)
        for spelled in given:
            key = bare(spelled)
            if not (key in self.types or key in self.sections or key.startswith(free)):
                yield spelled

    def unknown(self, given: Iterable[str]) -> Iterator[Problem]:
        """Yield the settings that the release does not have, with the most similar one that it has."""
        for spelled in self.lacking(given):
            key = bare(spelled)
            near = similar(key, self.types)
            hint = f"did you mean {near}?" if near else ""
            yield Problem(path=("settings", spelled), message=f"unknown setting {key}", hint=hint)


@cache
def facts(package: str, version: str) -> Facts:
    """Return the facts of a known release of a framework."""
    file = resources.files(package).joinpath("facts", f"{version}.json")
    return msgspec.json.decode(file.read_bytes(), type=Facts)


@cache
def releases(package: str) -> tuple[str, ...]:
    """Return the releases of a framework whose settings are known, the newest last."""
    names = (file.name for file in resources.files(package).joinpath("facts").iterdir())
    known = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return tuple(sorted(known, key=Version))


def similar(key: str, known: Iterable[str]) -> str:
    """Return the known key most similar to an unknown one, preferring equal last names; empty if none."""
    return _similar(key, tuple(sorted(known)))


@lru_cache(maxsize=1024)  # a job is checked several times and against several releases
def _similar(key: str, known: tuple[str, ...]) -> str:
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    return nearest(key, same or known)


class DeclaredSettings(Settings, ABC):
    """A job's settings over the defaults of the release that stands for its own."""

    engine_versions: Mapping[str, str] = {}  # engine -> the version that the job names
    renamed: ClassVar[tuple[Renamed, ...]] = ()
    older: ClassVar[tuple[str, ...]] = ()  # releases with only names and defaults on record
    code: OwnCode | None = None  # the framework's code that the job would run
    takes_images: bool = False  # or sound: the model has encoders
    spelled: frozenset[str] = frozenset()  # settings of the job and its config file, as spelled there
    is_of_earlier: bool = False  # the job is one of a release before those on record, by its command

    def __init__(
        self,
        job: Job,
        package: str,
        releases: tuple[str, ...],
        *,
        entry: str,
        document: Mapping[str, Any] | None = None,
        filled: Mapping[str, Any] | None = None,
        declared: Facts | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Resolve a job whose own program is `entry`, a part of a word of the command.

        `document`: the content of its config file, which replaces the declared defaults; `filled`: further
        defaults; `declared` and `given`: the release's facts and the job's settings, if the framework reads
        them in its own way.
        """
        self.given = {**overrides_in(job.command), **flat(job.settings)} if given is None else dict(given)
        self.release = self.release_of(job, self.given, releases)
        self.engine_versions, self.code = job.engine_versions, job.own_code
        self.shape = job.shape
        self.experts = 0 if job.shape is None else job.shape.experts
        self.takes_images = bool(job.shape and job.shape.tower)
        self.facts = facts(package, self.release.version) if declared is None else declared
        self.is_own = not job.command or any(entry in word for word in job.command)
        self._document = flat(document or {})
        self.spelled = frozenset((*self._document, *map(bare, self.given)))
        written = self._document | {bare(key): value_of(value) for key, value in self.given.items()}
        super().__init__(written, ({} if document else self.facts.defaults) | dict(filled or {}))
        # Nothing is known of a file on another machine.
        own = self._document if document else {} if job.config is not None else self.facts.types
        self.keys = frozenset(own)

    @classmethod
    def release_of(cls, job: Job, given: Iterable[str], releases: tuple[str, ...]) -> Release:
        """Return the release that stands for the job's own, by its version or else its settings' names."""
        if job.framework_version:
            return choose(job.framework_version, releases, cls.older)
        before = release_before(cls.renamed, frozenset(map(bare, given)), (*cls.older, *releases))
        return choose(before, releases, cls.older)._replace(origin=Origin.ASSUMED)

    def named(self, key: str) -> str:
        """Return a setting's name as the job uses it, otherwise as its release has it."""
        return translated(key, self.older_names)

    @cached_property
    def older_names(self) -> Mapping[str, str]:
        """Today's names of renamed settings -> those that the job uses or its release has."""
        own = names_of(self.renamed, self.spelled) if not self.release.exact else {}
        of_release = names_in(self.renamed, self.release.version)
        return {new: old for new, old in of_release.items() if new not in self.spelled} | own

    def own_part(self, key: str) -> str:
        """Return a setting's name up to a free-form section, which an engine or a library reads."""
        named, types = self.named(key), self.facts.types
        dots = [n for n, letter in enumerate(named) if letter == "." and types.get(named[:n]) == FREE]
        return named[: dots[0]] if dots else named

    def lacks(self, key: str) -> bool:
        """Return whether the job's own code lacks a setting; only for names in `code_query`."""
        return self.code is not None and self.code.lacks(self.named(key).rpartition(".")[2])

    def has(self, key: str) -> bool:
        """Return whether the job sets a key, under any of its names."""
        return super().has(self.named(key))

    def raw(self, key: str) -> Any:
        """Return a key's unresolved value under the name that the job uses, otherwise its default."""
        own = self.named(key)
        return super().raw(own if own in self._values or own in self._defaults else key)

    def guesses(self) -> Iterator[tuple[str, str]]:
        """Yield assumptions about how the job is launched, and what would make them known."""
        return iter(())

    @property
    def knows_release(self) -> bool:
        """Whether the facts on record belong to the job's own release."""
        return self.release.exact

    @property
    def knows_all(self) -> bool:
        """Whether all settings of the program are known, from its config file or the job's release."""
        return self.release.exact or bool(self._document)

    def misfits(self, numbers: frozenset[str]) -> Iterator[Problem]:
        """Yield the settings whose value has a wrong type; `numbers`: settings that must be numbers anyway.

        If the release is not the job's own, only texts in place of numbers are reported.
        """
        own = {bare(spelled): ("settings", spelled) for spelled in self.given}
        for key, place in ({name: ("config", *name.split(".")) for name in self._document} | own).items():
            value, kind = self.get(key), self.facts.types.get(key, FREE)
            wanted = misfit("float" if kind == FREE and key in numbers else kind, value)
            if wanted and (self.release.exact or (isinstance(value, str) and not kind.startswith("bool"))):
                # No release accepts a text for a number, and the job could not be resolved.
                origin = Origin.WRITTEN if isinstance(value, str) else Origin.EXACT
                message = f"{key} must be {wanted}, not {value!r}"
                yield Problem(path=place, message=message, origin=origin)

    def holds(self, key: str) -> bool:
        """Return whether the job's config file, or the framework's default one, has a key or section."""
        return key in self.keys or any(each.startswith(f"{key}.") for each in self.keys)

    def absent(self, known: Container[str], *, adds: str) -> Iterator[Problem]:
        """Yield the overrides that add a key without the prefix `adds`; `known` keys get it automatically."""
        for key in self.given if self.keys else ():
            if prefix(key) or key in known or self.holds(key):
                continue
            near = similar(key, self.keys)
            hint = f"did you mean {near}? {adds}{key} adds a key of your own" if near else ""
            yield Problem(path=("settings", key), message=f"unknown setting {key}", hint=hint)

    def key(self, name: str) -> str:
        """Return a setting as the job's command line needs it."""
        return self.named(name)

    def as_written(self, name: str) -> str:
        """Return a setting as the job spells it, otherwise its plain name."""
        return self.key(name) if self.has(name) else name

    def place(self, name: str) -> tuple[str, ...]:
        """Return the path in job.yaml that a problem of a setting points to."""
        return ("settings", self.as_written(name))

    def differs(self, changes: Mapping[str, Any], key: str) -> bool:
        """Return whether a setting has to be written, because the job would not have this value otherwise."""
        followed = self.followed(key)
        present = changes.get(followed, self.get(key)) if followed else self.get(key)
        value = changes[key]
        return bool(present != value) or isinstance(present, bool) != isinstance(value, bool)

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """Tokens of the longest sequence over all turns; None if unlimited."""

    @property
    @abstractmethod
    def resumes(self) -> bool:
        """Whether the job writes checkpoints and can resume from them."""

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints, resumable or not."""
        return self.resumes

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """Whether trainer and engines share their cards, and whether they work at the same time."""

    @property
    @abstractmethod
    def engine(self) -> str:
        """The inference engine."""
