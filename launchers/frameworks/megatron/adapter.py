"""What the adapters of slime, Relax and miles have in common: a Megatron trainer, SGLang engines, flags."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from autotune.launchers.base import Advice, Problem, Tracked
from autotune.launchers.frameworks.core import rehearsals, trackers
from autotune.launchers.frameworks.core.data import GuidedFramework, document, package_of, rows
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.dialects.flags import (
    Flags,
    arguments,
    bare,
    flags_of,
    printed_flags,
    shown,
    spelled,
)
from autotune.launchers.frameworks.megatron.checkpoints import (
    checkpoint_flags,
    checkpoint_warnings,
    root,
    saves,
)
from autotune.launchers.frameworks.megatron.checks import problems_of, unknown_of
from autotune.launchers.frameworks.megatron.job import Dialect, dialect_of, shape_of
from autotune.launchers.frameworks.megatron.knobs import knobs_of, settings_of
from autotune.launchers.frameworks.megatron.lines import marker_of
from autotune.launchers.frameworks.megatron.model import model_of
from autotune.launchers.frameworks.megatron.profile import (
    constraints_of,
    layout_of,
    resident_of,
    supported_of,
    unsupported_of,
)
from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

_YAML = ("custom-config-path", "megatron-config-path", "sglang-config")
_PYTHONS = ("python", "python3")


class MegatronRl(GuidedFramework):
    """One framework of the three, told by its dialect; no flag makes answers go on beyond their end."""

    entry: tuple[str, ...]
    async_entry: tuple[str, ...] = ()  # with --fully-async, where that is another program
    dropped: tuple[str, ...] = ()  # flags of a restart of the framework's own
    trial_off: Mapping[str, Any] = {}  # what a trial does not do or write

    @cached_property
    def dialect(self) -> Dialect:
        """In what the framework differs from the others."""
        return dialect_of(package_of(self), "dialect.yaml")

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What holds for Megatron trainers and SGLang engines, and what the framework's guide says."""
        return (*rows(__package__, "advice.yaml", Advice), *super().advice)

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's flags."""
        flags = self._flags(job)
        return problems_of(job, flags, shape_of(job, flags, self.dialect), self.dialect)

    def model_path(self, job: Job) -> str | None:
        """Return --hf-checkpoint."""
        return self._flags(job).text("hf-checkpoint") or None

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return --save, or the folder that every run has its own in."""
        return root(job, self._flags(job))

    def shape(self, job: Job) -> Model | None:
        """Return the shape that Megatron's flags describe, where no config tells it."""
        return job.shape or model_of(self._flags(job))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with the defaults filled in, and what limits them."""
        flags = self._flags(job)
        shape = shape_of(job, flags, self.dialect)
        knobs = knobs_of(flags, shape, self.dialect, gpu_memory_bytes=job.cluster.gpu_memory_bytes or 0)
        supported = supported_of(flags, shape, self.dialect)
        return Profile(
            framework=self.name,
            knobs=knobs,
            supported=supported,
            unsupported=unsupported_of(flags, shape, self.dialect),
            constraints=tuple(constraints_of(flags, shape, self.dialect, knobs, supported)),
            placement=shape.placement,
            resident=resident_of(shape, self.dialect),
            engine="sglang",
            engine_version=self.dialect.engine_version,
            longest_sequence=shape.longest,
            resumable=saves(flags),
            layout=with_lengths(layout_of(flags, shape), job),
            warnings=(*checkpoint_warnings(job, flags), *self._warnings(job, flags)),
        )

    def training(self, job: Job) -> Training:
        """Return the sizes of a rollout, and what decides which samples it has."""
        flags = self._flags(job)
        shape = shape_of(job, flags, self.dialect)
        samples = shape.batch * shape.samples
        update = min(flags.count("global-batch-size") or samples, samples)
        return Training(
            samples_per_step=samples or None,
            global_batch=update or None,
            updates_per_step=-(-samples // update) if update else None,
            steps=flags.count("num-rollout") or None,
            epochs=flags.count("num-epoch") or None,
            prompt_tokens=shape.prompt or None,
            response_tokens=shape.response or None,
            learning_rate=flags.number("lr") or None,
            seeds={name: flags.count(name) for name in ("seed", "rollout-seed") if flags.has(name)},
            data_order="shuffled by `rollout-seed`" if flags.on("rollout-shuffle") else "as the file has it",
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as the framework's entry point with all flags."""
        wanted = {**job.settings, **self.settings(job, knobs)}
        flags = flags_of(wanted, negatable=self.dialect.negatable)
        given: dict[str, Any] = {**flags.given}
        given |= checkpoint_flags(job, flags, run=run, attempt=attempt, resume=resume)
        given |= self._loggers(job, flags, run=run)
        kept = {name: value for name, value in given.items() if name not in self.dropped}
        environment = {"RAY_DEDUP_LOGS": "0", **job.env}
        if flags.on("use-wandb"):  # one run in the tracker, however often it is relaunched
            stable = {"WANDB_RUN_ID": f"{job.name}-{run}", "WANDB_RESUME": "allow"}
            environment = {**stable, **environment}
        return Command(
            argv=(*self._entry(job), *arguments(kept, negatable=self.dialect.negatable)),
            env=environment,
            cwd=job.workdir,
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the flags that differ from the job as written, as the job writes them."""
        return settings_of(job, knobs, self.dialect, folder=root(job, self._flags(job)))

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return where trackers keep the run."""
        return trackers.tracked(__package__, self._flags(job).given.get)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as flags with their values."""
        return shown(settings, negatable=self.dialect.negatable)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the flags in Megatron's dump of arguments, or in a command line that `set -x` shows."""
        engine = {f"sglang-{name}" for name in self.dialect.engine_names}
        return printed_flags(
            text,
            known=self.dialect.names | engine,
            inverse=self.dialect.inverse,
            negatable=self.dialect.negatable,
        )

    def marker(self, line: str) -> Marker | None:
        """Return what a line of the log says about progress, if anything."""
        return marker_of(line)

    def last_step(self, job: Job) -> int | None:
        """Return --num-rollout: none of the frameworks prints how many steps there are."""
        return self._flags(job).count("num-rollout") or None

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with `steps` rollouts, no checkpoints, no trackers and folders of its own."""
        flags = self._flags(job)
        off = {**document(__package__, "trial.yaml", dict[str, Any]), **self.trial_off, "num-rollout": steps}
        load = flags.text("load")
        if load and load.rstrip("/") == flags.text("save").rstrip("/"):
            off["load"] = None
        off |= {
            name: None for name in flags.given if name.startswith(self.dialect.prefixes)
        }  # of evaluations
        off |= {name: f"{folder}/{name}" for name in _FOLDERS if flags.has(name)}
        changes = spelled(job.settings, off, negatable=self.dialect.negatable)
        if not flags.has("save"):
            changes["save"] = None  # said, so that no checkpoint is added
        return msgspec.structs.replace(job, settings={**job.settings, **changes}, resume=False)

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself saves and validates."""
        flags = self._flags(job)
        without = [LateEvent.LENGTH] + ([] if saves(flags) else [LateEvent.SAVE])
        without += [] if rehearsals.validates(__package__, flags.given.get) else [LateEvent.VALIDATION]
        return rehearsals.met(__package__, without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and validates in the same step, where the job does."""
        flags = self._flags(job)
        trial = self.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        if not saves(flags):
            return trial
        validation = rehearsals.validates(__package__, flags.given.get)
        own = rehearsals.additions(__package__, validation=validation) | {"save": f"{folder}/checkpoints"}
        left = set(rehearsals.left(__package__, validation=validation))
        left |= {name for name in flags.given if validation and name.startswith(self.dialect.prefixes)}
        changes = spelled(job.settings, own, negatable=self.dialect.negatable)
        settings = rehearsals.settings_of(job, trial, changes, left=left, bare=bare)
        return msgspec.structs.replace(trial, settings=settings)

    def _flags(self, job: Job) -> Flags:
        return flags_of(job.settings, negatable=self.dialect.negatable)

    def _entry(self, job: Job) -> tuple[str, ...]:
        if not job.command:
            apart = self.async_entry and self._flags(job).on("fully-async")
            return self.async_entry if apart else self.entry
        first, *rest = job.command
        interpreter = "{python}" if job.python is not None and first in _PYTHONS else first
        return (interpreter, *(word for word in rest if bare(word) not in self.dropped))

    def _loggers(self, job: Job, flags: Flags, *, run: str) -> dict[str, Any]:
        """Return names under which every attempt of a run continues the same record."""
        on = flags.on("use-tensorboard", default="use-tensorboard" in self.dialect.negatable)
        if on and flags.has("tb-project-name") and not flags.has("tb-experiment-name"):
            return {"tb-experiment-name": f"{job.name}-{run}"}
        return {}

    def _warnings(self, job: Job, flags: Flags) -> tuple[str, ...]:
        told = "refuses" if self.dialect.strict else "ignores without a word"
        result = [
            f"--{name} is in no list of flags; {self.name} {told} what it does not know"
            for name in unknown_of(job, self.dialect)
        ]
        result += [
            f"the file of --{name} is read after the flags: what it sets cannot be changed from here"
            for name in _YAML
            if flags.has(name)
        ]
        result += [
            f"--{name} is left out: it restarts with the settings that just failed"
            for name in self.dropped
            if flags.on(name)
        ]
        if any(word.startswith("--") for word in job.command):
            result.append("flags in `command` are passed on but not seen: write them under `settings:`")
        if flags.on("balance-by-flops"):
            result.append(
                "--balance-by-flops may put more tokens into a micro-batch than --max-tokens-per-gpu"
            )
        shape = shape_of(job, flags, self.dialect)
        if shape.placement is Placement.COLOCATED and not shape.offload_rollout:
            result.append("--no-offload-rollout leaves the engine's pool on the card while training runs")
        if shape.longest is None:
            result.append(
                "--rollout-max-context-len or --rollout-max-prompt-len and --rollout-max-response-len "
                "would bound the longest sequence; without them a token budget may fall below it"
            )
        return tuple(result)


_FOLDERS = ("memory-snapshot-dir", "tensorboard-dir", "rollout-result-dir", "update-weight-disk-dir")
