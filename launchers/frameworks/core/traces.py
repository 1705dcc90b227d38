"""How a log is recognised as a framework's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Traces(NamedTuple):
    """What the logs of one framework hold."""

    traces: tuple[str, ...] = ()  # texts that only its logs contain
    runs: tuple[str, ...] = ()  # other frameworks here that it is built of, whose traces its logs hold too
    # A text of a log -> the settings of the job that prints it, such as the backend of a class of workers.
    implies: Mapping[str, Mapping[str, Any]] = {}

    def implied(self, text: str) -> dict[str, Any]:
        """Return the settings of the job that prints a text, beside those that it shows."""
        result: dict[str, Any] = {}
        for trace, settings in self.implies.items():
            result |= settings if trace in text else {}
        return result
