"""Identifies the tensor of a failed request: logits, an activation, a matrix or a layer of its size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from autotune.policies.values.architecture.model import Model, model_from_config
from autotune.policies.values.value import Value

_TOLERANCE = 0.005  # of the size; messages round to two decimals
_ROUND_TOKENS = 1024  # token budgets are mostly multiples of it
_CHANCE = 0.05  # maximum probability that a round number of tokens is a coincidence
_DTYPES = ((4, "fp32"), (2, "bf16"))
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "vocab_size",
)
_FIELD = re.compile(rf"""["'](model_type|{"|".join(_FIELDS)})["']: ["']?(\w{{1,40}})""")


_Dimension: TypeAlias = tuple[int, str]


class Named(Value, frozen=True, kw_only=True):
    """A size and its formula."""

    formula: str  # "24,576 tokens × 151,936 vocab × 4 bytes"
    meaning: str  # "one fp32 copy of the logits"
    size_bytes: int
    assumed: bool = False  # the number of tokens follows from the size


def named(requested_bytes: int, model: Model, *, tokens: tuple[int, ...] = ()) -> Named | None:
    """Return the tensor of a request; None if none matches within 0.5 %.

    `tokens`: the token budgets of a micro-batch. Without them only weights match, and logits of a round
    number of tokens.
    """
    if requested_bytes <= 0:
        return None
    fits = [
        (abs(size.size_bytes - requested_bytes), order, size)
        for order, size in enumerate((*_passes(model, tokens), *_weights(model)))
        if abs(size.size_bytes - requested_bytes) <= _TOLERANCE * requested_bytes
    ]
    if fits:
        return min(fits, key=lambda fit: fit[:2])[2]
    return None if tokens else _round_logits(requested_bytes, model)


def printed_model(fields: Mapping[str, int | str]) -> Model | None:
    """Return the shape of the model whose config fields a log prints; None if they do not make one."""
    try:
        return model_from_config(dict(fields))
    except ValueError:
        return None


def printed_fields(text: str) -> dict[str, int | str]:
    """Return the entries of a config.json in a log; empty if it prints several models."""
    fields: dict[str, int | str] = {}
    for name, value in _FIELD.findall(text):
        written = value if name == "model_type" else int(value) if value.isdecimal() else None
        if written is None:
            continue
        if fields.setdefault(name, written) != written:
            return {}
    return fields


def _passes(model: Model, tokens: tuple[int, ...]) -> Iterator[Named]:
    vocab, hidden, inner = _dimensions(model)
    for count in dict.fromkeys(tokens):
        rows = count, "tokens"
        for size, dtype in _DTYPES:
            yield _product(rows, vocab, size, f"one {dtype} copy of the logits")
        for size, dtype in _DTYPES:
            yield _product(rows, hidden, size, f"one {dtype} activation of a layer")
            if model.intermediate:
                yield _product(rows, inner, size, f"one {dtype} activation inside an MLP")


def _weights(model: Model) -> Iterator[Named]:
    vocab, hidden, inner = _dimensions(model)
    for size, dtype in _DTYPES:
        yield _product(vocab, hidden, size, f"the embedding, or the output layer, in {dtype}")
        if model.intermediate:
            yield _product(hidden, inner, size, f"one matrix of an MLP in {dtype}")
    if model.intermediate and not model.experts and not model.kv_lora_rank:
        attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        mlp = model.hidden * model.intermediate * (3 if model.gated else 2)
        for size, dtype in _DTYPES:
            yield Named(
                formula=f"{attention + mlp:,} weights of a layer × {size} bytes",
                meaning=f"one whole layer, gathered in {dtype}",
                size_bytes=(attention + mlp) * size,
            )


def _round_logits(requested_bytes: int, model: Model) -> Named | None:
    """Return logits of a round number of tokens; None if none match or the figure is too imprecise."""
    unit = 1 << 30 if requested_bytes >= 1 << 30 else 1 << 20
    error = 0.005 * unit  # of a size printed with two decimals
    for size, dtype in _DTYPES:
        row = model.vocab * size
        steps = max(1, round(requested_bytes / row / _ROUND_TOKENS))
        distance = abs(requested_bytes - steps * _ROUND_TOKENS * row)
        if distance <= error and 2 * error / (_ROUND_TOKENS * row) <= _CHANCE:
            rows, (vocab, _, _) = (steps * _ROUND_TOKENS, "tokens"), _dimensions(model)
            fit = _product(rows, vocab, size, f"one {dtype} copy of the logits")
            return msgspec.structs.replace(fit, assumed=True)
    return None


def _dimensions(model: Model) -> tuple[_Dimension, _Dimension, _Dimension]:
    return (model.vocab, "vocab"), (model.hidden, "hidden"), (model.intermediate, "intermediate")


def _product(first: _Dimension, second: _Dimension, size: int, meaning: str) -> Named:
    return Named(
        formula=f"{first[0]:,} {first[1]} × {second[0]:,} {second[1]} × {size} bytes",
        meaning=meaning,
        size_bytes=first[0] * second[0] * size,
    )
