"""Runs blocking calls in this thread, or in worker threads while other trials proceed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

T = TypeVar("T")


class Invoke(Protocol):
    """A way to run a blocking call."""

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Run the call. Generator: yields until it finishes, then returns its result."""


def here(call: Callable[[], T]) -> Generator[None, None, T]:
    """Run the call in this thread."""
    yield from ()
    return call()


def beside(call: Callable[[], T]) -> Future[T]:
    """Run the call in a daemon thread."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="autotune-call", daemon=True).start()
    return future


class ThreadedInvoke:
    """Runs calls in worker threads; the calling thread receives each result or exception."""

    def __init__(self, *, at_once: int) -> None:
        self._places = threading.Semaphore(at_once)
        self._running: set[Future[object]] = set()
        self._closed = False

    def __call__(self, call: Callable[[], T], /) -> Generator[None, None, T]:
        """Run the call in a worker thread. Generator: yields until it finishes, then returns its result."""

        def admitted() -> T:
            with self._places:
                if self._closed:
                    raise RuntimeError("no further call begins")
                return call()

        future = beside(admitted)
        self._running.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._running.discard)
        while not future.done():
            yield
        return future.result()

    def finish(self, *, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` for running calls; calls that have not started are dropped."""
        self._closed = True
        wait(tuple(self._running), timeout=timeout_s)
