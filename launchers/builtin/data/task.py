"""A verifiable task that a model with random weights learns within 30 steps."""

import random

import msgspec

CLASSES = 4
_FIRST_CLASS_TOKEN = 2  # 0 and 1 are the tokenizer's padding and end


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
