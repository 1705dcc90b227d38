"""Calls that block for seconds: in this thread, or in worker threads while other trials take their turns."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Invoke(Protocol):
    """A way to run a call that blocks."""

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Run the call. Generator: yields until it finishes, then returns its result."""


def here(call: Callable[[], T]) -> Generator[None, None, T]:
    """Run the call in this thread; everything else waits."""
    yield from ()
    return call()


class ThreadedInvoke:
    """Runs calls in worker threads; the calling thread receives each result or exception."""

    def __init__(self, *, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="autotune-call")

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Run the call in a worker thread. Generator: yields until it finishes, then returns its result."""
        future = self._pool.submit(call)
        while not future.done():
            yield
        return future.result()

    def finish(self) -> None:
        """Wait for the running calls; cancel those that have not begun."""
        self._pool.shutdown(cancel_futures=True)
