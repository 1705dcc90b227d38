"""A SkyRL job's settings with the defaults of its release filled in."""

from __future__ import annotations

import math

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.engine_settings import POOL_BYTES
from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement

ENGINE = "generator.inference_engine"
POLICY = "trainer.policy"
CPU_ADAM = f"{POLICY}.megatron_config.optimizer_config_kwargs"
TRANSFORMER = f"{POLICY}.megatron_config.transformer_config_kwargs"
POOL = f"{ENGINE}.engine_init_kwargs.{POOL_BYTES}"
RECOMPUTE = f"{TRANSFORMER}.recompute_granularity"
PLACEMENT = "trainer.placement"
TOKENS = "trainer.max_tokens_per_microbatch"
TRAIN_SIZE, SCORE_SIZE = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
RELEASES = ("0.4.0",)
OLDER = ("0.2.0",)  # only names and defaults are on record; it takes those of skyrl_train too
# Settings that skyrl_train has under `generator.` (skyrl/train/config/legacy.py of 0.2.0).
_KEPT = """
    backend enable_chunked_prefill enable_prefix_caching enable_ray_prometheus_stats enforce_eager
    engine_init_kwargs external_proxy_url external_server_urls fully_sharded_loras gpu_memory_utilization
    max_num_batched_tokens max_num_seqs model_dtype run_engines_locally served_model_name
    vllm_v1_disable_multiproc weight_sync_backend weight_transfer_threshold_cuda_ipc_GB
"""
_SIZES = "data_parallel_size expert_parallel_size pipeline_parallel_size tensor_parallel_size"
RENAMED = (
    Renamed("trainer.use_sample_packing", "trainer.remove_microbatch_padding", since="0.3.0"),
    Renamed("generator.async_engine", since="0.3.0", hint="leave it out: engines are always asynchronous"),
    Renamed("generator.num_inference_engines", f"{ENGINE}.num_engines", since="0.3.0"),
    *(Renamed(f"generator.{name}", f"{ENGINE}.{name}", since="0.3.0") for name in _KEPT.split()),
    *(Renamed(f"generator.inference_engine_{n}", f"{ENGINE}.{n}", since="0.3.0") for n in _SIZES.split()),
)
# Defaults of MegatronConfig's free-form sections.
_FILLED = {
    f"{CPU_ADAM}.optimizer_offload_fraction": 0.0,
    f"{CPU_ADAM}.optimizer_cpu_offload": False,
    f"{CPU_ADAM}.overlap_cpu_optimizer_d2h_h2d": False,
    f"{CPU_ADAM}.use_precision_aware_optimizer": False,
    RECOMPUTE: "full",
    f"{TRANSFORMER}.recompute_method": "uniform",
    f"{TRANSFORMER}.recompute_num_layers": 1,
}


