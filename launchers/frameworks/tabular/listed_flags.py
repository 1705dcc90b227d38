"""Base adapter of a framework whose flags are listed in a dialect, with types as far as known."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.core.renames import replacement
from autotune.launchers.frameworks.core.versions import Release
from autotune.launchers.frameworks.dialects import flag_facts
from autotune.launchers.frameworks.dialects.flag_facts import Flag
from autotune.launchers.frameworks.dialects.flags import bare, flags_of, is_on, parsed_value, spelled
from autotune.launchers.frameworks.dialects.settings import Settings, with_settings
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.declared import Facts
from autotune.launchers.frameworks.tabular.flags import FlagFramework, FlagSettings
from autotune.launchers.frameworks.tabular.table import Row
from autotune.launchers.likeness import MISSPELT, nearest
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.provenance import Origin
from autotune.policies.values.value import Value


class FlagNames(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags that a framework accepts, without dashes."""

    names: frozenset[str] = frozenset()
    flags: dict[str, Flag] = {}  # their declarations, as far as known
    of_other_releases: frozenset[str] = frozenset()  # flags of other releases, which are not misspelt
    negatable: frozenset[str] = frozenset()  # with a --no- form
    strict: bool = True  # unknown flags are refused; otherwise they are silently ignored
    aliases: dict[str, str] = {}  # second names of flags -> the flag; the last one given counts

    def knows(self, flag: str) -> bool:
        """Return whether the framework accepts a flag."""
        return flag in self.names


