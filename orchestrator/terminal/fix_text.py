"""The answer of `autotune fix`, as a value and as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from autotune.orchestrator import messages
from autotune.orchestrator.units import show_gib
from autotune.policies.values.failure import Cause
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value


class PredictedPeak(Value, frozen=True, kw_only=True):
    """The predicted peak of a phase on its GPU, before and after the change."""

    phase: str
    before_bytes: float
    after_bytes: float
    capacity_bytes: float | None  # null: not known


class FixDocument(Value, frozen=True, kw_only=True):
    """The answer of `autotune fix --json`."""

    schema: int = 1
    log: str
    line: int | None = None  # of the log that says so; null: none does
    cause: str  # of the failure
    phase: str
    step: int | None  # in which it failed; null: not known
    rank: int | None
    headline: str  # what died, in one line
    remedy: str = ""  # empty: nothing is left to change
    reason: str = ""
    effect: Effect | None = None  # on the numbers of the training
    slows: str = ""
    changes: dict[str, tuple[Setting, Setting]] = {}  # by knob: before and after
    settings: dict[str, Any] = {}  # of the framework, as they become
    file: str = ""  # that the diff is of; empty: the command
    diff: str = ""  # unified; empty: the file cannot be edited, and `words` are to be added to the command
    words: tuple[str, ...] = ()  # of the changed settings on the command line
    is_written: bool = False
    peaks: tuple[PredictedPeak, ...] = ()
    note: str = ""  # why there is no prediction
    write: str = ""  # the command that writes the change; empty: it is written, or there is no file
    with_autotune: str = ""  # the command that starts the changed job
    without_autotune: str = ""


def render_fix(answer: FixDocument) -> str:
    """Return the answer of `autotune fix` for people."""
    where = answer.log if answer.line is None else f"{answer.log}:{answer.line}"
    facts = [f"step {answer.step}" if answer.step else ""]
    facts += [f"rank {answer.rank}"] if answer.rank is not None else []
    details = ", ".join(each for each in (where, *facts) if each)
    lines = [f"error[{answer.cause}]: {answer.headline}", f"  {details}", ""]
    if not answer.remedy:
        is_memory = Cause(answer.cause).is_oom
        why = "nothing is left to change" if is_memory else "no memory ran out, so nothing is changed"
        return "\n".join([*lines, why, f"hint: autotune explain {shlex.quote(answer.log)}"])
    changes = (messages.arrow(knob, *values) for knob, values in answer.changes.items())
    slows = f"; slows {answer.slows}" if answer.slows and not answer.slows.startswith("nothing") else ""
    lines += [f"change: {', '.join(changes)} ({answer.effect}{slows})"]
    lines += [f"  {answer.reason}", ""]
    lines += [answer.diff, ""] if answer.diff else []
    if not answer.diff:
        lines += ["the value is calculated or set elsewhere; add to the command:"]
        lines += [*_indented(answer.words), ""]
    lines += [_peak(each) for each in answer.peaks]
    lines += [f"no predicted peaks: {answer.note}"] if answer.note else []
    lines += ["", "write the change", f"  {answer.write}"] if answer.write else [""]
    lines += ["start it with autotune", *_indented(answer.with_autotune.splitlines())]
    lines += ["or without", *_indented([answer.without_autotune])] if answer.without_autotune else []
    if answer.is_written:
        lines += ["", f"{answer.file} is changed"]
    return "\n".join(lines)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _peak(peak: PredictedPeak) -> str:
    of = ""
    if peak.capacity_bytes:
        share = peak.after_bytes / peak.capacity_bytes
        of = f" of {show_gib(peak.capacity_bytes, digits=1)} ({share:.0%})"
    before, after = (show_gib(size, digits=1) for size in (peak.before_bytes, peak.after_bytes))
    return f"predicted peak of {peak.phase}: {before} → {after}{of}"
