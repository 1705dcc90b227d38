"""Facts that are in a family's code and not in its config.json (transformers 5.19, models/<family>)."""

from __future__ import annotations

from typing import Any

_GLM4 = {"norms_per_layer": 4, "fused_gate": True, "partial_rotary": True}
_GLM4V = {**_GLM4, "qkv_bias": True}
_GEMMA2 = {
    "norm": "rms32",
    "tied": True,
    "head_dim": 256,
    "norms_per_layer": 4,
    "softcap": True,
    "sliding_every": 2,
}
_GEMMA3 = {
    "norm": "rms32",
    "tied": True,
    "head_dim": 256,
    "norms_per_layer": 4,
    "qk_norm": "head",
    "sliding_every": 6,
}
_COHERE = {"norm": "layer32", "norms_per_layer": 1, "tied": True}
_DELTA = {
    "norm": "rms32",
    "qk_norm": "head",
    "partial_rotary": True,
    "attention_gate": True,
    "linear": "delta",
    "shared_gate": True,
}
_OLMO = {"qk_norm": "all", "norm": "rms32"}

# Every known family; all others are reported as unknown.
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {"gated": False},
    "cohere": _COHERE,
    "cohere2": _COHERE | {"sliding_every": 4},
    "deepseek_v2": {"router_fp32": True},
    "deepseek_v3": {"router_fp32": True},
    "ernie4_5": {},
    "exaone4": {"qk_norm": "head", "sliding_every": 4},
    "falcon_h1": {"linear": "mamba2"},
    "gemma": {"norm": "rms32", "tied": True, "head_dim": 256},
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm": {"fused_gate": True, "partial_rotary": True},
    "glm4": _GLM4,
    "glm4v": _GLM4V,
    "glm4v_text": _GLM4V,
    "glm4_moe": {"partial_rotary": True, "router_fp32": True},
    "glm4_moe_lite": {"router_fp32": True},
    "gpt_oss": {
        "qkv_bias": True,
        "output_bias": True,
        "norm": "rms32",
        "sinks": True,
        "expert_bias": True,
        "clamped_gate": True,
        "sliding_every": 2,
    },
    "granite": {},
    "granitemoehybrid": {"linear": "mamba2"},
    "jamba": {"linear": "mamba"},
    "kimi_k2": {"router_fp32": True},
    "lfm2": {"linear": "conv", "qk_norm": "head", "tied": True},
    "llama": {},
    "llama4": {"qk_norm": "l2", "all_experts": True},
    "llama4_text": {"qk_norm": "l2", "all_experts": True},
    "mimo": {"qkv_bias": True},
    "minimax_m2": {"qk_norm": "all"},
    "ministral3": {},
    "mistral": {},
    "mistral3": {},
    "mixtral": {},
    "nemotron_h": {
        "linear": "mamba2",
        "norm": "rms32",
        "norms_per_layer": 1,
        "gated": False,
        "router_fp32": True,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"sliding_every": 4},
    "olmoe": {"qk_norm": "all"},
    "phi3": {"fused_qkv": True, "fused_gate": True, "partial_rotary": True},
    "qwen2": {"qkv_bias": True},
    "qwen2_5_vl": {"qkv_bias": True},
    "qwen2_5_vl_text": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen2_vl": {"qkv_bias": True},
    "qwen2_vl_text": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_moe": {"qk_norm": "head"},
    "qwen3_next": _DELTA,
    "qwen3_vl": {"qk_norm": "head"},
    "qwen3_vl_moe": {"qk_norm": "head"},
    "qwen3_vl_moe_text": {"qk_norm": "head"},
    "qwen3_vl_text": {"qk_norm": "head"},
    "seed_oss": {"qkv_bias": True},
    "smollm3": {"tied": True},
    "starcoder2": {"norm": "layer", "gated": False, "tied": True},
}
# Families whose `attention_bias` applies to q, k and v alone.
QKV_ONLY = frozenset({"glm", "glm4", "glm4_moe", "qwen2", "qwen2_moe", "seed_oss"})
