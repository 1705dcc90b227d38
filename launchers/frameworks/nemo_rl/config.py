"""A NeMo-RL job's resolved settings: overrides over its YAML or over NeMo-RL's default one."""

from __future__ import annotations

import math
import re
from typing import Any

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.engine_settings import POOL_BYTES
from autotune.launchers.frameworks.dialects.interpolation import resolved
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement

GENERATION = "policy.generation"
VLLM, SGLANG = f"{GENERATION}.vllm_cfg", f"{GENERATION}.sglang_cfg"
POOL = f"{GENERATION}.vllm_kwargs.{POOL_BYTES}"
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
PACKING, DYNAMIC = "policy.sequence_packing", "policy.dynamic_batching"
TRAIN_SIZE, SCORE_SIZE = "policy.train_micro_batch_size", "policy.logprob_batch_size"
ALLOCATOR = "env_vars.PYTORCH_CUDA_ALLOC_CONF"
RELEASES = ("0.7.0",)
# Settings that NeMo-RL's files leave out, so that Hydra needs a prefix to add them.
_OPTIONAL = (f"{GENERATION}.vllm_kwargs.", f"{MEGATRON}.recompute_")
# NeMo-RL's GRPO programs; a user's program, such as run_grpo_chess.py, may have other defaults.
PROGRAM = re.compile(r"(?:^|/)run_(?:vlm_)?grpo(?:_math|_rm|_nemo_gym)?\.py$")


_DATA = ("train", "validation", "default")  # sections of data, each with its environment


