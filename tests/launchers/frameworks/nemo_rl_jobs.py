"""Jobs of NeMo-RL that its tests start from."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, Job

CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
SHAPE = Model(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
_BASE: dict[str, Any] = {
    "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "policy.max_total_sequence_length": 4096,
    "policy.train_micro_batch_size": 4,
    "policy.logprob_batch_size": 8,
    "grpo.num_prompts_per_step": 64,
    "grpo.num_generations_per_prompt": 32,
    "cluster.gpus_per_node": 8,
}
_PLAIN = {"policy.sequence_packing.enabled": False}
_MEGATRON = {
    "policy.dtensor_cfg.enabled": False,
    "policy.megatron_cfg.enabled": True,
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
}
_VLLM = "++policy.generation.vllm_kwargs"


def job(settings: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Return the example job with settings of its own."""
    return Job(
        **{
            "name": "math",
            "framework": "nemo-rl",
            "framework_version": "0.7.0",
            "settings": {**_BASE, **(settings or {})},
            "shape": SHAPE,
            "workdir": "/opt/nemo-rl",
            **fields,
        }
    )


JOBS = {
    "images": job(shape=replace(SHAPE, tower=676_000_000)),
    "packed": job(),
    "sequences": job(_PLAIN),
    "dynamic": job({**_PLAIN, "policy.dynamic_batching.enabled": True}),
    "megatron": job(_MEGATRON),
    "experts": job(
        _MEGATRON, shape=replace(SHAPE, experts=128, experts_per_token=8, expert_intermediate=768)
    ),
    "megatron-sequences": job(
        {
            **_MEGATRON,
            **_PLAIN,
            "policy.megatron_cfg.defer_fp32_logits": True,
            "policy.logprob_chunk_size": 1024,
        }
    ),
    "limited": job({f"{_VLLM}.max_num_seqs": 256, f"{_VLLM}.max_num_batched_tokens": 8192}),
    "apart": job(
        {
            "policy.generation.colocated.enabled": False,
            "policy.generation.colocated.resources.gpus_per_node": 4,
        }
    ),
}
