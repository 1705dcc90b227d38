"""AReaL: its YAML with Hydra overrides behind it, launched through its own schedulers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.areal import checks
from autotune.launchers.frameworks.areal.config import RELEASES, Config, changed, known, overrides
from autotune.launchers.frameworks.areal.knobs import allocation_mode
from autotune.launchers.frameworks.areal.layout import layout, resident, split_sizes
from autotune.launchers.frameworks.areal.rows import TABLE
from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.dialects.hydra import literal_text, printed_overrides
from autotune.launchers.frameworks.dialects.printed_config import printed_trees
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.declared import SECTION
from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Constraint, Grid, Requires
from autotune.policies.values.provenance import Origin
from autotune.policies.values.rehearsing import Part

_SWANLAB_ID = 21  # characters of a run's id, lower-case letters and digits
_INTERPRETERS = re.compile(r"python(3(\.\d+)?)?")
_COMMAND = re.compile(r"(?:^|\s)\S*--config[= ]\S+")
_NAMES = re.compile(r"[\w.]+")
_ROUNDS = 3  # an unlimited budget follows the layout: where that changes, the budget must be written


class Areal(TabularFramework[Config]):
    """Asynchronous RL with FSDP2, Megatron or Archon trainers and SGLang or vLLM engines.

    Its step lines print the total, so that the last step needs no setting.
    """

    name = "areal"
    reasons: ClassVar[Mapping[str, str]] = {
        "config": "the job's own file of settings",
        "recover.*": "relaunches continue the checkpoints of this run, and AReaL itself does not relaunch",
        "stats_logger.wandb.id_suffix": "relaunches continue one W&B run",
        "scheduler.type": "autotune launches on Ray",
        "*.backend": "the part that the job's allocation_mode gives to it",
        "allocation_mode": "the parts of the cluster that the job's backends take",
    }
    settings_class = Config
    saves_by_time = True
    announces_end = True
    longest_request = "vllm.max_model_len"
    distribution = "areal"
    modules = ("areal",)
    releases = RELEASES
    table = TABLE
    is_whole = True
    own_settings = (
        "scheduler.type",
        "rollout.backend",
        "actor.backend",
        "stats_logger.wandb.id_suffix",
        *(f"recover.{name}" for name in ("mode", "experiment_name", "trial_name", "fileroot", "retries")),
    )
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    reads_declined = True
    model_key = "actor.path"

    def problems(self, job: Job) -> tuple[Problem, ...]:
        """Return the problems of the job's settings and its YAML."""
        if another := checks.another_program(job.framework_version):
            return (another,)
        config = Config(job)
        unknown = (problem for problem in self.unknown(config) if self.is_certain(config, problem))
        return (*unknown, *self.refused(config))

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield the settings that AReaL refuses at its start or once its models are loaded."""
        yield from checks.problems(config)
        yield from super().refused(config)

    def unknown(self, config: Config) -> Iterator[Problem]:
        """Yield the settings that the release standing for the job's AReaL does not know."""
        return checks.unknown(config)

    def is_certain(self, config: Config, problem: Problem) -> bool:
        """Return whether an unknown setting is a mistake: invalid, or similar to one of the exact release."""
        return problem.origin is Origin.WRITTEN or (config.release.exact and bool(problem.hint))

    def declined(self, config: Config) -> dict[str, str]:
        """Return the knobs that a job does not offer; an older release may lack a setting."""
        refused, release = super().declined(config), config.release.version
        for row in self.applicable(config):
            names = [name for name in _NAMES.findall(row.key) if name in known()]
            if absent := [name for name in names if name not in config.facts]:
                refused.setdefault(row.knob, f"AReaL {release} has no setting {absent[0]}")
        return refused

    def warnings_on(self, config: Config, cluster: Cluster) -> Iterator[str]:
        """Yield warnings about the job's nodes."""
        per_node = config.count("cluster.n_gpus_per_node")
        if 0 < cluster.gpus_per_node < per_node:
            yield (
                f"cluster.n_gpus_per_node = {per_node}, but a node of this cluster has "
                f"{cluster.gpus_per_node}; {checks.SHARED_SILENTLY}."
            )

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return recover.fileroot, or cluster.fileroot."""
        return Config(job).recover_root or None

    def last_step(self, job: Job) -> int | None:
        """Return the job's step limit; step lines count over all epochs."""
        return self.config(job).number("total_train_steps")

    def gpus(self, job: Job) -> int | None:
        """Return the GPUs of trainer and engines; None if their backends do not determine them."""
        config = self.config(job)
        if config.rollout is None or config.actor is None:
            return None
        return config.actor.ranks + (0 if config.colocated else config.rollout.ranks)

    def training(self, job: Job) -> Training:
        """Return the settings of a step's size and of the selection of its samples."""
        config = Config(job)
        sequences, count = config.samples, config.updates("actor")
        shuffle = config.get("train_dataset.shuffle") if config.says("train_dataset.shuffle") else None
        seed = config.number("seed")
        return Training(
            samples_per_step=sequences,
            global_batch=-(-sequences // count),
            updates_per_step=count,
            steps=config.number("total_train_steps"),
            epochs=config.number("total_train_epochs"),
            prompt_tokens=config.number("train_dataset.max_length"),
            response_tokens=config.number("gconfig.max_new_tokens"),
            learning_rate=config.share("actor.optimizer.lr"),
            seeds={} if seed is None else {"seed": seed},
            data_order="" if shuffle is None else "shuffled" if shuffle else "as the files have it",
        )

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the parallel sizes that heads and devices allow."""
        context = split_sizes(config, "actor", "context")
        megatron = config.trainer == "megatron"
        return {
            **transformer.recompute_modes(config.field, config.shape, megatron=megatron),
            "rollout_tensor_parallel": split_sizes(config, "rollout", "tensor"),
            "tensor_parallel": split_sizes(config, "actor", "tensor"),
            "sequence_parallel": context,
            "context_parallel": context,
        }

    def constraints(self, config: Config) -> Iterator[Constraint]:
        """Yield the constraint that optimizer state is offloaded together with weights, if both can be."""
        if "optimizer_offload" in {row.knob for row in self.offered(config)}:
            for knob, other, value in (
                ("param_offload", "optimizer_offload", True),
                ("optimizer_offload", "param_offload", False),
            ):
                why = "the optimizer state follows offloaded weights to the host"
                yield Requires(knob=knob, value=value, other=other, values=(value,), why=why)

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        offered = self.offered(Config(job))
        own = msgspec.structs.replace(Knobs(), **{row.knob: getattr(knobs, row.knob) for row in offered})
        result: dict[str, Any] = {}
        for _ in range(_ROUNDS):
            config = Config(changed(job, result))
            wanted = rows.settings_for(offered, config, own)
            more = {
                name: value
                for name, value in wanted.items()
                if _differs(config, name, value) or config.reference(name) in wanted
            }
            if not more:
                break
            result |= more
        return result | _pinned(Config(job), Config(changed(job, result)), result)

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the settings that a job needs to start, to resume and to keep its logs separate."""
        own: dict[str, Any] = {}
        launcher = config.launcher
        if not launcher and not config.has("scheduler.type"):
            own["scheduler.type"] = "ray"
        for role, backend in (("rollout", config.rollout), ("actor", config.actor)):
            if backend is not None and not config.text(f"{role}.backend") and not config.is_of_earlier:
                own[f"{role}.backend"] = str(backend)
        engines, trainer = config.rollout, config.actor
        if launcher and not config.text("allocation_mode") and engines is not None and trainer is not None:
            own["allocation_mode"] = allocation_mode(engines, trainer, shared=config.colocated)
        own |= _recovery(config, job, run=run) if config.resumes else {}
        # AReaL derives its W&B run id from experiment and trial names, and continues that run.
        suffix = "stats_logger.wandb.id_suffix"
        named = config.says(suffix) and config.text(suffix) != "timestamp"
        if config.text("stats_logger.wandb.mode") != "disabled" and not named:
            own[suffix] = run
        return own

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render the training script with `--config`, followed by all overrides.

        All roles write to the script's output; AReaL's log files, to which attempts append, only repeat it.
        """
        own = self.settings(job, knobs)
        config = Config(changed(job, own))
        needed = self.added(config, self.run_settings(config, job, run=run, resume=resume))
        settings = {**overrides(job), **needed, **own}
        argv = [*job.command]
        if argv and _INTERPRETERS.fullmatch(argv[0]):
            argv[0] = "{python}"
        if job.config is not None and "--config" not in argv:
            argv += ["--config", job.config]
        return Command(
            argv=(*argv, *self.words(settings)),
            env={**_loggers(config, run=run), **job.env},
            cwd=job.workdir,
            ray_native=(config.launcher or config.text("scheduler.type") or "ray") == "ray",
        )

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return overrides that are valid whether or not the job's YAML has the key."""
        return tuple(f"++{name}={literal_text(value)}" for name, value in settings.items())

    def printed(self, text: str) -> dict[str, Any]:
        """Return the YAML that a log prints, and the overrides of its command line."""
        commands = "\n".join(line for line in text.splitlines() if _COMMAND.search(line))
        top = tuple(key for key in known().kinds if "." not in key)
        return printed_trees(text, known().kinds) | printed_overrides(commands, known(), top=top)

    def can_force_longest(self, job: Job) -> bool:
        """Return whether `gconfig.ignore_eos` forces every response to the job's length limit."""
        return Config(job).lengths_known

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps and its own names and folders, without trackers and checkpoints."""
        config = Config(job)
        off = document(__package__, "trial.yaml", dict[str, Any])
        own = {**off, "total_train_steps": steps, **_places(config, folder)}
        if longest:
            own["gconfig.ignore_eos"] = True
        return msgspec.structs.replace(job, settings={**overrides(job), **_without_idle_nulls(config, own)})

    def validates(self, config: Config) -> bool:
        """Return whether the job sets a validation interval."""
        return any(config.has(f"evaluator.freq_{unit}") for unit in ("epochs", "steps", "secs"))

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves for recovery and, if the job does, validates in the same step."""
        rehearsed = super().rehearsal(job, folder=folder, part=part, longest=longest)
        own = _without_idle_nulls(Config(job), rehearsed.settings)
        return msgspec.structs.replace(rehearsed, settings=own, resume=False)


def _without_idle_nulls(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's settings without nulls that the job has as well."""
    return {
        name: value
        for name, value in settings.items()
        if value is not None or config.has(name) or name in config.given
    }


def _differs(config: Config, name: str, value: Any) -> bool:
    if value is None:
        return config.has(name) or not config.says(name)
    return bool(config.get(name) != value)


def _pinned(before: Config, after: Config, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that refer to a changed one, with their present values, so that they stay.

    Only the same setting of another role is meant to follow.
    """
    keys = {name.rpartition(".")[2] for name in written}
    return {
        name: before.get(name)
        for name in before.names()
        if not any(f"{name}.".startswith(f"{each}.") for each in written)
        and name.rpartition(".")[2] not in keys
        and before.facts.kind_of(name) not in (None, SECTION)
        and before.get(name) != after.get(name)
    }


def _recovery(config: Config, job: Job, *, run: str) -> dict[str, Any]:
    """Return the settings with which a job resumes from its own checkpoints and no others.

    AReaL resumes from anything under recover.fileroot, so a run gets its own subfolder there unless the job
    has `resume: true`. AReaL's retries, which restart with unchanged settings, are turned off.
    """
    mode = "auto" if config.is_of_earlier else "on"
    own: dict[str, Any] = {} if config.recovers else {"recover.mode": mode}
    if not config.says_when_to_save:
        own |= config.interval
    for name in ("experiment_name", "trial_name"):
        if not config.has(f"recover.{name}"):
            own[f"recover.{name}"] = config.text(name)
    if not job.resume:
        own["recover.fileroot"] = f"{config.recover_root.rstrip('/')}/autotune/{run}"
    elif not config.has("recover.fileroot"):
        own["recover.fileroot"] = config.recover_root
    return own | {"recover.retries": 0}


def _loggers(config: Config, *, run: str) -> dict[str, str]:
    """Return environment variables with which SwanLab continues its run, because AReaL passes no run id."""
    if config.text("stats_logger.swanlab.mode") in ("", "disabled"):
        return {}
    name = re.sub(r"[^a-z0-9]", "", f"autotune{run}".lower())
    return {"SWANLAB_RUN_ID": name.ljust(_SWANLAB_ID, "0")[:_SWANLAB_ID], "SWANLAB_RESUME": "allow"}


def _places(config: Config, folder: str) -> dict[str, str]:
    """Return settings that replace spelled-out names and folders with ones of this run alone."""
    tag = re.sub(r"[^A-Za-z0-9]", "", folder)[-32:] or "trial"
    own = {"trial_name": f"autotune{tag}", "fileroot": folder}
    spelled = {
        name: own[key]
        for name in config.names()
        for section, _, key in (name.rpartition("."),)
        if key in own and section not in ("", "cluster") and config.reference(name) is None
    }
    return {"cluster.fileroot": folder, "trial_name": own["trial_name"], **spelled}
