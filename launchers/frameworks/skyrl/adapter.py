"""SkyRL: GRPO and PPO with FSDP2 or Megatron trainers and vLLM engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.checkpoint_folders import RESUMED, absolute, folder_of
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.core.splits import divisors, head_sizes, wider
from autotune.launchers.frameworks.dialects.hydra import yaml_override
from autotune.launchers.frameworks.dialects.settings import with_sizes
from autotune.launchers.frameworks.skyrl.config import (
    CPU_ADAM,
    ENGINE,
    PLACEMENT,
    POLICY,
    RELEASES,
    SCORE_SIZE,
    TRAIN_SIZE,
    Config,
)
from autotune.launchers.frameworks.skyrl.layout import layout, resident
from autotune.launchers.frameworks.skyrl.rows import TABLE
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.profile import Grid

_OLDER_MODULE = "skyrl_train"


class SkyRL(TabularFramework[Config]):
    """SkyRL's own trainer, or an entry point that takes its settings; they are OmegaConf's `key=value`."""

    name = "skyrl"
    reasons: ClassVar[Mapping[str, str]] = {
        "trainer.ckpt_path": "checkpoints of this run alone, from which its relaunches continue",
        "trainer.ckpt_interval": "the job saves nothing, and a relaunch needs a checkpoint",
        "trainer.resume_mode": RESUMED,
        "SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "the log shows the failures of engines",
    }
    settings_class = Config
    saves_by_time = False
    announces_end = True
    longest_request = "generator.inference_engine.engine_init_kwargs.max_model_len"
    done_is_final = True  # filtered batches end a training below the total of its bar
    distribution = "skyrl"
    releases = RELEASES
    modules = ("skyrl",)
    table = TABLE
    is_whole = True
    own_settings = (
        *("trainer.ckpt_path", "trainer.ckpt_interval", "trainer.resume_mode"),
        *("trainer.max_training_steps", "trainer.print_example_interval", "trainer.num_logger_train_samples"),
    )
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    entry = ("{python}", "-m", "skyrl.train.entrypoints.main_base")
    # Without it, output and errors of workers and engines go to a file on their node (ray_logging.py).
    env: ClassVar[Mapping[str, str]] = {"SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1", "RAY_DEDUP_LOGS": "0"}
    engine_nodes = tuple(f"{ENGINE}.{kind}_init_kwargs" for kind in ("engine", "prefill", "decode"))
    model_key = f"{POLICY}.model.path"
    steps_key = "trainer.max_training_steps"
    prompt_keys = PromptKeys(files="data.train_data", field="prompt")
    forces_longest: ClassVar[Mapping[str, Any]] = {
        "generator.sampling_params.additional_kwargs.ignore_eos": True
    }
    no_file = "write its settings under `settings:`, such as trainer.strategy: fsdp"

    def modules_of(self, job: Job) -> tuple[str, ...]:
        """Return SkyRL's package, or its older one if the job starts that."""
        is_older = any(word.startswith(f"{_OLDER_MODULE}.") for word in job.command)
        return (_OLDER_MODULE,) if is_older else self.modules

    def added(self, config: Config, needed: Mapping[str, Any]) -> dict[str, Any]:
        """Return an attempt's settings without those that the job's code or older release refuses.

        The driver ends a trial for which no last step can be set.
        """
        added, types = super().added(config, needed), config.facts.types
        if config.release.version not in config.older:
            return added
        return {k: value for k, value in added.items() if config.has(k) or config.named(k) in types}

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the checkpoint folder and interval, and whether the attempt resumes from a checkpoint."""
        place, interval = "trainer.ckpt_path", "trainer.ckpt_interval"
        own: dict[str, Any] = {"trainer.resume_mode": "latest" if resume and config.resumes else "none"}
        if config.has(place) or not job.resume:  # else SkyRL's own, in the home folder of its user
            own[place] = folder_of(job, config.text(place), run=run, named=config.has(place))
        if not config.has(interval):
            own[interval] = job.recovery.save_every or SAVE_STEPS
        return own

    def gpus(self, job: Job) -> int:
        """Return how many GPUs the job's settings request, for the trainer and disaggregated engines."""
        config = self.config(job)
        return config.world + (0 if config.colocated else config.engine_world)

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None if engines have their own GPUs or a batch does not divide."""
        config = self.config(job)
        engine = config.engine_world // max(1, config.count(f"{ENGINE}.num_engines"))
        if not config.colocated or not engine or nodes * per_node % engine:
            return None
        sizes: dict[str, Any] = {f"{ENGINE}.num_engines": nodes * per_node // engine}
        for role in ("policy", "ref", "critic"):
            own = {f"{PLACEMENT}.{role}_num_nodes": nodes, f"{PLACEMENT}.{role}_num_gpus_per_node": per_node}
            sizes |= own if role == "policy" or any(map(config.has, own)) else {}
        resized = with_sizes(job, {config.named(name): size for name, size in sizes.items()})
        return resized if self.config(resized).mini_batch else None

    def checkpoint_folder(self, job: Job) -> str:
        """Return trainer.ckpt_path, or the folder in which every run gets its own subfolder."""
        return absolute(job, Config(job).text("trainer.ckpt_path") or "checkpoints")

    def together(self, config: Config, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changed settings with those that have to change along."""
        if TRAIN_SIZE in changes:  # log-prob micro-batches follow, because no knob sets them
            share = changes[TRAIN_SIZE] / config.count(TRAIN_SIZE)
            changes[SCORE_SIZE] = max(1, int(config.count(SCORE_SIZE) * share))
        tensor = changes.get(f"{ENGINE}.tensor_parallel_size")
        if tensor:  # the engines keep their GPUs
            changes[f"{ENGINE}.num_engines"] = config.engine_world // (tensor * config.engine_others)
        fraction = changes.get(f"{CPU_ADAM}.optimizer_offload_fraction")
        if fraction is not None:  # Megatron takes them only together
            changes[f"{CPU_ADAM}.optimizer_cpu_offload"] = fraction > 0
            changes[f"{CPU_ADAM}.use_precision_aware_optimizer"] = fraction > 0
        return changes

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as OmegaConf's command line takes them."""
        return tuple(yaml_override(key, value) for key, value in settings.items())

    def can_force_longest(self, job: Job) -> bool:
        """Return whether vLLM can ignore the end of a response, which single-turn jobs allow."""
        return Config(job).count("generator.max_turns") <= 1

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the sizes that the job's GPUs, heads and batches allow, from more memory to less."""
        stage = config.stage
        tensor, context = config.ranks("tensor_model"), config.ranks("context")
        groups = config.engine_world // config.engine_others
        return {
            **transformer.recompute_modes(config.field, config.shape, megatron=config.megatron),
            "rollout_tensor_parallel": head_sizes(divisors(groups), shape),
            "sequence_parallel": head_sizes(divisors(config.world), shape),
            **transformer.sizes(config.world, shape, config.ranks, etp=config.splits_experts),
            "shard_group": wider(config.shard_group, config.world),
            "tensor_parallel": head_sizes([n for n in divisors(stage) if stage % (n * context) == 0], shape),
            "context_parallel": tuple(n for n in divisors(stage) if stage % (n * tensor) == 0),
            "microbatch_size": tuple(reversed(divisors(config.mini_batch))),
        }
