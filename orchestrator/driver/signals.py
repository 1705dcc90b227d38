"""Ctrl-C and SIGTERM as facts that the loop looks at; the second one ends waiting at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class ForcedExit(BaseException):
    """The user asked a second time while the attempt was being stopped."""


class Interrupts:
    """Whether the user or the machine asked the driver to end."""

    def __init__(self, request: Path | None = None) -> None:
        self._by = ""
        self._request = request
        self.impatient = False
        self._cutting = False

    @property
    def by(self) -> str:
        """SIGINT, SIGTERM or nothing; a request file stands for SIGTERM from another host."""
        if not self._by and self._request is not None and self._request.exists():
            self._by = signal.SIGTERM.name
        return self._by

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; the first decides the exit code."""
        if self._by:
            self.impatient = True
            if self._cutting:
                raise ForcedExit
        else:
            self._by = signal.Signals(number).name

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Let a second signal raise ForcedExit inside; that reaches the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._cutting = True
        try:
            yield
        finally:
            self._cutting = False


@contextmanager
def listening(request: Path | None = None) -> Iterator[Interrupts]:
    """Return the interrupts of this process while the block runs; an old request is forgotten."""
    if request is not None:
        request.unlink(missing_ok=True)
    interrupts = Interrupts(request)
    before = {number: signal.signal(number, interrupts.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if request is not None:
            request.unlink(missing_ok=True)
