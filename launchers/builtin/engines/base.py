"""What the built-in job asks of a rollout engine."""

from typing import TYPE_CHECKING, Literal, Protocol, TypedDict, Unpack

import msgspec

if TYPE_CHECKING:
    import torch

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
    temperature: float = 1.0
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


class Engine(Protocol):
    """A running engine; not thread-safe. Some have nothing to do in the methods that return here."""

    def mark_step(self, step: int) -> None:
        """Name the training step that the next calls belong to, for failure records."""
        return

    def generate(
        self, prompts: list[list[int]], *, seeds: list[int], **sampling: Unpack[Sampling]
    ) -> list[Completion]:
        """Return one response per prompt; equal seeds and weights give equal tokens."""

    def sleep(self) -> None:
        """Give weights and token pool back to the card; neither keeps its content."""
        return

    def wake(self, part: Part) -> None:
        """Take the memory of one part again: the weights, to be loaded again, then the pool."""
        return

    def borrow(self, handles: bytes) -> None:
        """Load some of the model's tensors from where another process of this card has them."""
        return

    def begin_update(self) -> None:
        """Open a transfer of weights through memory."""
        return

    def update(self, bucket: "list[tuple[str, torch.Tensor]]") -> None:
        """Load some of the model's tensors."""

    def end_update(self) -> None:
        """Close the transfer; the next response comes from the new weights."""
        return

    def update_from_disk(self, path: str) -> None:
        """Load all weights from a folder of safetensors."""

    def memory(self) -> EngineMemory:
        """Return the memory used since the last call."""

    def shutdown(self) -> None:
        """End the engine and all its processes."""
        return
