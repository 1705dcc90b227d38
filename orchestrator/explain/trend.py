"""Trends in the steps before a late failure: growing memory, longer sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from autotune.launchers.base import Framework
from autotune.policies.values.observation import StepDone

_MEMORY = re.compile(
    r"(?i)mem(ory)?[_/].{0,20}(alloc|reserv|used)|(alloc|reserv|used).{0,12}(_gb|_gib|memory)"
)
_LENGTH = re.compile(r"(?i)(len(gth)?|seqlen)s?[_/]max|max_(seq_?len|length|response)|global_seqlen/max")
_ANY_LENGTH = re.compile(r"(?i)(len(gth)?|seqlen)s?[_/](mean|max)|(mean|max)_(len(gth)?|seqlen)|response_len")
_RUNNING_MAXIMUM = re.compile(r"(?i)max_mem|peak|mem\w*_max")
_FEWEST = 4  # steps that make a trend
_STEADY = 0.75  # of the steps; a running maximum that rose once shows one long batch
_GROWTH = 0.02  # of the first value
_LONGER = 0.1  # of the longest before
_KEPT = 200  # steps
_STEP = re.compile(
    r"Training Progress: [^|]{0,40}\|[^|]*\| (\d{1,9})/\d|\bstep[:=] ?(\d{1,9}) - |"
    r"Global Step: {1,8}(\d{1,9})/|\biteration +(\d{1,9})/ *\d+ *\|"
)
_SAVED = re.compile(
    r"[Ss]av(?:ed|ing)\b.{0,120}?\b(?:to|at|in)\b[ :]{1,3}['\"]?"
    r"(\S{0,300}?(?:global_step_?|checkpoint-|iter_|step[_-]?)\d{1,9})\b"
)


def last_step(framework: Framework | None, text: str) -> int | None:
    """Return the number of the last step that a text reports, in words of its framework or of any trainer."""
    steps = steps_of(framework, text.split("\n"))
    numbers = [int(next(filter(None, match.groups()))) for match in _STEP.finditer(text)]
    return steps[-1].step if steps else numbers[-1] if numbers else None


def last_checkpoint(text: str) -> str:
    """Return the folder of the last checkpoint that a text says was saved."""
    return next(reversed(_SAVED.findall(text)), "")


def steps_of(framework: Framework | None, lines: Iterable[str]) -> tuple[StepDone, ...]:
    """Return the last steps that the lines of a log report."""
    if framework is None:
        return ()
    markers = (framework.marker(line) for line in lines)
    return tuple(marker for marker in markers if isinstance(marker, StepDone))[-_KEPT:]


def what_changed(steps: tuple[StepDone, ...]) -> str:
    """Return what grew before a late failure; empty if the steps show no growth."""
    return _longest(steps) or _growth(steps)


def _growth(steps: tuple[StepDone, ...]) -> str:
    for name, values in _series(steps, _MEMORY):
        steady = sum(after > before for before, after in pairwise(values)) >= _STEADY * (len(values) - 1)
        falls = any(after < before for before, after in pairwise(values))
        if steady and not falls and values[0] > 0 and values[-1] >= values[0] * (1 + _GROWTH):
            first, last = steps[-len(values)].step, steps[-1].step
            return (
                f"memory grew from step to step: `{name}` {values[0]:g} → {values[-1]:g} "
                f"over steps {first} to {last}; {_reason(steps, name)}"
            )
    return ""


def _reason(steps: tuple[StepDone, ...], memory: str) -> str:
    """Return what may have made a memory metric grow: sequences where they grew too, else a leak."""
    for name, values in _series(steps, _ANY_LENGTH):
        half = len(values) // 2
        if min(values[half:]) >= max(values[:half]) and values[-1] >= values[0] * (1 + _LONGER):
            return f"so did the sequences: `{name}` {values[0]:g} → {values[-1]:g}"
    longer = "longer batches, " if _RUNNING_MAXIMUM.search(memory) else ""
    return f"{longer}a leak, or an engine that does not release its memory when it sleeps"


def _longest(steps: tuple[StepDone, ...]) -> str:
    for name, values in _series(steps, _LENGTH):
        before = max(values[:-1])
        if values[-1] >= before * (1 + _LONGER):
            return (
                f"the last logged batch has the longest sequences so far: `{name}` {values[-1]:g}, "
                f"at most {before:g} before"
            )
    return ""


def _series(steps: tuple[StepDone, ...], pattern: re.Pattern[str]) -> Iterable[tuple[str, list[float]]]:
    if len(steps) < _FEWEST:
        return
    for name in steps[-1].metrics:
        if pattern.search(name):
            values = [step.metrics[name] for step in steps if name in step.metrics]
            if len(values) >= _FEWEST:
                yield name, values
