"""A verifiable task that a model with random weights learns within 30 steps: prompts, rewards, advantages."""

import random
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec

CLASSES = 4
_FIRST_CLASS_TOKEN = 2  # 0 and 1 are the model's padding and end
# GRPO divides by the group's deviation; the constant keeps a group without spread at zero advantage.
_EPSILON = 1e-6


class Prompt(msgspec.Struct, frozen=True):
    """One question: answer with tokens whose id % 4 is `wanted`."""

    tokens: tuple[int, ...]
    wanted: int


def prompt(position: int, *, seed: int, prompt_tokens: int, vocab: int) -> Prompt:
    """Return the prompt at a position of the endless, seeded data set."""
    source = random.Random(f"{seed}/{position}")  # noqa: S311 - data, not a secret
    wanted = source.randrange(CLASSES)
    marker = _FIRST_CLASS_TOKEN + wanted
    filling = (source.randrange(vocab // 2, vocab) for _ in range(prompt_tokens - 2))
    return Prompt(tokens=(marker, *filling, marker), wanted=wanted)


def prompts(position: int, *, count: int, seed: int, prompt_tokens: int, vocab: int) -> list[Prompt]:
    """Return `count` prompts from a position on."""
    return [
        prompt(index, seed=seed, prompt_tokens=prompt_tokens, vocab=vocab)
        for index in range(position, position + count)
    ]


def reward(tokens: list[int], *, wanted: int) -> float:
    """Return the share of generated tokens that are what the prompt asked for."""
    if not tokens:
        return 0.0
    return sum(token % CLASSES == wanted for token in tokens) / len(tokens)


def request_seed(*, seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the sampling seed of one request, the same after a resume."""
    return random.Random(f"{seed}/{step}/{prompt_index}/{sample_index}").randrange(1 << 31)  # noqa: S311


class PromptSource:
    """Prompts by position; with workers the next step's are prepared while this one trains."""

    def __init__(self, *, workers: int, count: int, seed: int, prompt_tokens: int, vocab: int) -> None:
        self._count = count
        self._make = partial(prompts, count=count, seed=seed, prompt_tokens=prompt_tokens, vocab=vocab)
        # Spawned: forking a process that is connected to Ray copies its threads' locks.
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None
        self._ahead: dict[int, Future[list[Prompt]]] = {}

    def take(self, position: int) -> list[Prompt]:
        """Return the prompts from a position on."""
        if self._pool is None:
            return self._make(position)
        ready = self._ahead.pop(position, None) or self._pool.submit(self._make, position)
        following = position + self._count
        self._ahead[following] = self._pool.submit(self._make, following)
        return ready.result()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with one answer, as the trainer consumes it."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]  # the engine's
    reward: float
    advantage: float

    @property
    def tokens(self) -> int:
        """Return the length of the sequence."""
        return len(self.prompt) + len(self.response)


def grouped(
    prompts: Sequence[Prompt], answers: Sequence[tuple[list[int], list[float]]], *, group: int
) -> list[Sample]:
    """Return samples with rewards and group-relative advantages.

    Every prompt has `group` answers, its tokens and their log-probabilities, in the order of the prompts.
    """
    samples: list[Sample] = []
    for number, asked in enumerate(prompts):
        members = answers[number * group : (number + 1) * group]
        rewards = [reward(tokens, wanted=asked.wanted) for tokens, _ in members]
        mean = sum(rewards) / group
        variance = sum((value - mean) ** 2 for value in rewards) / max(1, group - 1)
        scale = variance**0.5 + _EPSILON
        samples += [
            Sample(
                prompt=list(asked.tokens),
                response=tokens,
                logprobs=logprobs,
                reward=value,
                advantage=(value - mean) / scale,
            )
            for (tokens, logprobs), value in zip(members, rewards, strict=True)
        ]
    return samples


def record(samples: list[Sample], *, folder: Path, step: int) -> None:
    """Write the samples of a step, for `engine: replay`."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".step-{step:06d}.json"
    temporary.write_bytes(msgspec.json.encode(samples))
    temporary.replace(_path(folder, step))


def replay(*, folder: Path, step: int) -> list[Sample]:
    """Return the recorded samples of a step."""
    return msgspec.json.decode(_path(folder, step).read_bytes(), type=list[Sample])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.json"
