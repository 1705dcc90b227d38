"""How an attempt of a verl job is started: its command line, checkpoints and loggers."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from autotune.launchers.frameworks.core.checkpoints import absolute, folder_of
from autotune.launchers.frameworks.dialects.hydra import bare, override
from autotune.launchers.frameworks.verl.config import ENV_VARS, MODEL, ROLLOUT, Config, written
from autotune.launchers.frameworks.verl.keys import taken
from autotune.launchers.frameworks.verl.knobs import SNAPSHOT_TOOL, write
from autotune.launchers.frameworks.verl.overrides import overrides_in
from autotune.policies.values.command import Command
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs

ENTRY = ("{python}", "-m", "verl.trainer.main_ppo")
_KEPT = 2  # checkpoints: with one, verl deletes the old one before the new one is complete
_DAY_S = "86400"
_WORKERS = "ray_kwargs.ray_init.runtime_env.py_executable"
_UNSAFE = re.compile(r"[^\w.-]+")

Settings = dict[str, Any]


def command(job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
    """Render an attempt: the job's own overrides, what its knobs change, and what a run of ours needs."""
    settings = written(job) | write(Config(job), knobs)
    whole = Config(msgspec.structs.replace(job, settings=settings))
    needed = needs(job, whole, run=run, attempt=attempt, resume=resume)
    settings = {key: value for key, value in settings.items() if bare(key) not in needed}
    settings |= {whole.key(key): value for key, value in needed.items()}
    words = tuple(override(taken(key, job.framework_version), value) for key, value in settings.items())
    preloads = f"{ENV_VARS}.LD_PRELOAD" in {bare(key) for key in settings}
    return Command(
        argv=(*entry(job), *words),
        env={
            "RAY_DEDUP_LOGS": "0",
            **{name: value for name, value in job.env.items() if not (preloads and name == "LD_PRELOAD")},
        },
        cwd=job.workdir,
    )


def entry(job: Job) -> tuple[str, ...]:
    """Return the program with the words that are no overrides; the job may name another than verl's own."""
    if not job.command:
        return ENTRY
    return tuple(word for word in job.command if not overrides_in([word]))


def is_own(job: Job) -> bool:
    """Return whether the job starts verl's own trainer and not a recipe with settings of its own."""
    return not job.command or any(word.endswith("main_ppo") for word in job.command)


def needs(job: Job, config: Config, *, run: str, attempt: int, resume: bool) -> Settings:
    """Return the settings that make an attempt resumable, and its loggers go on where they stopped."""
    folder = checkpoints(job, config, run=run)
    result: Settings = {
        "trainer.default_local_dir": folder,
        "trainer.resume_mode": "auto"
        if resume and config.text("trainer.resume_mode") != "disable"
        else "disable",
    }
    if not config.has("trainer.save_freq"):
        result["trainer.save_freq"] = job.recovery.save_every or SAVE_STEPS
    if config.count("trainer.save_freq") > 0 or "trainer.save_freq" in result:
        for key in ("trainer.max_actor_ckpt_to_keep", *config.of_critic("trainer.max_critic_ckpt_to_keep")):
            if not config.has(key):
                result[key] = _KEPT
    loggers = _listed(config.get("trainer.logger"))
    if job.python is not None and config.get(_WORKERS) is None:
        result[_WORKERS] = "{python}"  # verl's own null would make Ray take the cluster's interpreter
    if "console" not in loggers or "file" not in loggers:
        result["trainer.logger"] = [*loggers, *(name for name in ("console", "file") if name not in loggers)]
    variables = _variables(job, config, loggers, folder=folder, run=run, attempt=attempt)
    result |= {f"{ENV_VARS}.{name}": value for name, value in variables.items() if name not in job.env}
    if config.text("global_profiler.tool") == SNAPSHOT_TOOL and not config.has("global_profiler.save_path"):
        result["global_profiler.save_path"] = f"{folder}/memory/attempt-{attempt:04d}"
    return {key: value for key, value in result.items() if config.get(key) != value or not config.has(key)}


def checkpoints(job: Job, config: Config, *, run: str) -> str:
    """Return the absolute folder of a run's checkpoints."""
    named = _named_folder(config)
    project, experiment = config.text("trainer.project_name"), config.text("trainer.experiment_name")
    return folder_of(job, named or f"checkpoints/{project}/{experiment}", run=run, named=bool(named))


def checkpoint_folder(job: Job, config: Config) -> str:
    """Return the absolute folder below which the checkpoints of all runs of a job go."""
    return absolute(job, _named_folder(config) or "checkpoints")


def _named_folder(config: Config) -> str:
    named = config.text("trainer.default_local_dir")
    return "" if "${" in named else named


def trial(job: Job, *, folder: str, steps: int, longest: bool) -> Job:
    """Return the job with a few steps under names, folders and loggers of its own."""
    own: Settings = {
        "trainer.default_local_dir": f"{folder}/checkpoints",
        "trainer.project_name": "autotune",
        "trainer.experiment_name": f"{job.name}-trial",
        "trainer.logger": ["console", "file"],
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.log_val_generations": 0,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
    }
    if longest and can_force_longest(Config(job)):
        own[f"{ROLLOUT}.ignore_eos"] = True
    settings = {key: value for key, value in job.settings.items() if bare(key) not in own}
    return msgspec.structs.replace(job, settings={**settings, **own}, resume=False)


def can_force_longest(config: Config) -> bool:
    """Return whether answers can be made as long as allowed: verl passes `ignore_eos` to vLLM alone."""
    return config.rollout == "vllm"


def model_path(config: Config) -> str | None:
    """Return the model that the job names."""
    return config.text(f"{MODEL}.path") if config.has(f"{MODEL}.path") else None


def _variables(
    job: Job, config: Config, loggers: list[str], *, folder: str, run: str, attempt: int
) -> dict[str, str]:
    """Return variables of verl's own process: a Ray worker inherits nothing from whoever starts it."""
    result = {
        "VERL_FILE_LOGGER_ROOT": f"{folder}/metrics/attempt-{attempt:04d}",
        # verl says every minute that it waits for rollouts, even for dead ones: a hang has to be silent.
        "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": _DAY_S,
    }
    if "wandb" in loggers:
        result |= {"WANDB_RUN_ID": _UNSAFE.sub("-", f"{job.name}-{run}"), "WANDB_RESUME": "allow"}
    if "tensorboard" in loggers:
        names = f"{config.text('trainer.project_name')}/{config.text('trainer.experiment_name')}"
        result["TENSORBOARD_DIR"] = absolute(job, f"tensorboard_log/{names}")
    return {name: value for name, value in result.items() if not config.has(f"{ENV_VARS}.{name}")}


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
