"""What is trained, and how it is spread over the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from autotune.policies.values.value import Value


class Model(Value, frozen=True, kw_only=True):
    """Shape of a causal language model, from a Hugging Face `config.json` or written in the job."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of all shared experts together
    shared_gate: bool = False  # a one-row projection weighs the shared experts
    dense_layers: int = 0  # of a model with experts: layers without
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    gated: bool = True  # the MLP has a gate and an up projection
    qk_norm: str = ""  # "" | head (over one head) | all (over all heads at once)
    norms_per_layer: int = 2  # of the hidden size
    norm: str = "rms"  # rms | rms32 (scaled in fp32) | layer (with bias)
    fused_qkv: bool = False  # q, k and v are one matrix
    fused_gate: bool = False  # gate and up are one matrix
    partial_rotary: bool = False  # only a part of each head is rotated, so its parts are joined again
    sliding_window: int = 0  # tokens; 0: full attention everywhere
    sliding_layers: int = 0  # layers that use it
    q_lora_rank: int = 0  # multi-head latent attention
    kv_lora_rank: int = 0  # 0: ordinary attention
    rope_head_dim: int = 0  # of latent attention: the rotated part of a head
    value_head_dim: int = 0  # of latent attention
    family: str = ""  # `model_type` of the config


class Layout(Value, frozen=True, kw_only=True):
    """How a job is spread and what it holds: what an estimate needs beyond the knobs.

    Sizes of tensor, sequence and context parallelism and of the engine's tensor parallelism are knobs.
    """

    strategy: str = "none"  # none (one rank) | ddp | fsdp | fsdp2 | megatron
    ranks: int = 1  # devices of the trainer
    shards: int = 1  # ranks over which FSDP or a distributed optimizer spreads one copy of the state
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert_shards: int = 0  # ranks over which a distributed optimizer spreads the experts; 0: as all else
    engine_ranks: int = 0  # devices of all rollout engines together; colocated: the trainer's own
    parameter_bytes: int = 4  # per resident (sharded) parameter: 4 where FSDP keeps fp32
    compute_bytes: int = 2  # per parameter and activation inside a pass
    gradient_bytes: int = 4  # per parameter
    reduce_bytes: int = 0  # per parameter in a reduce-scatter's input; 0: as gradient_bytes
    optimizer_bytes: int = 8  # per parameter; 12 with an fp32 master copy of its own
    logits_bytes: int = 4  # per logit
    engine_bytes: float = 2  # per parameter inside the engine
    kv_bytes: float = 2  # per element of the engine's cache
    reference: bool = False  # a frozen copy is scored
    reference_offload: bool = False  # ... and is in host memory outside its own pass
    critic: bool = False  # a second model of the same shape is trained
    critic_offload: bool = False
    lora_rank: int = 0  # 0: all parameters are trained
    entropy: bool = False  # the loss or its metrics compute the entropy of the logits
    engine_sleeps: bool = False  # the engine frees its memory while training runs
    engine_weights_on_host: bool = True  # ... and keeps its weights in host memory until it wakes
    embedding_apart: bool = True  # FSDP2 gathers an untied embedding by itself; else with the root
    head_apart: bool = False  # FSDP2 gathers an untied head by itself; else with the root
    reshard_after_forward: bool = (
        True  # else all weights stay gathered from a layer's forward to its backward
    )
    reshards_root: bool = False  # ... and what no unit wraps, at once; torch's own default keeps it whole
    reduces_last: bool = False  # gradients stay whole on every rank until the last micro-batch
    sequence_parallel: bool = (
        True  # FSDP: tensor parallelism splits the residual stream too (AReaL, torchtitan)
    )
    trainer_sleeps: bool = False  # gradients and optimizer go to host memory too while the engine works
    optimizer_stays_offloaded: bool = False  # offloaded state is used from host memory, not loaded back
    parameters_stay_offloaded: bool = False  # offloaded weights are gathered layer by layer in a pass
    tokens_before_split: bool = (
        False  # token budgets count before sequence and context parallelism split them
    )
    padded: bool = False  # a micro-batch is a rectangle as long as its longest sequence
    masked_attention: bool = False  # attention reads a dense mask: heads are repeated, layers keep the mask
    selective_share: float = 0.0  # of a layer, kept by selective recomputation; 0: all but attention's core
    logits_in_place: bool = False  # the loss and its gradient overwrite the logits
    loss: Literal["softmax", "kernel", "pieces"] = "softmax"  # what it keeps: policies/estimate/passes.py
    compiled_loss: bool = True  # `kernel`: the entropy is one compiled function
    scaled_logits: bool = False  # `kernel`: a temperature other than 1 divides the logits
    logits_share: float = 1.0  # of a micro-batch's tokens, those whose logits are computed
    chunked_head: bool = False  # chunks of logits begin at the head; else its whole output exists
    per_tensor_optimizer: bool = False  # temporaries of the largest tensor; else of all (foreach)
    optimizer_temporary_bytes: float = 4  # per parameter while the optimizer runs
    sync_buckets: int = 2  # transfer buffers alive at once in a weight sync
    sequences: int = 0  # samples of one step, over all ranks
    prompt_tokens: int = 0  # longest
    response_tokens: int = 0  # longest, of all turns together


