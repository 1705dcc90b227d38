"""What a failed request was, and what is not claimed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.explain.tensor_sizes import named, printed_fields, printed_model
from autotune.policies.values.architecture.model import Model

GIB = 1 << 30
QWEN = Model(
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    vocab=151936,
    qk_norm="head",
)
CONFIG = """
(WorkerDict pid=1) Model config after override: Qwen3Config {
(WorkerDict pid=1)   "head_dim": 128,
(WorkerDict pid=1)   "hidden_size": 4096,
(WorkerDict pid=1)   "intermediate_size": 12288,
(WorkerDict pid=1)   "model_type": "qwen3",
(WorkerDict pid=1)   "num_attention_heads": 32,
(WorkerDict pid=1)   "num_hidden_layers": 36,
(WorkerDict pid=1)   "num_key_value_heads": 8,
(WorkerDict pid=1)   "vocab_size": 151936
"""


@pytest.mark.parametrize(
    ("size", "tokens", "formula", "meaning"),
    [
        (13.91 * GIB, (24576,), "24,576 tokens × 151,936 vocab × 4 bytes", "one fp32 copy of the logits"),
        (6.96 * GIB, (24576,), "24,576 tokens × 151,936 vocab × 2 bytes", "one bf16 copy of the logits"),
        (
            1.16 * GIB,
            (),
            "151,936 vocab × 4,096 hidden × 2 bytes",
            "the embedding, or the output layer, in bf16",
        ),
        (
            192 * (1 << 20),
            (24576,),
            "24,576 tokens × 4,096 hidden × 2 bytes",
            "one bf16 activation of a layer",
        ),
        (96 * (1 << 20), (), "4,096 hidden × 12,288 intermediate × 2 bytes", "one matrix of an MLP in bf16"),
    ],
)
def test_sizes_are_told_apart(size: float, tokens: tuple[int, ...], formula: str, meaning: str) -> None:
    result = named(round(size), QWEN, tokens=tokens)
    assert result is not None and (result.formula, result.meaning) == (formula, meaning)


def test_a_round_number_of_tokens_is_recognised_without_its_budget() -> None:
    result = named(round(13.91 * GIB), QWEN)
    assert result is not None and result.formula == "24,576 tokens × 151,936 vocab × 4 bytes"


@pytest.mark.parametrize("size", [0, 1, 24, 2 << 20, round(7.77 * GIB), round(61.34 * GIB), 1 << 60])
def test_nothing_is_claimed_where_nothing_fits(size: int) -> None:
    assert named(size, QWEN, tokens=(24576,)) is None


@given(st.integers(min_value=-1, max_value=1 << 50), st.lists(st.integers(1, 1 << 20), max_size=3))
def test_a_claim_is_within_half_a_per_cent(size: int, tokens: list[int]) -> None:
    result = named(size, QWEN, tokens=tuple(tokens))
    assert result is None or abs(result.size_bytes - size) <= 0.005 * size


def test_a_printed_model_is_read() -> None:
    assert printed_model(printed_fields(CONFIG)) == replace(QWEN, family="qwen3")


def test_two_models_are_none() -> None:
    assert printed_model(printed_fields(CONFIG + CONFIG)) is not None
    assert printed_model(printed_fields(CONFIG + CONFIG.replace("4096", "2048"))) is None
    assert printed_model(printed_fields("no model here")) is None
