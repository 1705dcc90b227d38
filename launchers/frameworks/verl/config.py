"""A verl job's settings, resolved with the defaults of its release."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.engine_settings import POOL_BYTES
from autotune.launchers.frameworks.core.versions import Release, choose, is_before
from autotune.launchers.frameworks.dialects import hydra
from autotune.launchers.frameworks.dialects.hydra import bare, prefix, value_of
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.launchers.frameworks.verl.keys import OLDER, RELEASES, is_node, keys_of, names_own_file, of_code
from autotune.launchers.frameworks.verl.renamed import RENAMED
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.provenance import Origin

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
FSDP = f"{ACTOR}.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
POOL = f"{ROLLOUT}.engine_kwargs.vllm.{POOL_BYTES}"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
CRITIC_UPDATE = "critic.ppo_max_token_len_per_gpu"
TOP = ("model_engine",)  # keys without a section
_APART = re.compile(r"\bone_step_off_policy\.|\bfully_async_policy\.|/(?:one_step_off|fully_async)_policy/")
_PER_GPU, _BY_ALL = "_micro_batch_size_per_gpu", "_micro_batch_size"
# Hard-coded behavior of verl 0.2 to 0.6 where it has no setting yet (fsdp_workers.py, dp_actor.py,
# main_ppo.py): before 0.3 a reference is always loaded.
_OF_OLDER = {
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": True,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": True,
    "actor_rollout_ref.actor.megatron.dtype": "bfloat16",
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer": True,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": "bf16",
    "actor_rollout_ref.rollout.enable_sleep_mode": True,
    "algorithm.use_kl_in_reward": True,
    "trainer.use_legacy_worker_impl": "auto",
}
_OF_ENGINES = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}  # defaults of disaggregated programs


def _hidden(job: Job) -> dict[str, int]:
    """Return the sizes of `cluster` where another config file, which is not read, hides verl's defaults."""
    sizes = {"trainer.nnodes": job.cluster.nodes, "trainer.n_gpus_per_node": job.cluster.gpus_per_node}
    return {name: size for name, size in sizes.items() if size} if names_own_file(job.command) else {}


