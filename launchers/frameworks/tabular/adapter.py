"""A framework of data files: what is left to its own adapter is what depends on the job."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import rehearsals
from autotune.launchers.frameworks.core.data import GuidedFramework, package_of
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.dialects import engine_arguments
from autotune.launchers.frameworks.dialects.hydra import (
    bare,
    override,
    overrides_in,
    prefix,
    printed_overrides,
)
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings, facts
from autotune.launchers.frameworks.tabular.lines import marker_of
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Constraint, Grid, Placement, Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

C = TypeVar("C", bound=DeclaredSettings)
_NAMES = re.compile(r"[\w.]+")


class TabularFramework(GuidedFramework, Generic[C]):
    """Its folder holds knobs, unsupported, lines and rehearsal (each `.yaml`), and `facts/RELEASE.json`."""

    when: ClassVar[Mapping[str, Callable[[Any], bool]]]  # the predicates that the data files name
    ways: ClassVar[Mapping[str, rows.Way]] = rows.NO_WAYS  # those that knobs.yaml names
    reads_declined: ClassVar[bool] = False  # knobs that a job does not offer are read too, for its estimate
    entry: ClassVar[tuple[str, ...]]  # the program, where the job names none
    env: ClassVar[Mapping[str, str]]
    model_key: ClassVar[str]
    steps_key: ClassVar[str]
    engine_nodes: ClassVar[tuple[str, ...]] = ()  # below which the names are arguments of the engine
    no_file: ClassVar[str] = ""  # what to do instead, where the framework reads no file of settings
    file_option: ClassVar[str] = ""  # before the job's file of settings on the command line
    adds: ClassVar[str] = ""  # the prefix that an override needs to add a key; empty: none is added

    @abstractmethod
    def config(self, job: Job) -> C:
        """Return what a job's settings come to."""

    @abstractmethod
    def refused(self, config: C) -> Iterator[Problem]:
        """Yield what the framework refuses at its start."""

    @abstractmethod
    def sizes(self, config: C, shape: Model | None) -> Mapping[str, tuple[int, ...] | Grid]:
        """Return the legal values that follow from the job, by knob, from more memory to less."""

    @abstractmethod
    def constraints(self, config: C) -> Iterator[Constraint]:
        """Yield what binds the knobs beyond their grids; those of knobs that are not offered are left out."""

    @abstractmethod
    def warnings(self, config: C) -> Iterator[str]:
        """Yield what the user should know before the launch."""

    @abstractmethod
    def started(self, config: C, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the settings that an attempt needs beside the job's own, its checkpoints above all."""

    @abstractmethod
    def spread(self, config: C) -> tuple[Placement, dict[str, tuple[str, ...]], Layout]:
        """Return the placement, who holds device memory in which phase, and every size of an estimate."""

    def warnings_on(self, config: C, cluster: Cluster) -> Iterator[str]:
        """Yield what the user should know of the job on this cluster."""
        yield from ()

    def validates(self, config: C) -> bool:
        """Return whether the job validates during its training."""
        return rehearsals.validates(package_of(self), config.get)

    def present(self, config: C) -> tuple[rows.Row, ...]:
        """Return the rows of the knobs that a job offers."""
        refused = self.declined(config)
        return tuple(row for row in self._holding(config) if row.knob not in refused)

    def declined(self, config: C) -> dict[str, str]:
        """Return why knobs are not offered to a job; its release may be one that lacks a setting."""
        refused = rows.declined(package_of(self), lambda name: not name or self.when[name](config))
        newest = facts(package_of(self), self.releases[-1])
        for row in self._holding(config):
            names = [name for name in _NAMES.findall(row.setting) if name in newest]
            if absent := [name for name in names if name not in config.facts]:
                why = f"{self.name} {config.release.version} has no setting {absent[0]}"
                refused.setdefault(row.knob, why)
        return refused

    def _holding(self, config: C) -> tuple[rows.Row, ...]:
        return rows.holding(package_of(self), lambda name: not name or self.when[name](config))

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's settings."""
        if job.config is not None and self.no_file:
            message = f"{self.name} reads no file of settings"
            return (Problem(path=("config",), message=message, hint=self.no_file),)
        config = self.config(job)
        if not config.is_own:
            return ()
        if self.adds:
            known = {row.setting for row in rows.knob_rows(package_of(self))}
            unknown = tuple(config.absent(known, adds=self.adds))
        else:
            unknown = tuple(config.facts.unknown(config.given)) if config.release.exact else ()
        misfits = tuple(config.facts.misfits(config, config.given))
        if (engine := self._engine(job, config)) is not None:
            misfits += tuple(engine_arguments.problems(engine, self._arguments(config)))
        return unknown + (misfits or tuple(self.refused(config)))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with the defaults filled in, and what limits them."""
        config = self.config(job)
        present = self.present(config)
        knobs = {row.knob for row in present}
        bounds = (*self.constraints(config), *rows.fixed(present))
        placement, resident, layout = self.spread(config)
        return Profile(
            framework=self.name,
            knobs=rows.read(self._holding(config) if self.reads_declined else present, config, self.ways),
            supported=rows.offered(present, self.sizes(config, job.shape)),
            unsupported=self.declined(config) | rows.staying(present),
            constraints=tuple(bound for bound in bounds if bound.knob in knobs),
            placement=placement,
            resident=resident,
            engine=config.engine,
            engine_version=job.engine_versions.get(config.engine)
            or config.facts.engines.get(config.engine, ""),
            longest_sequence=config.longest,
            resumable=config.resumes,
            layout=with_lengths(layout, job),
            warnings=(
                *job.notes,
                *self.warnings(config),
                *self.warnings_on(config, cluster),
                *self.passed_on(job, config),
            ),
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt: the program, the job's own settings, what its knobs change, what a run needs."""
        config = self.config(job)
        own = self.started(config, job, run=run, resume=resume)
        changed = self.settings(job, knobs)
        kept = {key: value for key, value in config.given.items() if bare(key) not in changed.keys() | own}
        entry = tuple(word for word in job.command if not overrides_in([word])) or self.entry
        file = () if job.config is None else (self.file_option, job.config)
        words = self.words(self.spelled(config, {**kept, **changed, **own}))
        return Command(argv=(*entry, *file, *words), env={**self.env, **job.env}, cwd=job.workdir)

    def model_path(self, job: Job) -> str | None:
        """Return the model that the settings name."""
        config = self.config(job)
        return config.text(self.model_key) if config.has(self.model_key) else None

    def last_step(self, job: Job) -> int | None:
        """Return the step that ends the training; without it the length of the data decides."""
        config = self.config(job)
        return config.count(self.steps_key) or None if config.has(self.steps_key) else None

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as the framework's command line takes them."""
        known = facts(package_of(self), self.releases[-1]).types if self.adds else {}
        return tuple(
            override(key if not self.adds or prefix(key) or key in known else f"{self.adds}{key}", value)
            for key, value in settings.items()
        )

    def spelled(self, config: C, settings: dict[str, Any]) -> dict[str, Any]:
        """Return an attempt's settings under the keys that its command line takes."""
        if not self.adds:
            return settings
        return {
            key if prefix(key) or config.holds(key) else f"{self.adds}{key}": value
            for key, value in settings.items()
        }

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself saves, validates and can be made to do."""
        config = self.config(job)
        without = [] if self.can_force_longest(job) else [LateEvent.LENGTH]
        without += [] if config.resumes else [LateEvent.SAVE]
        without += [] if self.validates(config) else [LateEvent.VALIDATION]
        return rehearsals.met(package_of(self), without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and validates in the same step, where the job does."""
        config = self.config(job)
        trial = self.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        if not config.resumes:
            return trial
        validation = self.validates(config)
        own = rehearsals.additions(package_of(self), validation=validation)
        left = rehearsals.left(package_of(self), validation=validation)
        settings = rehearsals.settings_of(job, trial, own, left=left, bare=bare)
        return msgspec.structs.replace(trial, settings=settings)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the overrides of the command line, where a log shows one."""
        return printed_overrides(text, facts(package_of(self), self.releases[-1]).types)

    def marker(self, line: str) -> Marker | None:
        """Return what a line of the log says about progress."""
        return marker_of(package_of(self), line)

    def knob_settings(self, config: C, knobs: Knobs) -> dict[str, Any]:
        """Return the settings of the rows in which a job does not use `knobs` already."""
        return rows.written(self.present(config), config, knobs, self.ways)

    def passed_on(self, job: Job, config: C) -> Iterator[str]:
        """Yield a sentence for each setting that the known releases do not have, but the job's own may."""
        refused = self.adds or (config.release.exact and config.is_own)  # an error, and no warning beside it
        for problem in () if refused else config.facts.unknown(config.given):
            yield f"{self.name} {config.release.version} has no setting {problem.path[-1]}; it is passed on"
        if config.is_own and (engine := self._engine(job, config)) is not None:
            yield from engine_arguments.passed_on(engine, self._arguments(config))

    def _engine(self, job: Job, config: C) -> engine_arguments.Engine | None:
        if not self.engine_nodes:
            return None
        pinned, exact = config.facts.engines, config.release.exact
        return engine_arguments.engine_of(config.engine, job, pinned, exact=exact)

    def _arguments(self, config: C) -> list[engine_arguments.Argument]:
        plain = {bare(key): value for key, value in config.given.items()}
        spelled = {bare(key): key for key in config.given}
        return [
            each
            for node in self.engine_nodes
            for each in engine_arguments.arguments_below(node, plain, spelled)
        ]
