"""Count layers by their parts: attention, linear attention or a state space, an MLP, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.policies.values.architecture.fields import count, flag, wrong

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_LINEAR = frozenset({"linear_attention", "mamba", "mamba2", "conv"})
_BOTH = frozenset({"hybrid"})  # attention and a state space side by side, both with an MLP
_MIXERS_ALONE = frozenset({"nemotron_h"})  # a layer is one mixer, one MLP or one set of experts
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def layer_kinds(config: Mapping[str, Any], *, family: str, layers: int) -> tuple[str, ...]:
    """Return the kind of every layer as named in the config; empty if it names none."""
    for name in ("layer_types", "layers_block_type"):
        kinds = config.get(name)
        if isinstance(kinds, list | tuple):
            if not all(isinstance(kind, str) and kind for kind in kinds):
                raise wrong(name, kinds, "list of names")
            return tuple(kinds[:layers])
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return tuple(_PATTERN.get(letter, letter) for letter in pattern)
    if family == "jamba":
        period, offset = (
            count(config, f"attn_layer_{n}", default=d) for n, d in (("period", 8), ("offset", 4))
        )
        return tuple("attention" if i % (period or 1) == offset else "mamba" for i in range(layers))
    if family == "falcon_h1":
        return ("hybrid",) * layers
    if family == "lfm2" and isinstance(places := config.get("full_attn_idxs"), list | tuple):
        return tuple("full_attention" if i in places else "conv" for i in range(layers))
    if family.startswith(("qwen3_next", "qwen3_5")):
        every = count(config, "full_attention_interval", default=4) or 1
        return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(layers))
    return ()


def mixed(
    config: Mapping[str, Any],
    kinds: tuple[str, ...],
    *,
    family: str,
    known: Mapping[str, Any],
    layers: int,
    hidden: int,
) -> dict[str, Any]:
    """Return the fields of `Model` for layers of more than one kind; empty if all are alike."""
    linear = sum(kind in _LINEAR or kind in _BOTH for kind in kinds)
    alone = family in _MIXERS_ALONE
    if not linear and not alone:
        return {}
    kind = str(known.get("linear", "")) or ("delta" if "linear_num_value_heads" in config else "mamba2")
    attention = sum(kind in _ATTENTION or kind in _BOTH for kind in kinds)
    result: dict[str, Any] = {"attention_layers": attention, "linear_layers": linear, "linear": kind}
    if alone:
        result["mlp_layers"] = sum(kind in ("mlp", "moe") for kind in kinds)
    return result | _sizes(config, kind, hidden=hidden)


def _sizes(config: Mapping[str, Any], kind: str, *, hidden: int) -> dict[str, int]:
    conv = count(
        config,
        "linear_conv_kernel_dim",
        "conv_kernel",
        "mamba_d_conv",
        "conv_L_cache",
        default=3 if kind == "conv" else 4,
    )
    if kind == "conv":
        return {"linear_values": 1, "linear_value_dim": hidden, "linear_conv": conv}
    if kind == "delta":
        return {
            "linear_keys": count(config, "linear_num_key_heads"),
            "linear_key_dim": count(config, "linear_key_head_dim"),
            "linear_values": count(config, "linear_num_value_heads"),
            "linear_value_dim": count(config, "linear_value_head_dim"),
            "linear_conv": conv,
        }
    state = count(config, "ssm_state_size", "mamba_d_state")
    if kind == "mamba":
        inner = count(config, "mamba_expand", "expand", default=2) * hidden
        return {"linear_values": 1, "linear_value_dim": inner, "linear_key_dim": state, "linear_conv": conv}
    heads = count(config, "mamba_num_heads", "mamba_n_heads")
    wide = count(config, "mamba_d_ssm", default=0) or (
        count(config, "mamba_expand", "expand", default=2) * hidden
    )
    per_head = config.get("mamba_head_dim", config.get("mamba_d_head"))
    return {
        "linear_keys": count(config, "n_groups", "mamba_n_groups", default=1),
        "linear_key_dim": state,
        "linear_values": heads,
        "linear_value_dim": wide // heads
        if per_head in (None, "auto")
        else count({"mamba_d_head": per_head}, "mamba_d_head"),
        "linear_conv": conv,
    }


def sparse_layers(
    config: Mapping[str, Any], kinds: tuple[str, ...], *, family: str, layers: int
) -> int | None:
    """Return how many layers have experts; None if the config leaves it to `first_k_dense_replace`."""
    if family in _MIXERS_ALONE:
        return kinds.count("moe")
    if family == "jamba":
        period = count(config, "expert_layer_period", default=2) or 1
        offset = count(config, "expert_layer_offset", default=1)
        return sum(i % period == offset for i in range(layers))
    if family.startswith("llama4"):
        named = config.get("moe_layers")
        if isinstance(named, list | tuple):
            return len(named)
        return layers // (count(config, "interleave_moe_layer_step", default=1) or 1)
    named = config.get("mlp_layer_types")
    if isinstance(named, list | tuple):
        return list(named[:layers]).count("sparse")
    only = config.get("mlp_only_layers")
    every = count(config, "decoder_sparse_step", default=1) or 1
    if isinstance(only, list | tuple) and (only or every > 1):
        return sum(layer not in only and (layer + 1) % every == 0 for layer in range(layers))
    return None


def sliding(
    config: Mapping[str, Any], kinds: tuple[str, ...], *, known: Mapping[str, Any], layers: int
) -> tuple[int, int]:
    """Return the tokens of the attention window (or chunk) and the number of layers that it limits."""
    window = count(config, "sliding_window", default=0)
    if not window and "chunked_attention" in kinds:
        window = count(config, "attention_chunk_size", default=0)
    if not window or flag(config, "use_sliding_window", default=True) is False:
        return window, 0
    if kinds:
        return window, sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return window, sum(pattern[i % len(pattern)] == "L" for i in range(layers)) if pattern else 0
    every = count(config, "sliding_window_pattern", default=int(known.get("sliding_every", 0)))
    return window, layers - layers // every if every else layers


def unknown_kinds(kinds: tuple[str, ...], *, family: str) -> tuple[str, ...]:
    """Return the kinds of layers that are not counted here, each once."""
    known = _ATTENTION | _LINEAR | _BOTH
    if family in _MIXERS_ALONE:
        known = known | {"mlp", "moe"}
    return tuple(dict.fromkeys(kind for kind in kinds if kind not in known))


def short_intermediate(config: Mapping[str, Any]) -> int:
    """Return the width of an LFM2 layer's MLP, which its code derives from the config's."""
    width = count(config, "block_ff_dim", "intermediate_size")
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return width
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    multiple = count(config, "block_multiple_of", default=256) or 1
    adjusted = int((factor if isinstance(factor, int | float) else 1.0) * (2 * width // 3))
    return -(-adjusted // multiple) * multiple
