"""What is measured: shapes of public models, layouts, settings, and their combinations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

_QWEN2 = {"model_type": "qwen2", "use_sliding_window": False}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "use_sliding_window": False}


def _shape(
    *, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
        **more,
    }


# The public models' config.json, the keys that decide sizes.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(layers=2, hidden=64, heads=4, kv=2, inner=128, vocab=512, **_QWEN2),
    "Qwen2.5-0.5B": _shape(
        layers=24,
        hidden=896,
        heads=14,
        kv=2,
        inner=4864,
        vocab=151936,
        **_QWEN2 | {"tie_word_embeddings": True},
    ),
    "Qwen3-1.7B": _shape(
        layers=28,
        hidden=2048,
        heads=16,
        kv=8,
        inner=6144,
        vocab=151936,
        **_QWEN3 | {"tie_word_embeddings": True},
    ),
    "Qwen2.5-3B": _shape(
        layers=36,
        hidden=2048,
        heads=16,
        kv=2,
        inner=11008,
        vocab=151936,
        **_QWEN2 | {"tie_word_embeddings": True},
    ),
    "Qwen2.5-7B": _shape(layers=28, hidden=3584, heads=28, kv=4, inner=18944, vocab=152064, **_QWEN2),
    "Qwen3-14B": _shape(layers=40, hidden=5120, heads=40, kv=8, inner=17408, vocab=151936, **_QWEN3),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a trainer holds its state; bytes per parameter, under the names of the estimate's layout."""

    strategy: str
    parameter_bytes: int
    compute_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    autocast: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of weights, gradients and moments."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


LAYOUTS = {
    "built-in": Layout(
        strategy="none", parameter_bytes=4, compute_bytes=4, gradient_bytes=4, optimizer_bytes=8
    ),
    "bf16": Layout(strategy="none", parameter_bytes=2, compute_bytes=2, gradient_bytes=2, optimizer_bytes=4),
    "autocast": Layout(
        strategy="none",
        parameter_bytes=4,
        compute_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=8,
        autocast=True,
    ),
    "fsdp2": Layout(
        strategy="fsdp2", parameter_bytes=4, compute_bytes=2, gradient_bytes=4, optimizer_bytes=8
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What varies, under the knobs' names; sizes in bytes."""

    tokens_per_microbatch: int
    recompute: str = "off"
    optimizer_offload: bool = False
    logprob_chunk: int | None = None
    loss_recompute: bool = False
    sync_buffer: int = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trainer, stepped twice."""

    model: str
    layout: str
    settings: Settings
    prompt_tokens: int
    response_tokens: int
    microbatches: int = 2
    budget_bytes: int | None = None  # of the allocator; None: the whole card
    grow: bool = False  # double the tokens until memory runs out

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch."""
        return max(1, self.settings.tokens_per_microbatch // self.length)

    def doubled(self) -> Case:
        """Return the case with twice the tokens per micro-batch."""
        tokens = 2 * self.settings.tokens_per_microbatch
        return replace(self, settings=replace(self.settings, tokens_per_microbatch=tokens))


def cases(total_bytes: int, *, models: list[str], layouts: list[str], tokens: int) -> list[Case]:
    """Return what is measured, in an order of chance that is always the same: any start of it is a sample."""
    planned = list(_planned(total_bytes, models=models, layouts=layouts, tokens=tokens))
    random.Random(0).shuffle(planned)
    return planned


def _planned(total_bytes: int, *, models: list[str], layouts: list[str], tokens: int) -> Iterator[Case]:
    half = max(2, min(1024, tokens // 2))
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"recompute": "full"},
        {"recompute": "full", "logprob_chunk": 1024, "loss_recompute": True},
        {"optimizer_offload": True},
        {"logprob_chunk": 1024},
    )
    for grow in (False, True):
        for model in models:
            for layout in layouts:
                for changed in variants if not grow else variants[:3]:
                    for times in (1, 4) if not grow else (8,):
                        yield Case(
                            model=model,
                            layout=layout,
                            settings=Settings(tokens_per_microbatch=times * tokens, **changed),
                            prompt_tokens=half,
                            response_tokens=half,
                            grow=grow,
                        )
    for model in models:  # the allocator's share of a card, as two processes on one card have it
        settings = Settings(tokens_per_microbatch=tokens)
        yield Case(
            model=model,
            layout=layouts[0],
            settings=settings,
            prompt_tokens=half,
            response_tokens=half,
            budget_bytes=total_bytes // 2,
            grow=True,
        )


def parameters(shape: dict[str, Any]) -> int:
    """Return roughly how many parameters a shape has."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim", hidden // shape["num_attention_heads"])
    heads = 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"]) * head
    ends = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    return int(shape["num_hidden_layers"] * hidden * (heads + 3 * inner) + ends)
