"""Progress lines of autotune's own programs: the built-in job and the entry for TRL and ms-swift."""

from __future__ import annotations

import re

from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.observation import (
    Marker,
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    TrainingDone,
)

_LINE = re.compile(r": (?P<kind>phase|step|checkpoint|resumed|done)\b(?P<rest>.*)")
_PAIR = re.compile(r"(\w+)=(\S+)")
_STEP = re.compile(r"\s+(\d+)/(\d+)")


def own_marks(text: bytes, *, program: str) -> bool:
    """Return whether a text contains a line of the named program."""
    return f"{program}: ".encode() in text


def own_marker(line: str, *, program: str) -> Marker | None:
    """Return the progress in a line of the named program; None for other and truncated lines."""
    at = line.find(f"{program}: ")
    match = None if at < 0 else _LINE.match(line, at + len(program))
    if match is None:
        return None
    rest = match["rest"]
    fields = dict(_PAIR.findall(rest))
    try:
        match match["kind"]:
            case "phase":
                return _phase(rest, fields)
            case "step":
                return _step(rest, fields)
            case "checkpoint":
                return Saved(step=int(fields["step"]))
            case "resumed":
                return Resumed(step=int(fields["step"]))
            case _:
                return TrainingDone(step=int(fields["steps"]))
    except (KeyError, ValueError):
        return None  # a line torn by a crash


def _phase(rest: str, fields: dict[str, str]) -> Marker:
    phase, step = Phase(fields["name"]), int(fields["step"])
    if rest.lstrip().startswith("start"):
        return PhaseStarted(phase=phase, step=step)
    peak = None
    if "peak_bytes" in fields:
        peak = Peak(
            used_bytes=int(fields["peak_bytes"]),
            capacity_bytes=int(fields.get("budget_bytes", 0)),
            component=Component(fields.get("component", "trainer")),
        )
    return PhaseEnded(phase=phase, step=step, seconds=float(fields["seconds"]), peak=peak)


def _step(rest: str, fields: dict[str, str]) -> Marker | None:
    counts = _STEP.match(rest)
    if counts is None:
        return None
    numbers = {name: float(value) for name, value in fields.items()}
    return StepDone(
        step=int(counts[1]),
        of=int(counts[2]),
        seconds=numbers.pop("seconds", None),
        tokens_per_second=numbers.pop("tokens_per_second", None),
        metrics=numbers,
    )
