"""Public models as their config.json describes them, as data: nothing is downloaded."""

from __future__ import annotations

from typing import Any

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _dense(
    model_type: str, *, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **_SPECIAL,
        **more,
    }


_TIED = {"tie_word_embeddings": True}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _dense("qwen2", layers=24, hidden=896, heads=14, kv=2, inner=4864, vocab=151936, **_TIED),
    "Qwen3-0.6B": _dense(
        "qwen3", layers=28, hidden=1024, heads=16, kv=8, inner=3072, vocab=151936, head_dim=128, **_TIED
    ),
    "Llama-3.2-1B": _dense(
        "llama", layers=16, hidden=2048, heads=32, kv=8, inner=8192, vocab=128256, head_dim=64, **_TIED
    ),
    "SmolLM3-3B": _dense(
        "smollm3", layers=36, hidden=2048, heads=16, kv=4, inner=11008, vocab=128256, **_TIED
    ),
    "Phi-3-mini (3.8B)": _dense("phi3", layers=32, hidden=3072, heads=32, kv=32, inner=8192, vocab=32064),
    "Mistral-7B-v0.3": _dense(
        "mistral", layers=32, hidden=4096, heads=32, kv=8, inner=14336, vocab=32768, head_dim=128
    ),
    "OLMo-2-7B": _dense("olmo2", layers=32, hidden=4096, heads=32, kv=32, inner=11008, vocab=100352),
    "Qwen2.5-7B": _dense("qwen2", layers=28, hidden=3584, heads=28, kv=4, inner=18944, vocab=152064),
    "StarCoder2-7B": _dense(
        "starcoder2", layers=32, hidden=4608, heads=36, kv=4, inner=18432, vocab=49152, use_bias=True
    ),
    "Llama-3.1-8B": _dense(
        "llama", layers=32, hidden=4096, heads=32, kv=8, inner=14336, vocab=128256, head_dim=128
    ),
    "Gemma-7B (8.5B)": _dense(
        "gemma", layers=28, hidden=3072, heads=16, kv=16, inner=24576, vocab=256000, head_dim=256, **_TIED
    ),
    "GLM-4-9B-0414": _dense(
        "glm4",
        layers=40,
        hidden=4096,
        heads=32,
        kv=2,
        inner=13696,
        vocab=151552,
        head_dim=128,
        attention_bias=False,
    ),
    "Qwen3-14B": _dense(
        "qwen3", layers=40, hidden=5120, heads=40, kv=8, inner=17408, vocab=151936, head_dim=128
    ),
    "Qwen2.5-32B": _dense("qwen2", layers=64, hidden=5120, heads=40, kv=8, inner=27648, vocab=152064),
    "Llama-3.1-70B": _dense(
        "llama", layers=80, hidden=8192, heads=64, kv=8, inner=28672, vocab=128256, head_dim=128
    ),
    "Qwen2.5-72B": _dense("qwen2", layers=80, hidden=8192, heads=64, kv=8, inner=29568, vocab=152064),
    "Qwen3-30B-A3B": _dense(
        "qwen3_moe",
        layers=48,
        hidden=2048,
        heads=32,
        kv=4,
        inner=6144,
        vocab=151936,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "Mixtral-8x7B": _dense(
        "mixtral",
        layers=32,
        hidden=4096,
        heads=32,
        kv=8,
        inner=14336,
        vocab=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
}
