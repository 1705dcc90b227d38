"""Detect when an ended attempt has written its last output."""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.launchers.base import Exit

HARVEST_S = 5.0  # within this time Ray reaps workers, and these write their last output
_QUIET_S = 0.7


class Harvest:
    """Withholds the exit until logs are quiet and processes gone; after 5 s, until nothing new is read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noticed_at: float | None = None
        self._last_word_at = clock()
        self._complete = False

    @property
    def begun(self) -> bool:
        """Whether the exit is known, published or not."""
        return self._noticed_at is not None

    def publish(self, ended: Exit | None, *, heard: bool, alive: int) -> Exit | None:
        """Return `ended` once no more output is expected."""
        now = self._clock()
        if heard:
            self._last_word_at = now
        if ended is None or self._complete:
            return ended
        if self._noticed_at is None:
            self._noticed_at = self._last_word_at = now
        quiet = not alive and now - self._last_word_at >= _QUIET_S
        self._complete = quiet or (now - self._noticed_at >= HARVEST_S and not heard)
        return ended if self._complete else None
