"""OpenRLHF: DeepSpeed trainers and vLLM engines under Ray, as of 0.11.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.checkpoint_folders import RESUMED
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.dialects.settings import with_sizes
from autotune.launchers.frameworks.openrlhf.config import OLDER, RELEASES, Config
from autotune.launchers.frameworks.openrlhf.layout import layout, resident
from autotune.launchers.frameworks.openrlhf.rows import TABLE
from autotune.launchers.frameworks.tabular.argparse_flags import ArgparseFramework
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.knobs import Knobs

_PATH, _LOAD, _EVERY = "ckpt.path", "ckpt.load_enable", "ckpt.save_steps"
_AWAKE = (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_ASLEEP = tuple(phase for phase in Phase if phase not in _AWAKE)
_IDLE = {True: ("microbatch_size",), False: ("tokens_per_microbatch", "logprob_tokens")}  # by packing


class OpenRlhf(ArgparseFramework[Config]):
    """OpenRLHF's `openrlhf.cli.train_ppo_ray` with dotted flags; it refuses unknown ones."""

    name = "openrlhf"
    reasons: ClassVar[Mapping[str, str]] = {
        _PATH: "checkpoints of this run alone, from which its relaunches continue",
        _LOAD: RESUMED,
        _EVERY: "the job saves nothing, and a relaunch needs a checkpoint",
        "logger.wandb.run_name": "relaunches continue one W&B run",
    }
    settings_class = Config
    saves_by_time = False
    announces_end = False
    longest_request = "data.max_len"
    without_critic: ClassVar[Mapping[str, Any]] = {"algo.advantage.estimator": "group_norm"}
    distribution = "openrlhf"
    version_file = "version.txt"
    releases = RELEASES
    older = OLDER
    modules = ("openrlhf",)
    table = TABLE
    is_whole = True
    own_settings = (_PATH, _LOAD, _EVERY, "logger.wandb.run_name")
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    entry = ("{python}", "-m", "openrlhf.cli.train_ppo_ray")
    model_key = "actor.model_name_or_path"
    steps_key = ""  # the number of prompts decides
    prompt_keys = PromptKeys(files="data.prompt_dataset", field="input", field_key="data.input_key")

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...]]:
        """Return the parallel sizes that the job's GPUs allow."""
        return {
            "rollout_tensor_parallel": splits.sizes(config.engine_size, config.engine_gpus),
            "context_parallel": splits.sizes(config.ring, config.actors // config.tensor),
            "tensor_parallel": splits.sizes(config.tensor, config.actors // config.ring),
        }

    def phases(self, config: Config) -> dict[str, tuple[Phase, ...]]:
        """Return the phases in which state sleeps; with a critic in all, in turn with the actor's."""
        return {"grad_offload": () if config.critic else _ASLEEP}

    def knob_settings(self, config: Config, knobs: Knobs) -> dict[str, Any]:
        """Return the flags that apply `knobs`, without those that the job's packing ignores."""
        idle = () if knobs.dynamic_batching is None else _IDLE[bool(knobs.dynamic_batching)]
        return super().knob_settings(config, msgspec.structs.replace(knobs, **dict.fromkeys(idle)))

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the checkpoint folder and interval, and whether the attempt resumes from a checkpoint."""
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
        """Return how many GPUs the job's settings request, for the trainer and disaggregated engines."""
        config = self.config(job)
        return config.actors + (0 if config.colocated else config.engine_gpus)

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None if engines have their own GPUs or a batch does not divide."""
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
        """Return --ckpt.path, or the folder in which every run gets its own subfolder."""
        return self.config(job).root

    def of_steps(self, config: Config, steps: int) -> dict[str, Any]:
        """Return the number of prompts of `steps` rollouts, with spare ones if some are filtered out."""
        spare = 8 if config.flag("algo.dynamic_filtering_enable") else 1
        return {"data.max_samples": steps * config.count("rollout.batch_size") * spare}
