"""A framework of data files whose settings are the flags of a command line, read by argparse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.data import document, package_of
from autotune.launchers.frameworks.dialects import flag_facts
from autotune.launchers.frameworks.dialects.flags import (
    arguments,
    bare,
    flags_of,
    printed_flags,
    printed_namespace,
    shown,
    spelled,
)
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings, Facts
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

_NONE: frozenset[str] = frozenset()  # of the flags has a --no- form


def flags(package: str, version: str) -> flag_facts.FlagFacts:
    """Return the flags of a known release of a framework."""
    return flag_facts.flag_facts(package, f"facts/{version}.json")


@cache
def declared(package: str, version: str) -> Facts:
    """Return the settings of a known release, with the defaults of its `defaults.yaml`."""
    known = flags(package, version).flags
    off = {name: False for name, flag in known.items() if flag.action == "store_true"}
    types = {name: "bool" if name in off else flag.type for name, flag in known.items()}
    return Facts(types=types, defaults=off | document(package, "defaults.yaml", dict[str, Any]))


class ArgparseSettings(DeclaredSettings):
    """What a job's flags come to; a value that argparse would refuse counts as absent."""

    def __init__(self, job: Job, package: str, releases: tuple[str, ...], *, entry: str) -> None:
        given = flags_of(job.settings, negatable=_NONE).given
        facts = declared(package, releases[-1])
        super().__init__(job, package, releases, entry=entry, declared=facts, given=given)
        known = flags(package, releases[-1]).flags
        read = {name: flag_facts.value_of(known.get(name), value) for name, value in given.items()}
        self._values = {name: value for name, value in read.items() if value is not None}
        self.job = job

    def key(self, name: str) -> str:
        """Return a flag as the job itself writes it, else with its kind of dashes."""
        return next(iter(spelled(self.job.settings, {name: True}, negatable=_NONE)))

    def as_written(self, name: str) -> str:
        """Return a flag as the job itself writes it, else its plain name."""
        return self.key(name) if name in self.given else name


C = TypeVar("C", bound=ArgparseSettings)


class ArgparseFramework(TabularFramework[C]):
    """Its folder holds `defaults.yaml` too; the program refuses flags that it does not know."""

    def bare(self, key: str) -> str:
        """Return a flag without its dashes."""
        return bare(key)

    def declared(self, version: str) -> Facts:
        """Return the flags of a known release."""
        return declared(package_of(self), version)

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what the program would refuse."""
        found = [*flag_facts.problems_of(job.settings, self._known, program=self.name)]
        found += self.refused(self.config(job))
        if job.config is not None:
            message = f"{self.name} takes flags, no file"
            found.append(Problem(path=("config",), message=message, hint=self.no_file))
        return tuple(found)

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as the program with all flags, in the order in which the job writes them."""
        changed = {**job.settings, **self.settings(job, knobs)}
        given = self.config(msgspec.structs.replace(job, settings=changed)).given
        own = self.started(self.config(job), job, run=run, resume=resume)
        first, *rest = job.command or self.entry
        named = job.python is not None and first in ("python", "python3")
        return Command(
            argv=("{python}" if named else first, *rest, *arguments({**given, **own}, negatable=_NONE)),
            env={**self.env, **job.env},
            cwd=job.workdir,
        )

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as flags with their values."""
        return shown(settings, negatable=_NONE)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the flags in the namespace that a run prints first, or in a traced command line."""
        names = frozenset(self._known.flags)
        found = printed_namespace(text, known=names)
        return found or printed_flags(text, known=names, inverse={}, negatable=_NONE)

    @property
    def _known(self) -> flag_facts.FlagFacts:
        return flags(package_of(self), self.releases[-1])

    def _passed_on(self, job: Job, config: C) -> Iterator[str]:
        which = f"{self.name} {self.releases[-1]}, which refuses what it does not know"
        yield from (
            f"--{name} is no flag of {which}" for name in flag_facts.unknown(job.settings, self._known)
        )
