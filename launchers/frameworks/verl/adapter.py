"""verl: PPO and GRPO with FSDP or Megatron trainers and vLLM or SGLang engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.checkpoints import absolute, folder_of
from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.dialects.hydra import bare, override
from autotune.launchers.frameworks.dialects.printed_config import Program, printed
from autotune.launchers.frameworks.tabular import rows
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.lines import lines
from autotune.launchers.frameworks.verl import checks, keys
from autotune.launchers.frameworks.verl.config import ACTOR, MEGATRON, MODEL, ROLLOUT, TOP, Config
from autotune.launchers.frameworks.verl.knobs import (
    LD_PRELOAD,
    READERS,
    SNAPSHOT_TOOL,
    WHEN,
    WRITERS,
    requests,
)
from autotune.launchers.frameworks.verl.layout import layout, placement, resident
from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.command import Command
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import AtLeast, Constraint, Divides, Grid, Placement, Requires

_SECTIONS = ("actor_rollout_ref", "data", "trainer", "algorithm", "critic", "reward")
_PROGRAM = Program(sections=_SECTIONS, top=TOP, entry="main_ppo")
_SEEDS = ("data.seed", f"{ACTOR}.data_loader_seed", f"{ROLLOUT}.seed")
_KEPT = 2  # checkpoints: with one, verl deletes the old one before the new one is complete
_RUNTIME = "ray_kwargs.ray_init.runtime_env"
_DAY_S = "86400"
_UNSAFE = re.compile(r"[^\w.-]+")
_LONGEST = "data.max_prompt_length + data.max_response_length = "


class Verl(TabularFramework[Config]):
    """verl's own trainer, or a recipe that takes its settings; settings are Hydra overrides."""

    name = "verl"
    saves_by_time = False
    announces_end = False
    loss = "actor/pg_loss"
    traces: tuple[str, ...] = lines(__package__).traces
    distribution = "verl"
    version_file = "verl/version/version"
    modules = ("verl",)
    releases = keys.releases()
    when = WHEN
    readers: ClassVar[Mapping[str, rows.Reader]] = READERS
    writers: ClassVar[Mapping[str, rows.Writer]] = WRITERS
    reads_declined = True
    entry = ("{python}", "-m", "verl.trainer.main_ppo")
    top = TOP
    env: ClassVar[Mapping[str, str]] = {"RAY_DEDUP_LOGS": "0"}
    engine_nodes = tuple(
        f"{node}.engine_kwargs.{{engine}}" for node in (ROLLOUT, "reward.reward_model.rollout")
    )
    model_key = f"{MODEL}.path"
    steps_key = "trainer.total_training_steps"
    no_file = "write its settings under `settings:` as flat keys, such as trainer.nnodes: 1"

    def config(self, job: Job) -> Config:
        """Return what a job's overrides come to."""
        return Config(job)

    def declared(self, version: str) -> keys.Keys:
        """Return the settings of a known release, those of both model engines."""
        first, second = (keys.keys_of(version, engine) for engine in keys.ENGINES)
        return msgspec.structs.replace(first, types=first.types | second.types)

    def unknown(self, config: Config) -> Iterator[Problem]:
        """Yield the settings that the release does not have; those of a recipe are its own."""
        return checks.unknown(config) if config.is_own else iter(())

    def is_certain(self, config: Config, problem: Problem) -> bool:
        """Return whether an unknown setting is a mistake: the job's own release has a similar one."""
        return config.release.exact and bool(problem.hint)

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield what would make the job fail at its start or at its first longest sequence."""
        return checks.refused(config)

    def engines(self, config: Config) -> tuple[str, ...]:
        """Return the engines: a reward model may have another one than the policy."""
        return ("vllm", "sglang")

    def spread(self, config: Config) -> tuple[Placement, dict[str, tuple[str, ...]], Layout]:
        """Return who works where, who holds device memory in which phase, and every size."""
        return placement(config), resident(config), layout(config)

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the values that GPUs, heads, batches and limits of the job allow, from more memory to less."""
        stage = config.world // config.ranks(MEGATRON, "pipeline_model")
        tensor, groups = config.ranks(MEGATRON, "tensor_model"), splits.divisors(stage)
        heads = [] if shape is None else [shape.heads, shape.kv_heads]
        tensors = [n for n in groups if stage % (n * config.parallel) == 0 and not any(h % n for h in heads)]
        # Dynamic batching can begin where the limit that it would use holds the longest sequence.
        limit = config.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * config.parallel
        fixed = config.dynamic or limit < config.longest
        return {
            "concurrency": Grid(minimum=1, maximum=requests(config), multiple=1),
            "rollout_tensor_parallel": checks.rollout_sizes(config),
            "microbatch_size": tuple(reversed(splits.divisors(config.mini_batch))) or (1,),
            "dynamic_batching": (True,) if fixed else (False, True),
            "sequence_parallel": checks.sequence_sizes(config),
            "tensor_parallel": tuple(tensors),
            "context_parallel": tuple(n for n in groups if stage % (n * tensor) == 0),
        }

    def phases(self, config: Config) -> dict[str, tuple[Phase, ...]]:
        """Return where knobs free memory: a critic's budget follows the smaller of training and scoring."""
        elsewhere = tuple(phase for phase in Phase if phase is not Phase.LOG_PROB)
        return {
            "param_offload": _parked(
                config, Phase.CHECKPOINT, *(() if config.reference else (Phase.LOG_PROB,))
            ),
            "optimizer_offload": _parked(config),
            "tokens_per_microbatch": () if config.critic else elsewhere,
            "entropy_chunking": () if config.entropy else (Phase.LOG_PROB, Phase.NONE),
        }

    def constraints(self, config: Config) -> Iterator[Constraint]:
        """Yield what binds the knobs beyond their grids."""
        longest, lengths = config.longest, f"{_LONGEST}{config.longest}"
        yield AtLeast(
            knob="tokens_per_microbatch",
            value=longest,
            why=f"a micro-batch holds the longest sequence: {lengths}",
        )
        yield AtLeast(
            knob="logprob_tokens", value=longest, why=f"a scoring pass holds the longest sequence: {lengths}"
        )
        yield AtLeast(
            knob="max_model_len", value=longest, why=f"the engine takes the longest sequence: {lengths}"
        )
        if config.engine == "vllm":
            why = "vLLM takes at least one token of each of its max_num_seqs requests"
            yield AtLeast(knob="max_batched_tokens", value=config.count(f"{ROLLOUT}.max_num_seqs"), why=why)
        why = f"{ROLLOUT}.tensor_model_parallel_size divides the engines' GPUs"
        yield Divides(knob="rollout_tensor_parallel", of=config.rollout_world, why=why)
        if config.shape is not None:
            heads = config.shape.heads
            yield Divides(knob="rollout_tensor_parallel", of=heads, why="it divides the attention heads")
            why = f"Ulysses divides the model's {heads} attention heads"
            yield Divides(knob="sequence_parallel", of=heads, why=why)
        if not config.dynamic and config.mini_batch:
            why = f"it divides the {config.mini_batch} sequences of a mini-batch on one rank"
            yield Divides(knob="microbatch_size", of=config.mini_batch, why=why)
        yield from self._of_trainer(config)

    def _of_trainer(self, config: Config) -> Iterator[Constraint]:
        why = f"{config.split_key} divides the trainer's GPUs"
        if not config.megatron:
            yield Divides(knob="sequence_parallel", of=config.world, why=why)
            why = "fsdp_config.offload_policy is FSDP2's"
            yield Requires(knob="grad_offload", value=True, other="sharding", values=("fsdp2",), why=why)
            return
        stage = config.world // config.ranks(MEGATRON, "pipeline_model")
        yield Divides(knob="context_parallel", of=stage or 1, why=why)
        offered = rows.offered(self.present(config), self.sizes(config, config.shape))
        why = f"tensor x context parallelism divides the trainer's {config.world} GPUs"
        yield from splits.together(offered, "context_parallel", devices=stage, why=why)
        fraction, parts = "optimizer_offload_fraction", (1.0, 0.75, 0.5, 0.25)
        why = "its copies overlap only where a part of the optimizer is on the CPU"
        yield Requires(knob="optimizer_offload_overlap", value=True, other=fraction, values=parts, why=why)

    def training(self, job: Job) -> Training:
        """Return the sizes of a step, and what decides which samples it has."""
        config = Config(job)
        update, sequences = config.update, config.sequences
        epochs = max(1, config.count(f"{ACTOR}.ppo_epochs"))
        return Training(
            samples_per_step=sequences,
            global_batch=update,
            updates_per_step=-(-sequences // update) * epochs if update else None,
            steps=config.count("trainer.total_training_steps") or None,
            epochs=config.count("trainer.total_epochs") or None,
            prompt_tokens=config.count("data.max_prompt_length") or None,
            response_tokens=config.count("data.max_response_length") or None,
            learning_rate=config.share(f"{ACTOR}.optim.lr") or None,
            seeds={key: config.count(key) for key in _SEEDS if config.get(key) is not None},
            data_order="shuffled by `data.seed`" if config.flag("data.shuffle") else "as the files have it",
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the overrides that differ from the job as written, in its own spelling."""
        config = Config(job)
        found = self.knob_settings(config, knobs)
        return {config.key(key): value for key, value in sorted(found.items()) if config.differs(found, key)}

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt as `python -m verl.trainer.main_ppo` with Hydra overrides."""
        command = super().command(job, knobs, run=run, attempt=attempt, resume=resume)
        # The workers preload what the override says, and verl's own process nothing.
        if LD_PRELOAD not in (bare(word).partition("=")[0] for word in command.argv):
            return command
        env = {name: value for name, value in command.env.items() if name != "LD_PRELOAD"}
        return msgspec.structs.replace(command, env=env)

    def typed(self, config: Config, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return an attempt's settings as Hydra takes them in the job's release."""
        version = config.release.version
        return tuple(override(keys.taken(key, version), value) for key, value in settings.items())

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as Hydra overrides."""
        return tuple(override(keys.taken(key), value) for key, value in settings.items())

    def started(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return what makes an attempt resumable, and its loggers go on where they stopped."""
        resumes = resume and config.text("trainer.resume_mode") != "disable"
        loggers = _loggers(config)
        own: dict[str, Any] = {
            "trainer.default_local_dir": _checkpoints(config, job, run=run),
            "trainer.resume_mode": "auto" if resumes else "disable",
            "trainer.logger": [*loggers, *(name for name in ("console", "file") if name not in loggers)],
        }
        if not config.has("trainer.save_freq"):
            own["trainer.save_freq"] = job.recovery.save_every or SAVE_STEPS
        if config.saves:
            kept = ("trainer.max_actor_ckpt_to_keep", *config.of_critic("trainer.max_critic_ckpt_to_keep"))
            own |= {key: _KEPT for key in kept if not config.has(key)}
        if job.python is not None and config.get(f"{_RUNTIME}.py_executable") is None:
            # verl's own null would make Ray take the cluster's interpreter.
            own[f"{_RUNTIME}.py_executable"] = "{python}"
        # verl says every minute that it waits for rollouts, even for dead ones: a hang has to be silent.
        variables = {"VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": _DAY_S}
        if "wandb" in loggers:
            variables |= {"WANDB_RUN_ID": _UNSAFE.sub("-", f"{job.name}-{run}"), "WANDB_RESUME": "allow"}
        if "tensorboard" in loggers:
            variables["TENSORBOARD_DIR"] = absolute(job, f"tensorboard_log/{_experiment(config)}")
        return _needed(config, own | _variables(config, job, variables))

    def of_attempt(self, config: Config, job: Job, *, run: str, attempt: int) -> dict[str, Any]:
        """Return where an attempt writes its metrics, and its snapshots of memory if it makes any."""
        folder = _checkpoints(config, job, run=run)
        own = _variables(config, job, {"VERL_FILE_LOGGER_ROOT": f"{folder}/metrics/attempt-{attempt:04d}"})
        place = "global_profiler.save_path"
        if config.text("global_profiler.tool") == SNAPSHOT_TOOL and not config.has(place):
            own[place] = f"{folder}/memory/attempt-{attempt:04d}"
        return _needed(config, own)

    def checkpoint_folder(self, job: Job) -> str:
        """Return trainer.default_local_dir, or the folder that every run has its own in."""
        return absolute(job, _named_folder(Config(job)) or "checkpoints")

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings that the head of a log shows."""
        return printed(text, _PROGRAM)

    def can_force_longest(self, job: Job) -> bool:
        """Return whether answers can be made as long as allowed: verl passes `ignore_eos` to vLLM alone."""
        return Config(job).engine == "vllm"

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps under names, folders and loggers of its own."""
        own = document(__package__, "trial.yaml", dict[str, Any]) | {
            "trainer.default_local_dir": f"{folder}/checkpoints",
            "trainer.experiment_name": f"{job.name}-trial",
            "trainer.total_training_steps": steps,
        }
        if longest and self.can_force_longest(job):
            own[f"{ROLLOUT}.ignore_eos"] = True
        settings = {key: value for key, value in job.settings.items() if bare(key) not in own}
        return msgspec.structs.replace(job, settings={**settings, **own}, resume=False)

    def warnings(self, config: Config) -> Iterator[str]:
        """Yield what the user should know before the launch."""
        yield from checks.ignored(config)
        if not config.resumes:
            why = "trainer.save_freq is not positive or trainer.resume_mode is disable"
            yield f"the job cannot be resumed: {why}, so every relaunch begins at step 0"
        if config.get("trainer.max_actor_ckpt_to_keep") == 1:
            yield "trainer.max_actor_ckpt_to_keep: 1 deletes a checkpoint before the next is complete; keep 2"
        if config.flag(f"{ACTOR}.checkpoint.async_save"):
            yield "with checkpoint.async_save verl does not record the checkpoint that a resume would read"
        if config.engine == "vllm" and config.get(f"{ROLLOUT}.max_model_len") is None:
            plans = "vLLM plans for the model's longest context and may refuse to start"
            yield f"{ROLLOUT}.max_model_len is unset: {plans}; this job needs {config.longest}"
        if any("expandable_segments" in value for value in config.env.values()):
            yield (
                "expandable_segments in the environment reaches the engine, whose sleep mode refuses it; "
                "verl switches it on for the trainer by itself"
            )
        if config.summons_whole and config.world > 1:
            apart = f"{ROLLOUT}.layered_summon: true (with {ROLLOUT}.load_format: safetensors)"
            gathers = "every weight sync gathers the whole model on every card to read its adapters"
            yield f"{gathers}; {apart} does it layer by layer"
        if config.colocated and not config.sleeps and config.engine:
            yield "the engine never sleeps: its weights and pool stay on the card while training runs"


def _parked(config: Config, *used: Phase) -> tuple[Phase, ...]:
    """Return the phases in which offloaded state is off the card: verl loads it back whole for an update.

    `used`: others that load it. Another model's state stays away meanwhile, so with a critic every phase gains.
    """
    busy = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, *used)
    return () if config.critic else tuple(phase for phase in Phase if phase not in busy)


def _needed(config: Config, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return, in the job's own spelling, those of an attempt's settings that the job itself does not write."""
    return {
        config.key(key): value
        for key, value in own.items()
        if config.get(key) != value or not config.has(key)
    }


def _variables(config: Config, job: Job, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return variables of verl's own process: a Ray worker inherits nothing from whoever starts it."""
    own = {f"{_RUNTIME}.env_vars.{name}": value for name, value in variables.items() if name not in job.env}
    return {key: value for key, value in own.items() if not config.has(key)}


def _loggers(config: Config) -> list[str]:
    value = config.get("trainer.logger")
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _experiment(config: Config) -> str:
    return f"{config.text('trainer.project_name')}/{config.text('trainer.experiment_name')}"


def _named_folder(config: Config) -> str:
    named = config.text("trainer.default_local_dir")
    return "" if "${" in named else named


def _checkpoints(config: Config, job: Job, *, run: str) -> str:
    """Return the absolute folder of a run's checkpoints."""
    named = _named_folder(config)
    return folder_of(job, named or f"checkpoints/{_experiment(config)}", run=run, named=bool(named))
