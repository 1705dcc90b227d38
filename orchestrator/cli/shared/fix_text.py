"""The answer of `autotune fix`, and its text."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from autotune.orchestrator import messages
from autotune.orchestrator.terminal.widgets import folded
from autotune.orchestrator.units import show_gib
from autotune.policies.values.failure import Cause
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value


class PredictedPeak(Value, frozen=True, kw_only=True):
    """The predicted peak of a phase on its GPU, before and after the change."""

    phase: str  # name of the phase, as in `phases` of a plan, or `host memory`
    before_bytes: float  # peak with the settings that failed
    after_bytes: float  # peak with the change
    capacity_bytes: float | None  # null: unknown


class FixDocument(Value, frozen=True, kw_only=True):
    """The answer of `autotune fix --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    log: str  # path of the log
    line: int | None = None  # line of the log with the failure; null: none
    cause: str  # cause of the failure, e.g. `gpu-oom`
    phase: str  # phase in which the job failed, e.g. `backward`; `none`: unknown
    step: int | None  # step that failed, or the last complete one; null: unknown
    step_text: str = ""  # `step`, and which of the two it is: `step 51`, `after step 50 of 2,110`
    rank: int | None  # rank of the process that failed first; null: unknown
    headline: str  # what died, in one line
    remedy: str = ""  # name of the remedy; empty: no change is left
    reason: str = ""  # why the remedy helps; empty: no change is left
    effect: Effect | None = None  # effect on the numbers of the training: `exact` or `numeric`
    slows: str = ""  # what becomes slower; empty or `nothing`: nothing
    at_least: tuple[str, ...] = ()  # why new values may go no lower, one sentence each
    for_speed: tuple[str, ...] = ()  # the knobs of `changes` without which the job fits as well
    changes: dict[str, tuple[Setting, Setting]] = {}  # knob -> value before and after
    differs: dict[str, tuple[Setting, Setting]] = {}  # knob -> value in the log, and in the file now
    settings: dict[str, Any] = {}  # settings of the framework with their new values
    kept: tuple[str, ...] = ()  # settings that are written so that they keep their value
    file: str = ""  # path of the file of the diff; empty: the command
    diff: str = ""  # unified diff; empty: the file cannot be edited, and `words` must be added to the command
    words: tuple[str, ...] = ()  # the changed settings as words of the command line
    is_written: bool = False  # whether the change was written to `file`
    peaks: tuple[PredictedPeak, ...] = ()
    note: str = ""  # why there is no prediction
    would_help: tuple[str, ...] = ()  # what else helps, if no change is left
    write: str = ""  # the command that writes the change; empty: already written, or there is no file
    with_autotune: str = ""  # the command that starts the changed job
    without_autotune: str = ""  # the command that starts the changed job on its own; empty: there is none


def render_fix(answer: FixDocument, *, named: str = "", width: int | None = None) -> str:
    """Return the answer of `autotune fix` as text; `named` is the user's word for the log or its run.

    Sentences are wrapped to `width`; the diff and the commands stay whole.
    """

    def prose(*lines: str) -> list[str]:
        return [folded(line, width) for line in lines]

    where = answer.log if answer.line is None else f"{answer.log}:{answer.line}"
    facts = [answer.step_text]
    facts += [f"rank {answer.rank}"] if answer.rank is not None else []
    details = ", ".join(each for each in (where, *facts) if each)
    lines = prose(f"error[{answer.cause}]: {answer.headline}", f"  {details}", "")
    if not answer.remedy:
        is_memory = Cause(answer.cause).is_oom
        why = "nothing is left to change" if is_memory else "no memory ran out, so nothing is changed"
        helping = (f"hint: {each}" for each in answer.would_help)
        last = f"next: autotune explain {shlex.quote(named or answer.log)}"
        return "\n".join([*lines, *prose(why, *helping), last])
    if answer.differs:
        since = messages.arrows(answer.differs)
        name = answer.file or "the command"
        lines += prose(f"warning: {name} is not as the log shows it: {since}; it may be changed already", "")
    price = messages.price(answer.effect, answer.slows)
    lines += prose(f"change: {messages.arrows(answer.changes)} ({price})")
    kept = (f"{name} is written to keep its value: it would follow the other setting" for name in answer.kept)
    lines += prose(*_indented([answer.reason, *answer.at_least, *_for_speed(answer), *kept]), "")
    lines += [answer.diff, ""] if answer.diff else []
    if not answer.diff:
        lines += ["the value is calculated or set elsewhere; add to the command:"]
        lines += [*_indented(answer.words), ""]
    lines += prose(*(_peak(each) for each in answer.peaks))
    lines += prose(f"no predicted peaks: {answer.note}") if answer.note else []
    lines += ["", "write the change", f"  {answer.write}"] if answer.write else [""]
    lines += ["start it with autotune", *_indented(answer.with_autotune.splitlines())]
    lines += ["or without", *_indented([answer.without_autotune])] if answer.without_autotune else []
    if answer.is_written:
        lines += ["", f"{answer.file} is changed"]
    return "\n".join(lines)


def _for_speed(answer: FixDocument) -> list[str]:
    """Return which changes are not needed to fit."""
    names = " and ".join(answer.for_speed)
    verb, them = ("shortens", "it") if len(answer.for_speed) == 1 else ("shorten", "them")
    return [f"{names} only {verb} steps: without {them} the job fits as well"] if names else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _peak(peak: PredictedPeak) -> str:
    of = ""
    if peak.capacity_bytes:
        share = peak.after_bytes / peak.capacity_bytes
        of = f" of {show_gib(peak.capacity_bytes, digits=1)} ({share:.0%})"
    before, after = (show_gib(size, digits=1) for size in (peak.before_bytes, peak.after_bytes))
    change = f"{before} → {after}" if before != after else f"still {after}"
    return f"predicted peak of {peak.phase}: {change}{of}"
