"""Families beyond the plain ones, with the sizes of the public models that are shipped.

Layers are made alike where a model begins with a few dense ones, so that figures are lines in the depth; a
hybrid is measured in whole periods of its layers. Kernels that a CPU lacks have stand-ins
(`benchmarks.kernels`).
"""

from __future__ import annotations

from typing import Any

from autotune.orchestrator.config.public_models import find_public

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _shipped(name: str, **changes: Any) -> dict[str, Any]:
    known = find_public(name)
    assert known is not None, name
    text = known.config.get("text_config")
    config = {**known.config, **(text if isinstance(text, dict) else {})}
    dropped = ("text_config", "vision_config", "layers_block_type", "layer_types")
    return {key: value for key, value in config.items() if key not in dropped} | _SPECIAL | changes


FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma-2-9B": _shipped("google/gemma-2-9b"),
    "Gemma-3-1B": _shipped("google/gemma-3-1b-it"),
    "OLMo-3-7B": _shipped("allenai/Olmo-3-1025-7B"),
    "Aya-23-8B": _shipped("CohereLabs/aya-23-8B"),
    "DeepSeek-V3": _shipped("deepseek-ai/DeepSeek-V3", first_k_dense_replace=0),
    "GLM-4.5-Air": _shipped("zai-org/GLM-4.5-Air", first_k_dense_replace=0),
    "gpt-oss-20b": _shipped("openai/gpt-oss-20b"),
    "Llama-4-Maverick": _shipped(
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct", num_local_experts=16, interleave_moe_layer_step=1
    ),
    "Qwen3.5-27B": _shipped("Qwen/Qwen3.5-27B"),
    "Qwen3-Next-80B-A3B": _shipped("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "Nemotron-3-Nano-30B-A3B": _shipped(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", hybrid_override_pattern="MEM*"
    ),
    "Qwen1.5-MoE-A2.7B": _shipped("Qwen/Qwen1.5-MoE-A2.7B"),
    "MiniMax-M2": _shipped("MiniMaxAI/MiniMax-M2", num_local_experts=64),
    "Cohere-2 of Aya-23's sizes": _shipped("CohereLabs/aya-23-8B", model_type="cohere2"),
    "EXAONE-4 of Qwen3-8B's sizes": _shipped("Qwen/Qwen3-8B", model_type="exaone4"),
}
# Named before any of them was measured; no formula was changed after.
HELD_OUT = frozenset(
    {"Qwen1.5-MoE-A2.7B", "MiniMax-M2", "Cohere-2 of Aya-23's sizes", "EXAONE-4 of Qwen3-8B's sizes"}
)
_PERIODS = {"Qwen3.5-27B": 4, "Qwen3-Next-80B-A3B": 4, "Nemotron-3-Nano-30B-A3B": 4}


def depths(name: str) -> tuple[int, int]:
    """Return the two numbers of layers at which a model is measured."""
    period = _PERIODS.get(name, 2)
    return period, 2 * period


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config of so many layers; a pattern of layers is repeated."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        return config | {"num_hidden_layers": layers}
    repeated = pattern * -(-layers // len(pattern))
    return config | {"num_hidden_layers": layers, "hybrid_override_pattern": repeated[:layers]}
