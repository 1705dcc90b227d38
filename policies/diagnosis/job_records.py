"""Parses lines of autotune's own programs: failure and cure records, and the built-in job's phases."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from autotune.policies.diagnosis.message_figures import with_outside
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.value import Value

_PREFIX = re.compile(r"(?:builtin|trl|swift): failure (?=\{)")
_CURED = re.compile(r"(?:builtin|trl): cured (?=\{)")
_MARKER = re.compile(r"builtin: (?:phase (start|end) name=(\w+) step=(\d{1,12})|step (\d{1,12})/)")


class Record(Value, frozen=True, kw_only=True):
    """A failure that a process of the job reported before it died."""

    cause: Cause
    phase: Phase = Phase.NONE
    component: Component = Component.UNKNOWN
    rank: int | None = None
    step: int | None = None
    facts: Facts = Facts()


class CureRecord(Value, frozen=True, kw_only=True):
    """A failure that the job itself cured by continuing with a smaller setting."""

    failure: Record
    knob: str
    before: int
    after: int


class Mark(Value, frozen=True, kw_only=True):
    """The start or end of a phase, or a completed step."""

    phase: Phase = Phase.NONE
    step: int
    begins: bool = False
    done: bool = False


def record_of(line: str) -> Record | None:
    """Return the failure record in a line; None if there is none or it is invalid."""
    return _record(_decoded(line, _PREFIX))


def cure_of(line: str) -> CureRecord | None:
    """Return the cure record in a line; None if there is none or it is invalid."""
    raw = _decoded(line, _CURED)
    failure, knob = _record(raw), raw.get("knob")
    before, after = _bytes(raw.get("before")), _bytes(raw.get("after"))
    if failure is None or before is None or not after or knob not in KNOBS:
        return None
    return CureRecord(failure=failure, knob=knob, before=before, after=after)


def _decoded(line: str, prefix: re.Pattern[str]) -> dict[str, Any]:
    """Return the JSON object after a prefix; empty if there is none or it is invalid."""
    match = prefix.search(line)
    if match is None:
        return {}
    try:
        raw: Any = msgspec.json.decode(line[match.end() :].strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _record(raw: dict[str, Any]) -> Record | None:
    cause = _one_of(Cause, raw.get("cause"))
    if cause is None:
        return None
    used, budget = _bytes(raw.get("used_bytes")), _bytes(raw.get("budget_bytes"))
    device = raw.get("device")
    return Record(
        cause=cause,
        phase=_one_of(Phase, raw.get("phase")) or Phase.NONE,
        component=_one_of(Component, raw.get("component")) or Component.UNKNOWN,
        rank=_bytes(raw.get("rank")),
        step=_bytes(raw.get("step")),
        facts=with_outside(
            Facts(
                requested_bytes=_bytes(raw.get("requested_bytes")),
                free_bytes=None if used is None or not budget else max(0, budget - used),
                capacity_bytes=budget or None,
                allocated_bytes=used,
                device=device if isinstance(device, str) else None,
            )
        ),
    )


def mark_of(line: str) -> Mark | None:
    """Return the progress in a line of the built-in job; None if the line reports none."""
    match = _MARKER.search(line)
    if match is None:
        return None
    if match[4] is not None:
        return Mark(step=int(match[4]), done=True)
    phase = _one_of(Phase, match[2]) or Phase.NONE
    return Mark(phase=phase, step=int(match[3]), begins=match[1] == "start")


def _one_of(kind: type[Any], raw: Any) -> Any:
    return kind(raw) if isinstance(raw, str) and raw in kind._value2member_map_ else None


def _bytes(raw: Any) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < 1 << 62 else None