class ListedFlagSettings(FlagSettings):
    """A job's flags by their bare names, over the declared defaults.

    The type of its default is the type of a flag: values of switches and numbers are parsed as such.
    """

    def __init__(self, job: Job, facts: Facts, names: FlagNames) -> None:
        self.job = job
        self.flags = flags_of(job.settings, negatable=names.negatable)
        self.release = Release(job.framework_version or "", Origin.ASSUMED)
        self.facts, self.code = facts, job.own_code
        self.given = dict(job.settings)
        self.is_own = True
        self.keys = frozenset(facts.types)
        values = {names.aliases.get(flag, flag): value for flag, value in self.flags.items()}
        Settings.__init__(self, values, facts.defaults)

    def has(self, key: str) -> bool:
        """Return whether the job sets the flag, even to false."""
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the job's value of a flag, otherwise the default."""
        default = self._defaults.get(key)
        if isinstance(default, bool):
            return self.flag(key)
        if isinstance(default, int):
            return self.count(key)
        if isinstance(default, float):
            return self.share(key)
        return self._values[key] if self.has(key) else default

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return whether a switch is on; `default` replaces the declared default."""
        if self.has(key):
            return is_on(self._values[key])
        return self._defaults.get(key) is True if default is None else default

    def count(self, key: str, default: int | None = None) -> int:
        """Return a flag as an int, the default if it is none; `default` replaces the declared default."""
        return int(self.share(key, default))

    def share(self, key: str, default: float | None = None) -> float:
        """Return a flag as a float, the default if it is none; `default` replaces the declared default."""
        value = self._values.get(key)
        if isinstance(value, str):
            value = parsed_value(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return self._defaults.get(key, 0) if default is None else default

    def document(self, key: str) -> dict[str, Any]:
        """Return the object in a JSON flag; empty if absent or no object."""
        value = self._values.get(key)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return {}
        return value if isinstance(value, dict) else {}

    def with_entries(self, key: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return a JSON flag, as the job spells it, with changed entries; None removes one.

        Empty if no entry is left and the job does not set the flag.
        """
        present = self._values.get(key)
        merged = {**self.document(key), **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        if not kept and present is None:
            return {}
        return {key: json.dumps(kept) if isinstance(present, str) or present is None else kept}

    def place(self, name: str) -> tuple[str, ...]:
        """Return the path in job.yaml that a problem of a flag points to; `settings` if it is absent."""
        own = {bare(key): key for key in self.given}
        return ("settings", own[name]) if name in own else ("settings",)


F = TypeVar("F", bound=ListedFlagSettings)


class ListedFlagFramework(FlagFramework[F]):
    """A framework whose dialect lists the flags and whether unknown ones are refused."""

    save_key: ClassVar[str]  # the flag of the checkpoint folder; null in a job without checkpoints

    @property
    @abstractmethod
    def dialect(self) -> FlagNames:
        """The flags that the framework accepts."""

    @property
    def negatable(self) -> frozenset[str]:
        """The flags that have a --no- form."""
        return self.dialect.negatable

    def trial_flags(self, config: F, *, folder: str, steps: int) -> dict[str, Any]:
        """Return the flags of a trial beyond those of `trial.yaml`."""
        return {self.steps_key: steps}

    def mistakes_of(self, config: F, key: str, value: Any) -> Iterator[Problem]:
        """Yield a problem if a flag is misspelt or was removed."""
        ignores, silently = ("refuse", "") if self.dialect.strict else ("ignore", " without a word")
        flag, path = bare(key), ("settings", key)
        if config.has_own(flag):
            return
        if hint := replacement(self.table.renamed, flag, config.release.version):
            message = f"{self.name} {ignores}s --{flag}{silently}"
            yield Problem(path=path, message=message, hint=hint)
        elif not self.is_on_record(flag) and (meant := self.meant(config, flag)):
            message = f"unknown flag --{flag}, which {self.name} would {ignores}{silently}"
            yield Problem(path=path, message=message, hint=f"did you mean --{meant}?")

    def mistakes(self, config: F) -> Iterator[Problem]:
        """Yield unknown flags, then invalid values."""
        yield from super().mistakes(config)
        yield from self._misfits(config)

    def is_on_record(self, flag: str) -> bool:
        """Return whether the lists contain a flag, also as one of another release."""
        others = self.dialect.of_other_releases
        return self.dialect.knows(flag) or flag in others or bool(replacement(self.table.renamed, flag))

    def meant(self, config: F, flag: str) -> str:
        """Return the flag that an unknown name is like; empty where there is none."""
        hyphens = flag.replace("_", "-")
        if self.dialect.knows(hyphens):
            return hyphens
        if flag in self.dialect.of_other_releases:
            return ""
        return nearest(hyphens, self.declared("").types, cutoff=MISSPELT)

    def _passed_on(self, job: Job, config: F) -> Iterator[str]:
        verb = "refuses" if self.dialect.strict else "ignores without a word"
        for flag in map(bare, config.given):
            known = self.dialect.knows(flag) or replacement(self.table.renamed, flag)
            if not known and not config.has_own(flag) and not self.meant(config, flag):
                other = flag in self.dialect.of_other_releases
                which = "a flag of another release" if other else "no known flag"
                yield f"--{flag} is {which}; {self.name} {verb} what it does not know"

    def _misfits(self, config: F) -> Iterator[Problem]:
        for flag, value in config.flags.items():
            known = self.dialect.flags.get(flag, Flag())
            if value is None:
                continue
            single = str(value) if isinstance(value, list) and known.action == "store" else value
            choices = [str(word) for word in known.choices]
            if known.action == "store" and choices and str(single) not in choices:
                message, hint = f"--{flag} has no {value!r}", "one of " + ", ".join(choices)
                yield Problem(path=config.place(flag), message=message, hint=hint)
            elif wrong := self.misfit(flag, single):
                yield Problem(path=config.place(flag), message=f"--{flag} {wrong}, not {value!r}")

    def misfit(self, flag: str, value: Any) -> str:
        """Return what is wrong with a flag's value, to follow its name; empty if nothing is known of it."""
        return flag_facts.misfit(self.dialect.flags.get(flag, Flag()), value)

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the flags that differ from the job as written, in its own spelling."""

        def again(changes: Mapping[str, Any]) -> tuple[tuple[Row[F], ...], F]:
            config = self.config(with_settings(job, self._spelled(job, changes)))
            return self.applicable(config), config

        return self._spelled(job, rows.settings_in_turn(again, knobs))

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps and the flags of `trial.yaml`: no checkpoints and no trackers."""
        config = self.config(job)
        own: dict[str, Any] = {}
        for package in reversed(self.tables):
            own |= document(package, "trial.yaml", dict[str, Any])
        own |= self.trial_flags(config, folder=folder, steps=steps)
        own |= dict.fromkeys(self.of_validation(config))
        changes = self._spelled(job, own)
        if not config.has(self.save_key):
            changes[self.save_key] = None  # explicit, so that no checkpoint folder is added
        return msgspec.structs.replace(with_settings(job, changes), resume=False)

    def of_rehearsal(self, job: Job, additions: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Return the flags of a rehearsal beyond its trial's, in the job's spelling."""
        return self._spelled(job, {**additions, self.save_key: f"{folder}/checkpoints"})

    def _spelled(self, job: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
        aliases = self.dialect.aliases
        return spelled(job.settings, changes, negatable=self.negatable, aliases=aliases)
