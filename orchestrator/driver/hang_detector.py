"""Detects hung attempts: without output, or with output or work but no completed step."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

_SILENCE_S = 15 * 60.0
_SILENCE_STEPS = 5
_SILENCE_START_S = 45 * 60.0  # loading and compiling a large model prints nothing for long
# A job that retries a failed rollout forever prints all the time; only its steps are missing. The same holds
# for a job whose rank waits in a collective, which shows full GPU utilization, but also for a long
# validation.
_IDLE_STALL_S = 60 * 60.0  # with output but without work
_IDLE_STALL_START_S = 2 * 60 * 60.0
_STALL_STEPS = 10
_STALL_SILENCES = 4  # times the silence that the job sets
_STALL_START_SILENCES = 12
_BUSY_STALL_S = 8 * 60 * 60.0  # even with work
_RECENT_STEPS = 50


class HangDetector:
    """The times of an attempt's last output, last work and last completed step."""

    def __init__(
        self, *, silence_s: float | None, stall_s: float | Literal["off"] | None = None, now: float
    ) -> None:
        """Start at a time of the driver's clock; `None` is the rule that `auto` names in a job file."""
        self._silence_s, self._stall_s = silence_s, stall_s
        self._heard_at = self._worked_at = self._stepped_at = now
        self._idle_s = 0.0  # since the last step, in which neither a CPU nor a GPU worked
        self._printed_at: float | None = None  # of the last step; None where it was read late
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._steps = 0
        self._asked_at = now
        self.silent_s = 0.0

    def pause(self, now: float) -> None:
        """Exclude the time since the last poll, in which nothing of the attempt could be read."""
        unread_s = now - self._asked_at
        self._asked_at = now
        self._heard_at, self._worked_at = self._heard_at + unread_s, self._worked_at + unread_s
        self._stepped_at += unread_s

    def heard(self, now: float) -> None:
        """Record output."""
        self._heard_at = now

    def worked(self, at: float) -> None:
        """Record when a CPU or a GPU of the attempt last worked."""
        self._worked_at = max(self._worked_at, at)

    def stepped(self, now: float, *, seconds: float | None, late: bool = False) -> float | None:
        """Record a completed step; return its seconds, None if unknown.

        `late`: its line may be old, written while no driver was there to read it.
        """
        if seconds is None and self._printed_at is not None and not late and now > self._printed_at:
            seconds = now - self._printed_at
        self._stepped_at, self._printed_at = now, None if late else now
        self._idle_s = 0.0
        self._steps += 1
        if seconds:
            self._durations.append(seconds)
        return seconds

    def hung(self, now: float) -> str:
        """Return why the attempt counts as hung; empty if it does not."""
        if self._worked_at <= self._asked_at:
            self._idle_s += now - max(self._asked_at, self._stepped_at)
        self._asked_at = now
        self.silent_s = now - max(self._heard_at, self._worked_at)
        if self.silent_s >= self._allowed_silence_s():
            return f"no output for {self.silent_s:.0f} s"
        if self._stalled(now - self._stepped_at):
            return f"no training step for {now - self._stepped_at:.0f} s"
        return ""

    def _stalled(self, seconds: float) -> bool:
        """Return whether no step was completed for too long."""
        if self._stall_s is not None:
            return self._stall_s != "off" and seconds >= self._stall_s
        idle_s = self._allowed_idle_s()
        return self._idle_s >= idle_s or seconds >= max(_BUSY_STALL_S, idle_s)

    def _allowed_silence_s(self) -> float:
        if self._silence_s is not None:
            return self._silence_s
        if not self._steps:
            return _SILENCE_START_S
        return max(_SILENCE_S, _SILENCE_STEPS * self._typical_s())

    def _allowed_idle_s(self) -> float:
        if not self._steps:
            return _IDLE_STALL_START_S if self._silence_s is None else _STALL_START_SILENCES * self._silence_s
        least = _IDLE_STALL_S if self._silence_s is None else _STALL_SILENCES * self._silence_s
        return max(least, _STALL_STEPS * self._typical_s())

    def _typical_s(self) -> float:
        return median(self._durations) if self._durations else 0.0