# What a family's code does and its config does not say (transformers 5.19, models/<family>/modeling_*.py).
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "phi3": {"fused_qkv": True, "fused_gate": True, "partial_rotary": True},
    "olmo2": {"qk_norm": "all", "norm": "rms32"},
    "olmo3": {"qk_norm": "all", "norm": "rms32"},
    "olmoe": {"qk_norm": "all"},
    "gemma": {"norm": "rms32", "tied": True, "head_dim": 256},
    "gemma2": {"norm": "rms32", "tied": True, "head_dim": 256, "norms_per_layer": 4},
    "gemma3_text": {
        "norm": "rms32",
        "tied": True,
        "head_dim": 256,
        "norms_per_layer": 4,
        "qk_norm": "head",
    },
    "glm": {"fused_gate": True, "partial_rotary": True},
    "glm4": {"norms_per_layer": 4, "fused_gate": True, "partial_rotary": True},
    "starcoder2": {"norm": "layer", "gated": False, "tied": True},
    "cohere": {"norm": "layer", "norms_per_layer": 1, "tied": True},
    "smollm3": {"tied": True},
    "gpt_oss": {"qkv_bias": True, "output_bias": True},
}
# Families whose `attention_bias` stands for q, k and v alone.
_QKV_ONLY = frozenset({"glm", "glm4", "glm4_moe", "qwen2", "qwen2_moe"})
_LARGEST = 1 << 24  # any dimension; a larger one is a typing error or an attack


def model_from_config(config: Mapping[str, Any]) -> Model:
    """Return the shape that a Hugging Face config.json describes; raises ValueError saying what is wrong."""
    if not isinstance(config, Mapping):
        raise _wrong("the config", config, "mapping of names to values")
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**{key: value for key, value in config.items() if key != "text_config"}, **nested}
    family = config.get("model_type", "")
    if not isinstance(family, str):
        raise _wrong("model_type", family, "name")
    known = _FAMILIES.get(family, {})
    hidden = _count(config, "hidden_size", "n_embd", "d_model")
    heads = _count(config, "num_attention_heads", "n_head")
    layers = _count(config, "num_hidden_layers", "n_layer")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are no multiple of {kv_heads} key-value heads")
    latent = _count(config, "kv_lora_rank", default=0)
    head_dim = _head_dim(config, known, hidden=hidden, heads=heads, latent=latent)
    experts = _count(config, "num_experts", "n_routed_experts", "num_local_experts", default=0)
    attention_bias = _flag(config, "attention_bias") or _flag(config, "use_bias")
    window = _count(config, "sliding_window", default=0)
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size", "n_inner", default=4 * hidden if not experts else 0),
        vocab=_count(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings", default=known.get("tied", False)),
        **_experts(config, experts=experts, layers=layers, known=known),
        qkv_bias=_flag(config, "qkv_bias", default=known.get("qkv_bias", attention_bias)),
        output_bias=known.get("output_bias", attention_bias and family not in _QKV_ONLY),
        mlp_bias=_flag(config, "mlp_bias") or _flag(config, "use_bias"),
        gated=known.get("gated", True),
        qk_norm=known.get("qk_norm", "head" if _flag(config, "use_qk_norm") else ""),
        norms_per_layer=known.get("norms_per_layer", 2),
        norm=known.get("norm", "rms"),
        fused_qkv=known.get("fused_qkv", False),
        fused_gate=known.get("fused_gate", False),
        partial_rotary=known.get("partial_rotary", False),
        sliding_window=window,
        sliding_layers=_sliding_layers(config, window=window, layers=layers),
        q_lora_rank=_count(config, "q_lora_rank", default=0),
        kv_lora_rank=latent,
        rope_head_dim=_count(config, "qk_rope_head_dim", default=0) if latent else 0,
        value_head_dim=_count(config, "v_head_dim", default=0) if latent else 0,
        family=family,
    )


