"""OpenRLHF: DeepSpeed trainers and vLLM engines under Ray, as of 0.11.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.dialects.settings import with_sizes
from autotune.launchers.frameworks.openrlhf.config import RELEASES, Config
from autotune.launchers.frameworks.openrlhf.layout import layout, resident
from autotune.launchers.frameworks.tabular import legacy
from autotune.launchers.frameworks.tabular.argparse_flags import ArgparseFramework
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement

_PATH, _LOAD, _EVERY = "ckpt.path", "ckpt.load_enable", "ckpt.save_steps"
_ENGINES, _SCORED = "vllm.num_engines", "rollout.micro_batch_size"
_IDLE = {True: ("microbatch_size",), False: ("tokens_per_microbatch", "logprob_tokens")}  # by packing

# The predicates that refused.yaml, unsupported.yaml and warnings.yaml name.
WHEN: dict[str, Callable[[Config], bool]] = {
    "optimizer_is_not_adam": lambda config: config.text("actor.optim") != "adam",
    "has_no_ring": lambda config: config.ring == 1,
    "balances_experts_by_pass": lambda config: config.share("actor.aux_loss_coef") > 0,
    "has_no_loader": lambda config: config.count("data.dataloader_num_workers") == 0,
    "has_other_engines_than_actors": lambda config: (
        config.colocated and config.engine_gpus not in (0, config.actors)
    ),
    "sleeps_beside_a_running_trainer": lambda config: (
        config.placement is Placement.ASYNCHRONOUS and config.flag("vllm.enable_sleep")
    ),
    "splits_unevenly": lambda config: config.actors % config.split > 0,
    "scores_too_few_batches": lambda config: (
        config.batch // max(1, config.count(_SCORED)) < config.data_parallel
    ),
    "interrupts_without_async": lambda config: (
        config.flag("train.partial_rollout_enable") and config.placement is not Placement.ASYNCHRONOUS
    ),
    "has_flags_in_its_command": lambda config: any(word.startswith("--") for word in config.job.command),
    "scores_beside_the_engines": lambda config: config.colocated and config.has("reward.model_name_or_path"),
}


def _write_engine_size(config: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return engines of another size on the same cards."""
    size = after.rollout_tensor_parallel or 1
    return {"vllm.tensor_parallel_size": size, _ENGINES: max(1, config.engine_gpus // size)}


def _write_microbatch_size(config: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the sizes of passes: scoring packs as many or fewer, so it follows downwards only."""
    size = after.microbatch_size or 1
    return {"train.micro_batch_size": size, _SCORED: min(size, config.count(_SCORED))}


class OpenRlhf(ArgparseFramework[Config]):
    """The dotted flags of `openrlhf.cli.train_ppo_ray`, which refuses what it does not know."""

    name = "openrlhf"
    settings_class = Config
    saves_by_time = False
    announces_end = False
    distribution = "openrlhf"
    version_file = "version.txt"
    releases = RELEASES
    modules = ("openrlhf",)
    when = WHEN
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    entry = ("{python}", "-m", "openrlhf.cli.train_ppo_ray")
    model_key = "actor.model_name_or_path"
    steps_key = ""  # the number of prompts decides
    prompt_keys = PromptKeys(files="data.prompt_dataset", field="input", field_key="data.input_key")
    readers: ClassVar[Mapping[str, legacy.Reader]] = {
        "training_tokens": lambda config: (
            config.count("train.max_tokens_per_gpu") if config.dynamic else None
        ),
        "scoring_tokens": lambda config: (
            config.count("rollout.max_tokens_per_gpu") if config.dynamic else None
        ),
        "microbatch_size": lambda config: None if config.dynamic else config.count("train.micro_batch_size"),
    }
    writers: ClassVar[Mapping[str, legacy.Writer]] = {
        "engine_size": _write_engine_size,
        "microbatch_size": _write_microbatch_size,
    }

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...]]:
        """Return the parallel sizes that the job's GPUs allow."""
        return {
            "rollout_tensor_parallel": splits.sizes(config.engine_size, config.engine_gpus),
            "context_parallel": splits.sizes(config.ring, config.actors // config.tensor),
            "tensor_parallel": splits.sizes(config.tensor, config.actors // config.ring),
        }

    def knob_settings(self, config: Config, knobs: Knobs) -> dict[str, Any]:
        """Return the flags that make a job use `knobs`, but for those that its packing ignores."""
        idle = () if knobs.dynamic_batching is None else _IDLE[bool(knobs.dynamic_batching)]
        return super().knob_settings(config, msgspec.structs.replace(knobs, **dict.fromkeys(idle)))

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return where checkpoints lie, how often they come, and whether the attempt goes on from one."""
        own: dict[str, Any] = {}
        if config.resumes:
            continued = config.continues_its_folder
            own[_PATH] = config.root if continued else f"{config.root}/{job.name}-{run}"
            own[_LOAD] = resume or continued
            if config.count(_EVERY) <= 0:
                own[_EVERY] = job.recovery.save_every or SAVE_STEPS
        elif config.flag(_LOAD):
            own[_LOAD] = False  # another run's
        if config.has("logger.wandb.key") and not config.has("logger.wandb.run_name"):
            own["logger.wandb.run_name"] = f"{job.name}-{run}"
        return own

    def gpus(self, job: Job) -> int:
        """Return how many GPUs the job's settings ask for: of the trainer and of engines beside it."""
        config = self.config(job)
        return config.actors + (0 if config.colocated else config.engine_gpus)

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None where engines have their own or a batch does not divide."""
        config = self.config(job)
        engines, left = divmod(nodes * per_node, config.engine_size)
        if not config.colocated or left:
            return None
        sizes = {"vllm.num_engines": engines}
        for role in ("actor", "ref", "critic", "reward"):
            own = {f"{role}.num_nodes": nodes, f"{role}.num_gpus_per_node": per_node}
            sizes |= own if role == "actor" or any(map(config.has, own)) else {}
        resized = with_sizes(job, {config.named(name): size for name, size in sizes.items()})
        config = self.config(resized)
        return None if config.update % config.data_parallel else resized

    def checkpoint_folder(self, job: Job) -> str:
        """Return --ckpt.path, or the folder below which every run has its own."""
        return self.config(job).root

    def of_steps(self, config: Config, steps: int) -> dict[str, Any]:
        """Return the prompts of `steps` rollouts, and spare ones where some are filtered out."""
        spare = 8 if config.flag("algo.dynamic_filtering_enable") else 1
        return {"data.max_samples": steps * config.count("rollout.batch_size") * spare}
