"""Count the parameters of a language model's image encoders (transformers 5.19, models/<family>)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.policies.values.architecture.fields import count, wrong

_ENCODERS = ("vision_config", "audio_config")


def tower_of(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the parameters of a model's encoders and, in words, those unknown; raises ValueError."""
    total, unknown = 0, []
    for name in _ENCODERS:
        encoder = config.get(name)
        if not isinstance(encoder, Mapping) or not encoder:
            continue
        kind = encoder.get("model_type") or config.get("model_type", "")
        if not isinstance(kind, str):
            raise wrong("model_type", kind, "name")
        counted = _KINDS.get(kind.removesuffix("_vision"))
        if counted is None:
            unknown.append(f"the encoder {kind or name}")
        else:
            total += counted(encoder, _text_hidden(config))
    return total, ", ".join(unknown)


def _text_hidden(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    return count({**config, **(text if isinstance(text, Mapping) else {})}, "hidden_size", default=0)


def _patches(encoder: Mapping[str, Any], wide: int) -> int:
    patch = count(encoder, "patch_size", "spatial_patch_size", default=14)
    return wide * count(encoder, "in_channels", "in_chans", "num_channels", default=3) * patch * patch


def _block(wide: int, inner: int) -> int:
    """Count attention and an MLP of two matrices, all with biases, and two layer norms."""
    return 4 * wide * wide + 4 * wide + 2 * wide * inner + inner + wide + 4 * wide


def _merger(joined: int, norm: int, out: int) -> int:
    return norm + joined * joined + joined + joined * out + out


def _qwen2_vl(encoder: Mapping[str, Any], hidden: int) -> int:
    wide = count(encoder, "embed_dim", default=1280)
    inner = wide * count(encoder, "mlp_ratio", default=4)
    joined = wide * count(encoder, "spatial_merge_size", default=2) ** 2
    depth = count(encoder, "depth", default=32)
    frames = count(encoder, "temporal_patch_size", default=2)
    return frames * _patches(encoder, wide) + depth * _block(wide, inner) + _merger(joined, 2 * wide, hidden)


def _qwen2_5_vl(encoder: Mapping[str, Any], hidden: int) -> int:
    wide = count(encoder, "hidden_size", default=1280)
    inner = count(encoder, "intermediate_size", default=3420)
    joined = wide * count(encoder, "spatial_merge_size", default=2) ** 2
    layer = 4 * wide * wide + 4 * wide + 3 * wide * inner + 2 * inner + wide + 2 * wide
    out = count(encoder, "out_hidden_size", default=hidden)
    frames = count(encoder, "temporal_patch_size", default=2)
    depth = count(encoder, "depth", default=32)
    return frames * _patches(encoder, wide) + depth * layer + _merger(joined, wide, out)


def _qwen3_vl(encoder: Mapping[str, Any], hidden: int) -> int:
    wide, inner = count(encoder, "hidden_size"), count(encoder, "intermediate_size")
    joined = wide * count(encoder, "spatial_merge_size", default=2) ** 2
    out = count(encoder, "out_hidden_size", default=hidden)
    places = count(encoder, "num_position_embeddings", default=2304) * wide
    patches = count(encoder, "temporal_patch_size", default=2) * _patches(encoder, wide) + wide
    deep = encoder.get("deepstack_visual_indexes")
    mergers = len(deep) if isinstance(deep, list | tuple) else 0
    layers = count(encoder, "depth") * _block(wide, inner)
    return (
        patches
        + places
        + layers
        + _merger(joined, 2 * wide, out)
        + mergers * _merger(joined, 2 * joined, out)
    )


def _glm4v(encoder: Mapping[str, Any], hidden: int) -> int:
    """Count an encoder whose layers' MLPs are out_hidden_size wide, and the merger's intermediate_size."""
    wide, inner = count(encoder, "hidden_size", default=1536), count(encoder, "intermediate_size")
    out = count(encoder, "out_hidden_size", default=hidden)
    joined = wide * count(encoder, "spatial_merge_size", default=2) ** 2
    side = count(encoder, "image_size", default=336) // (count(encoder, "patch_size", default=14) or 1)
    patches = count(encoder, "temporal_patch_size", default=2) * _patches(encoder, wide) + wide
    layers = count(encoder, "depth", default=24) * (4 * wide * wide + 3 * wide * out + 2 * wide)
    merger = joined * out + out + out * out + 2 * out + 3 * out * inner
    return side * side * wide + patches + layers + 2 * wide + merger


def _siglip(encoder: Mapping[str, Any], hidden: int) -> int:
    wide, inner = count(encoder, "hidden_size"), count(encoder, "intermediate_size")
    side = count(encoder, "image_size", default=224) // (count(encoder, "patch_size", default=16) or 1)
    layers = count(encoder, "num_hidden_layers") * _block(wide, inner)
    return _patches(encoder, wide) + wide + side * side * wide + layers + 2 * wide + wide * hidden + wide


_KINDS: dict[str, Callable[[Mapping[str, Any], int], int]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "glm4v": _glm4v,
    "siglip_vision_model": _siglip,
}
