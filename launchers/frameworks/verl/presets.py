"""The configuration templates of verl's guide as starts of a job, in today's settings.

Read with verl 0.9.1: a recomputation that Megatron's engine reads, the critic's budget under the key that is
read, fused kernels where Liger's fused loss is switched off, and nothing that dynamic batching ignores.
"""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.verl.config import ACTOR, MODEL, ROLLOUT

_RECOMPUTE = f"{ACTOR}.megatron.override_transformer_config.recompute"
_CPU_ADAM = f"++{ACTOR}.optim.override_optimizer_config"

PRESETS: dict[str, dict[str, Any]] = {
    "memory-constrained": {
        "trainer.n_gpus_per_node": 1,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{ROLLOUT}.enforce_eager": True,
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"{MODEL}.enable_activation_offload": True,
        f"{MODEL}.use_fused_kernels": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
    },
    "large-model": {
        "model_engine": "megatron",
        f"{ROLLOUT}.gpu_memory_utilization": 0.7,
        f"{ROLLOUT}.tensor_model_parallel_size": 4,
        f"{_RECOMPUTE}_granularity": "full",
        f"{_RECOMPUTE}_method": "uniform",
        f"{_RECOMPUTE}_num_layers": 1,
        f"{ACTOR}.megatron.param_offload": True,
        f"{ACTOR}.megatron.optimizer_offload": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
        "++critic.ppo_infer_max_token_len_per_gpu": 32768,
    },
    "very-large-model": {
        "model_engine": "megatron",
        f"{ROLLOUT}.gpu_memory_utilization": 0.85,
        f"{ROLLOUT}.tensor_model_parallel_size": 8,
        f"{_RECOMPUTE}_granularity": "full",
        f"{_RECOMPUTE}_method": "uniform",
        f"{_RECOMPUTE}_num_layers": 1,
        f"{ACTOR}.megatron.param_offload": True,
        f"{ACTOR}.megatron.optimizer_offload": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{_CPU_ADAM}.optimizer_cpu_offload": True,
        f"{_CPU_ADAM}.optimizer_offload_fraction": 1.0,
        f"{_CPU_ADAM}.use_precision_aware_optimizer": True,
        f"{_CPU_ADAM}.overlap_cpu_optimizer_d2h_h2d": True,
    },
}