class Config(DeclaredSettings):
    """A job's overrides over its config file; without a file, over NeMo-RL's default one."""

    def __init__(self, job: Job) -> None:
        filled = {f"{backend}.{ALLOCATOR}": "" for backend in (DTENSOR, MEGATRON)}
        super().__init__(job, __package__, RELEASES, entry="run_grpo", document=job.document, filled=filled)
        self.is_own = not job.command or any(map(PROGRAM.search, job.command))

    def get(self, key: str) -> Any:
        """Return the value of a key, with references and NeMo-RL's resolvers resolved."""
        return resolved(key, self.raw)

    def key(self, name: str) -> str:
        """Return a setting as an override, with the prefix that Hydra needs to add a key."""
        own = super().key(name)
        known = not own.startswith(_OPTIONAL) or self.holds(own) or self.has(name)
        return own if known else f"++{own}"

    def field(self, name: str) -> object:
        """Return a field of Megatron's TransformerConfig; None if the job leaves it out."""
        section = MEGATRON
        if name.startswith("fp8"):
            section = f"{MEGATRON}.fp8_cfg"
            if not self.flag(f"{section}.enabled"):
                return None
        if name == "recompute_granularity":  # models/megatron/setup.py
            return self.flag(f"{section}.activation_checkpointing") and (
                self.get(f"{section}.{name}") or "full"
            )
        return self.get(f"{section}.{name}")

    @property
    def splits_experts(self) -> int:
        """The expert tensor-parallel size; 0 for Megatron's default."""
        return self.count(f"{MEGATRON}.expert_tensor_parallel_size")

    @property
    def megatron(self) -> bool:
        """Whether the policy is trained by Megatron."""
        return self.flag(f"{MEGATRON}.enabled")

    @property
    def engine(self) -> str:
        """The inference engine."""
        return self.text(f"{GENERATION}.backend") or "vllm"

    @property
    def balances_experts(self) -> bool:
        """Whether there is a load-balancing loss for experts."""
        balancing = self.text(f"{MEGATRON}.moe_router_load_balancing_type")
        return self.megatron and balancing not in ("", "none")

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines share GPUs."""
        return self.flag(f"{GENERATION}.colocated.enabled")

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines share their GPUs, and whether they work at the same time."""
        return residency.placement(shared=self.colocated, ahead=self.flag("grpo.async_grpo.enabled"))

    @property
    def packed(self) -> str:
        """The section with token budgets of micro-batches; empty if micro-batches count sequences."""
        return next((section for section in (PACKING, DYNAMIC) if self.flag(f"{section}.enabled")), "")

    def cuts(self, limit: str) -> bool:
        """Return whether a token budget is smaller than the longest sequence."""
        return bool(self.packed) and 0 < self.count(f"{self.packed}.{limit}") < self.longest

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return max(1, self.count("cluster.gpus_per_node"))

    @property
    def engine_world(self) -> int:
        """GPUs of all engines."""
        resources = f"{GENERATION}.colocated.resources"
        if self.colocated:
            return self._gpus
        return max(1, self.count(f"{resources}.gpus_per_node")) * max(1, self.count(f"{resources}.num_nodes"))

    @property
    def world(self) -> int:
        """GPUs of the policy's trainer.

        NeMo Gym's nodes come on top of `cluster.num_nodes`. Some recipes before 0.7.0 include them; a job of
        another release is taken to do so if only the remaining nodes can be split.
        """
        own = self._gpus - (0 if self.colocated else self.engine_world)
        rest, ranks = own - self.per_node * self.gym_nodes, self.ranks_per_sequence
        counted_in = not self.knows_release and rest > 0 and own % ranks and not rest % ranks
        return max(1, rest if counted_in else own)

    @property
    def gym_nodes(self) -> int:
        """Nodes of the models that NeMo Gym starts."""
        return self.count("env.nemo_gym.num_gpu_nodes") if self.flag("env.should_use_nemo_gym") else 0

    @property
    def _gpus(self) -> int:
        """GPUs of trainer and engines; a reward model and teachers have their own (algorithms/grpo.py)."""
        nodes, reward = max(1, self.count("cluster.num_nodes")), "env.reward_model.resources"
        has_reward = any(self.text(f"data.{part}.env_name") == "reward_model" for part in _DATA)
        if nodes == 1:
            return self.per_node - (self.count(f"{reward}.gpus_per_node") if has_reward else 0)
        apart = self.count(f"{reward}.num_nodes") if has_reward else 0
        return self.per_node * (nodes - apart - self._teacher_nodes)

    @property
    def _teacher_nodes(self) -> int:
        """Nodes of the teachers for distillation, counting each model once."""
        section = "on_policy_distillation"
        apart = f"{section}.non_colocated_teachers"
        if not (self.flag(f"{section}.enabled") and self.flag(f"{apart}.enabled")):
            return 0
        models = self.inside(f"{section}.teacher_model_by_agent_name")
        shares = self.get(f"{section}.deduplicate_shared_teacher_checkpoints") is not False
        first = {str(model) if shares else name: name for name, model in reversed(models.items())}
        usual = self.count(f"{apart}.default_teacher_cfg.num_nodes") or 1
        return sum(
            self.count(f"{apart}.teacher_overrides.{name}.num_nodes") or usual for name in first.values()
        )

    def ranks(self, kind: str) -> int:
        """Return the trainer's tensor-, context-, pipeline- or expert-parallel size."""
        if not self.megatron:
            return max(1, self.count(f"{DTENSOR}.{kind}_parallel_size"))
        model = "" if kind == "context" else "_model"
        return max(1, self.count(f"{MEGATRON}.{kind}{model}_parallel_size"))

    @property
    def ranks_per_sequence(self) -> int:
        """GPUs that share the sequences of one micro-batch."""
        return math.prod(map(self.ranks, ("tensor", "context", "pipeline")))

    @property
    def mini_batch(self) -> int:
        """Sequences per rank and update, which a micro-batch divides; 0 if they do not divide evenly."""
        sequences, ranks = (
            self.count("policy.train_global_batch_size"),
            max(1, self.world // self.ranks_per_sequence),
        )
        return 0 if sequences % ranks else sequences // ranks

    @property
    def scored(self) -> int:
        """Sequences per rank and step, which a log-prob micro-batch divides."""
        return max(1, self.sequences // max(1, self.world // self.ranks_per_sequence))

    @property
    def sequences(self) -> int:
        """Responses per step."""
        return self.count("grpo.num_prompts_per_step") * max(1, self.count("grpo.num_generations_per_prompt"))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence over all turns, padded as in a micro-batch."""
        longest = self.count("policy.max_total_sequence_length")
        multiple = max(1, self.count("policy.make_sequence_length_divisible_by"))
        return -(-longest // multiple) * multiple

    @property
    def lora_rank(self) -> int:
        """LoRA rank; 0 if all weights are trained."""
        section = f"{MEGATRON}.peft" if self.megatron else f"{DTENSOR}.lora_cfg"
        return self.count(f"{section}.dim") if self.flag(f"{section}.enabled") else 0

    @property
    def resumes(self) -> bool:
        """Whether checkpoints are written; NeMo-RL resumes from the last one in its folder."""
        return self.flag("checkpointing.enabled") and self.count("checkpointing.save_period") > 0