class Config(DeclaredSettings):
    """A job's resolved overrides."""

    engine = "vllm"
    renamed = RENAMED
    older = OLDER

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES, entry="train.entrypoints.", filled=_FILLED)
        self.is_own = self.is_own and "trainer.override_entrypoint" not in self.given

    @property
    def megatron(self) -> bool:
        """Whether the trainer is Megatron's."""
        return self.text("trainer.strategy") == "megatron"

    def field(self, name: str) -> object:
        """Return the value of a field of Megatron's TransformerConfig; None where nobody sets it."""
        switched = name == "recompute_granularity" and not self.flag("trainer.gradient_checkpointing")
        return None if switched else self.get(f"{TRANSFORMER}.{name}")

    @property
    def keeps_hybrids(self) -> bool:
        """Whether no layer is recomputed: Megatron's MambaStack is since 0.18, and SkyRL 0.2.0 has 0.16."""
        spaces = self.shape is not None and self.shape.linear.startswith("mamba")
        return self.megatron and spaces and self.release.version in OLDER

    @property
    def packs_by_tokens(self) -> bool:
        """Whether micro-batches are packed up to a number of tokens."""
        return self.count(TOKENS) > 0

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines share GPUs."""
        return self.flag(f"{PLACEMENT}.colocate_all")

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines share their GPUs, and whether they work at the same time."""
        return residency.placement(shared=self.colocated, ahead=self.flag("trainer.fully_async.enabled"))

    @property
    def world(self) -> int:
        """GPUs of the policy's trainer."""
        return math.prod(
            max(1, self.count(f"{PLACEMENT}.policy_num_{unit}")) for unit in ("nodes", "gpus_per_node")
        )

    @property
    def stage(self) -> int:
        """GPUs of a stage of Megatron's pipeline."""
        return self.world // self.ranks("pipeline_model")

    @property
    def splits_experts(self) -> int:
        """The expert tensor-parallel size; 0 for Megatron's default."""
        return self.count(f"{POLICY}.megatron_config.expert_tensor_parallel_size")

    @property
    def shard_group(self) -> int:
        """Ranks that share one copy of FSDP's state; all of them by default."""
        size = self.count(f"{POLICY}.fsdp_config.fsdp_size")
        return size if 0 < size < self.world else self.world

    @property
    def engine_world(self) -> int:
        """GPUs of all engines."""
        tensor = max(1, self.count(f"{ENGINE}.tensor_parallel_size"))
        return self.count(f"{ENGINE}.num_engines") * self.engine_others * tensor

    @property
    def engine_others(self) -> int:
        """The product of an engine's pipeline- and data-parallel sizes."""
        kinds = ("pipeline", "data")
        return math.prod(max(1, self.count(f"{ENGINE}.{kind}_parallel_size")) for kind in kinds)

    def ranks(self, kind: str) -> int:
        """Return the size of one of Megatron's kinds of parallelism."""
        return max(1, self.count(f"{POLICY}.megatron_config.{kind}_parallel_size"))

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share the sequences of one micro-batch."""
        if self.megatron:
            return self.ranks("tensor_model") * self.ranks("pipeline_model") * self.ranks("context")
        return max(1, self.count(f"{POLICY}.sequence_parallel_size"))

    @property
    def samples(self) -> int:
        """Responses per prompt."""
        return max(1, self.count("generator.n_samples_per_prompt"))

    @property
    def mini_batch(self) -> int:
        """Sequences per rank and mini-batch, which a micro-batch divides; 0 if they do not divide evenly.

        With a critic the greatest common divisor of both models' sequences, because they share the setting.
        """
        own = self._of_rank("policy", max(1, self.world // self.ranks_per_sequence))
        if not self.critic:
            return own
        gpus = math.prod(self.count(f"{PLACEMENT}.critic_num_{unit}") for unit in ("nodes", "gpus_per_node"))
        split = max(1, self.count("trainer.critic.sequence_parallel_size"))
        critic = self._of_rank("critic", max(1, gpus // split))
        return math.gcd(own, critic) if own and critic else 0

    @property
    def divided_in_words(self) -> str:
        """A description of what a micro-batch divides."""
        who = "the policy's and the critic's mini-batch" if self.critic else "a mini-batch"
        return f"a rank's sequences of {who}"

    def _of_rank(self, model: str, ranks: int) -> int:
        sequences = self.count(f"trainer.{model}_mini_batch_size") * self.samples
        return 0 if sequences % ranks else sequences // ranks

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence over all turns."""
        turns = self.count("generator.max_turns") > 1 and self.count("generator.max_input_length")
        prompt = turns or self.count("trainer.max_prompt_length")
        return prompt + self.answer

    @property
    def answer(self) -> int:
        """Tokens of the longest response of one turn."""
        return self.count("generator.sampling_params.max_generate_length")

    @property
    def reference(self) -> bool:
        """Whether there is a reference model."""
        return any(self.flag(f"trainer.algorithm.use_kl_{where}") for where in ("loss", "in_reward"))

    @property
    def critic(self) -> bool:
        """Whether a critic is trained."""
        return bool(self.text("trainer.critic.model.path"))

    @property
    def lora_rank(self) -> int:
        """LoRA rank; 0 if all weights are trained."""
        return self.count(f"{POLICY}.model.lora.rank")

    @property
    def resumes(self) -> bool:
        """Whether a relaunch resumes from the job's own checkpoints; null or none mean the first start."""
        mode, saves = "trainer.resume_mode", self.count("trainer.ckpt_interval") > 0
        return saves and self.text(mode) != "from_path" and not self.lacks(mode)
