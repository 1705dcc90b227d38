"""verl: PPO and GRPO with FSDP or Megatron trainers and vLLM or SGLang engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import splits, transformer
from autotune.launchers.frameworks.core.checkpoint_folders import RESUMED, absolute, folder_of
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.core.trackers import one_wandb_run
from autotune.launchers.frameworks.core.versions import is_before
from autotune.launchers.frameworks.dialects.hydra import bare, override
from autotune.launchers.frameworks.dialects.printed_config import Program
from autotune.launchers.frameworks.dialects.settings import with_sizes
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.verl import checks, keys, parts
from autotune.launchers.frameworks.verl.config import ACTOR, MEGATRON, MODEL, ROLLOUT, TOP, Config
from autotune.launchers.frameworks.verl.keys import OTHER_CONFIG
from autotune.launchers.frameworks.verl.knobs import LD_PRELOAD, SNAPSHOT_TOOL, requests
from autotune.launchers.frameworks.verl.layout import layout, resident
from autotune.launchers.frameworks.verl.rows import TABLE
from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.command import Command
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Grid
from autotune.policies.values.provenance import CodeQuery

_SECTIONS = ("actor_rollout_ref", "data", "trainer", "algorithm", "critic", "reward")
_SEEDS = ("data.seed", f"{ACTOR}.data_loader_seed", f"{ROLLOUT}.seed")
_KEPT = 2  # checkpoints; with one, verl deletes the old one before the new one is complete
_RUNTIME = "ray_kwargs.ray_init.runtime_env"
_DAY_S = "86400"
FILES = "logger: file"  # a name in the code query
_BACKENDS = r"supported_backend\s*=\s*\[[^\]]*[\"']file[\"']"  # verl/utils/tracking.py
_CONFIGS = ("trainer/config/_generated_{}.yaml", "trainer/config/{}.yaml")
_ENDS_AT_LAST = ("is_last_step", "0.3")  # a variable of the loop, and the first release that has it


class Verl(TabularFramework[Config]):
    """verl's trainer, or a recipe with the same settings; settings are Hydra overrides."""

    name = "verl"
    settings_class = Config
    saves_by_time = False
    announces_end = False
    loss = "actor/pg_loss"
    longest_request = "actor_rollout_ref.rollout.max_model_len"
    without_critic: ClassVar[Mapping[str, Any]] = {"algorithm.adv_estimator": "grpo"}
    reasons: ClassVar[Mapping[str, str]] = {
        "trainer.default_local_dir": "checkpoints of this run alone, from which its relaunches continue",
        "trainer.resume_mode": RESUMED,
        "trainer.logger": "the console shows progress, the file its metrics",
        "trainer.save_freq": "the job saves nothing, and a relaunch needs a checkpoint",
        "trainer.max_*_ckpt_to_keep": "older checkpoints of this run are deleted, never others",
        f"{_RUNTIME}.py_executable": "the workers run the job's interpreter",
        "*VERL_REPLAY_BUFFER_DEBUG*": "a job that hangs prints nothing, so that it is noticed",
        "*WANDB_*": "relaunches continue one W&B run",
        "*TENSORBOARD_DIR": "relaunches continue one TensorBoard log",
        "*VERL_FILE_LOGGER_ROOT": "metrics of this attempt, for the certificate",
        "global_profiler.save_path": "memory snapshots of this attempt",
    }
    distribution = "verl"
    version_file = "verl/version/version"
    modules = ("verl",)
    releases = keys.RELEASES
    table = TABLE
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    reads_declined = True
    own_settings = (
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.resume_mode",
    )
    elder = keys.OLDER
    is_whole = True
    entry = ("{python}", "-m", "verl.trainer.main_ppo")
    unread_in = "0.9.1"
    program = Program(sections=_SECTIONS, top=TOP, entry="main_ppo")
    top = TOP
    engine_nodes = tuple(
        f"{node}.engine_kwargs.{{engine}}" for node in (ROLLOUT, "reward.reward_model.rollout")
    )
    model_key = f"{MODEL}.path"
    steps_key = "trainer.total_training_steps"
    prompt_keys = PromptKeys(files="data.train_files", field="prompt", field_key="data.prompt_key")
    forces_longest: ClassVar[Mapping[str, Any]] = {f"{ROLLOUT}.ignore_eos": True}
    no_file = "write its settings under `settings:` as flat keys, such as trainer.nnodes: 1"

    def declared(self, version: str) -> keys.Keys:
        """Return the settings of a known release, those of both model engines."""
        first, second = (keys.keys_of(version, engine) for engine in keys.ENGINES)
        return msgspec.structs.replace(first, types=first.types | second.types)

    def unknown(self, config: Config) -> Iterator[Problem]:
        """Yield the settings that the release does not have; a recipe may have more."""
        return checks.unknown(config) if config.is_own else iter(())

    def is_certain(self, config: Config, problem: Problem) -> bool:
        """Return whether an unknown setting is a mistake: its release lacks it, or no release had it."""
        return super().is_certain(config, problem) or checks.is_misspelt(config, problem)

    def settings_of(self, job: Job, component: Component, text: str) -> Mapping[str, str] | None:
        """Return the settings of the critic, the reference or the reward model."""
        return parts.settings_of(component, megatron=Config(job).megatron, text=text)

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return what to look up in the installed verl: names, loggers and configuration."""
        query = super().code_query(job)
        if query is None:
            return None
        name = "ppo_megatron_trainer" if Config(job).megatron else "ppo_trainer"
        is_other = any(word.startswith(OTHER_CONFIG) for word in job.command)
        return msgspec.structs.replace(
            query,
            names=query.names | {*_RUNTIME.split("."), _ENDS_AT_LAST[0]},
            patterns={FILES: _BACKENDS},
            configs=() if is_other else tuple(form.format(name) for form in _CONFIGS),
        )

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield settings that make the job fail at its start or at its first sequence of maximum length."""
        yield from super().refused(config)
        yield from checks.refused(config)

    def engines(self, config: Config) -> tuple[str, ...]:
        """Return the engines; a reward model may use another one than the policy."""
        return ("vllm", "sglang")

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the knob values that the job's GPUs, heads, batches and limits allow."""
        stage, groups = config.stage, splits.divisors(config.stage)
        tensor = config.ranks(MEGATRON, "tensor_model")
        heads = [] if shape is None else [shape.heads, shape.kv_heads]
        tensors = [n for n in groups if stage % (n * config.parallel) == 0 and not any(h % n for h in heads)]
        # Dynamic batching needs a token limit of at least the longest sequence.
        limit = config.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * config.parallel
        fixed = config.dynamic or limit < config.longest
        return {
            **transformer.recompute_modes(config.field, config.shape, megatron=config.megatron),
            "concurrency": Grid(minimum=1, maximum=requests(config), multiple=1),
            "rollout_tensor_parallel": checks.rollout_sizes(config),
            "microbatch_size": tuple(reversed(splits.divisors(config.mini_batch))) or (1,),
            "dynamic_batching": (True,) if fixed else (False, True),
            "sequence_parallel": checks.sequence_sizes(config),
            "shard_group": splits.wider(config.shard_group, config.world),
            **transformer.sizes(
                config.world, shape, partial(config.ranks, MEGATRON), etp=config.splits_experts
            ),
            "tensor_parallel": tuple(tensors),
            "context_parallel": tuple(n for n in groups if stage % (n * tensor) == 0),
        }

    def phases(self, config: Config) -> dict[str, tuple[Phase, ...]]:
        """Return the phases in which knobs free memory, where they depend on the job."""
        scoring = () if config.reference else (Phase.LOG_PROB,)  # a reference takes the actor's turn there
        elsewhere = tuple(phase for phase in Phase if phase is not Phase.LOG_PROB)
        return {
            "param_offload": _parked(config, Phase.CHECKPOINT, *scoring),
            "optimizer_offload": _parked(config),
            "tokens_per_microbatch": () if config.critic else elsewhere,
            "entropy_chunking": () if config.entropy else (Phase.LOG_PROB, Phase.NONE),
        }

    def gpus(self, job: Job) -> int:
        """Return how many GPUs the job's settings request, for the trainer and disaggregated engines."""
        config = self.config(job)
        return config.world + (0 if config.colocated else config.rollout_world)

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None if engines have their own GPUs or a batch does not divide."""
        if not self.config(job).colocated:
            return None
        resized = with_sizes(job, {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": per_node})
        config = self.config(resized)
        return resized if config.mini_batch and config.sequences % config.world == 0 else None

    def training(self, job: Job) -> Training:
        """Return the settings of a step's size and of the selection of its samples."""
        config = Config(job)
        update, sequences = config.update, config.sequences
        epochs = max(1, config.count(f"{ACTOR}.ppo_epochs"))
        return Training(
            samples_per_step=sequences,
            global_batch=update,
            updates_per_step=-(-sequences // update) * epochs if update else None,
            steps=self.last_step(job),
            epochs=config.count("trainer.total_epochs") or None,
            prompt_tokens=config.count("data.max_prompt_length") or None,
            response_tokens=config.count("data.max_response_length") or None,
            learning_rate=config.share(f"{ACTOR}.optim.lr") or None,
            seeds={key: config.count(key) for key in _SEEDS if config.get(key) is not None},
            data_order="shuffled by `data.seed`" if config.flag("data.shuffle") else "as the files have it",
        )

    def last_step(self, job: Job) -> int | None:
        """Return the last step of the training; before 0.3 `total_training_steps - 1`."""
        last, config = super().last_step(job), Config(job)
        return last - 1 if last and _ends_early(config) else last

    def of_steps(self, config: Config, steps: int) -> dict[str, Any]:
        """Return the settings that end the training after a number of steps."""
        return super().of_steps(config, steps + 1 if _ends_early(config) else steps)

    def together(self, config: Config, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changed settings in the order of verl's own configuration."""
        return dict(sorted(changes.items()))

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as `python -m verl.trainer.main_ppo` with Hydra overrides."""
        command = super().command(job, knobs, run=run, attempt=attempt, resume=resume)
        # Only the workers preload libraries, not verl's own process.
        if LD_PRELOAD not in (bare(word).partition("=")[0] for word in command.argv):
            return command
        env = {name: value for name, value in command.env.items() if name != "LD_PRELOAD"}
        return msgspec.structs.replace(command, env=env)

    def words(self, settings: Mapping[str, Any], version: str | None = None) -> tuple[str, ...]:
        """Return settings as Hydra overrides for the job's release, otherwise for the newest."""
        return tuple(override(keys.taken(key, version), value) for key, value in settings.items())

    def command_words(self, config: Config, settings: dict[str, Any]) -> tuple[str, ...]:
        """Return an attempt's settings as Hydra overrides."""
        return self.words(settings, config.release.version)

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the settings that make an attempt resumable and let its loggers continue their run."""
        resumes = resume and config.text("trainer.resume_mode") != "disable"
        loggers = _loggers(config)
        wanted = ("console", "file") if _writes_files(config) else ("console",)
        own: dict[str, Any] = {
            "trainer.default_local_dir": _checkpoints(config, job, run=run),
            "trainer.resume_mode": "auto" if resumes else "disable",
        }
        if missing := [name for name in wanted if name not in loggers]:
            own["trainer.logger"] = [*loggers, *missing]
        if not config.has("trainer.save_freq"):
            own["trainer.save_freq"] = job.recovery.save_every or SAVE_STEPS
        if config.saves and not job.resume:  # otherwise the folder has the user's checkpoints
            models = ("actor", "critic") if config.critic else ("actor",)
            kept = (f"trainer.max_{model}_ckpt_to_keep" for model in models)
            own |= {key: _KEPT for key in kept if not config.has(key)}
        if self._absent(config, _RUNTIME):
            return own  # it does not pass Ray settings on
        if job.python is not None and config.get(f"{_RUNTIME}.py_executable") is None:
            # With verl's default null, Ray would use the cluster's interpreter.
            own[f"{_RUNTIME}.py_executable"] = "{python}"
        # verl logs every minute that it waits for rollouts, even dead ones, which would hide a hang.
        variables = {"VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": _DAY_S}
        if "wandb" in loggers:
            variables |= one_wandb_run(job, run)
        if "tensorboard" in loggers:
            variables["TENSORBOARD_DIR"] = absolute(job, f"tensorboard_log/{_experiment(config)}")
        return own | _variables(config, job, variables)

    def of_attempt(self, config: Config, job: Job, *, run: str, attempt: int) -> dict[str, Any]:
        """Return where an attempt writes its metrics and memory snapshots."""
        folder, own = _checkpoints(config, job, run=run), dict[str, Any]()
        if _writes_files(config) and not self._absent(config, _RUNTIME):
            variables = {"VERL_FILE_LOGGER_ROOT": f"{folder}/metrics/attempt-{attempt:04d}"}
            own = _variables(config, job, variables)
        place = "global_profiler.save_path"
        if config.text("global_profiler.tool") == SNAPSHOT_TOOL and not config.has(place):
            own[place] = f"{folder}/memory/attempt-{attempt:04d}"
        return own

    def checkpoint_folder(self, job: Job) -> str:
        """Return trainer.default_local_dir, or the folder in which every run gets its own subfolder."""
        return absolute(job, _named_folder(Config(job)) or "checkpoints")

    def can_force_longest(self, job: Job) -> bool:
        """Return whether responses can be forced to full length: verl passes `ignore_eos` only to vLLM."""
        return Config(job).engine == "vllm"


def _parked(config: Config, *used: Phase) -> tuple[Phase, ...]:
    """Return the phases in which offloaded state is off the GPU; verl loads all of it for an update.

    `used`: further phases that load it. With a critic every phase gains, because the state of the model that
    is not updated stays offloaded.
    """
    busy = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, *used)
    return () if config.critic else tuple(phase for phase in Phase if phase not in busy)


def _variables(config: Config, job: Job, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return variables for verl's own process; its Ray workers do not inherit them."""
    own = {f"{_RUNTIME}.env_vars.{name}": value for name, value in variables.items() if name not in job.env}
    return {key: value for key, value in own.items() if not config.has(key)}


def _loggers(config: Config) -> list[str]:
    value = config.get("trainer.logger")
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _writes_files(config: Config) -> bool:
    """Return whether the job's verl has the file logger, as releases from 0.6 do."""
    return config.release.exact or (config.code is not None and FILES in config.code.names)


def _ends_early(config: Config) -> bool:
    """Return whether the training loop increments the step before comparing it with the last one."""
    name, release = _ENDS_AT_LAST
    return is_before(config.version, release) and not (config.code and name in config.code.names)


def _experiment(config: Config) -> str:
    return f"{config.text('trainer.project_name')}/{config.text('trainer.experiment_name')}"


def _named_folder(config: Config) -> str:
    named = config.text("trainer.default_local_dir")
    return "" if "${" in named else named


def _checkpoints(config: Config, job: Job, *, run: str) -> str:
    """Return the absolute folder of a run's checkpoints."""
    named = _named_folder(config)
    return folder_of(job, named or f"checkpoints/{_experiment(config)}", run=run, named=bool(named))
