"""Prompts of the coming step, prepared ahead by worker processes when there are any."""

from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from autotune.launchers.builtin.data.task import Prompt, prompts


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
