"""Published recipes as facts: settings that decide their memory, the model, and where they ran."""

from __future__ import annotations

from typing import Any, NamedTuple

from autotune.policies.values.architecture.model import Model, model_from_config

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))


class Recipe(NamedTuple):
    """A job, where its authors ran it, and from where it is known."""

    framework: str
    source: str
    model: Model | None  # None: its own flags describe it
    nodes: int
    gpu_gib: int
    settings: dict[str, Any]
    host_gib: int = 1800
    gpus: int = 8
    document: dict[str, Any] = {}


def _qwen(family: str, hidden: int, layers: int, heads: int, kv: int, inner: int, **more: Any) -> Model:
    config = {"model_type": family, "hidden_size": hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner}
    return model_from_config(config | {"vocab_size": 151936, **more})


_ROUTED = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
QWEN3_1B = _qwen("qwen3", 2048, 28, 16, 8, 6144, head_dim=128, tie_word_embeddings=True)
QWEN3_8B = _qwen("qwen3", 4096, 36, 32, 8, 12288, head_dim=128)
QWEN2_7B = _qwen("qwen2", 3584, 28, 28, 4, 18944)
QWEN2_32B = _qwen("qwen2", 5120, 64, 40, 8, 27648)
QWEN3_30B_A3B = _qwen("qwen3_moe", 2048, 48, 32, 4, 6144, moe_intermediate_size=768, **_ROUTED)
QWEN3_235B_A22B = _qwen("qwen3_moe", 4096, 94, 64, 4, 12288, moe_intermediate_size=1536, **_ROUTED)
DEEPSEEK_V3 = model_from_config(
    {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)


def _verl(prompt: int, response: int, *, batch: int, mini: int, n: int, fraction: float, tensor: int):
    return {
        "algorithm.adv_estimator": "grpo",
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "data.train_batch_size": batch,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": n,
        f"{ROLLOUT}.gpu_memory_utilization": fraction,
        f"{ROLLOUT}.tensor_model_parallel_size": tensor,
        f"{ACTOR}.use_kl_loss": True,
        "trainer.save_freq": 20,
    }


def _packed(tokens: int) -> dict[str, Any]:
    return {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": tokens}


def _megatron(nodes: int, *, tensor: int, pipeline: int = 1, expert: int = 1, **more: Any) -> dict[str, Any]:
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "expert_model": expert, **more}
    own = {f"{ACTOR}.megatron.{name}_parallel_size": size for name, size in sizes.items()}
    offload = {f"{ACTOR}.megatron.{name}_offload": True for name in ("param", "optimizer")}
    return {"model_engine": "megatron", "trainer.nnodes": nodes, **own, **offload}


_TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
_FULL = {
    f"+{_TRANSFORMER}.recompute_granularity": "full",
    f"+{_TRANSFORMER}.recompute_method": "uniform",
    f"+{_TRANSFORMER}.recompute_num_layers": 1,
}
_CPU_ADAM = {
    f"+{ACTOR}.optim.override_optimizer_config.{name}": value
    for name, value in {
        "optimizer_offload_fraction": 1.0,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
    }.items()
}


def _slime(nodes: int, *, tensor: int, pipeline: int = 1, context: int = 1, expert: int = 1, **more: Any):
    return {
        "actor-num-nodes": nodes,
        "actor-num-gpus-per-node": 8,
        "colocate": True,
        "num-rollout": 3000,
        "rollout-batch-size": 32,
        "n-samples-per-prompt": 8,
        "rollout-max-response-len": 8192,
        "global-batch-size": 256,
        "use-kl-loss": True,
        "ref-load": "/root/ref",
        "tensor-model-parallel-size": tensor,
        "sequence-parallel": True,
        "pipeline-model-parallel-size": pipeline,
        "context-parallel-size": context,
        "expert-model-parallel-size": expert,
        "expert-tensor-parallel-size": 1,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
        "use-dynamic-batch-size": True,
        "optimizer-cpu-offload": True,
        "overlap-cpu-optimizer-d2h-h2d": True,
        "use-precision-aware-optimizer": True,
        "sglang-mem-fraction-static": 0.7,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


_QWEN3_30B_FLAGS = {
    "swiglu": True,
    "num-layers": 48,
    "hidden-size": 2048,
    "ffn-hidden-size": 6144,
    "vocab-size": 151936,
    "num-attention-heads": 32,
    "group-query-attention": True,
    "num-query-groups": 4,
    "kv-channels": 128,
    "disable-bias-linear": True,
    "normalization": "RMSNorm",
    "qk-layernorm": True,
    "untie-embeddings-and-output-weights": True,
    "num-experts": 128,
    "moe-router-topk": 8,
    "moe-ffn-hidden-size": 768,
}
_SLIME_30B = {
    **_QWEN3_30B_FLAGS,
    **_slime(1, tensor=4, expert=8, max_tokens_per_gpu=20480, rollout_num_gpus_per_engine=8),
}
_NAMES = {"experiment_name": "tau2", "trial_name": "t"}
_AREAL_1B = {
    **_NAMES,
    **{name: {**_NAMES, "fileroot": "/tmp/e"} for name in ("saver", "evaluator", "stats_logger")},
    "tokenizer_path": "Qwen/Qwen3-1.7B",
    "cluster": {"n_nodes": 1, "n_gpus_per_node": 8, "fileroot": "/tmp/e"},
    "scheduler": {"type": "ray"},
    "econfig": {"domain": "airline"},  # of the recipe's own class
    "gconfig": {"n_samples": 8, "max_new_tokens": 4096, "max_tokens": 16384},
    "rollout": {"backend": "sglang:d6", "max_concurrent_rollouts": 128, "consumer_batch_size": 16},
    "actor": {
        **_NAMES,
        "backend": "archon:d2",
        "path": "Qwen/Qwen3-1.7B",
        "gradient_checkpointing": True,
        "mb_spec": {"max_tokens_per_mb": 24576},
        "optimizer": {"type": "adam"},
        "kl_ctl": 0.0,
    },
    "sglang": {"model_path": "Qwen/Qwen3-1.7B", "mem_fraction_static": 0.8},
    "train_dataset": {"batch_size": 16, "path": "tau2/train", "type": "rl"},
}
VERL_EXAMPLES = "verl, examples/grpo_trainer"

RUNNING = {
    "verl-8b-fsdp": Recipe(
        "verl",
        f"{VERL_EXAMPLES}/run_qwen3_8b_fsdp.sh",
        QWEN3_8B,
        1,
        80,
        _verl(1024, 2048, batch=1024, mini=256, n=5, fraction=0.6, tensor=2) | _packed(24576),
    ),
    "verl-7b-counted": Recipe(
        "verl",
        f"{VERL_EXAMPLES}/run_qwen2-7b.sh of 0.7",
        QWEN2_7B,
        1,
        80,
        _verl(512, 1024, batch=1024, mini=256, n=5, fraction=0.6, tensor=2)
        | {
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 40,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 40,
            f"{REF}.log_prob_micro_batch_size_per_gpu": 40,
        },
    ),
    "verl-32b-megatron": Recipe(
        "verl",
        "verl, docs/perf/device_tuning.rst: 32B, MIN, 8 x H20",
        QWEN2_32B,
        1,
        96,
        _verl(2048, 6144, batch=512, mini=256, n=5, fraction=0.6, tensor=8)
        | _megatron(1, tensor=8)
        | {
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
            f"{REF}.log_prob_micro_batch_size_per_gpu": 1,
        },
    ),
    "verl-30b-moe": Recipe(
        "verl",
        f"{VERL_EXAMPLES}/run_qwen3moe-30b_megatron_96gb.sh of 0.7",
        QWEN3_30B_A3B,
        1,
        96,
        _verl(2048, 8192, batch=512, mini=128, n=16, fraction=0.7, tensor=4)
        | _megatron(1, tensor=1, expert=8, expert_tensor=1)
        | _CPU_ADAM
        | _packed(10240)
        | {f"{ACTOR}.use_kl_loss": False, f"{ROLLOUT}.enforce_eager": True},
    ),
    "verl-235b-moe": Recipe(
        "verl",
        f"{VERL_EXAMPLES}/run_qwen3_235b_a22b_megatron.sh, 8 nodes",
        QWEN3_235B_A22B,
        8,
        96,
        _verl(8192, 4096, batch=128, mini=128, n=16, fraction=0.75, tensor=8)
        | _megatron(8, tensor=4, pipeline=8, expert=4)
        | _FULL
        | _packed(12288),
    ),
    "verl-671b": Recipe(
        "verl",
        f"{VERL_EXAMPLES}/run_deepseek_v3_671b_megatron.sh, 12 nodes of 80 GB",
        DEEPSEEK_V3,
        12,
        80,
        _verl(2048, 8192, batch=96, mini=32, n=8, fraction=0.6, tensor=32)
        | _megatron(12, tensor=8, pipeline=12, expert=8, expert_tensor=1)
        | _FULL
        | _CPU_ADAM
        | _packed(10240)
        | {"actor_rollout_ref.model.use_fused_kernels": True},
    ),
    "slime-30b-moe": Recipe("slime", "slime, scripts/run-qwen3-30B-A3B.sh", None, 1, 80, _SLIME_30B, 2000),
    "slime-30b-int4": Recipe(
        "slime",
        "slime, scripts/low_precision/run-qwen3-30B-A3B-int4.sh",
        QWEN3_30B_A3B,
        1,
        80,
        {**_SLIME_30B, "hf-checkpoint": "/root/Qwen3-30B-A3B-INT4/", "rollout-num-gpus-per-engine": 1},
        2000,
    ),
    "slime-r1": Recipe(
        "slime",
        "slime, scripts/run-deepseek-r1.sh, 16 nodes of H100",
        DEEPSEEK_V3,
        16,
        80,
        _slime(
            16,
            tensor=8,
            pipeline=4,
            context=4,
            expert=32,
            max_tokens_per_gpu=16384,
            rollout_max_response_len=32768,
            rollout_batch_size=128,
            rollout_num_gpus_per_engine=64,
        ),
        2000,
    ),
    "areal-1.7b-archon": Recipe(
        "areal", "AReaL, examples/tau2/config_1.7b_airline.yaml", QWEN3_1B, 1, 96, {}, document=_AREAL_1B
    ),
}
