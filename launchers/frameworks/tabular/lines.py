"""Parses progress from log lines, by the rows of a framework's `lines.yaml`."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Literal, NamedTuple

from autotune.launchers.frameworks.core.data import document
from autotune.launchers.frameworks.dialects.printed_dicts import numbers_in
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.observation import (
    Marker,
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    StepTokens,
    TrainingDone,
    UpdateDone,
)
from autotune.policies.values.value import Value

_GIB = 1 << 30


class Metrics(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to read the group `metrics` of a line at the end of a step or phase."""

    pattern: str = ""  # of one metric, with the groups `name` and `value`; empty: a printed dict
    prefix: str = ""  # removed from names
    needs: tuple[str, ...] = ()  # the line counts only with one of these
    seconds: tuple[str, ...] = ()  # the first that is present gives the step's seconds
    tokens: tuple[str, ...] = ()  # their product gives the step's tokens
    rate: str = ""  # tokens per second of the whole step
    # Tokens per second and seconds of a part of the step that processes all its tokens; preferred to `rate`.
    part: tuple[str, str] = ("", "")
    saved: str = ""  # present if the step ended with a checkpoint


class Line(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of line and what it reports.

    The pattern has the groups `step`, `of`, `seconds`, `tokens`, `loss` and `name`, and at the end of a phase
    `used_gib` and `total_gib`, the memory of the device.
    """

    says: Literal["starts", "ends", "step", "update", "tokens", "resumed", "saved", "saved_last", "done"]
    pattern: str
    needle: str  # a text in every such line, searched before the pattern
    offset: int = 0  # added to the step number: 1 if the framework counts from 0
    phase: Phase | None = None  # the phase that starts or ends
    names: dict[str, Phase] = {}  # value of the group `name` -> that phase
    components: dict[str, Component] = {}  # value of `name` -> whose memory it is (default: trainer)
    upper_bound: bool = False  # the memory in the line is an upper bound of the phase's peak
    metrics: Metrics | None = None


class _Read(NamedTuple):
    line: Line
    pattern: re.Pattern[str]


def lines(package: str) -> tuple[Line, ...]:
    """Return a framework's `lines.yaml`."""
    return document(package, "lines.yaml", tuple[Line, ...])


@cache
def _rows(package: str) -> tuple[_Read, ...]:
    return tuple(_Read(line, re.compile(line.pattern)) for line in lines(package))


@cache
def _needles(package: str) -> tuple[bytes, ...]:
    return tuple({line.needle.encode() for line in lines(package)})


def marks_of(package: str, text: bytes) -> bool:
    """Return whether a text contains the needle of any row."""
    return any(needle in text for needle in _needles(package))


def marker_of(package: str, text: str) -> Marker | None:
    """Return the progress that a log line reports, by the first row that matches and yields any."""
    for line, pattern in _rows(package):
        match = pattern.search(text) if line.needle in text else None
        marker = None if match is None else _marker(line, match.groupdict())
        if marker is not None:
            return marker
    return None


def _marker(line: Line, groups: dict[str, str | None]) -> Marker | None:
    number, seconds = groups.get("step"), groups.get("seconds")
    step = int(number) + line.offset if number else 0
    match line.says:
        case "step" if line.metrics is not None:
            return _measured(line.metrics, step, groups["metrics"] or "")
        case "step":
            of = groups.get("of")
            return StepDone(
                step=step, of=int(of) if of else None, seconds=float(seconds) if seconds else None
            )
        case "update":
            return UpdateDone(loss=float(groups["loss"] or 0))
        case "tokens":
            return StepTokens(tokens=float(groups["tokens"] or 0))
        case "resumed":
            return Resumed(step=step)
        case "saved":
            return Saved(step=step or None)
        case "saved_last":  # this line follows that of the step
            return Saved(step=None, last=True)
        case "done":
            return TrainingDone(step=step)
    phase = line.phase or line.names.get(groups.get("name") or "")
    if phase is None:
        return None
    if line.says == "starts":
        return PhaseStarted(phase=phase, step=step)
    if line.metrics is not None:
        done = _measured(line.metrics, step, groups["metrics"] or "")
        return done and PhaseEnded(phase=phase, step=step, seconds=done.seconds or 0.0)
    return PhaseEnded(phase=phase, step=step, seconds=float(seconds or 0), peak=_peak(line, groups))


def _peak(line: Line, groups: dict[str, str | None]) -> Peak | None:
    used, total = groups.get("used_gib"), groups.get("total_gib")
    if used is None or total is None or not float(total):  # a processor's memory is not measured
        return None
    return Peak(
        used_bytes=round(float(used) * _GIB),
        capacity_bytes=round(float(total) * _GIB),
        component=line.components.get(groups.get("name") or "", Component.TRAINER),
        upper_bound=line.upper_bound,
    )


def _measured(metrics: Metrics, step: int, text: str) -> StepDone | None:
    numbers = _numbers(metrics, text)
    if metrics.needs and not any(name in numbers for name in metrics.needs):
        return None
    seconds = next((numbers[name] for name in metrics.seconds if name in numbers), None)
    return StepDone(
        step=step,
        seconds=seconds,
        tokens_per_second=_throughput(metrics, numbers, seconds),
        metrics=numbers,
        saved=metrics.saved in numbers,
    )


def _numbers(metrics: Metrics, text: str) -> dict[str, float]:
    if metrics.pattern:
        result = {match["name"]: float(match["value"]) for match in re.finditer(metrics.pattern, text)}
    else:
        result = numbers_in(text) or {}
    return {name.removeprefix(metrics.prefix): value for name, value in result.items()}


def _throughput(metrics: Metrics, values: dict[str, float], seconds: float | None) -> float | None:
    rate, during = metrics.part
    tokens = math.prod(values.get(name, 0.0) for name in metrics.tokens) if metrics.tokens else 0.0
    if rate in values and during in values:
        tokens = values[rate] * values[during]
    return tokens / seconds if tokens and seconds else values.get(metrics.rate)
