"""verl: PPO and GRPO with FSDP or Megatron trainers and vLLM or SGLang engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.launchers.base import Problem, Tracked
from autotune.launchers.frameworks.core import rehearsals, trackers
from autotune.launchers.frameworks.core.data import GuidedFramework
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.dialects.hydra import bare, override
from autotune.launchers.frameworks.verl import checks, keys, launch, layout, limits
from autotune.launchers.frameworks.verl.config import ACTOR, ROLLOUT, Config
from autotune.launchers.frameworks.verl.knobs import read, write
from autotune.launchers.frameworks.verl.markers import TRACES, marker_of
from autotune.launchers.frameworks.verl.printed_config import printed
from autotune.policies.certificate.contents import Training
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

_SEEDS = ("data.seed", f"{ACTOR}.data_loader_seed", f"{ROLLOUT}.seed")


class Verl(GuidedFramework):
    """verl's own trainer, or a recipe that takes its settings; settings are Hydra overrides."""

    name = "verl"
    saves_by_time = False
    announces_end = False
    loss = "actor/pg_loss"
    traces: tuple[str, ...] = TRACES
    distribution = "verl"
    version_file = "verl/version/version"
    modules = ("verl",)
    releases = keys.releases()

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's settings."""
        return checks.problems(job)

    def model_path(self, job: Job) -> str | None:
        """Return the model that the settings name."""
        return launch.model_path(Config(job))

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return trainer.default_local_dir, or the folder that every run has its own in."""
        return launch.checkpoint_folder(job, Config(job))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with the defaults filled in, and what limits them."""
        config = Config(job)
        return Profile(
            framework=self.name,
            knobs=read(config),
            supported=limits.offered(config, job.shape),
            unsupported=limits.declined(config),
            constraints=limits.constraints(config, job.shape),
            placement=layout.placement(config),
            resident=layout.resident(config),
            engine=config.rollout,
            engine_version=job.engine_versions.get(config.rollout)
            or config.keys.engines.get(config.rollout, ""),
            longest_sequence=config.longest,
            resumable=_resumable(config),
            layout=with_lengths(layout.layout(config), job),
            warnings=(
                *job.notes,
                *checks.passed_on(job, config),
                *checks.ignored(config),
                *_warnings(job, config),
            ),
        )

    def training(self, job: Job) -> Training:
        """Return the sizes of a step, and what decides which samples it has."""
        config = Config(job)
        update, sequences = config.update, config.sequences
        epochs = max(1, config.count(f"{ACTOR}.ppo_epochs"))
        order = "shuffled by `data.seed`" if config.flag("data.shuffle") else "as the files have it"
        seeds = {key: config.count(key) for key in _SEEDS if config.get(key) is not None}
        return Training(
            samples_per_step=sequences,
            global_batch=update,
            updates_per_step=-(-sequences // update) * epochs if update else None,
            steps=config.count("trainer.total_training_steps") or None,
            epochs=config.count("trainer.total_epochs") or None,
            prompt_tokens=config.count("data.max_prompt_length") or None,
            response_tokens=config.count("data.max_response_length") or None,
            learning_rate=config.share(f"{ACTOR}.optim.lr") or None,
            seeds=seeds,
            data_order=order,
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as `python -m verl.trainer.main_ppo` with Hydra overrides."""
        return launch.command(job, knobs, run=run, attempt=attempt, resume=resume)

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the overrides that differ from the job as written."""
        return write(Config(job), knobs)

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return where trackers keep the run."""
        return trackers.tracked(__package__, Config(job).get)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as Hydra overrides."""
        return tuple(override(keys.taken(key), value) for key, value in settings.items())

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings that the head of a log shows."""
        return printed(text)

    def marker(self, line: str) -> Marker | None:
        """Return what one of verl's lines says."""
        return marker_of(line)

    def last_step(self, job: Job) -> int | None:
        """Return trainer.total_training_steps; without it the length of the data decides."""
        return Config(job).count("trainer.total_training_steps") or None

    def can_force_longest(self, job: Job) -> bool:
        """Return whether the engine can be told to go on after the end of an answer."""
        return launch.can_force_longest(Config(job))

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps under names, folders and loggers of its own."""
        return launch.trial(job, folder=folder, steps=steps, longest=longest)

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself saves, validates and can be made to do."""
        config = Config(job)
        without = [LateEvent.LENGTH] if not launch.can_force_longest(config) else []
        without += [] if _saves(config) else [LateEvent.SAVE]
        without += [] if _resumable(config) else [LateEvent.RELOAD]
        without += [] if rehearsals.validates(__package__, config.get) else [LateEvent.VALIDATION]
        return rehearsals.met(__package__, without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and validates in the same step, where the job does."""
        config = Config(job)
        trial = launch.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        if not _saves(config):
            return trial
        validation = rehearsals.validates(__package__, config.get)
        own = rehearsals.additions(__package__, validation=validation)
        left = rehearsals.left(__package__, validation=validation)
        settings = rehearsals.settings_of(job, trial, own, left=left, bare=bare)
        return msgspec.structs.replace(trial, settings=settings)


def _saves(config: Config) -> bool:
    return config.count("trainer.save_freq") > 0 or not config.has("trainer.save_freq")


def _resumable(config: Config) -> bool:
    return _saves(config) and config.text("trainer.resume_mode") != "disable"


def _warnings(job: Job, config: Config) -> tuple[str, ...]:
    result = []
    if not _resumable(config):
        result.append(
            "the job cannot be resumed: trainer.save_freq is not positive or trainer.resume_mode is disable, "
            "so every relaunch begins at step 0"
        )
    if config.get("trainer.max_actor_ckpt_to_keep") == 1:
        result.append(
            "trainer.max_actor_ckpt_to_keep: 1 deletes a checkpoint before the next is complete; keep 2"
        )
    if config.flag(f"{ACTOR}.checkpoint.async_save"):
        result.append(
            "with checkpoint.async_save verl does not record the checkpoint that a resume would read"
        )
    if config.rollout == "vllm" and config.get(f"{ROLLOUT}.max_model_len") is None:
        result.append(
            f"{ROLLOUT}.max_model_len is unset: vLLM plans for the model's longest context and may refuse to "
            f"start; this job needs {config.longest}"
        )
    if any("expandable_segments" in value for value in job.env.values()):
        result.append(
            "expandable_segments in the environment reaches the engine, whose sleep mode refuses it; "
            "verl switches it on for the trainer by itself"
        )
    if config.summons_whole and config.world > 1:
        result.append(
            "every weight sync gathers the whole model on every card to read its adapters; "
            f"{ROLLOUT}.layered_summon: true (with {ROLLOUT}.load_format: safetensors) does it layer by layer"
        )
    if config.colocated and not config.sleeps and config.rollout:
        result.append("the engine never sleeps: its weights and pool stay on the card while training runs")
    return tuple(result)
