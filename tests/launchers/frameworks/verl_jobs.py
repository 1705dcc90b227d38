"""verl jobs of every kind that the tests look at: engines, batching, critics, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from autotune.launchers.frameworks.verl.adapter import Verl
from autotune.policies.remedies.legality import lowest, objections
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile

VERL = Verl()
CLUSTER = Cluster(
    address="10.0.0.1:6379",
    nodes=1,
    gpus_per_node=8,
    gpu_memory_bytes=80 << 30,
    host_memory_bytes=1 << 40,
)
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
QWEN_7B = Model(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064)
HEADS_40 = Model(layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064)

GRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": 512,
    "data.max_response_length": 1536,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 4,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.logger": ["console"],
    "trainer.save_freq": 10,
}
_STATIC = {
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
    f"{REF}.log_prob_micro_batch_size_per_gpu": 16,
    f"{ACTOR}.use_kl_loss": True,
}
_MEGATRON = {"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2}
_KINDS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp2-reference": {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.use_kl_loss": True},
    "static": _STATIC,
    "sglang": {f"{ROLLOUT}.name": "sglang"},
    "critic": {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct"},
    "static-critic": {**_STATIC, "algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 8},
    "entropy": {f"{ACTOR}.entropy_coeff": 0.001},
    "lora": {
        "actor_rollout_ref.model.lora_rank": 32,
        f"{ACTOR}.use_kl_loss": True,
        f"{ROLLOUT}.name": "sglang",
    },
    "ulysses": {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{ACTOR}.ppo_max_token_len_per_gpu": 8192},
    "no-validation": {"trainer.val_before_train": False, "data.train_batch_size": 64},
    "groups": {
        f"{ACTOR}.fsdp_config.fsdp_size": 2,
        f"{ACTOR}.fsdp_config.reshard_after_forward": False,
    },
    "megatron": _MEGATRON,
    "megatron-critic": {**_MEGATRON, "algorithm.adv_estimator": "gae"},
}


def job(shape: Model | None = QWEN_7B, **changes: Any) -> Job:
    """Return a GRPO job with other settings; `__` stands for the dot of a key."""
    own = {key.replace("__", "."): value for key, value in changes.items()}
    return Job(
        name="story",
        framework="verl",
        framework_version="0.9.1",
        workdir="/home/me",
        settings={**GRPO, **own},
        shape=shape,
    )


JOBS: dict[str, Job] = {name: job(**kind) for name, kind in _KINDS.items()}
JOBS["experts"] = job(
    replace(QWEN_7B, experts=128, experts_per_token=8, expert_intermediate=768, kv_lora_rank=512),
    **_MEGATRON,
    **{
        f"+{ACTOR}.megatron.override_transformer_config.fine_grained_activation_offloading": False,
        f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": "selective",
    },
)
_CONFIGS = Path(__file__).parents[3] / "configs"


def written_jobs() -> dict[str, Job]:
    """Return the jobs of configs/ and a job per preset."""
    result = {}
    for path in sorted(_CONFIGS.glob("verl-*.yaml")):
        document = yaml.safe_load(path.read_text())
        result[path.stem] = Job(
            framework_version="0.9.1",
            name=document["name"],
            framework="verl",
            workdir="/home/me",
            settings=document["settings"],
        )
    for name, preset in VERL.presets.items():
        result[f"preset-{name}"] = Job(
            framework_version="0.9.1",
            name=name,
            framework="verl",
            workdir="/home/me",
            settings={**GRPO, **preset},
        )
    return result


def profile(of: Job) -> Profile:
    return VERL.profile(of, CLUSTER)


def with_settings(of: Job, settings: dict[str, Any]) -> Job:
    return replace(of, settings={**of.settings, **settings})


def moves(of: Job, *, started: bool = False) -> Iterator[tuple[str, Setting, Knobs]]:
    """Yield every legal single change of a job: each knob at each value of its grid, ranges at a few."""
    own = profile(of)
    for knob, offer in own.supported.items():
        grid = offer.grid
        values: tuple[Any, ...] = grid.values
        if not values:
            low, step = grid.minimum or 0, grid.multiple or 1
            high = grid.maximum if grid.maximum is not None else max(low * 64, 1 << 15)
            floor = -(-max(low, lowest(own, knob) or low) // step) * step
            picked = {floor, floor + step * ((high - floor) // (2 * step)), high}
            whole = not isinstance(step, float) or step.is_integer()
            values = tuple(int(v) if whole else round(v, 6) for v in sorted(picked) if low <= v <= high)
        for value in values:
            after = replace(own.knobs, **{knob: value})
            if not objections(own, own.knobs, after, started=started):
                yield knob, value, after
