"""Base adapter of a framework described by rows and data files; subclasses add what depends on the job."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from autotune.launchers.base import Advice, Framework, Problem, Prompts, Tracked
from autotune.launchers.frameworks.core import rehearsals, trackers
from autotune.launchers.frameworks.core.data import document, package_of
from autotune.launchers.frameworks.core.lengths import PromptKeys, with_lengths
from autotune.launchers.frameworks.dialects import engine_arguments
from autotune.launchers.frameworks.dialects.hydra import (
    bare,
    override,
    overrides_in,
    prefix,
    printed_overrides,
    value_of,
)
from autotune.launchers.frameworks.dialects.printed_config import Program, printed, printed_trees
from autotune.launchers.frameworks.dialects.settings import with_settings
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings, Facts, facts
from autotune.launchers.frameworks.tabular.known import (
    alternatives,
    facts_of,
    has_alternatives,
    is_of_release,
)
from autotune.launchers.frameworks.tabular.lines import marker_of, marks_of
from autotune.launchers.frameworks.tabular.table import Row, Table, text
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.command import Command
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job, no_expandable_segments
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Constraint, Grid, Profile
from autotune.policies.values.provenance import CodeQuery, Origin
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

C = TypeVar("C", bound=DeclaredSettings)
_NAMES = re.compile(r"\w+")  # in dotted keys


class TabularFramework(Framework, Generic[C]):
    """A framework whose folder holds `rows.py`, `facts/RELEASE.json`, `lines.yaml` and `trial.yaml`."""

    table: ClassVar[Table[Any]]  # its knobs, what it refuses and what it warns of
    settings_class: Callable[[Job], C]  # resolves a job's settings
    layout: Callable[[Any], Layout]  # sizes for the estimate
    # The components that hold GPU memory, by phase.
    resident: Callable[[Any], dict[str, tuple[str, ...]]] = staticmethod(lambda _: {})
    entry: ClassVar[tuple[str, ...]]  # the default program
    env: ClassVar[Mapping[str, str]] = {"RAY_DEDUP_LOGS": "0"}  # of an attempt, under the job's own
    model_key: ClassVar[str]
    steps_key: ClassVar[str]
    prompt_keys: ClassVar[PromptKeys | None] = None
    engine_nodes: ClassVar[tuple[str, ...]] = ()  # sections whose keys are arguments of the engine
    no_file: ClassVar[str] = ""  # a hint for users of `config:`, if the framework reads no config file
    file_option: ClassVar[str] = ""  # the option that passes the job's config file
    adds: ClassVar[str] = ""  # the prefix with which an override adds a key; empty: keys cannot be added
    unread_in: ClassVar[str] = ""  # the release that ignores the table's `unread` settings
    program: ClassVar[Program | None] = None  # identifies its printed configuration, if it prints one
    top: ClassVar[tuple[str, ...]] = ()  # keys of overrides without a section
    forces_longest: ClassVar[Mapping[str, Any]] = {}  # settings that force responses to their maximum length
    own_settings: ClassVar[tuple[str, ...]] = ()  # of an attempt; left out if the job's code lacks them
    elder: ClassVar[tuple[str, ...]] = ()  # releases older than those on record that use memory differently
    is_whole: ClassVar[bool] = False  # whether its own package reads all settings but the engines'
    reads_declined: ClassVar[bool] = False  # whether knobs that a job does not offer are read and written
    # Knobs that act, and that the estimate reads, also in jobs that do not offer them.
    acting: ClassVar[frozenset[str]] = frozenset({"microbatch_size", "tokens_per_microbatch"})
    scoring_settings = property(lambda self: self.table.scoring)

    @property
    def tables(self) -> tuple[str, ...]:
        """The packages with its data files: its own first, then the one that its dialects share."""
        return (package_of(self),)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        return rows.numbers(self.table)

    @cached_property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Starting settings from the framework's guide, by name."""
        return document(package_of(self), "presets.yaml", dict[str, dict[str, Any]])

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Remedies of public guides: those shared by its dialects, then its own."""
        return self.table.advice

    def config(self, job: Job) -> C:
        """Return a job's resolved settings."""
        return self.settings_class(job)

    def refused(self, config: C) -> Iterator[Problem]:
        """Yield the settings that the framework refuses at its start."""
        for row in self.table.refused:
            if row.when(config):
                message, hint = text(row.message, config), text(row.hint, config)
                yield Problem(path=config.place(row.key), message=message, hint=hint)

    @abstractmethod
    def sizes(self, config: C, shape: Model | None) -> Mapping[str, tuple[int, ...] | Grid]:
        """Return the legal values of knobs that depend on the job, ordered from more memory to less."""

    def phases(self, config: C) -> Mapping[str, tuple[Phase, ...]]:
        """Return the phases in which knobs change memory, for knobs where this depends on the job."""
        return {}

    def constraints(self, config: C) -> Iterator[Constraint]:
        """Yield constraints beyond those of the rows; those of knobs that are not offered are ignored."""
        return iter(())

    def warnings(self, config: C) -> Iterator[str]:
        """Yield warnings about the job's settings, shown before the launch."""
        version = config.release.version
        for unread in self.table.unread if version == self.unread_in else ():
            if config.has(unread.key) and unread.when(config):
                yield f"{unread.key} has no effect in {self.name} {version}: {unread.why}"
        for warned in self.table.warned:
            if warned.when(config):
                yield text(warned.says, config)

    def warnings_on(self, config: C, cluster: Cluster) -> Iterator[str]:
        """Yield warnings about the job on this cluster."""
        yield from ()

    @abstractmethod
    def run_settings(self, config: C, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the settings that autotune adds to an attempt, mainly its checkpoint folder."""

    def offered(self, config: C) -> tuple[Row[C], ...]:
        """Return the rows of the knobs that a job offers."""
        refused = self.declined(config)
        return tuple(row for row in self.applicable(config) if row.knob not in refused)

    def applicable(self, config: C) -> tuple[Row[C], ...]:
        """Return the rows of the knobs that apply to a job, offered or not."""
        return rows.applicable(self.table, config, self._versions(config))

    def declined(self, config: C) -> dict[str, str]:
        """Return the knobs that a job does not offer, each with the first reason that applies."""
        result = rows.declined(self.table, config, self._versions(config))
        result |= rows.lacking(self.applicable(config), config, self.name)
        for row in self.applicable(config) if self.is_whole and config.code is not None else ():
            for absent in filter(None, (self._absent(config, key) for key in (row.key, *row.fills))):
                result.setdefault(row.knob, f"the job's own {self.name} has no {absent}")
        return result

    def _absent(self, config: C, key: str) -> str:
        """Return a part of a setting's name that does not occur in the job's own code; empty if none."""
        if config.code is None or key.startswith(tuple(each.partition("{")[0] for each in self.engine_nodes)):
            return ""
        return next(filter(config.code.lacks, self.names_in(config, key)), "")

    def added(self, config: C, needed: Mapping[str, Any]) -> dict[str, Any]:
        """Return an attempt's settings without those that the job's own code lacks."""
        return {
            key: value
            for key, value in needed.items()
            if key not in self.own_settings or config.has(key) or not self._absent(config, key)
        }

    def names_in(self, config: C, key: str) -> tuple[str, ...]:
        """Return the words of a setting's name that occur in code that reads it."""
        return tuple(word for word in _NAMES.findall(config.own_part(key)) if not word.isupper())

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return the names of all settings in use: the knobs', an attempt's and the job's own."""
        config = self.config(job)
        keys = (key for row in self.table.rows for key in (*row.keys, *row.fills))
        every = (*keys, *self.own_settings, *map(self.bare, config.given))
        names = frozenset(word for key in every for word in self.names_in(config, key))
        return CodeQuery(package=self.modules_of(job)[0], names=names)

    def _versions(self, config: C) -> dict[str, str]:
        """Return the job's releases of the framework and its engines, by name."""
        return {self.name: config.release.version, **config.facts.engines, **config.engine_versions}

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's settings by the rules of the release that stands for its own.

        If that is not the job's own release, the problems are assumed, and settings that the job's own code
        lacks are left out.
        """
        config = self.config(job)
        result = self.problems(job)
        if config.knows_release:
            return result
        return tuple(
            each if not is_of_release(each) else msgspec.structs.replace(each, origin=Origin.ASSUMED)
            for each in result
            if not (is_of_release(each) and self.is_whole and self._absent(config, str(each.path[-1])))
        )

    def recorded_version(self, job: Job) -> str:
        """Return the release whose names and defaults are used, which may be older than those with rules."""
        return self.config(job).release.version

    def release_by_settings(self, job: Job) -> str:
        """Return the release on record that the names of the settings imply; empty if it is the newest."""
        result = self.recorded_version(job)
        return "" if job.framework_version or not self.releases or result == self.releases[-1] else result

    def problems(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's settings, regardless of how its release is known."""
        if job.config is not None and self.no_file:
            message = f"{self.name} reads no file of settings"
            return (Problem(path=("config",), message=message, hint=self.no_file),)
        config = self.config(job)
        if not config.is_own:
            return ()
        unknown = tuple(problem for problem in self.unknown(config) if self.is_certain(config, problem))
        misfits = tuple(config.misfits(self._numbers))
        for engine, arguments in self._handed_on(job, config):
            misfits += tuple(engine_arguments.problems(engine, arguments))
        return unknown + (misfits or tuple(self.refused(config)))

    def unknown(self, config: C) -> Iterator[Problem]:
        """Yield the settings that the release does not have."""
        if self.adds:
            known = {row.key for row in self.table.rows}
            return config.absent(known, adds=self.adds)
        return config.facts.unknown(config.given)

    def is_certain(self, config: C, problem: Problem) -> bool:
        """Return whether an unknown setting is a mistake; otherwise it is passed on with a warning.

        It is a mistake if all settings of the job's own release are known and one of them is similar.
        """
        return config.knows_all and bool(problem.hint)

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with defaults, their limits, and the assumptions behind them."""
        result, config = self.profile_as(job, cluster), self.config(job)
        facts = tuple(facts_of(self.name, config, job, self.releases))
        versions = (*self.releases, *self.elder) if any(map(has_alternatives, facts)) else ()
        jobs = [msgspec.structs.replace(job, framework_version=version) for version in versions]
        others = (self.profile_as(own, cluster) for own in self._as_fitting(job, jobs))
        return msgspec.structs.replace(result, facts=facts, alternatives=alternatives(result, others))

    def _as_fitting(self, job: Job, others: list[Job]) -> Iterator[Job]:
        """Yield the jobs of other releases that accept the settings as well as the job's release does.

        Compares the counts of missing settings first, because naming similar settings takes minutes for a job
        with hundreds of them.
        """
        if not others:
            return
        lacking, problems = len(self.lacking(job)), len(self.problems(job))
        for other in others:
            if len(self.lacking(other)) <= lacking and len(self.problems(other)) <= problems:
                yield other

    def lacking(self, job: Job) -> tuple[str, ...]:
        """Return the job's settings that the release standing for its own does not have."""
        config = self.config(job)
        return tuple(config.facts.lacking(config.given))

    def profile_as(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs and their limits, treating the chosen release as the job's own."""
        config = self.config(job)
        present = self.offered(config)
        knobs = {row.knob for row in present}
        phases, grids = self.phases(config), self.sizes(config, job.shape)
        supported = rows.supports(present, grids, phases, spell=config.key, has=config.has)
        sizes = rows.bounds(present, config, supported)
        bounds = (*sizes, *self.constraints(config), *rows.fixed(present))
        return Profile(
            framework=self.name,
            knobs=rows.read(self._estimated(config), config),
            supported=supported,
            unsupported=self.declined(config) | rows.reasons_to_stay(present),
            constraints=tuple(bound for bound in bounds if bound.knob in knobs),
            placement=config.placement,
            resident=self.resident(config),
            engine=config.engine,
            engine_version=job.engine_versions.get(config.engine)
            or config.facts.engines.get(config.engine, ""),
            longest_sequence=config.longest,
            resumable=config.resumes,
            layout=with_lengths(self.layout(config), job),
            warnings=(
                *job.notes,
                *self.warnings(config),
                *self.warnings_on(config, cluster),
                *self._passed_on(job, config),
            ),
        ).without("allocator", no_expandable_segments(cluster.gpu_name))

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt: the program, the job's settings, changed knobs and the run's own settings."""
        config = self.config(job)
        changed = self.settings(job, knobs)
        whole = self.config(with_settings(job, changed))
        needed = self.of_attempt(whole, job, run=run, attempt=attempt)
        needed |= self.run_settings(whole, job, run=run, resume=resume)
        own = {whole.key(key): value for key, value in self.added(whole, needed).items()}
        replaced = {bare(key) for key in (*changed, *own)}
        kept = {key: value for key, value in config.given.items() if bare(key) not in replaced}
        entry = tuple(word for word in job.command if not overrides_in([word], top=self.top)) or self.entry
        file = () if job.config is None else (self.file_option, job.config)
        words = self.command_words(config, {**kept, **changed, **own})
        return Command(argv=(*entry, *file, *words), env={**self.env, **job.env}, cwd=job.workdir)

    def defaults(self, job: Job) -> Mapping[str, Any]:
        """Return the defaults of settings that the job does not set, in the release standing for its own."""
        config = self.config(job)
        return {key: config.get(key) for key in config.facts.defaults if not config.has(key)}

    def model_path(self, job: Job) -> str | None:
        """Return the model that the settings name."""
        config = self.config(job)
        return config.text(self.model_key) or None if config.has(self.model_key) else None

    def prompts(self, job: Job) -> Prompts | None:
        """Return the data of the training's prompts."""
        return None if self.prompt_keys is None else self.prompt_keys.named(self.config(job).get)

    def last_step(self, job: Job) -> int | None:
        """Return the last step of the training; None if it follows from the length of the data."""
        config = self.config(job)
        return config.count(self.steps_key) or None if config.has(self.steps_key) else None

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return the job's experiment trackers and where they keep the run."""
        return trackers.tracked(self.table.trackers, self.config(job).get)

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written, in its own spelling."""
        config = self.config(job)
        result = self.together(config, self.knob_settings(config, knobs))
        return {config.key(key): value for key, value in result.items() if config.differs(result, key)}

    def together(self, config: C, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changed settings with those that have to change along."""
        return changes

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps and the settings of `trial.yaml`, which give it its own folders."""
        config = self.config(job)
        own = rows.filled(document(package_of(self), "trial.yaml", dict[str, Any]), job, folder)
        own = self.added(config, own | self.of_steps(config, steps))
        own = {config.named(key): value for key, value in own.items()}
        if longest and self.can_force_longest(job):
            own |= self.longest_settings(config)
        replaced = own.keys() | {self.bare(key) for key in own}
        given = {key: value for key, value in config.given.items() if self.bare(key) not in replaced}
        return msgspec.structs.replace(job, settings={**given, **own}, resume=False)

    def longest_settings(self, config: C) -> Mapping[str, Any]:
        """Return the settings that force every response to its maximum length."""
        return self.forces_longest

    def bare(self, key: str) -> str:
        """Return a setting's name without the dialect's prefix."""
        return bare(key)

    def of_steps(self, config: C, steps: int) -> dict[str, Any]:
        """Return the settings that end the training after a number of steps."""
        return {self.steps_key: steps}

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as words of the framework's command line."""
        known = self.declared(self.releases[-1]).types if self.adds else {}
        return tuple(
            override(key if not self.adds or prefix(key) or key in known else f"{self.adds}{key}", value)
            for key, value in settings.items()
        )

    def of_attempt(self, config: C, job: Job, *, run: str, attempt: int) -> dict[str, Any]:
        """Return settings that differ per attempt, beyond those of `run_settings`."""
        return {}

    def command_words(self, config: C, settings: dict[str, Any]) -> tuple[str, ...]:
        """Return an attempt's settings as words of its command line."""
        return self.words(self.with_prefixes(config, settings))

    def declared(self, version: str) -> Facts:
        """Return the settings of a known release."""
        return facts(package_of(self), version)

    def with_prefixes(self, config: C, settings: dict[str, Any]) -> dict[str, Any]:
        """Return an attempt's settings with the prefixes that its command line needs."""
        if not self.adds:
            return settings
        return {
            key if prefix(key) or config.holds(key) else f"{self.adds}{key}": value
            for key, value in settings.items()
        }

    def validates(self, config: C) -> bool:
        """Return whether the job validates during its training."""
        return self.table.rehearsal.validates_job(config.get)

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return the late events that a rehearsal of the job covers."""
        config = self.config(job)
        without = [] if self.can_force_longest(job) else [LateEvent.LENGTH]
        without += [] if config.saves else [LateEvent.SAVE]
        without += [] if config.resumes else [LateEvent.RELOAD]
        without += [] if self.validates(config) else [LateEvent.VALIDATION]
        return self.table.rehearsal.met(without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and, if the job does, validates in the same step."""
        config = self.config(job)
        trial = self.trial(job, folder=folder, steps=STEPS[part] * self.span(config), longest=longest)
        if not config.saves:
            return trial
        validation = self.validates(config)
        own = self.of_rehearsal(job, self.table.rehearsal.additions(validation=validation), folder)
        left = self.table.rehearsal.kept(validation=validation)
        left = left.union(self.of_validation(config) if validation else ())
        settings = rehearsals.settings_of(job, trial, own, left=left, bare=self.bare)
        return msgspec.structs.replace(trial, settings=settings)

    def span(self, config: C) -> int:
        """Return how many framework steps make up one step of a rehearsal."""
        return 1

    def of_rehearsal(self, job: Job, additions: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Return a rehearsal's settings beyond its trial's; it writes checkpoints below `folder`."""
        return rows.filled(additions, job, folder)

    def of_validation(self, config: C) -> tuple[str, ...]:
        """Return settings that only the job's validation reads, beyond those of the data files."""
        return ()

    def printed(self, text: str) -> dict[str, Any]:
        """Return the command line's overrides and the configuration that a log prints."""
        if self.program is not None:
            return printed(text, self.program)
        types = self.declared(self.releases[-1]).types
        return printed_trees(text, types) | printed_overrides(text, types)

    def marks(self, text: bytes) -> bool:
        """Return whether any line of a text may report progress."""
        return marks_of(self.tables[-1], text)

    def marker(self, line: str) -> Marker | None:
        """Return the progress that a log line reports, if any."""
        return marker_of(self.tables[-1], line)

    def knob_settings(self, config: C, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that apply `knobs`, for knobs that the job does not already have so."""
        return rows.settings_for(self._read(config), config, knobs)

    def _estimated(self, config: C) -> tuple[Row[C], ...]:
        held = {row.knob for row in self._read(config)} | self.acting
        return tuple(row for row in self.applicable(config) if row.knob in held)

    def _read(self, config: C) -> tuple[Row[C], ...]:
        if self.reads_declined:
            return self.applicable(config)
        return self.offered(config)

    def _passed_on(self, job: Job, config: C) -> Iterator[str]:
        release = config.release
        which = f"{self.name} {release.version}" + (
            "" if release.exact else ", the nearest release known here,"
        )
        for problem in self.unknown(config):
            if not (self.is_certain(config, problem) and (config.is_own or self.adds)):
                hint = f" ({problem.hint})" if problem.hint else ""
                setting = bare(".".join(map(str, problem.path[1:])))
                yield f"{which} does not have the setting {setting}; it is passed on{hint}"
        if config.is_own:
            for engine, arguments in self._handed_on(job, config):
                yield from engine_arguments.passed_on(engine, arguments)

    def engines(self, config: C) -> tuple[str, ...]:
        """Return the inference engines that the settings below `engine_nodes` may configure."""
        return (config.engine,) if self.engine_nodes else ()

    def _handed_on(
        self, job: Job, config: C
    ) -> Iterator[tuple[engine_arguments.Engine, list[engine_arguments.Argument]]]:
        """Yield each inference engine with the arguments that the settings pass to it."""
        given = {key: value_of(value) for key, value in config.given.items() if prefix(key) != "~"}
        plain = {bare(key): value for key, value in given.items()}
        spelled = {bare(key): key for key in given}
        pinned, exact = config.facts.engines, config.release.exact
        for name in self.engines(config):
            engine = engine_arguments.engine_of(name, job, pinned, exact=exact)
            nodes = (node.format(engine=name) for node in self.engine_nodes)
            result = [
                each for node in nodes for each in engine_arguments.arguments_below(node, plain, spelled)
            ]
            if engine is not None and result:
                yield engine, result
