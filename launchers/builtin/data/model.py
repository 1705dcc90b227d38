"""A small Qwen2 with random weights, written as a Hugging Face folder; no download.

Not by `save_pretrained`: the main program would import transformers for nothing else (6 CPU seconds).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from autotune.launchers.builtin.config.settings import ModelShape
from autotune.launchers.builtin.storage.tensor_file import Entry, Raw, write

# The scale at which the task was seen to be learnt in 30 steps from random weights.
_INIT_STD = 0.05
_MAX_POSITIONS = 32768


def write_model(folder: Path, *, shape: ModelShape, seed: int) -> None:
    """Write config and weights of the generated model; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = _entries(shape)
    write(folder / "model.safetensors", entries, _weights(entries, seed=seed))
    # Last: its presence says that the folder is complete.
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))


def vocabulary(folder: Path) -> int:
    """Return the vocabulary size of a Hugging Face folder."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _MAX_POSITIONS,
        "hidden_act": "silu",
        "initializer_range": _INIT_STD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def _entries(shape: ModelShape) -> list[Entry]:
    head = shape.hidden // shape.heads
    wide, narrow = shape.heads * head, shape.kv_heads * head
    entries = [Entry("model.embed_tokens.weight", "F32", (shape.vocab, shape.hidden))]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, width in (("q", wide), ("k", narrow), ("v", narrow)):
            entries.append(Entry(f"{prefix}self_attn.{name}_proj.weight", "F32", (width, shape.hidden)))
            entries.append(Entry(f"{prefix}self_attn.{name}_proj.bias", "F32", (width,)))
        entries.append(Entry(f"{prefix}self_attn.o_proj.weight", "F32", (shape.hidden, wide)))
        up = (shape.intermediate, shape.hidden)
        entries += [Entry(f"{prefix}mlp.{name}_proj.weight", "F32", up) for name in ("gate", "up")]
        entries.append(Entry(f"{prefix}mlp.down_proj.weight", "F32", (shape.hidden, shape.intermediate)))
        norms = ("input_layernorm", "post_attention_layernorm")
        entries += [Entry(f"{prefix}{name}.weight", "F32", (shape.hidden,)) for name in norms]
    entries.append(Entry("model.norm.weight", "F32", (shape.hidden,)))
    entries.append(Entry("lm_head.weight", "F32", (shape.vocab, shape.hidden)))
    return entries


def _weights(entries: list[Entry], *, seed: int) -> Iterator[Raw]:
    source = np.random.default_rng(seed)
    for entry in entries:
        if entry.name.endswith("bias"):
            values = np.zeros(entry.shape, dtype=np.float32)
        elif "norm" in entry.name:
            values = np.ones(entry.shape, dtype=np.float32)
        else:
            values = source.standard_normal(entry.shape, dtype=np.float32) * np.float32(_INIT_STD)
        yield values.reshape(-1).view(np.uint8)
