"""Base adapter of TRL and ms-swift: their entry script, batch sizes and trials."""

from __future__ import annotations

import re
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, ClassVar, TypeVar

import msgspec

from autotune.launchers.base import Problem, Tracked
from autotune.launchers.frameworks.core import trackers
from autotune.launchers.frameworks.core.checkpoint_folders import absolute, folder_of
from autotune.launchers.frameworks.core.data import package_of
from autotune.launchers.frameworks.core.renames import replacement
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.dialects.flags import parsed_value
from autotune.launchers.frameworks.dialects.own_lines import own_marker, own_marks
from autotune.launchers.frameworks.dialects.settings import with_settings
from autotune.launchers.frameworks.hugging_face.settings import (
    ACCUMULATION,
    ENVIRONMENT,
    MICRO,
    WHOLE,
    TrainerSettings,
    argument_text,
    shown_settings,
)
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.launchers.likeness import suggestion
from autotune.policies.remedies.allow_deny import denial
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.command import Command, File
from autotune.policies.values.job import SAVE_STEPS, Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import SAVED_AT

ENTRY = "{attempt}/entry.py"
_FILES = ("entry.py", "at_import.py", "in_place.py")
_BEST = "load_best_model_at_end"
_BLANK = "..."  # an unknown value
_NOWHERE = Cluster(address="", nodes=0, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)

C = TypeVar("C", bound=TrainerSettings)


# Settings that TRL's arguments have with transformers 4.56.2 or 4.57.3, and not with 5.23.0: releases of TRL
# and ms-swift run with either. Read by `python -m benchmarks.facts trl 1.16.0 --with transformers==4.57.3`.
_OF_OLDER_TRANSFORMERS = """
    adafactor fp16_backend fp16_opt_level group_by_length half_precision_backend include_inputs_for_metrics
    include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda overwrite_output_dir past_index
    per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization
    push_to_hub_token ray_scope save_safetensors torchdynamo tpu_metrics_debug tpu_num_cores use_ipex
    use_legacy_prediction_loop use_mps_device warmup_ratio
"""