class Config(DeclaredSettings):
    """A job's resolved settings; `get` expects keys without Hydra's prefixes."""

    renamed = RENAMED
    older = OLDER

    def __init__(self, job: Job) -> None:
        given = written(job)
        values = {bare(key): value_of(value) for key, value in given.items()}
        self.model_engine = str(values.get("model_engine") or _implied(job, values))
        known = keys_of(job.framework_version, "megatron" if self.megatron else "dp")
        own = job.own_code.defaults if job.own_code is not None else {}
        self.known = known if job.own_code is None or not own else of_code(known, job.own_code)
        self.cluster = job.cluster
        super().__init__(
            job,
            __package__,
            RELEASES,
            entry="main_ppo",
            declared=self.known,
            given=given,
            filled=self._unsaid(choose(job.framework_version, RELEASES, OLDER).version) | _hidden(job),
        )
        is_fork = bool(own) and own.keys() != known.configured.keys()  # whatever number it has
        if is_fork or names_own_file(job.command):
            self.release = self.release._replace(origin=Origin.ASSUMED)
        self.takes_plain = self.known.configured if own or self.release.exact else {}  # without Hydra's `++`
        self.version = job.framework_version or ""
        # Programs with longer names, such as recipes, have settings of their own.
        self.is_own = not job.command or any(word.endswith("main_ppo") for word in job.command)
        self.shape, self.env = job.shape, job.env
        # verl's one-step-off-policy and fully asynchronous programs, and those built on them, give engines
        # their own GPUs, set in a section that verl's main program does not have.
        self.names_release = job.framework_version is not None  # stated by the job, or installed
        self.disaggregated = any(map(self.has, _OF_ENGINES)) or any(map(_APART.search, job.command))

    @classmethod
    def release_of(cls, job: Job, given: Iterable[str], releases: tuple[str, ...]) -> Release:
        """Return the release of the job's version, otherwise the newest."""
        return choose(job.framework_version, releases, cls.older)

    def _unsaid(self, release: str) -> dict[str, Any]:
        """Return an older release's hard-coded behavior where it has no setting yet."""
        optimizer = {f"{ACTOR}.optim.optimizer": "adam" if self.megatron else "AdamW"}
        every = _OF_OLDER | optimizer if release in OLDER else {}
        return {key: value for key, value in every.items() if key not in self.known.defaults}

    def raw(self, key: str) -> Any:
        """Return a key's unresolved value or default; counts over all GPUs become counts per GPU."""
        value = super().raw(key)
        if value is None and self.counts_all(key):
            return max(1, super().raw(key.replace(_PER_GPU, _BY_ALL)) // self.data_parallel)
        return value

    def counts_all(self, key: str) -> bool:
        """Return whether the job counts a micro-batch over all GPUs, which 0.7 refuses."""
        whole = super().raw(key.replace(_PER_GPU, _BY_ALL)) if key.endswith(_PER_GPU) else None
        return isinstance(whole, int) and not self.release.exact

    @property
    def megatron(self) -> bool:
        """Whether the trainer is Megatron's."""
        return self.model_engine == "megatron"

    @property
    def swaps_optimizer(self) -> bool:
        """Whether MindSpeed's Adam keeps all but the slice being updated in host memory.

        mindspeed/core/optimizer/swap_optimizer, of Ascend NPUs: Adam with the distributed optimizer.
        """
        return self.megatron and self.inside(TRANSFORMER).get("swap_optimizer") is True

    def field(self, name: str) -> object:
        """Return a field of Megatron's TransformerConfig; None if the job leaves it out."""
        return self.inside(TRANSFORMER).get(name) if self.megatron else None

    def key(self, name: str) -> str:
        """Return a key as an override: in the job's spelling, otherwise with `++` if Hydra needs it."""
        name = self.named(name)
        for spelled in self.given:
            if bare(spelled) == name and prefix(spelled) != "~":
                return spelled
        return name if name in self.takes_plain else f"++{name}"

    @property
    def engine(self) -> str:
        """The inference engine: vllm, sglang or trtllm."""
        name = self.text(f"{ROLLOUT}.name")
        return "" if name == "???" else name  # Hydra's value of a required setting

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints."""
        return self.count("trainer.save_freq") > 0 or not self.has("trainer.save_freq")

    @property
    def resumes(self) -> bool:
        """Whether the job writes checkpoints and can resume from them."""
        mode = "trainer.resume_mode"
        return self.saves and self.text(mode) != "disable" and not self.lacks(mode)

    def ranks(self, node: str, *kinds: str) -> int:
        """Return the product of some parallel sizes of a node."""
        return math.prod(max(1, self.count(f"{node}.{kind}_parallel_size")) for kind in kinds)

    @property
    def world(self) -> int:
        """GPUs of the trainer."""
        return max(1, self.count("trainer.nnodes")) * max(1, self.count("trainer.n_gpus_per_node"))

    @property
    def stage(self) -> int:
        """GPUs of one of Megatron's pipeline stages."""
        return max(1, self.world // self.ranks(MEGATRON, "pipeline_model"))

    @property
    def heads(self) -> int:
        """Attention heads of the model; 0 if its shape is unknown."""
        return 0 if self.shape is None else self.shape.heads

    @property
    def most_requests(self) -> int:
        """Concurrent requests of the engine; 0 if it chooses itself."""
        return self.count(f"{ROLLOUT}.max_num_seqs")

    @property
    def parallel(self) -> int:
        """Ranks that share one sequence: Ulysses, or Megatron's context parallelism."""
        if self.megatron:
            return self.ranks(MEGATRON, "context")
        old = self.count(f"{ACTOR}.ulysses_sequence_parallel_size")
        return old if old > 1 else max(1, self.count(f"{FSDP}.ulysses_sequence_parallel_size"))

    @property
    def split_key(self) -> str:
        """The setting of `parallel`."""
        return (
            f"{MEGATRON}.context_parallel_size"
            if self.megatron
            else f"{ACTOR}.ulysses_sequence_parallel_size"
        )

    @property
    def splits_experts(self) -> int:
        """The expert tensor-parallel size; 0 for Megatron's default."""
        return self.count(f"{MEGATRON}.expert_tensor_parallel_size")

    @property
    def shard_group(self) -> int:
        """Ranks that share one copy of FSDP's state; all of them by default."""
        size = self.count(f"{FSDP}.fsdp_size")
        return size if 0 < size < self.world else self.world

    @property
    def critic_node(self) -> str:
        """The critic's section that corresponds to the actor's trainer section."""
        return "critic.megatron" if self.megatron else "critic.fsdp"

    @property
    def older_workers(self) -> bool:
        """Whether the critic uses the legacy workers, the default of verl 0.7."""
        return self.text("trainer.use_legacy_worker_impl") in ("auto", "enable")

    @property
    def critic_split_key(self) -> str:
        """The setting of the ranks that share one of the critic's sequences."""
        node = "critic" if self.older_workers and not self.megatron else self.critic_node
        return f"{node}.{self.split_key.rpartition('.')[2]}"

    @property
    def critic_tokens_key(self) -> str:
        """The setting of the critic's tokens per micro-batch; values and update share one limit."""
        return CRITIC_UPDATE if self.older_workers else "critic.ppo_infer_max_token_len_per_gpu"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; verl truncates prompts and the responses of all turns to it."""
        return self.count(f"{ROLLOUT}.prompt_length") + self.count(f"{ROLLOUT}.response_length")

    @property
    def lora_rank(self) -> int:
        """LoRA rank; 0 if all parameters are trained."""
        return self.count(f"{MODEL}.lora.rank") or self.count(f"{MODEL}.lora_rank")

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained; then the reference is the actor without them."""
        return self.lora_rank > 0 or self.get(f"{MODEL}.lora_adapter_path") is not None

    @property
    def summons_whole(self) -> bool:
        """Whether a weight sync gathers the whole model on every GPU with FSDP1 to read the adapters.

        It does unless adapters are merged or summoned layer by layer (fsdp_utils.py, collect_lora_params).
        """
        apart = self.flag(f"{MODEL}.lora.merge") or self.flag(f"{ROLLOUT}.layered_summon")
        fsdp1 = not self.megatron and self.text(f"{ACTOR}.strategy") == "fsdp"
        return self.adapters and fsdp1 and not apart

    @property
    def copies_shards(self) -> bool:
        """Whether a weight sync reads FSDP1's sharded state dict (fsdp/transformer_impl.py)."""
        fsdp1 = not self.megatron and self.text(f"{ACTOR}.strategy") == "fsdp"
        return fsdp1 and (not self.adapters or self.flag(f"{MODEL}.lora.merge"))

    @property
    def reference(self) -> bool:
        """Whether a separate reference model is loaded."""
        scored = self.flag(f"{ACTOR}.use_kl_loss") or self.flag("algorithm.use_kl_in_reward")
        return scored and not self.adapters

    @property
    def critic(self) -> bool:
        """Whether a critic is trained."""
        enabled = self.get("critic.enable")
        return bool(enabled) if enabled is not None else self.text("algorithm.adv_estimator") == "gae"

    @property
    def dynamic(self) -> bool:
        """Whether micro-batches are packed up to a number of tokens."""
        return self.flag(f"{ACTOR}.use_dynamic_bsz")

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines share GPUs."""
        if self.disaggregated:
            return False
        return not self.flag("trainer.use_v1") or self.text("trainer.v1.trainer_mode") != "separate_async"

    @property
    def placement(self) -> Placement:
        """Whether trainer and engines take turns on their GPUs."""
        return residency.placement(shared=self.colocated, ahead=True)

    @property
    def sleeps(self) -> bool:
        """Whether the engine releases its memory during training."""
        awake = not self.flag(f"{ROLLOUT}.free_cache_engine") and not self.always_sleeps
        if self.engine == "vllm":
            awake = awake or not self.flag(f"{ROLLOUT}.enable_sleep_mode")
        return self.colocated and not awake

    @property
    def always_sleeps(self) -> bool:
        """Whether the engine sleeps regardless of `free_cache_engine`, as before 0.5.0 (fsdp_vllm.py)."""
        return self.engine == "vllm" and is_before(self.version, "0.5.0")

    @property
    def entropy(self) -> bool:
        """Whether the update computes the entropy, as it always does before 0.4.0 (dp_actor.py)."""
        asked = bool(self.share(f"{ACTOR}.entropy_coeff")) or self.flag(f"{ACTOR}.calculate_entropy")
        return asked or is_before(self.version, "0.4.0")

    @property
    def wakes_whole(self) -> bool:
        """Whether the engine wakes up its KV pool before the weight sync, as vLLM in 0.3 (fsdp_vllm.py)."""
        of_release = is_before(self.version, "0.4.0") and not is_before(self.version, "0.3.0")
        return of_release and self.engine == "vllm" and not self.megatron

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.ranks(ROLLOUT, "tensor_model", "data", "pipeline_model")

    @property
    def rollout_world(self) -> int:
        """GPUs of all engines."""
        if self.colocated:
            return self.world
        if self.disaggregated:
            return math.prod(self.count(key) if self.has(key) else n for key, n in _OF_ENGINES.items()) or 1
        return max(1, self.count(f"{ROLLOUT}.nnodes") * self.count(f"{ROLLOUT}.n_gpus_per_node"))

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks."""
        split = self.parallel
        if self.megatron:
            split *= self.ranks(MEGATRON, "tensor_model", "pipeline_model")
        return max(1, self.world // split)

    @property
    def mini_batch(self) -> int:
        """Sequences of one mini-batch on one data-parallel rank; 0 if they do not divide evenly."""
        sequences = self._update_written
        return 0 if sequences % self.data_parallel else sequences // self.data_parallel

    @property
    def update(self) -> int:
        """Samples per weight update, over all ranks."""
        return min(self._update_written, self.sequences)

    @property
    def _update_written(self) -> int:
        return self.count(f"{ACTOR}.ppo_mini_batch_size") * max(1, self.count(f"{ROLLOUT}.n"))

    @property
    def sequences(self) -> int:
        """Samples per step; the fully asynchronous trainer waits for whole mini-batches instead."""
        batch = self.count("data.train_batch_size")
        if self.disaggregated and not batch:
            return self._update_written * max(1, self.count("async_training.require_batches"))
        return batch * max(1, self.count(f"{ROLLOUT}.n"))


def _implied(job: Job, values: Mapping[str, Any]) -> str:
    """Return the model engine implied by older settings that chose Megatron."""
    alias = any("ppo_megatron_trainer" in word for word in job.command)
    return "megatron" if alias or values.get(f"{ACTOR}.strategy") == "megatron" else "dp"


def written(job: Job) -> dict[str, Any]:
    """Return the job's overrides by dotted key: its settings over those in its command."""
    result = overrides_in(job.command)
    spelled: dict[str, list[str]] = {}  # key without Hydra's prefix -> the job's spellings
    for name in result:
        spelled.setdefault(bare(name), []).append(name)
    for key, value in dict(_flat(job.settings, job.framework_version)).items():
        for other in spelled.get(bare(key), ()):
            if other != key:
                del result[other]
        spelled[bare(key)] = [key]
        result[key] = value
    return result


def overrides_in(words: Iterable[str]) -> dict[str, Any]:
    """Return the overrides among the words of a command line, under their keys as written."""
    return hydra.overrides_in(words, top=TOP)


def _flat(settings: Mapping[str, Any], version: str | None) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and is_node(bare(key), version):
            yield from _flat({f"{key}.{inner}": each for inner, each in value.items()}, version)
        else:
            yield key, value
