"""The model shape given by Megatron's flags."""

from __future__ import annotations

import re

from autotune.launchers.frameworks.tabular.listed_flags import ListedFlagSettings
from autotune.policies.values.architecture.model import Model

_DENSE = re.compile(r"\[\s*0\s*\]\s*\*\s*(\d+)")  # in --moe-layer-freq "([0]*3+[1]*58)"


def model_of(flags: ListedFlagSettings) -> Model | None:
    """Return the shape, with Megatron's defaults; None if the flags do not describe a model."""
    layers, hidden, heads = (
        flags.count(name) for name in ("num-layers", "hidden-size", "num-attention-heads")
    )
    vocab = flags.count("padded-vocab-size") or flags.count("vocab-size")
    if not (layers and hidden and heads and vocab):
        return None
    gated = flags.flag("swiglu")
    intermediate = flags.count("ffn-hidden-size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    biased = not flags.flag("disable-bias-linear")
    experts = flags.count("num-experts")
    latent = flags.flag("multi-latent-attention")
    rotated = flags.count("qk-pos-emb-head-dim", 64)
    width = (
        flags.count("qk-head-dim", 128) + rotated if latent else flags.count("kv-channels", hidden // heads)
    )
    dense = _DENSE.search(flags.text("moe-layer-freq"))
    further_norms = sum(flags.flag(name) for name in ("post-self-attn-layernorm", "post-mlp-layernorm"))
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=flags.count("num-query-groups", heads) if flags.flag("group-query-attention") else heads,
        head_dim=width,
        intermediate=intermediate,
        vocab=vocab,
        tied=not flags.flag("untie-embeddings-and-output-weights"),
        experts=experts,
        experts_per_token=flags.count("moe-router-topk", 2) if experts else 0,
        expert_intermediate=flags.count("moe-ffn-hidden-size", intermediate) if experts else 0,
        shared_intermediate=flags.count("moe-shared-expert-intermediate-size"),
        shared_gate=flags.flag("moe-shared-expert-gate"),
        dense_layers=int(dense[1]) if experts and dense else 0,
        qkv_bias=biased or flags.flag("add-qkv-bias"),
        output_bias=biased,
        mlp_bias=biased,
        gated=gated,
        qk_norm="head" if flags.flag("qk-layernorm") and not latent else "",
        norms_per_layer=2 + further_norms,
        norm="rms" if flags.text("normalization") == "RMSNorm" else "layer",
        fused_qkv=True,
        fused_gate=gated,
        partial_rotary=flags.share("rotary-percent", 1.0) < 1,
        q_lora_rank=flags.count("q-lora-rank") if latent else 0,
        kv_lora_rank=flags.count("kv-lora-rank", 32) if latent else 0,
        rope_head_dim=rotated if latent else 0,
        value_head_dim=flags.count("v-head-dim", 128) if latent else 0,
    )
