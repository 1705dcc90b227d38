"""Base of frameworks whose settings are command-line flags."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.dialects.flags import arguments, as_typed, bare
from autotune.launchers.frameworks.dialects.settings import with_settings
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.provenance import CodeQuery, Origin


class FlagSettings(DeclaredSettings):
    """A job's flags by their bare names."""

    job: Job
    flags: Mapping[str, Any]  # as the job names them

    def lacks(self, key: str) -> bool:
        """Return whether the parser in the job's own code lacks a flag."""
        return self.code is not None and self.code.lacks(self.named(key))

    def has_own(self, flag: str) -> bool:
        """Return whether the job's own code has a flag, regardless of the facts of releases."""
        return self.code is not None and flag in self.code.names


F = TypeVar("F", bound=FlagSettings)


class FlagFramework(TabularFramework[F]):
    """A framework whose flags may be written with or without dashes; null omits a flag."""

    no_file = "write the flags under `settings:`"
    dropped: ClassVar[tuple[str, ...]] = ()  # flags removed from every attempt
    reads_declined = True

    @property
    def negatable(self) -> frozenset[str]:
        """The flags that have a --no- form."""
        return frozenset()

    @abstractmethod
    def mistakes_of(self, config: F, key: str, value: Any) -> Iterator[Problem]:
        """Yield the problems of one flag of the job, which spells it `key`."""

    @abstractmethod
    def is_on_record(self, flag: str) -> bool:
        """Return whether any release on record has, or had, a flag."""

    @abstractmethod
    def meant(self, config: F, flag: str) -> str:
        """Return the flag most similar to an unknown name; empty if there is none."""

    def foreign(self, job: Job) -> tuple[str, ...]:
        """Return the flags of a fork: those in its code, or similar to none on record."""
        config = self.config(job)
        return tuple(
            key
            for key, flag in ((key, bare(key)) for key in job.settings)
            if not self.is_on_record(flag) and (config.has_own(flag) or not self.meant(config, flag))
        )

    def words_of(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as the words of a command line."""
        return arguments(settings, negatable=self.negatable)

    def warnings(self, config: F) -> Iterator[str]:
        """Yield warnings before the launch, also about flags that `command` hides."""
        yield from super().warnings(config)
        flags = (word.partition("=")[0] for word in config.job.command if word.startswith("--"))
        if hidden := [flag for flag in flags if self.is_on_record(bare(flag))]:
            which = ", ".join(hidden)
            yield f"`command` has {which}, which autotune passes on and does not read: use `settings:`"

    def mistakes(self, config: F) -> Iterator[Problem]:
        """Yield the problems of single flags."""
        spelled: dict[str, str] = {}
        for key, value in config.job.settings.items():
            if (flag := bare(key)) in spelled:
                message = f"unknown which of `{spelled[flag]}` and `{key}` counts: they are one flag"
                yield Problem(path=("settings", key), message=message, origin=Origin.WRITTEN)
            spelled[flag] = key
            yield from self.mistakes_of(config, key, value)

    def problems(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's flags."""
        config = self.config(job)
        result = [*self.mistakes(config), *self.refused(config)]
        if job.config is not None:
            message = f"{self.name} takes flags, no file"
            result.append(Problem(path=("config",), message=message, hint=self.no_file))
        return tuple(result)

    def bare(self, key: str) -> str:
        """Return a flag without its dashes."""
        return bare(key)

    def names_in(self, config: F, key: str) -> tuple[str, ...]:
        """Return a flag as the parser of the job's release declares it."""
        return () if key.isupper() else (config.named(bare(key)),)

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return the flags in use, to be looked up in the parser of the job's own code."""
        query = super().code_query(job)
        return None if query is None else msgspec.structs.replace(query, as_flags=True)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as flags with their values."""
        return as_typed(settings, negatable=self.negatable)

    def entry_of(self, config: F) -> tuple[str, ...]:
        """Return the default program."""
        return self.entry

    def variables(self, config: F, run: str) -> Mapping[str, str]:
        """Return the default environment variables of an attempt."""
        return {}

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt: the program with all flags in the job's order."""
        config = self.config(with_settings(job, self.settings(job, knobs)))
        own = self.run_settings(config, job, run=run, resume=resume)
        own |= self.of_attempt(config, job, run=run, attempt=attempt)
        own = self.added(config, own)
        given = {**config.flags, **{config.named(name): value for name, value in own.items()}}
        kept = {name: value for name, value in given.items() if name not in self.dropped}
        first, *rest = job.command or self.entry_of(config)
        interpreter = "{python}" if job.python is not None and first in ("python", "python3") else first
        program = (word for word in rest if bare(word) not in self.dropped)
        return Command(
            argv=(interpreter, *program, *arguments(kept, negatable=self.negatable)),
            env={**self.variables(config, run), **self.env, **job.env},
            cwd=job.workdir,
        )
