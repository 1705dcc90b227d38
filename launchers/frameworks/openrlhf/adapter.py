"""OpenRLHF: DeepSpeed trainers and vLLM engines under Ray, as of 0.11.2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autotune.launchers.base import Problem, Tracked
from autotune.launchers.frameworks.core import rehearsals, residency, trackers
from autotune.launchers.frameworks.core.checkpoints import absolute
from autotune.launchers.frameworks.core.data import GuidedFramework, document
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.dialects import flag_facts
from autotune.launchers.frameworks.dialects.flags import (
    Flags,
    arguments,
    bare,
    flags_of,
    printed_flags,
    printed_namespace,
    shown,
    spelled,
)
from autotune.launchers.frameworks.openrlhf.job import Shape, shape_of
from autotune.launchers.frameworks.openrlhf.knobs import NO_FORM, knobs_of, settings_of
from autotune.launchers.frameworks.openrlhf.lines import marker_of
from autotune.launchers.frameworks.openrlhf.profile import (
    constraints_of,
    layout_of,
    supported_of,
    unsupported_of,
)
from autotune.policies.values.command import Command
from autotune.policies.values.job import SAVE_STEPS, Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

_RELEASE = "0.11.2"


class OpenRlhf(GuidedFramework):
    """The dotted flags of `openrlhf.cli.train_ppo_ray`, which refuses what it does not know."""

    name = "openrlhf"
    saves_by_time = False
    announces_end = False
    distribution = "openrlhf"
    releases = (_RELEASE,)
    modules = ("openrlhf",)
    traces = ("openrlhf", "OpenRLHF", "PolicyModelActor", "ReferenceModelActor", "✨ Global step")

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what OpenRLHF would refuse."""
        flags, facts = _flags(job), flag_facts.flag_facts(__package__, f"facts/{_RELEASE}.json")
        keys = {bare(key): key for key in job.settings}
        found = list(flag_facts.problems_of(job.settings, facts, program=self.name))
        for name, message, hint in _demands(flags, shape_of(job, flags)):
            path = ("settings", keys[name]) if name in keys else ("settings",)
            found.append(Problem(path=path, message=message, hint=hint))
        if job.config is not None:
            hint = "write the flags under `settings:`"
            found.append(Problem(path=("config",), message="openrlhf takes flags, no file", hint=hint))
        return tuple(found)

    def model_path(self, job: Job) -> str | None:
        """Return --actor.model_name_or_path."""
        return _flags(job).text("actor.model_name_or_path") or None

    def checkpoint_folder(self, job: Job) -> str:
        """Return --ckpt.path, or the folder below which every run has its own."""
        return _root(job, _flags(job))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with the defaults filled in, and what limits them."""
        flags = _flags(job)
        shape = shape_of(job, flags)
        supported = supported_of(flags, shape)
        shared = shape.placement is Placement.COLOCATED
        resident = residency.colocated(  # the weights stay on the card, whatever else sleeps
            reference=shape.reference,
            critic=shape.critic,
            engine_sleeps=shape.sleeps,
            trainer_sleeps=False,
            trainer_first=False,
        )
        return Profile(
            framework=self.name,
            knobs=knobs_of(flags, shape),
            supported=supported,
            unsupported=unsupported_of(flags, shape),
            constraints=tuple(constraints_of(shape, supported)),
            placement=shape.placement,
            resident=resident if shared else {},
            engine="vllm",
            longest_sequence=shape.longest,
            resumable=_saves(flags),
            layout=with_lengths(layout_of(flags, shape), job),
            warnings=tuple(self._warnings(job, flags, shape)),
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as the entry point with all flags."""
        flags = flags_of({**job.settings, **self.settings(job, knobs)}, negatable=NO_FORM)
        given = {**flags.given}
        if _saves(flags):
            own = job.resume and flags.has("ckpt.path")
            given["ckpt.path"] = _root(job, flags) if own else f"{_root(job, flags)}/{job.name}-{run}"
            given["ckpt.load_enable"] = resume or own
            if flags.count("ckpt.save_steps", -1) <= 0:
                given["ckpt.save_steps"] = job.recovery.save_every or SAVE_STEPS
        elif flags.on("ckpt.load_enable"):
            given["ckpt.load_enable"] = False  # another run's
        if flags.has("logger.wandb.key") and not flags.has("logger.wandb.run_name"):
            given["logger.wandb.run_name"] = f"{job.name}-{run}"
        entry: tuple[str, ...] = ("{python}", "-m", "openrlhf.cli.train_ppo_ray")
        if job.command:
            first, *rest = job.command
            named = job.python is not None and first in ("python", "python3")
            entry = ("{python}" if named else first, *rest)
        words = arguments(given, negatable=NO_FORM)
        return Command(argv=(*entry, *words), env={"RAY_DEDUP_LOGS": "0", **job.env}, cwd=job.workdir)

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the flags that differ from the job as written, as the job writes them."""
        return settings_of(job, knobs)

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return where trackers keep the run."""
        return trackers.tracked(__package__, _flags(job).given.get)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as flags with their values."""
        return shown(settings, negatable=NO_FORM)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the flags in the namespace that a run prints first, or in a traced command line."""
        known = frozenset(flag_facts.flag_facts(__package__, f"facts/{_RELEASE}.json").flags)
        found = printed_namespace(text, known=known)
        return found or printed_flags(text, known=known, inverse={}, negatable=NO_FORM)

    def marker(self, line: str) -> Marker | None:
        """Return what a line of the log says about progress, if anything."""
        return marker_of(line)

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with prompts for `steps` rollouts, without checkpoints and trackers."""
        flags = _flags(job)
        spare = 8 if flags.on("algo.dynamic_filtering_enable") else 1  # prompts that are filtered out
        off = document(__package__, "trial.yaml", dict[str, Any])
        off["data.max_samples"] = steps * flags.count("rollout.batch_size", 1024) * spare
        off["ckpt.output_dir"] = f"{folder}/model"  # it is written in any case
        changes = {**spelled(job.settings, off, negatable=NO_FORM), "ckpt.path": None}
        own = {key: value for key, value in job.settings.items() if bare(key) != "ckpt.path"}
        return msgspec.structs.replace(job, settings={**own, **changes}, resume=False)

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself saves and validates."""
        flags = _flags(job)
        without = [LateEvent.LENGTH] + ([] if _saves(flags) else [LateEvent.SAVE])
        without += [] if rehearsals.validates(__package__, flags.given.get) else [LateEvent.VALIDATION]
        return rehearsals.met(__package__, without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and validates in the same step, where the job does."""
        flags = _flags(job)
        trial = self.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        if not _saves(flags):
            return trial
        validation = rehearsals.validates(__package__, flags.given.get)
        own = rehearsals.additions(__package__, validation=validation)
        own["ckpt.path"] = f"{folder}/checkpoints"
        left = rehearsals.left(__package__, validation=validation)
        changes = spelled(job.settings, own, negatable=NO_FORM)
        settings = rehearsals.settings_of(job, trial, changes, left=left, bare=bare)
        return msgspec.structs.replace(trial, settings=settings)

    def _warnings(self, job: Job, flags: Flags, shape: Shape) -> Iterator[str]:
        facts = flag_facts.flag_facts(__package__, f"facts/{_RELEASE}.json")
        for name in flag_facts.unknown(job.settings, facts):
            yield f"--{name} is no flag of openrlhf {_RELEASE}, which refuses what it does not know"
        if not _saves(flags):
            yield "without DeepSpeed's checkpoints every relaunch begins at step 0"
        elif not (job.resume and flags.has("ckpt.path")):
            own = f"{_root(job, flags)}/{job.name}-<run>"
            yield f"checkpoints go to {own}; `resume: true` uses --ckpt.path itself"
        if _saves(flags):
            first = "a crash inside the very first save leaves `_actor` without its file `latest`"
            yield f"{first}: relaunches then end in KeyError 'episode' until you remove that folder"
        if any(word.startswith("--") for word in job.command):
            yield "flags in `command` are passed on but not seen: write them under `settings:`"
        if shape.placement is Placement.COLOCATED and not shape.sleeps:
            yield "without --vllm.enable_sleep the engine's pool stays on the card while training runs"
        if flags.has("reward.model_name_or_path") and shape.placement is Placement.COLOCATED:
            yield "no estimate holds the reward model on the cards; --reward.offload keeps it on the host"


def _flags(job: Job) -> Flags:
    return flags_of(job.settings, negatable=NO_FORM)


def _saves(flags: Flags) -> bool:
    """Return whether checkpoints are wanted: a null `ckpt.path` in the job says no."""
    return flags.given.get("ckpt.path", "") is not None and not flags.on("ckpt.disable_ds")


def _root(job: Job, flags: Flags) -> str:
    return absolute(job, flags.text("ckpt.path") or "checkpoints").rstrip("/")


def _demands(flags: Flags, shape: Shape) -> Iterator[tuple[str, str, str]]:
    """Yield what OpenRLHF asserts of flags that belong together (openrlhf/cli/train_ppo_ray.py)."""
    shared = shape.placement is Placement.COLOCATED
    if not shape.engine_gpus:
        yield "vllm.num_engines", "without --vllm.num_engines nothing generates", ""
    elif shared and shape.actors != shape.engine_gpus:
        counts = f"{shape.actors} GPUs of the actor and {shape.engine_gpus} of the engines"
        yield "vllm.num_engines", f"{counts}: --train.colocate_all wants as many", ""
    if shape.placement is Placement.ASYNCHRONOUS and flags.on("vllm.enable_sleep"):
        yield "vllm.enable_sleep", "--train.async_enable refuses it: the engines never pause", "leave it out"
    if shape.actors % (shape.ring * shape.tensor):
        yield "ds.ring_attn_size", f"ring x tensor parallelism does not divide {shape.actors} GPUs", ""
    if shape.batch // flags.count("rollout.micro_batch_size", 1) < shape.data_parallel:
        yield "rollout.micro_batch_size", "fewer scoring batches than ranks of the actor", "lower it"
    if flags.on("train.partial_rollout_enable") and shape.placement is not Placement.ASYNCHRONOUS:
        yield "train.partial_rollout_enable", "it needs --train.async_enable", ""
