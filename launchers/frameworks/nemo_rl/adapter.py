"""NeMo-RL: GRPO with DTensor or Megatron trainers and vLLM or SGLang engines."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, ClassVar

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.checkpoint_folders import absolute, folder_of
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.launchers.frameworks.dialects.printed_dicts import braced
from autotune.launchers.frameworks.dialects.settings import flat, with_sizes
from autotune.launchers.frameworks.nemo_rl import config as key
from autotune.launchers.frameworks.nemo_rl.config import Config
from autotune.launchers.frameworks.nemo_rl.layout import layout, resident
from autotune.launchers.frameworks.nemo_rl.rows import TABLE
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import SAVE_STEPS, Job
from autotune.policies.values.profile import Grid

_FOLDER, _EVERY = "checkpointing.checkpoint_dir", "checkpointing.save_period"
_PRINTED = re.compile(r"\b(policy|cluster)=\{")  # in NeMo-RL's printed final configuration


class NemoRL(TabularFramework[Config]):
    """NeMo-RL's GRPO scripts: a YAML file, or their own, under Hydra's overrides."""

    name = "nemo-rl"
    reasons: ClassVar[Mapping[str, str]] = {
        _FOLDER: "checkpoints of this run alone, from which its relaunches continue",
        _EVERY: "the job saves nothing, and a relaunch needs a checkpoint",
    }
    settings_class = Config
    saves_by_time = False
    announces_end = False  # an end by grpo.max_num_epochs is silent
    done_is_final = True  # the step of its line is the last one
    builds_on = "defaults"
    longest_request = "policy.generation.vllm_cfg.max_model_len"
    file_option = "--config"
    adds = "++"
    releases = key.RELEASES
    modules = ("nemo_rl",)
    table = TABLE
    layout = staticmethod(layout)
    resident = staticmethod(resident)
    entry = ("uv", "run", "examples/run_grpo.py")
    model_key = "policy.model_name"
    steps_key = "grpo.max_num_steps"
    acting = TabularFramework.acting | {"tensor_parallel"}
    own_settings = (_FOLDER, _EVERY)

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the checkpoint folder and interval; NeMo-RL always resumes from what is there."""
        named = config.has(_FOLDER) and "${" not in config.text(_FOLDER)
        folder = folder_of(job, config.text(_FOLDER), run=run, named=named)
        own: dict[str, Any] = {_FOLDER: folder} if named or not job.resume else {}
        if not config.has(_EVERY):
            own[_EVERY] = job.recovery.save_every or SAVE_STEPS
        return own

    def gpus(self, job: Job) -> int:
        """Return how many GPUs the job's cluster section requests."""
        config = self.config(job)
        return config.per_node * max(1, config.count("cluster.num_nodes"))

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job on other GPUs; None if engines have their own GPUs or a batch does not divide."""
        if not self.config(job).colocated:
            return None
        resized = with_sizes(job, {"cluster.num_nodes": nodes, "cluster.gpus_per_node": per_node})
        return resized if self.config(resized).mini_batch else None

    def checkpoint_folder(self, job: Job) -> str:
        """Return the folder in which every run gets its own subfolder."""
        config = Config(job)
        return absolute(job, config.text(_FOLDER) if config.has(_FOLDER) or job.resume else "checkpoints")

    def together(self, config: Config, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changed settings with those that have to change along."""
        if key.TRAIN_SIZE in changes:  # log-prob micro-batches follow, because no knob sets them
            most = config.count(key.SCORE_SIZE) * changes[key.TRAIN_SIZE] // config.count(key.TRAIN_SIZE)
            changes[key.SCORE_SIZE] = max(size for size in divisors(config.scored) if size <= max(1, most))
        fraction = changes.get(f"{key.MEGATRON}.optimizer.optimizer_offload_fraction")
        if fraction is not None:  # it is taken only together
            changes[f"{key.MEGATRON}.optimizer.optimizer_cpu_offload"] = fraction > 0
        return changes

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings in the final configuration and the overrides that a log prints."""
        result: dict[str, Any] = {}
        for start in islice(_PRINTED.finditer(text), 2):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                result |= flat({start[1]: ast.literal_eval(braced(text, start.end() - 1))})
        return result | super().printed(text)

    def last_step(self, job: Job) -> int | None:
        """Return the step that ends an asynchronous training; the length of the data may end another one."""
        return super().last_step(job) if Config(job).flag("grpo.async_grpo.enabled") else None

    def _tensor_sizes(self, config: Config, shape: Model | None) -> tuple[int, ...]:
        """Return multiples of the present tensor-parallel size with which batches divide evenly."""
        present = config.ranks("tensor")
        others = config.ranks("pipeline") * config.ranks("context")
        free = [n for n in divisors(config.world) if n % present == 0 and config.world % (n * others) == 0]
        if not config.splits_experts:  # that of the rest
            of_experts = config.ranks("expert") * config.ranks("pipeline")
            free = [n for n in free if config.world % (n * of_experts) == 0]
        return head_sizes([n for n in free if n <= config.per_node], shape)

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...] | Grid]:
        """Return the sizes that the job's GPUs, heads and batches allow, from more memory to less."""
        others = max(1, config.count(f"{key.VLLM}.pipeline_parallel_size"))
        groups = math.gcd(config.per_node, config.engine_world // others)
        present = max(1, config.count(f"{key.VLLM}.tensor_parallel_size"))
        with_experts = config.count(f"{key.VLLM}.expert_parallel_size") > 1  # of which it is a divisor
        return {
            **transformer.recompute_modes(config.field, config.shape, megatron=config.megatron),
            "rollout_tensor_parallel": (present,) if with_experts else head_sizes(divisors(groups), shape),
            **transformer.sizes(
                config.world,
                shape,
                lambda kind: config.ranks(kind.removesuffix("_model")),
                etp=config.splits_experts,
            ),
            "tensor_parallel": self._tensor_sizes(config, shape),
            "microbatch_size": tuple(reversed(divisors(config.mini_batch))),
        }
