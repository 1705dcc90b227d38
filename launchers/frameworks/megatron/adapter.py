"""Base adapter of slime, Relax and miles: a Megatron trainer with SGLang engines, set by flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core import splits, transformer
from autotune.launchers.frameworks.core.checkpoint_folders import RESUMED, absolute
from autotune.launchers.frameworks.core.data import package_of
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.core.trackers import one_wandb_run
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.dialects.flags import bare, printed_flags
from autotune.launchers.frameworks.dialects.settings import with_sizes
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.dialect import (
    ENGINE,
    SET_BY_ITSELF,
    Dialect,
    dialect_of,
    facts_of,
)
from autotune.launchers.frameworks.megatron.layout import layout, resident
from autotune.launchers.frameworks.megatron.model import model_of
from autotune.launchers.frameworks.tabular.declared import Facts
from autotune.launchers.frameworks.tabular.listed_flags import ListedFlagFramework
from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Grid

_OF_VIME = "vllm-"
_YAML = ("custom-config-path", "megatron-config-path", "sglang-config")
_FOLDERS = ("memory-snapshot-dir", "tensorboard-dir", "rollout-result-dir", "update-weight-disk-dir")
_PACKED = ("tokens_per_microbatch", "logprob_tokens")  # of no use without dynamic batching
_COUNTED = ("microbatch_size",)  # of no use with it
# What makes Megatron take the weights of a checkpoint and nothing else, from step 0.
_WEIGHTS_ONLY = {"finetune": True, "no-load-optim": True, "no-load-rng": True, "start-rollout-id": 0}


class MegatronRl(ListedFlagFramework[Config]):
    """One of the three frameworks, described by its dialect; none can ignore the end of a response."""

    saves_by_time = False
    async_entry: ClassVar[tuple[str, ...]] = ()  # with --fully-async, where that is another program
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    model_key = "hf-checkpoint"
    steps_key = "num-rollout"  # none of the frameworks prints how many steps there are
    prompt_keys = PromptKeys(files="prompt-data", field="input", field_key="input-key")
    save_key = "save"
    own_settings = ("ref-load", "start-rollout-id", "tb-experiment-name")  # the others are of Megatron-LM
    is_whole = True
    reasons: ClassVar[Mapping[str, str]] = {
        "save": "checkpoints of this run alone, from which its relaunches continue",
        "save_interval": "the job saves nothing, and a relaunch needs a checkpoint",
        "load": RESUMED,
        "ref_load": "where the weights come from while nothing is saved",
        "no_load_*": "a relaunch continues the whole checkpoint, not its weights alone",
        "finetune": "a relaunch continues the whole checkpoint, not its weights alone",
        "ckpt_step": "a relaunch continues the newest checkpoint",
        "tb_experiment_name": "relaunches continue one TensorBoard log",
    }

    @property
    def tables(self) -> tuple[str, ...]:
        """The packages with its data files: its own and the shared one."""
        return (package_of(self), __package__)

    @property
    def dialect(self) -> Dialect:
        """How the framework differs from the others."""
        return dialect_of(package_of(self))

    def config(self, job: Job) -> Config:
        """Return a job's resolved flags."""
        return Config(job, package_of(self))

    def declared(self, version: str) -> Facts:
        """Return the flags of the one known version."""
        return facts_of(package_of(self))

    def _absent(self, config: Config, key: str) -> str:
        """Return a flag that the job's own code lacks; those of Megatron-LM are declared elsewhere."""
        return super()._absent(config, key) if key in self.dialect.of_framework else ""

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return --save, or the folder in which every run gets its own subfolder."""
        return self.config(job).root

    def shape(self, job: Job) -> Model | None:
        """Return the shape in Megatron's flags, unless a model config gives it."""
        return job.shape or model_of(self.config(job))

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the parallel sizes that divide the GPUs into whole copies of the model and its experts."""
        fixed = config.count("expert-tensor-parallel-size")
        tensor = splits.sizes(config.tensor, config.tensor_devices)
        others = config.expert * config.pipeline
        return {
            **transformer.recompute_modes(config.field, config.job.shape),
            "rollout_tensor_parallel": splits.sizes(config.engine_size, config.engine_gpus),
            "context_parallel": splits.sizes(config.context, config.context_devices),
            **transformer.sizes(config.trainer_gpus, self.shape(config.job), config.ranks, etp=fixed),
            "tensor_parallel": tuple(
                size
                for size in tensor
                if size == config.tensor or config.trainer_gpus % ((fixed or size) * others) == 0
            ),
        }

    def gpus(self, job: Job) -> int:
        """Return how many GPUs the job's settings request, over all roles that work at the same time."""
        return self.config(job).wanted

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None if roles have their own GPUs or a batch does not divide."""
        config = self.config(job)
        if not config.colocated or config.has("resource"):
            return None
        sizes = {"actor-num-nodes": nodes, "actor-num-gpus-per-node": per_node}
        engines = {"rollout-num-gpus": nodes * per_node} if config.count("rollout-num-gpus") else {}
        resized = with_sizes(job, sizes | engines)
        config = self.config(resized)
        return None if config.count("global-batch-size") % config.data_parallel else resized

    def training(self, job: Job) -> Training:
        """Return the settings of a rollout's size and of the selection of its samples."""
        config = self.config(job)
        samples = config.sequences
        update = min(config.count("global-batch-size") or samples, samples)
        return Training(
            samples_per_step=samples or None,
            global_batch=update or None,
            updates_per_step=-(-samples // update) if update else None,
            steps=config.count("num-rollout") or None,
            epochs=config.count("num-epoch") or None,
            prompt_tokens=config.prompt or None,
            response_tokens=config.response or None,
            learning_rate=config.share("lr") or None,
            seeds={name: config.count(name) for name in ("seed", "rollout-seed") if config.has(name)},
            data_order="shuffled by `rollout-seed`"
            if config.flag("rollout-shuffle")
            else "as the file has it",
        )

    # ------------------------------------------------------------------------ mistakes

    def misfit(self, flag: str, value: Any) -> str:
        """Return what is wrong with a flag's value, including the engines' flags."""
        kind = self.dialect.engine_types.get(self.dialect.argument(flag) or "")
        if kind is None:
            return super().misfit(flag, value)
        wanted = misfit(kind, value)
        return f"is {wanted}" if wanted else ""

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield another trainer, the flags that a user must not set, and the refusals of the rows."""
        if (trainer := config.text("train-backend")) != "megatron":
            message = f"only {self.name}'s Megatron trainer is driven, not `--train-backend {trainer}`"
            hint = "write `framework: command`, with the flags in its `command:`"
            yield Problem(path=("framework",), message=message, hint=hint)
        for key, flag in ((key, bare(key)) for key in config.given):
            if flag in self.dialect.names:
                continue
            if flag.startswith(_OF_VIME):
                message = f"--{flag} is a flag of vime, whose engine is vLLM: {self.name}'s is SGLang"
                hint = "write `framework: command`, with the flags in its `command:`"
                yield Problem(path=("settings", key), message=message, hint=hint)
            if flag.startswith(ENGINE) and flag.removeprefix(ENGINE) in SET_BY_ITSELF.split():
                does = "refuses" if self.dialect.strict else "ignores"
                message = f"{self.name} sets this of the engine itself and {does} --{flag}"
                yield Problem(path=("settings", key), message=message)
        yield from super().refused(config)

    def _passed_on(self, job: Job, config: Config) -> Iterator[str]:
        yield from super()._passed_on(job, config)
        for flag in filter(config.has, _YAML):
            yield f"the file of --{flag} is read after the flags: what it sets cannot be changed from here"
        for flag in filter(config.flag, self.dropped):
            yield f"--{flag} is left out: it restarts with the settings that just failed"

    # ------------------------------------------------------------------------ attempts

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the smallest change of the job's flags, in its own spelling."""
        idle = {True: _COUNTED, False: _PACKED, None: ()}[knobs.dynamic_batching]
        return super().settings(job, msgspec.structs.replace(knobs, **dict.fromkeys(idle)))

    def entry_of(self, config: Config) -> tuple[str, ...]:
        """Return the default program."""
        return self.async_entry if self.async_entry and config.flag("fully-async") else self.entry

    def variables(self, config: Config, run: str) -> dict[str, str]:
        """Return variables that keep one tracker run across relaunches."""
        return one_wandb_run(config.job, run) if config.flag("use-wandb") else {}

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the flags with which an attempt resumes only from its own run's checkpoint.

        The frameworks resume from anything in --load, which shipped scripts set to the folder of --save. A
        run gets a subfolder of its own there, unless the job has `resume: true`.
        """
        first = _WEIGHTS_ONLY if config.start else {"load": None}
        if not config.saves:
            return {"save": None, "save-interval": None, **first}
        interval = config.count("save-interval") or job.recovery.save_every or SAVE_STEPS
        if config.continues:
            home = absolute(job, config.text("save") or config.text("load"))
            return {"save": home, "save-interval": interval, "load": home}
        own = f"{config.root}/{job.name}-{run}"
        result: dict[str, Any] = {"save": own, "save-interval": interval}
        if not resume:
            return result | first
        result |= {"load": own, **{name: None for name in (*_WEIGHTS_ONLY, "ckpt-step") if config.has(name)}}
        # Where the weights come from while nothing is saved.
        return result | ({"ref-load": config.start} if config.start and not config.reference else {})

    def of_attempt(self, config: Config, job: Job, *, run: str, attempt: int) -> dict[str, Any]:
        """Return a first attempt's start, and the name that keeps all attempts in one TensorBoard run."""
        # Before the first attempt saved anything a job that continues may begin elsewhere; afterwards not.
        begins = config.saves and config.continues and attempt == 1 and config.start
        own: dict[str, Any] = {"load": begins} if begins else {}
        on = config.flag("use-tensorboard", "use-tensorboard" in self.dialect.negatable)
        if on and config.has("tb-project-name") and not config.has("tb-experiment-name"):
            own["tb-experiment-name"] = f"{job.name}-{run}"
        return own

    def of_validation(self, config: Config) -> tuple[str, ...]:
        """Return the flags of an evaluation engine."""
        return tuple(flag for flag in config.flags if flag.startswith(self.dialect.prefixes))

    def trial_flags(self, config: Config, *, folder: str, steps: int) -> dict[str, Any]:
        """Return a trial's number of steps, its start and its own folders."""
        own: dict[str, Any] = {self.steps_key: steps}
        if config.has("load") and not config.start:
            own["load"] = None
        return own | {name: f"{folder}/{name}" for name in _FOLDERS if config.has(name)}

    def printed(self, text: str) -> dict[str, Any]:
        """Return the flags in Megatron's dump of arguments or in a command line traced by `set -x`."""
        own = self.dialect
        return printed_flags(
            text,
            known=frozenset(
                flag for flag in facts_of(package_of(self)).types if not flag.startswith(own.prefixes)
            ),
            inverse=own.inverse,
            negatable=own.negatable,
        )
