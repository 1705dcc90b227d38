"""How a log is told to be a framework's, by the `traces.yaml` of its folder."""

from __future__ import annotations

from functools import cache
from typing import Any

from autotune.launchers.frameworks.core.data import document
from autotune.policies.values.value import Value


class Traces(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `traces.yaml` holds."""

    traces: tuple[str, ...]  # texts that only logs of the framework contain
    runs: tuple[str, ...] = ()  # other frameworks here that it is built of, whose traces its logs hold too
    # A text of a log -> the settings of the job that prints it, such as the backend of a class of workers.
    implies: dict[str, dict[str, Any]] = {}

    def implied(self, text: str) -> dict[str, Any]:
        """Return the settings of the job that prints a text, beside those that it shows."""
        found: dict[str, Any] = {}
        for trace, settings in self.implies.items():
            found |= settings if trace in text else {}
        return found


@cache
def traces_of(package: str) -> Traces:
    """Return the traces of the framework in a folder; raises DataError for a wrong key or type."""
    return document(package, "traces.yaml", Traces)
