"""What the built-in job tells its rollout engines, and what they answer."""

from typing import Literal, TypedDict

import msgspec

EngineKind = Literal["sglang", "light"]
Part = Literal["weights", "kv_cache"]  # SGLang's names


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine is set up."""

    model_path: str
    device: Literal["cpu", "cuda"] = "cpu"
    budget_bytes: int | None = None  # of device memory; None: the card's own, unlimited without one
    memory_fraction: float = 0.8  # of the budget: weights and token pool
    concurrency: int = 64  # requests that run at once; the others wait
    max_batched_tokens: int | None = None  # of one prefill; None: the engine's default
    max_model_len: int | None = None  # prompt and response of one request; None: the model's
    seed: int = 0
    dtype: str = "float32"
    sleeps: bool = False  # it gives its memory of the card back between rollouts


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One response, with the log-probability of each of its tokens."""

    tokens: list[int]
    logprobs: list[float]


class Sampling(TypedDict):
    """How responses are sampled."""

    max_new_tokens: int
    temperature: float
    ignore_eos: bool


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine used since it was last asked."""

    peak_bytes: int  # above the baseline of the process
    budget_bytes: int | None
    pool_tokens: int
