"""Wall-clock time, monotonic time and sleep as one object that tests replace."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The machine's clock."""

    def now(self) -> float:
        """Return Unix seconds, for records and output; an administrator or NTP may change them."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of a clock that cannot be set, for silence, waits and budgets."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds."""
        time.sleep(seconds)


def timestamp(now: float) -> str:
    """Return Unix seconds as UTC in ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_of(stamp: str) -> float:
    """Return the Unix seconds of a timestamp; 0 if it is empty."""
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
