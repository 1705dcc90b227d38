"""Detects which framework wrote a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Traces(NamedTuple):
    """Texts that identify the logs of one framework."""

    traces: tuple[str, ...] = ()  # texts that only its logs contain
    runs: tuple[str, ...] = ()  # frameworks that it is built on, whose traces its logs contain as well
    # A text of a log -> settings of the job that prints it, such as the backend of a worker class.
    implies: Mapping[str, Mapping[str, Any]] = {}

    def implied(self, text: str) -> dict[str, Any]:
        """Return settings that follow from a log's texts, beyond those that it prints."""
        result: dict[str, Any] = {}
        for trace, settings in self.implies.items():
            result |= settings if trace in text else {}
        return result