class HuggingFaceTrainer(TabularFramework[C]):
    """A framework whose program runs inside `entry.py`, which resumes it and reports progress."""

    reasons: ClassVar[Mapping[str, str]] = {
        "output_dir": "checkpoints of this run alone, from which its relaunches continue",
        "save_steps": "the job saves nothing, and a relaunch needs a checkpoint",
        "save_total_limit": "older checkpoints of this run are deleted, never those of the job's own folder",
        "add_version": "the folder keeps its name, so that a relaunch finds its checkpoints",
        "num_processes": "one process for each GPU",
        "nproc_per_node": "one process for each GPU",
        "WANDB_*": "relaunches continue one W&B run",
        "AUTOTUNE_IN_PLACE*": "a pass that runs out of memory is tried again in smaller pieces",
        "entry.py": "runs the trainer: it continues checkpoints and tells its phases",
        "at_import.py": "what entry.py does as the trainer is imported",
        "in_place.py": "repeats a pass that ran out of memory in smaller pieces",
    }
    title: ClassVar[str]  # of the framework, in messages
    reported_as: ClassVar[str]  # the program that the lines of the entry name
    saving: ClassVar[Mapping[str, Any]]  # setting -> the value that saves memory
    sizes_batch: ClassVar[frozenset[str]] = frozenset(
        {WHOLE}
    )  # once one is refused, the batch is not looked at
    section: ClassVar[str]  # the section of a config file with environment variables
    factor: ClassVar[str]  # the setting that keeps the batch size with a smaller micro-batch
    makes_pieces = False  # whether `in_place.py` can cure the trainer without a restart
    saves_by_time = False
    announces_end = True
    environment_settings = ENVIRONMENT
    done_is_final = True  # a callback may end the training before max_steps, and the entry says so
    reads_declined = True
    steps_key = "max_steps"
    entry: ClassVar[tuple[str, ...]] = ()
    env: ClassVar[dict[str, str]] = {}

    def refused(self, config: C) -> Iterator[Problem]:
        """Yield the refusals of the rows, otherwise those of batch sizes that no GRPO trainer accepts."""
        result = tuple(super().refused(config))
        yield from result
        if not {problem.path[-1] for problem in result} & self.sizes_batch:
            yield from self._of_batch(config)

    def _of_batch(self, config: C) -> Iterator[Problem]:
        group, whole = config.count("num_generations"), config.count(WHOLE)
        place = ("settings", MICRO)
        samples = whole or config.micro * config.passes * config.processes
        if whole and self.knows_processes(config) and whole % (config.micro * config.processes):
            message = f"{WHOLE} {whole} is no multiple of {config.micro} x {config.processes} processes"
            yield Problem(path=place, message=message)
        elif group and samples % group:
            message = f"a generation of {samples} samples is no multiple of num_generations {group}"
            yield Problem(path=place, message=message)

    @abstractmethod
    def launch(self, config: C, own: Mapping[str, Any], entry: tuple[str, ...]) -> tuple[str, ...]:
        """Return an attempt's command: launcher, the words of `entry`, the program and its settings.

        `own`: the settings that autotune adds to the job's.
        """

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt: the program inside the entry script, which is copied beside it."""
        config = self.config(with_settings(job, self.settings(job, knobs)))
        own = self.added(config, self.run_settings(config, job, run=run, resume=resume))
        entry = (ENTRY, run, self.mode(job, resume=resume))
        return Command(
            argv=self.launch(config, own, entry),
            env={**self.environment(config, job, run), **self._in_place(job, knobs)},
            cwd=job.workdir,
            files=self.files,
            ray_native=False,
        )

    def added(self, config: C, needed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an attempt that its program accepts; all if its release is unknown."""
        releases = (
            (config.release.version,) if config.job.framework_version else (*config.older, *self.releases)
        )
        every = [facts(package_of(self), release).types for release in releases]
        return {
            name: value
            for name, value in super().added(config, needed).items()
            if config.has(name) or all(config.named(name) in types for types in every)
        }

    def knows_processes(self, config: C) -> bool:
        """Return whether the job sets the number of training processes."""
        return True

    def unknown(self, config: C) -> Iterator[Problem]:
        """Yield every setting that the known release does not accept."""
        known = config.keys.union(ENVIRONMENT, (self.section,))
        for place, values in (("settings", config.job.settings), ("config", config.job.document)):
            for name in (name for name in values if name not in known):
                message = f"{self.title} {config.release.version} has no setting `{name}`"
                hint = replacement(self.table.renamed, str(name)) or suggestion(str(name), config.keys)
                yield Problem(path=(place, name), message=message, hint=hint)

    def is_certain(self, config: C, problem: Problem) -> bool:
        """Return whether an unknown setting is a mistake, because no older transformers accepts it either."""
        return super().is_certain(config, problem) and problem.path[-1] not in _OF_OLDER_TRANSFORMERS.split()

    def problems(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's command and settings."""
        config = self.config(job)
        return (*self._of_budget(job), *self._of_names(config), *self.refused(config))

    def _of_budget(self, job: Job) -> Iterator[Problem]:
        if not job.env.get("AUTOTUNE_DEVICE_BUDGET", "0").isdigit():
            path = ("env", "AUTOTUNE_DEVICE_BUDGET")
            yield Problem(path=path, message="the budget is a whole number of bytes")

    def _of_names(self, config: C) -> Iterator[Problem]:
        yield from (problem for problem in self.unknown(config) if self.is_certain(config, problem))
        for place, values in (("settings", config.job.settings), ("config", config.job.document)):
            for name, value in values.items():
                if wanted := misfit(config.kind(name), value):
                    yield Problem(path=(place, name), message=f"`{name}` is {wanted}, not {value!r}")

    def checkpoint_folder(self, job: Job) -> str:
        """Return output_dir, or the folder in which every run gets its own subfolder."""
        return absolute(job, str(self.config(job).get("output_dir") or "checkpoints"))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with defaults, and their limits on a cluster's GPUs."""
        measured = msgspec.structs.replace(
            job.cluster,
            gpus_per_node=cluster.gpus_per_node or job.cluster.gpus_per_node,
            nodes=max(cluster.nodes, job.cluster.nodes),
        )
        result = super().profile(msgspec.structs.replace(job, cluster=measured), cluster)
        if not self.makes_pieces:
            return result
        ranks, reason = result.layout.ranks, result.unsupported.get("microbatch_size", "")
        why = f"it works with one process only, this job has {ranks}" if ranks > 1 else reason
        return msgspec.structs.replace(result, cures_in_place=not why, not_in_place=why)

    def sizes(self, config: C, shape: Model | None) -> dict[str, tuple[int, ...]]:
        """Return the legal sizes of a micro-batch and of an engine."""
        engines = head_sizes(divisors(config.processes), shape)
        return {"microbatch_size": config.micro_sizes(), "rollout_tensor_parallel": engines}

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps, without cures in the process."""
        recovery = msgspec.structs.replace(job.recovery, in_place=False)
        short = super().trial(job, folder=folder, steps=steps, longest=longest)
        return msgspec.structs.replace(short, recovery=recovery)

    def _in_place(self, job: Job, knobs: Knobs) -> dict[str, str]:
        """Return the variable that lets the entry shrink micro-batches itself, if the job permits it."""
        profile = self.profile(job, _NOWHERE)
        smaller = msgspec.structs.replace(knobs, microbatch_size=1)
        permitted = profile.cures_in_place and not denial(job.recovery, profile, knobs, smaller)
        return {"AUTOTUNE_IN_PLACE": "1"} if permitted and job.recovery.in_place is not False else {}

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        config = self.config(job)
        changed: dict[str, Any] = {}
        for name, value in self.knob_settings(config, knobs).items():
            if name == MICRO:
                changed |= config.with_micro(value)
            else:
                changed[name] = config.with_mode(name, value) if name in ENVIRONMENT else value
        return {config.named(name): value for name, value in changed.items()}

    def run_settings(self, config: C, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the checkpoint folder, and the checkpoint interval if the job sets none."""
        own: dict[str, Any] = {"output_dir": _output(config, job, run=run)}
        # The choice of the best checkpoint depends on which ones exist.
        if not {"save_steps", "save_strategy"} & config.written.keys() and not config.on(_BEST):
            every = job.recovery.save_every or SAVE_STEPS
            own["save_steps"] = -(-every // config.span) * config.span  # never within a generation
            if not job.resume and "save_total_limit" not in config.written:
                own["save_total_limit"] = 2  # the folder belongs to this run alone
        return own

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return the job's trackers; transformers writes TensorBoard events below its checkpoints."""
        config = self.config(job)
        given = {"output": _output(config, job, run=run)}
        return trackers.tracked(self.table.trackers, config.get, given=given)

    def environment(self, config: C, job: Job, run: str) -> dict[str, str]:
        """Return an attempt's environment: the job's, variables in its settings, and the tracker's run id."""
        variables = {name: config.written[name] for name in ENVIRONMENT if name in config.written}
        reported = any(name in str(config.get("report_to")) for name in ("wandb", "all"))
        return {
            **(trackers.one_wandb_run(job, run) if reported else {}),
            **{name: value for name, value in job.env.items() if name not in variables},
            **{name: str(value) for name, value in variables.items() if value},
        }

    def mode(self, job: Job, *, resume: bool) -> str:
        """Return which checkpoints the entry may resume from."""
        return "start" if not resume else "any" if job.resume else "own"

    @property
    def files(self) -> tuple[File, ...]:
        """The files to copy into an attempt's folder."""
        folder = resources.files("autotune.launchers.frameworks.hugging_face")
        place = "launchers/frameworks/hugging_face"
        return tuple(
            File(name=name, text=(folder / name).read_text(), source=f"{place}/{name}") for name in _FILES
        )

    def flag(self, name: str, value: Any) -> str:
        """Return a setting as a user types it."""
        return f"--{name} {argument_text(value)}"

    def word(self, name: str, value: Any) -> str:
        """Return one setting as a command line has it: a flag, whatever `words` writes, or NAME=VALUE."""
        if name in ENVIRONMENT:
            return super().word(name, value)
        return HuggingFaceTrainer.flag(self, name, value)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as a user types them; an unknown value becomes the one that saves memory."""
        lines = []
        for name, written in settings.items():
            value = self.saving.get(name, written) if written in (True, _BLANK) else written
            if name in ENVIRONMENT:
                lines.append(f"{name}={value}" if value else f"without {name}")
            else:
                alone = name == MICRO and ACCUMULATION not in settings
                lines.append(self.flag(name, value) + (f", {self.factor}" if alone else ""))
        return tuple(lines)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings in a printed command line, configuration or arguments object."""
        types = facts(package_of(self), self.releases[-1]).types
        result: dict[str, Any] = {}
        for name in shown_settings(package_of(self)):
            match = re.search(rf"(?:--{name}[\s=]+|(?<![\w.-]){name}['\"]?\s?[=:]\s?)['\"]?([\w.+-]+)", text)
            if match is not None and not misfit(types[name], value := parsed_value(match[1].rstrip("."))):
                result[name] = value
        return result

    def marks(self, text: bytes) -> bool:
        """Return whether a text contains a line of the entry."""
        return own_marks(text, program=self.reported_as)

    def marker(self, line: str) -> Marker | None:
        """Return the progress in a line of the entry."""
        return own_marker(line, program=self.reported_as)

    def last_step(self, job: Job) -> int | None:
        """Return `max_steps` if set; otherwise the lines of steps give the total."""
        steps = self.config(job).count(self.steps_key)
        return steps if steps > 0 else None

    def span(self, config: C) -> int:
        """Return the optimizer steps per generation of responses."""
        return config.span

    def of_rehearsal(self, job: Job, additions: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Return a rehearsal's settings beyond its trial's; it saves only after whole generations."""
        at = SAVED_AT * self.config(job).span
        own = {**super().of_rehearsal(job, additions, folder), "save_steps": at}
        return own | ({"eval_steps": at} if "eval_strategy" in additions else {})

    def warnings(self, config: C) -> Iterator[str]:
        """Yield warnings before the launch."""
        if config.job.server:
            server = shlex.join(config.job.server)
            yield f"The training uses a server, which has to run before a launch: {server}"
        if not config.resumes:
            yield "The job writes no checkpoint that training can continue: every attempt starts at step 0."
        yield from super().warnings(config)


def _output(config: TrainerSettings, job: Job, *, run: str) -> str:
    named = config.get("output_dir")
    return folder_of(job, str(named or f"checkpoints/{job.name}-{run}"), run=run, named=bool(named))
