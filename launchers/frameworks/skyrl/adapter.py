"""SkyRL: GRPO and PPO with FSDP2 or Megatron trainers and vLLM engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.checkpoints import absolute, folder_of
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.launchers.frameworks.dialects.hydra import yaml_override
from autotune.launchers.frameworks.skyrl.config import (
    CPU_ADAM,
    ENGINE,
    POLICY,
    RECOMPUTE,
    RELEASES,
    SCORE_SIZE,
    TOKENS,
    TRAIN_SIZE,
    Config,
)
from autotune.launchers.frameworks.skyrl.layout import layout, placement, resident
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.lines import lines
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.profile import AtLeast, Constraint, Divides, Placement, Requires

_SAME_DEVICES = "trainer.placement.colocate_all: num_engines x tensor_parallel_size = the trainer's GPUs"

# The predicates that knobs.yaml and unsupported.yaml name.
WHEN: dict[str, Callable[[Config], bool]] = {
    "packs_by_tokens": lambda config: config.count(TOKENS) > 0,
    "chooses_what_to_recompute": lambda config: config.megatron and config.has(RECOMPUTE),
}


class SkyRL(TabularFramework[Config]):
    """SkyRL's own trainer, or an entry point that takes its settings; they are OmegaConf's `key=value`."""

    name = "skyrl"
    saves_by_time = False
    announces_end = True
    done_is_final = True  # filtered batches end a training below the total of its bar
    traces: tuple[str, ...] = lines(__package__).traces
    distribution = "skyrl"
    releases = RELEASES
    modules = ("skyrl",)
    when = WHEN
    entry = ("{python}", "-m", "skyrl.train.entrypoints.main_base")
    # Without it what workers and engines print, errors too, goes to a file of their node (ray_logging.py).
    env: ClassVar[Mapping[str, str]] = {"SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1", "RAY_DEDUP_LOGS": "0"}
    engine_nodes = tuple(f"{ENGINE}.{kind}_init_kwargs" for kind in ("engine", "prefill", "decode"))
    model_key = f"{POLICY}.model.path"
    steps_key = "trainer.max_training_steps"
    forces_longest: ClassVar[Mapping[str, Any]] = {
        "generator.sampling_params.additional_kwargs.ignore_eos": True
    }
    no_file = "write its settings under `settings:`, such as trainer.strategy: fsdp"

    def config(self, job: Job) -> Config:
        """Return what a job's overrides come to."""
        return Config(job)

    def started(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return where checkpoints lie, how often they come, and whether the attempt continues from one."""
        place, interval = "trainer.ckpt_path", "trainer.ckpt_interval"
        own: dict[str, Any] = {"trainer.resume_mode": "latest" if resume and config.resumes else "none"}
        if config.has(place) or not job.resume:  # else SkyRL's own, in the home folder of its user
            own[place] = folder_of(job, config.text(place), run=run, named=config.has(place))
        if not config.has(interval):
            own[interval] = job.recovery.save_every or SAVE_STEPS
        return own

    def checkpoint_folder(self, job: Job) -> str:
        """Return trainer.ckpt_path, or the folder below which every run has its own."""
        return absolute(job, Config(job).text("trainer.ckpt_path") or "checkpoints")

    def together(self, config: Config, found: dict[str, Any]) -> dict[str, Any]:
        """Return changed settings with those that follow them."""
        if TRAIN_SIZE in found:  # scoring passes follow, as there is no knob for them
            share = found[TRAIN_SIZE] / config.count(TRAIN_SIZE)
            found[SCORE_SIZE] = max(1, int(config.count(SCORE_SIZE) * share))
        tensor = found.get(f"{ENGINE}.tensor_parallel_size")
        if tensor:  # the engines keep their GPUs
            found[f"{ENGINE}.num_engines"] = config.engine_world // (tensor * config.engine_others)
        fraction = found.get(f"{CPU_ADAM}.optimizer_offload_fraction")
        if fraction is not None:  # Megatron takes them only together
            found[f"{CPU_ADAM}.optimizer_cpu_offload"] = fraction > 0
            found[f"{CPU_ADAM}.use_precision_aware_optimizer"] = fraction > 0
        return found

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as OmegaConf's command line takes them."""
        return tuple(yaml_override(key, value) for key, value in settings.items())

    def can_force_longest(self, job: Job) -> bool:
        """Return whether vLLM can be told to continue after the end of an answer: where there is one turn."""
        return Config(job).count("generator.max_turns") <= 1

    def spread(self, config: Config) -> tuple[Placement, dict[str, tuple[str, ...]], Layout]:
        """Return who works where, who holds device memory in which phase, and every size."""
        return placement(config), resident(config), layout(config)

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...]]:
        """Return the sizes that the job's GPUs, heads and batches allow, from more memory to less."""
        stage = config.world // config.ranks("pipeline_model")
        tensor, context = config.ranks("tensor_model"), config.ranks("context")
        groups = config.engine_world // config.engine_others
        return {
            "rollout_tensor_parallel": head_sizes(divisors(groups), shape),
            "sequence_parallel": head_sizes(divisors(config.world), shape),
            "tensor_parallel": head_sizes([n for n in divisors(stage) if stage % (n * context) == 0], shape),
            "context_parallel": tuple(n for n in divisors(stage) if stage % (n * tensor) == 0),
            "microbatch_size": tuple(reversed(divisors(config.mini_batch))),
        }

    def constraints(self, config: Config) -> Iterator[Constraint]:
        """Yield what binds the knobs beyond their grids."""
        lengths = f"{config.longest} tokens are the longest sequence, and none is split over passes"
        requests = "vLLM takes at least one token of each of its max_num_seqs requests"
        overlap = "its copies overlap only where a part of the optimizer is on the CPU"
        fraction, parts = "optimizer_offload_fraction", (1.0, 0.75, 0.5, 0.25)
        yield AtLeast(knob="tokens_per_microbatch", value=config.longest, why=lengths)
        yield AtLeast(knob="max_batched_tokens", value=config.count(f"{ENGINE}.max_num_seqs"), why=requests)
        yield Divides(
            knob="rollout_tensor_parallel", of=config.engine_world, why="it divides the engines' GPUs"
        )
        yield Divides(knob="sequence_parallel", of=config.world, why="it divides the trainer's GPUs")
        yield Divides(knob="microbatch_size", of=config.mini_batch, why=f"it divides {_shared(config)}")
        yield Requires(
            knob="optimizer_offload_overlap", value=True, other=fraction, values=parts, why=overlap
        )

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield what SkyRL refuses at its start (train/utils/utils.py, validate_cfg)."""

        def problem(key: str, message: str, hint: str = "") -> Problem:
            return Problem(path=("settings", key), message=message, hint=hint)

        strategy = config.text("trainer.strategy")
        if strategy not in ("fsdp", "fsdp2", "megatron"):
            yield problem("trainer.strategy", f"there is no trainer {strategy}", "fsdp or megatron")
        if config.text("trainer.resume_mode") == "from_path":
            hint = "name the folder of the others in trainer.ckpt_path and write `resume: true`"
            yield problem("trainer.resume_mode", "an attempt continues the checkpoints of its own run", hint)
        if config.text("trainer.ckpt_path").startswith("~"):
            yield problem("trainer.ckpt_path", "SkyRL does not expand `~`", "write the whole path")
        if config.world % config.split:
            key = "trainer.placement.policy_num_gpus_per_node"
            yield problem(key, f"{config.world} GPUs cannot be split by {config.split}")
        if config.colocated and config.engine_world != config.world:
            message = f"the engines take {config.engine_world} GPUs, the trainer {config.world}"
            yield problem(f"{ENGINE}.num_engines", message, _SAME_DEVICES)
        size = config.count(TRAIN_SIZE)
        if config.mini_batch and config.count(TOKENS) <= 0 and (size < 1 or config.mini_batch % size):
            yield problem(TRAIN_SIZE, f"{size} does not divide {config.mini_batch}: {_shared(config)}")

    def warnings(self, config: Config) -> Iterator[str]:
        """Yield what the user should know before the launch."""
        if not config.resumes:
            why = "trainer.resume_mode is from_path or trainer.ckpt_interval not positive"
            yield f"every relaunch begins at step 0: {why}; SkyRL's own default is latest, and 10"
        if 0 < config.count(TOKENS) < config.longest:
            longest = f"the longest sequence of {config.longest} tokens"
            yield f"{TOKENS} is below {longest}, which is then a pass of its own and needs more memory"


def _shared(config: Config) -> str:
    who = "the policy's and the critic's mini-batch" if config.critic else "a mini-batch"
    return f"a rank's sequences of {who}"
