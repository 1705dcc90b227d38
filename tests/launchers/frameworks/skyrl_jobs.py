"""Jobs of SkyRL that its tests start from."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job

CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
SHAPE = Model(layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064)
_BASE: dict[str, Any] = {
    "trainer.policy.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.placement.ref_num_gpus_per_node": 8,
    "trainer.train_batch_size": 256,
    "trainer.policy_mini_batch_size": 64,
    "trainer.micro_train_batch_size_per_gpu": 4,
    "trainer.micro_forward_batch_size_per_gpu": 8,
    "generator.inference_engine.num_engines": 8,
    "trainer.logger": "console",
}
_MEGATRON: dict[str, Any] = {
    "trainer.strategy": "megatron",
    "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
    "trainer.ref.megatron_config.tensor_model_parallel_size": 2,
}


def job(settings: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Return the example job with settings of its own."""
    return Job(
        **{
            "name": "gsm8k",
            "framework": "skyrl",
            "framework_version": "0.4.0",
            "settings": {**_BASE, **(settings or {})},
            "shape": SHAPE,
            "workdir": "/home/me/SkyRL",
            **fields,
        }
    )


_FSDP = "trainer.policy.fsdp_config"
JOBS = {
    "images": job(shape=replace(SHAPE, tower=676_000_000)),
    "sequences": job(),
    "tokens": job({"trainer.max_tokens_per_microbatch": 16384}),
    "groups": job({f"{_FSDP}.fsdp_size": 2, f"{_FSDP}.reshard_after_forward": False}),
    "megatron": job(_MEGATRON),
    "experts": job(
        _MEGATRON, shape=replace(SHAPE, experts=128, experts_per_token=8, expert_intermediate=768)
    ),
    "megatron-tokens": job({**_MEGATRON, "trainer.max_tokens_per_microbatch": 8192}),
    "adapters": job({"trainer.policy.model.lora.rank": 32}),
    "apart": job(
        {
            "trainer.placement.colocate_all": False,
            "generator.inference_engine.num_engines": 2,
            "generator.inference_engine.tensor_parallel_size": 2,
        }
    ),
}
