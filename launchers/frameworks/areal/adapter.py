"""AReaL: its YAML with Hydra overrides behind it, launched through its own schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.areal import keys
from autotune.launchers.frameworks.areal.checks import problems
from autotune.launchers.frameworks.areal.config import Config, overrides
from autotune.launchers.frameworks.areal.engines import (
    Site,
    allocation_mode,
    pinned,
    samples,
    settings_for,
    updates,
)
from autotune.launchers.frameworks.areal.overrides import printed, words
from autotune.launchers.frameworks.areal.profile import profile_of
from autotune.launchers.frameworks.areal.recover import recover_root, recover_settings, resumable
from autotune.launchers.frameworks.core import rehearsals
from autotune.launchers.frameworks.core.data import GuidedFramework, document
from autotune.launchers.frameworks.tabular.lines import lines, marker_of
from autotune.policies.certificate.contents import Training
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import STEPS, LateEvent, Met, Part

_SWANLAB_ID = 21  # characters of a run's id, lower-case letters and digits
_OLD_LAUNCHER = "areal.infra.launcher."
_INTERPRETERS = re.compile(r"python(3(\.\d+)?)?")
_ROUNDS = 3  # an unlimited budget follows the layout: where that changes, the budget must be written


class Areal(GuidedFramework):
    """Asynchronous RL with FSDP2, Megatron or Archon trainers and SGLang or vLLM engines.

    Every line of a step says how many there are, so that no setting has to tell the last one.
    """

    name = "areal"
    saves_by_time = True
    announces_end = True
    distribution = "areal"
    modules = ("areal",)
    releases = keys.releases()
    traces: tuple[str, ...] = lines(__package__).traces

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's settings and its YAML."""
        return tuple(problems(job))

    def model_path(self, job: Job) -> str | None:
        """Return the folder or hub name of the actor's model."""
        return Config(job).text("actor.path") or None

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return recover.fileroot, or cluster.fileroot."""
        return recover_root(Config(job)) or None

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with AReaL's defaults filled in, and what limits them."""
        return profile_of(job, cluster, name=self.name)

    def training(self, job: Job) -> Training:
        """Return the sizes of a step, and what decides which samples it has."""
        site = Site(job)
        config, sequences, count = site.config, samples(site), updates(site, "actor")
        shuffle = config.get("train_dataset.shuffle") if config.says("train_dataset.shuffle") else None
        return Training(
            samples_per_step=sequences,
            global_batch=-(-sequences // count),
            updates_per_step=count,
            steps=config.number("total_train_steps"),
            epochs=config.number("total_train_epochs"),
            prompt_tokens=config.number("train_dataset.max_length"),
            response_tokens=config.number("gconfig.max_new_tokens"),
            learning_rate=config.share("actor.optimizer.lr"),
            seeds={key: seed for key in ("seed",) if (seed := config.number(key)) is not None},
            data_order="" if shuffle is None else "shuffled" if shuffle else "as the files have it",
        )

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render the training script with `--config` and every override behind it.

        All roles write to the script's own output, so that AReaL's log files, to which attempts append,
        would only repeat it.
        """
        changed = self.settings(job, knobs)
        site = Site(job, changed)
        settings = {**overrides(job), **dict(_completed(job, site, run=run)), **changed}
        argv = [*job.command]
        if argv and _INTERPRETERS.fullmatch(argv[0]):
            argv[0] = "{python}"
        if job.config is not None and "--config" not in argv:
            argv += ["--config", job.config]
        return Command(
            argv=(*argv, *words(settings)),
            env={**_loggers(site, run=run), **job.env},
            cwd=job.workdir,
            ray_native=_takes_gpus_from_ray(job, site),
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        offered = tuple(profile_of(job, _NOWHERE, name=self.name).supported)
        changed: dict[str, Any] = {}
        for _ in range(_ROUNDS):
            more = settings_for(Site(job, changed), knobs, offered)
            if not more:
                break
            changed |= more
        return changed | pinned(Site(job), Site(job, changed), changed)

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as overrides of AReaL's command line."""
        return words(settings)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the overrides of the command line, where a log shows one."""
        return printed(text)

    def marker(self, line: str) -> Marker | None:
        """Return what a line says about steps, recovery and the memory that a phase left in use."""
        return marker_of(__package__, line)

    def can_force_longest(self, job: Job) -> bool:
        """Return whether `gconfig.ignore_eos` makes every answer as long as the job's own limit."""
        return Site(job).lengths_known

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps, names and folders of its own, and nothing reported or saved."""
        config = Config(job)
        off = document(__package__, "trial.yaml", dict[str, Any])
        own: dict[str, Any] = {**off, "total_train_steps": steps, **dict(_places(config, folder))}
        own = {name: value for name, value in own.items() if value is not None or config.has(name)}
        if longest:
            own["gconfig.ignore_eos"] = True
        return msgspec.structs.replace(job, settings={**overrides(job), **own})

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself recovers from and validates."""
        site = Site(job)
        without = [] if site.lengths_known else [LateEvent.LENGTH]
        without += [] if resumable(job, site) else [LateEvent.SAVE]
        without += [] if _validates(site.config) else [LateEvent.VALIDATION]
        return rehearsals.met(__package__, without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves for recovery and validates in the same step, where the job does."""
        site = Site(job)
        trial = self.trial(job, folder=folder, steps=STEPS[part], longest=longest)
        trial = msgspec.structs.replace(trial, resume=False)
        if not resumable(job, site):
            return trial
        own = rehearsals.additions(__package__, validation=_validates(site.config))
        own = {name: value for name, value in own.items() if value is not None or site.config.has(name)}
        return msgspec.structs.replace(trial, settings={**trial.settings, **own})


def _validates(config: Config) -> bool:
    return any(config.has(f"evaluator.freq_{unit}") for unit in ("epochs", "steps", "secs"))


_NOWHERE = Cluster(address="", nodes=0, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)


def _old_launcher(job: Job) -> str:
    """Return `local`, `ray` or `slurm` where the job starts through a launcher of one process per rank."""
    word = next((w for w in job.command if w.startswith(_OLD_LAUNCHER)), "")
    return word.removeprefix(_OLD_LAUNCHER)


def _takes_gpus_from_ray(job: Job, site: Site) -> bool:
    launcher = _old_launcher(job)
    return (launcher or site.config.text("scheduler.type") or "ray") == "ray"


def _completed(job: Job, site: Site, *, run: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings without which the job would not start, could not continue or would mix its logs."""
    config, launcher = site.config, _old_launcher(job)
    if not launcher and not config.has("scheduler.type"):
        yield "scheduler.type", "ray"
    for role, backend in (("rollout", site.rollout), ("actor", site.actor)):
        if backend is not None and not config.text(f"{role}.backend"):
            yield f"{role}.backend", str(backend)
    if (
        launcher
        and not config.text("allocation_mode")
        and site.rollout is not None
        and site.actor is not None
    ):
        yield "allocation_mode", allocation_mode(site.rollout, site.actor, shared=site.colocated)
    yield from recover_settings(job, site, run=run).items()
    # AReaL names its W&B run after experiment and trial and continues it; another run is another line.
    suffix = config.text("stats_logger.wandb.id_suffix")
    written = config.says("stats_logger.wandb.id_suffix")
    if config.text("stats_logger.wandb.mode") != "disabled" and (not written or suffix == "timestamp"):
        yield "stats_logger.wandb.id_suffix", run


def _loggers(site: Site, *, run: str) -> dict[str, str]:
    """Return the environment in which SwanLab continues its run, as AReaL names none to it."""
    if site.config.text("stats_logger.swanlab.mode") in ("", "disabled"):
        return {}
    name = re.sub(r"[^a-z0-9]", "", f"autotune{run}".lower())
    return {"SWANLAB_RUN_ID": name.ljust(_SWANLAB_ID, "0")[:_SWANLAB_ID], "SWANLAB_RESUME": "allow"}


def _places(config: Config, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield names and folders that no other run uses, wherever the job spells them out."""
    tag = re.sub(r"[^A-Za-z0-9]", "", folder)[-32:] or "trial"
    yield "cluster.fileroot", folder
    yield "trial_name", f"autotune{tag}"
    for name in config.written():
        section, _, key = name.rpartition(".")
        if not section or section == "cluster" or config.reference(name) is not None:
            continue
        if key == "trial_name":
            yield name, f"autotune{tag}"
        elif key == "fileroot":
            yield name, folder