def model_from_shape(shape: Mapping[str, int]) -> Model:
    """Return the model that a job's own `{hidden: ..., layers: ...}` describes; raises ValueError."""
    for name in ("layers", "hidden", "heads", "intermediate", "vocab"):
        if not shape.get(name):
            raise ValueError(f"{name} is missing")
    values: dict[str, Any] = {"kv_heads": shape["heads"], **shape}
    values.setdefault("head_dim", shape["hidden"] // shape["heads"])
    if values["heads"] % max(1, values["kv_heads"]):
        raise ValueError(f"{values['heads']} heads are no multiple of {values['kv_heads']} kv_heads")
    try:
        return msgspec.convert(values, Model, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _head_dim(
    config: Mapping[str, Any], known: Mapping[str, Any], *, hidden: int, heads: int, latent: int
) -> int:
    if latent:
        rotated = _count(config, "qk_rope_head_dim")
        return _count(config, "qk_nope_head_dim") + rotated
    present = _count(config, "head_dim", default=int(known.get("head_dim", 0)))
    if not present and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} attention heads")
    return present or hidden // heads


def _experts(
    config: Mapping[str, Any], *, experts: int, layers: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    if not experts:
        return {}
    per_token = _count(config, "num_experts_per_tok", "experts_per_token", "moe_topk", default=1)
    if per_token > experts:
        raise ValueError(f"{per_token} experts per token out of {experts}")
    width = _count(config, "moe_intermediate_size", "intermediate_size")
    shared = _count(config, "shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    shared = shared or width * _count(config, "n_shared_experts", "num_shared_experts", default=0)
    dense = _count(config, "first_k_dense_replace", default=0)
    only = config.get("mlp_only_layers")
    every = _count(config, "decoder_sparse_step", default=1)
    if isinstance(only, list | tuple) and (only or every > 1):
        dense = sum(layer in only or (layer + 1) % every != 0 for layer in range(layers))
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "shared_gate": bool(shared) and known.get("shared_gate", False),
        "dense_layers": min(dense, layers),
    }


def _sliding_layers(config: Mapping[str, Any], *, window: int, layers: int) -> int:
    if not window or config.get("use_sliding_window") is False:
        return 0
    types = config.get("layer_types")
    if isinstance(types, list | tuple):
        return min(layers, sum(1 for kind in types if kind == "sliding_attention"))
    every = _count(config, "sliding_window_pattern", default=0)
    return layers - layers // every if every else layers


def _count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
            raise _wrong(name, value, "count")
        if value or default is not None:
            return value
        raise ValueError(f"{name} is 0")
    if default is None:
        raise ValueError(f"{' or '.join(names)} is missing")
    return default


def _flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, value, "yes or no")
    return value


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    text = repr(value) if isinstance(value, float | str | bool) else type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 64:
        text = str(value)
    return ValueError(f"{name} is {text if len(text) <= 40 else text[:37] + '...'}, no {wanted}")
