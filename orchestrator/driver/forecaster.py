"""What an attempt's steps show of the memory that is still to come: series for the forecast."""

from __future__ import annotations

import math
import re
from collections import deque

from autotune.policies.forecast.foresee import WARM_UP, Measured, foresee
from autotune.policies.forecast.trend import WINDOW
from autotune.policies.values.events import Event, Foreseen
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.observation import Peak, Sample, StepDone

_LENGTHS = re.compile(r"(?i)response_?len(?:gth)?s?[_/](?:max|mean)\b")


class Forecaster:
    """The series of one attempt, and what was said of them last."""

    def __init__(self, *, known: tuple[Event, ...], longest_response: float | None) -> None:
        """Go on from what is `known` of the attempt; `longest_response` is what the job allows, in tokens."""
        self._longest = longest_response
        self._measured: deque[Measured] = deque(maxlen=WINDOW + WARM_UP)
        self._said = {event.memory: event for event in known if isinstance(event, Foreseen)}
        self._host: Peak | None = None  # since the last step
        self._host_phase = Phase.NONE

    def take(self, sample: Sample, phase: Phase) -> None:
        """Take in a reading of one node during a phase."""
        if not sample.host_total_bytes:
            return
        used, total = sample.host_used_bytes, sample.host_total_bytes
        if self._host is None or used / total > self._host.used_bytes / self._host.capacity_bytes:
            # Caches, the object store and other users' processes are in it, and end by themselves.
            self._host = Peak(
                used_bytes=used, capacity_bytes=total, component=Component.UNKNOWN, upper_bound=True
            )
            self._host_phase = phase

    def stepped(
        self, done: StepDone, peaks: dict[str, Peak], *, attempt: int, of: int | None, new: bool
    ) -> list[Event]:
        """Take in a step with the peaks since the one before; returns what is to be said, if it is `new`.

        `of` is the last step of the training.
        """
        lengths = {
            name: value
            for name, value in done.metrics.items()
            if _LENGTHS.search(name) and math.isfinite(value)
        }
        measured = Measured(
            step=done.step, peaks=peaks, host=self._host, host_phase=self._host_phase, lengths=lengths
        )
        self._measured.append(measured)
        self._host = None
        if not new:
            return []
        found = foresee(tuple(self._measured), attempt=attempt, said=self._said, of=of, longest=self._longest)
        self._said |= found
        return list(found.values())
