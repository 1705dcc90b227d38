"""What a run waits for before an attempt: `waiting.json`, which `status` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.cluster_fit import nodes_of
from autotune.orchestrator.run.directory import write_private
from autotune.orchestrator.run.storage import open_to_read
from autotune.orchestrator.units import show_duration
from autotune.policies.values.value import Value

_NAME = "waiting.json"


class Waiting(Value, frozen=True, kw_only=True):
    """The nodes that a run waits for."""

    since: str  # UTC, ISO 8601
    nodes: int  # nodes available
    wanted: int  # number of nodes that the run needs
    gpus: int  # that each of them has
    note: str = ""  # what the cluster's autoscaler does or fails to do
    limit_s: float  # after which the run ends


def sentence(waiting: Waiting, *, now: float | None) -> str:
    """Describe what a run waits for; without `now`, what it waited for in vain."""
    what, note = nodes_of(waiting.wanted, waiting.gpus), f"; {waiting.note}" if waiting.note else ""
    limit = show_duration(waiting.limit_s)
    if now is None:
        return f"waited {limit} for {what}: {waiting.nodes} came{note}"
    waited = show_duration(max(0.0, now - seconds_of(waiting.since)))
    return (
        f"waiting for {what}: {waiting.nodes} of {waiting.wanted} there{note} ({waited} of at most {limit})"
    )


def write(folder: Path, waiting: Waiting) -> None:
    """Write what a run waits for."""
    write_private(folder / _NAME, msgspec.json.format(msgspec.json.encode(waiting)) + b"\n")


def clear(folder: Path) -> None:
    """Record that the run no longer waits."""
    (folder / _NAME).unlink(missing_ok=True)


def read(folder: Path) -> Waiting | None:
    """Return what a run waits for; None if it waits for nothing or the file cannot be read."""
    try:
        with open_to_read(folder / _NAME) as file:
            return msgspec.json.decode(file.read(), type=Waiting)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
