"""The steps and checkpoints that a log reports, and what grew over the steps."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

from autotune.launchers.base import Framework
from autotune.policies.values.events import Progressed
from autotune.policies.values.observation import StepDone

_MEMORY = re.compile(
    r"(?i)mem(ory)?[_/].{0,20}(alloc|reserv|used)|(alloc|reserv|used).{0,12}(_gb|_gib|memory)"
)
_LENGTH = re.compile(r"(?i)(len(gth)?|seqlen)s?[_/]max|max_(seq_?len|length|response)|global_seqlen/max")
_ANY_LENGTH = re.compile(r"(?i)(len(gth)?|seqlen)s?[_/](mean|max)|(mean|max)_(len(gth)?|seqlen)|response_len")
_RUNNING_MAXIMUM = re.compile(r"(?i)max_mem|peak|mem\w*_max")
_FEWEST = 4  # minimum steps of a trend
_STEADY = 0.75  # minimum share of steps with growth; a running maximum that rose once shows one long batch
_GROWTH = 0.02  # minimum growth, of the first value
_LONGER = 0.1  # minimum increase over the longest before
_KEPT = 200  # maximum steps examined
_STEP = re.compile(
    r"Training Progress: [^|]{0,40}\|[^|]*\| (\d{1,9})/\d|\bstep[:=] ?(\d{1,9}) - |"
    r"Global Step: {1,8}(\d{1,9})/|\biteration +(\d{1,9})/ *\d+ *\|"
)
# verl's bar: the step, counted from the first process; then the time of this process and of one step.
_BAR = re.compile(
    r"Training Progress: [^|]{0,40}\|[^|]*\| (?P<step>\d{1,9})/(?P<of>\d{1,9}) "
    r"\[(?:(?P<hours>\d{1,5}):)?(?P<minutes>\d\d):(?P<seconds>\d\d)<[^,\]]{1,20}, *"
    r"(?P<rate>\d{1,9}(?:\.\d{1,9})?)(?P<unit>s/it|it/s)"
)
_SAVED = re.compile(
    r"(?:[Ss]av(?:ed|ing)\b.{0,120}?\b(?:to|at|in)\b|\blocal_global_step_folder)[ :]{1,3}['\"]?"
    r"(\S{0,300}?(?:global_step_?|checkpoint-|iter_|step[_-]?)\d{1,9})\b"
)


def last_step(framework: Framework | None, text: str) -> int | None:
    """Return the last step in a text, in the format of its framework or a common one; None if none."""
    if step := next(_steps(framework, reversed(text.split("\n"))), None):
        return step.step
    numbers = [int(next(filter(None, match.groups()))) for match in _STEP.finditer(text)]
    return numbers[-1] if numbers else None


def steps_in_all(framework: Framework | None, text: str, step: int | None) -> int | None:
    """Return the steps of the whole training by the last step or progress bar of a text; None if unknown."""
    done = next(_steps(framework, reversed(text.split("\n"))), None)
    total = done.of if done is not None else None
    if total is None:
        total = next((int(bar["of"]) for bar in deque(_BAR.finditer(text), maxlen=1)), None)
    return total if total is not None and step is not None and total >= step else None


def last_checkpoint(text: str) -> str:
    """Return the folder of the last checkpoint that a text reports as saved; empty if none."""
    return next(reversed(_SAVED.findall(text)), "")


def steps_of(framework: Framework | None, lines: Iterable[str]) -> tuple[StepDone, ...]:
    """Return the last _KEPT steps in the lines of a log."""
    return tuple(_steps(framework, lines))[-_KEPT:]


def of_bar(text: str) -> tuple[StepDone, ...]:
    """Return the steps of the last process, at most _KEPT, by the last progress bar of a text."""
    bars = deque(_BAR.finditer(text), maxlen=1)
    if not bars or not (rate := float(bars[0]["rate"])):
        return ()
    bar = bars[0]
    elapsed = (int(bar["hours"] or 0) * 60 + int(bar["minutes"])) * 60 + int(bar["seconds"])
    each, last = rate if bar["unit"] == "s/it" else 1 / rate, int(bar["step"])
    first = max(1, last + 1 - min(_KEPT, round(elapsed / each)))
    return tuple(StepDone(step=step, of=int(bar["of"]), seconds=each) for step in range(first, last + 1))


def _steps(framework: Framework | None, lines: Iterable[str]) -> Iterator[StepDone]:
    markers = map(framework.marker, lines) if framework is not None else ()
    return (marker for marker in markers if isinstance(marker, StepDone))


def completed(steps: Iterable[StepDone]) -> tuple[Progressed, ...]:
    """Return the steps since their count last fell, as an earlier attempt's ended, each once."""
    result: dict[int, Progressed] = {}
    last = 0
    for done in steps:
        if done.step < last:
            result.clear()
        last = done.step
        result[last] = Progressed(
            attempt=1,
            step=last,
            of=done.of,
            seconds=done.seconds,
            tokens_per_second=done.tokens_per_second,
            peaks=done.peaks,
        )
    return tuple(result.values())


def what_changed(steps: tuple[StepDone, ...]) -> str:
    """Return a description of what grew before a late failure; empty if the steps show no growth."""
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
    """Return a possible reason for the growth of a memory metric: longer sequences, otherwise a leak."""
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
