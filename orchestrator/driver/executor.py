"""Calls that block for seconds: made here, or beside the turns of a search with several trials at once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Making(Protocol):
    """A way to make a call that blocks."""

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Make the call and end with what it returns; yields while that is awaited."""


def here(call: Callable[[], T]) -> Generator[None, None, T]:
    """Make the call while everything else waits."""
    yield from ()
    return call()


class Beside:
    """Makes calls in threads, some at a time; each result is taken in by the thread that asked for it."""

    def __init__(self, *, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="autotune-beside")

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Make the call beside what the caller does between the turns of this generator."""
        future = self._pool.submit(call)
        while not future.done():
            yield
        return future.result()

    def finish(self) -> None:
        """Wait for the calls under way; those that have not begun never do."""
        self._pool.shutdown(cancel_futures=True)
