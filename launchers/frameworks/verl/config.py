"""A verl job's settings with verl 0.9.1's defaults filled in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.verl import keys
from autotune.launchers.frameworks.verl.overrides import bare, overrides_in, prefix, value_of
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"

_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}$")
_DEEPEST = 8  # references followed from one key


class Defaults(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults of verl_defaults.yaml, by key."""

    both: dict[str, Any]
    megatron: dict[str, Any]
    follows: dict[str, str]  # keys whose default is the value of another one


@cache
def defaults() -> Defaults:
    """Return the defaults of verl 0.9.1; keys that are not there default to nothing."""
    return document(__package__, "defaults.yaml", Defaults)


class Config:
    """What a job's settings come to; `get` takes the keys without Hydra's prefixes."""

    def __init__(self, job: Job) -> None:
        self.spelled = written(job)
        self._values = {bare(key): value_of(value) for key, value in self.spelled.items()}
        self.engine = str(self._values.get("model_engine") or _implied(job, self._values))
        self.keys = "megatron" if self.megatron else "dp"
        known = defaults()
        self._defaults = known.both | (known.megatron if self.megatron else {})
        self._follows = known.follows

    @property
    def megatron(self) -> bool:
        """Whether the trainer is Megatron's."""
        return self.engine == "megatron"

    def has(self, key: str) -> bool:
        """Return whether the job itself sets a key."""
        return key in self._values

    def get(self, key: str, *, depth: int = 0) -> Any:
        """Return the value of a key: the job's, else verl's."""
        if key in self._values:
            value = self._values[key]
            reference = _REFERENCE.match(value) if isinstance(value, str) else None
            if reference is None or depth >= _DEEPEST:
                return value
            return self.get(reference[1], depth=depth + 1)
        if key in self._follows and depth < _DEEPEST:
            return self.get(self._follows[key], depth=depth + 1)
        return self._defaults.get(key)

    def followed(self, key: str) -> str:
        """Return the key whose value a key takes because the job does not set it; empty where none."""
        return "" if self.has(key) else self._follows.get(key, "")

    def flag(self, key: str) -> bool:
        """Return a key's truth."""
        return self.get(key) is True

    def count(self, key: str) -> int:
        """Return a key's whole number; 0 where it is none."""
        value = self.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def share(self, key: str) -> float:
        """Return a key's number; 0 where it is none."""
        value = self.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0

    def text(self, key: str) -> str:
        """Return a key's text; empty where it is unset."""
        value = self.get(key)
        return "" if value is None else str(value)

    def inside(self, node: str) -> dict[str, Any]:
        """Return what a free-form setting holds, whether it is written whole or key by key."""
        whole = self.get(node)
        apart = {name.removeprefix(f"{node}."): name for name in self._values if name.startswith(f"{node}.")}
        present = dict(whole) if isinstance(whole, Mapping) else {}
        return present | {key: self.get(name) for key, name in apart.items()}

    def key(self, name: str) -> str:
        """Return an override's spelling of a key: the job's own, else with `++` where Hydra needs it."""
        for spelled in self.spelled:
            if bare(spelled) == name and prefix(spelled) != "~":
                return spelled
        return name if name in keys.configured(self.keys) else f"++{name}"

    # ------------------------------------------------------------------ what several readers need

    def ranks(self, node: str, *kinds: str) -> int:
        """Return over how many ranks kinds of parallelism of a node spread together."""
        return math.prod(max(1, self.count(f"{node}.{kind}_parallel_size")) for kind in kinds)

    @property
    def world(self) -> int:
        """GPUs of the trainer."""
        return max(1, self.count("trainer.nnodes")) * max(1, self.count("trainer.n_gpus_per_node"))

    @property
    def parallel(self) -> int:
        """Ranks over which one sequence is split: Ulysses, or Megatron's context parallelism."""
        if self.megatron:
            return self.ranks(MEGATRON, "context")
        old = self.count(f"{ACTOR}.ulysses_sequence_parallel_size")
        return old if old > 1 else max(1, self.count(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: verl cuts prompts and the answers of all turns to these lengths."""
        return self.count(f"{ROLLOUT}.prompt_length") + self.count(f"{ROLLOUT}.response_length")

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters; 0 where all parameters are trained."""
        return self.count(f"{MODEL}.lora.rank") or self.count(f"{MODEL}.lora_rank")

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained: then the reference is the actor without them."""
        return self.lora_rank > 0 or self.get(f"{MODEL}.lora_adapter_path") is not None

    @property
    def scores_reference(self) -> bool:
        """Whether a reference policy is scored."""
        return self.flag(f"{ACTOR}.use_kl_loss") or self.flag("algorithm.use_kl_in_reward")

    @property
    def reference(self) -> bool:
        """Whether a reference model of its own is loaded."""
        return self.scores_reference and not self.adapters

    @property
    def critic(self) -> bool:
        """Whether a critic is trained."""
        enabled = self.get("critic.enable")
        return bool(enabled) if enabled is not None else self.text("algorithm.adv_estimator") == "gae"

    def of_critic(self, *keys: str) -> tuple[str, ...]:
        """Return the keys where a critic is trained, else none."""
        return keys if self.critic else ()

    @property
    def dynamic(self) -> bool:
        """Whether micro-batches are filled up to a number of tokens."""
        return self.flag(f"{ACTOR}.use_dynamic_bsz")

    @property
    def rollout(self) -> str:
        """The inference engine: vllm, sglang or trtllm."""
        return self.text(f"{ROLLOUT}.name")

    @property
    def colocated(self) -> bool:
        """Whether trainer and engine share their GPUs."""
        return not self.flag("trainer.use_v1") or self.text("trainer.v1.trainer_mode") != "separate_async"

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives its memory back while training runs."""
        awake = not self.flag(f"{ROLLOUT}.free_cache_engine")
        if self.rollout == "vllm":
            awake = awake or not self.flag(f"{ROLLOUT}.enable_sleep_mode")
        return self.colocated and not awake

    @property
    def entropy(self) -> bool:
        """Whether the update itself computes the entropy."""
        return bool(self.share(f"{ACTOR}.entropy_coeff")) or self.flag(f"{ACTOR}.calculate_entropy")

    @property
    def replicas(self) -> int:
        """Engines that generate side by side."""
        ranks = self.world if self.colocated else self._rollout_ranks
        return max(1, ranks // self.engine_ranks)

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.ranks(ROLLOUT, "tensor_model", "data", "pipeline_model")

    @property
    def rollout_world(self) -> int:
        """GPUs of all engines together."""
        return self.world if self.colocated else self._rollout_ranks

    @property
    def _rollout_ranks(self) -> int:
        return max(1, self.count(f"{ROLLOUT}.nnodes") * self.count(f"{ROLLOUT}.n_gpus_per_node"))

    @property
    def data_parallel(self) -> int:
        """Ranks that each take their own part of a mini-batch."""
        split = self.parallel
        if self.megatron:
            split *= self.ranks(MEGATRON, "tensor_model", "pipeline_model")
        return max(1, self.world // split)

    @property
    def mini_batch(self) -> int:
        """Sequences of one mini-batch on one data-parallel rank; 0 where they do not divide evenly."""
        sequences = self._update_written
        return 0 if sequences % self.data_parallel else sequences // self.data_parallel

    @property
    def update(self) -> int:
        """Samples of one update of the weights, over all ranks."""
        return min(self._update_written, self.sequences)

    @property
    def _update_written(self) -> int:
        return self.count(f"{ACTOR}.ppo_mini_batch_size") * max(1, self.count(f"{ROLLOUT}.n"))

    @property
    def sequences(self) -> int:
        """Samples of one step."""
        return self.count("data.train_batch_size") * max(1, self.count(f"{ROLLOUT}.n"))


def _implied(job: Job, values: Mapping[str, Any]) -> str:
    """Return the model engine of a job that does not name one: older ways of choosing Megatron still do."""
    alias = any("ppo_megatron_trainer" in word for word in job.command)
    return "megatron" if alias or values.get(f"{ACTOR}.strategy") == "megatron" else "dp"


def written(job: Job) -> dict[str, Any]:
    """Return the job's own overrides: those in its command, and over them its settings, nested ones flat."""
    found = overrides_in(job.command)
    for key, value in _flat(job.settings).items():
        for other in [name for name in found if bare(name) == bare(key) and name != key]:
            del found[other]
        found[key] = value
    return found


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in settings.items():
        name = bare(key)
        inside = keys.is_node(name, "dp") or keys.is_node(name, "megatron")
        if isinstance(value, Mapping) and value and inside:
            result |= _flat({f"{key}.{inner}": each for inner, each in value.items()})
        else:
            result[key] = value
    return result
