"""Wall-clock and monotonic time and sleep, as one value that tests replace."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return Unix seconds: what is written and shown. An administrator or NTP may set them."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that nobody sets: what silence, waits and budgets are measured by."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        time.sleep(seconds)


def timestamp(now: float) -> str:
    """Return UTC as ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(stamp: str) -> float:
    """Return the Unix seconds of a timestamp."""
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
