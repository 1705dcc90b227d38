"""The attempts of a launch, one row each: what changed and why, how far it came, why it ended."""

from __future__ import annotations

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.alternatives import alternatives
from autotune.orchestrator.report.document import AttemptStory, LogLine, PhaseMark
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.report.past import Past
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_duration
from autotune.policies.values.events import Decided
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import accepted_of
from autotune.policies.values.observation import Cancelled, Completed, Lost
from autotune.policies.values.run.view import AttemptView, RunView

_FIRST, _LAST = 20, 80  # attempts that are shown
_WEIGHED = 12  # failures whose alternatives are ranked again
_ORDER = tuple(phase.value for phase in Phase)


def story_of(
    run: directory.RunFolder, past: Past, view: RunView, logs: LogReading
) -> tuple[tuple[AttemptStory, ...], int]:
    """Return the attempts of a launch, the trials of a search left out, and how many are not shown."""
    launched = view.launched
    chosen = launched if len(launched) <= _FIRST + _LAST else (*launched[:_FIRST], *launched[-_LAST:])
    rows = tuple(
        _attempt(run, past, attempt, logs=logs, weighed=row >= len(chosen) - _WEIGHED)
        for row, attempt in enumerate(chosen)
    )
    return rows, len(launched) - len(chosen)


def _attempt(
    run: directory.RunFolder, past: Past, attempt: AttemptView, *, logs: LogReading, weighed: bool
) -> AttemptStory:
    started, decided, diagnosed = attempt.started, attempt.decided, attempt.diagnosed
    first = accepted_of(past.history).profile.knobs
    weighed = weighed and started.rehearsal is None  # its failure is answered by other rules too
    last = attempt.last
    story = AttemptStory(
        number=attempt.number,
        tone=_tone(attempt),
        change=messages.attempt(started, before=attempt.before, first=first),
        remedy=decided.remedy.name if decided is not None and decided.remedy is not None else "",
        reason="; ".join(filter(None, (_reason(decided), *map(messages.cured, attempt.cures)))),
        costs=messages.remedy_costs(decided.remedy) if decided is not None and decided.remedy else "",
        phases=_phases(attempt),
        steps="" if last is None else messages.step_of(last.step, last.of),
        outcome=_outcome(attempt),
        seconds=None if attempt.ended is None else attempt.ended.seconds,
        unwatched=attempt.ended is not None and attempt.ended.unwatched,
        log=f"attempts/{attempt.number:04d}/run.log",
    )
    if diagnosed is None:
        return story
    line = diagnosed.evidence[0] if diagnosed.evidence else None
    lines = logs.context(run.attempt(attempt.number), line.line) if line is not None else ()
    if not any(each.failed for each in lines):
        lines = tuple(
            LogLine(number=each.line, text=plain(each.text)[:400], failed=place == 0)
            for place, each in enumerate(diagnosed.evidence[:5])
        )
    asked = weighed and diagnosed.cause.is_memory
    return msgspec.structs.replace(
        story,
        cause=messages.diagnosis(diagnosed),
        figures=messages.figures(diagnosed.facts),
        log=f"{story.log}:{line.line}" if line is not None else story.log,
        lines=lines,
        candidates=alternatives(past, attempt.diagnosed_place, diagnosed) if asked else (),
    )


def _tone(attempt: AttemptView) -> str:
    if attempt.diagnosed is not None:
        return "bad"
    if attempt.goal is not None:
        return "warn" if attempt.goal.marginal else "good"
    if attempt.ended is not None and isinstance(attempt.ended.outcome, Completed):
        return "good"
    return "warn"


def _reason(decided: Decided | None) -> str:
    if decided is None:
        return ""
    text = decided.remedy.reason if decided.remedy is not None else decided.reason
    wait = f" (after {show_duration(decided.not_before_s)})" if decided.not_before_s else ""
    return f"{text}{wait}"


def _outcome(attempt: AttemptView) -> str:
    goal, ended = attempt.goal, attempt.ended
    parts = [] if goal is None else [messages.goal(goal).replace("   ", " · ")]
    if ended is None:
        parts.append("no end on record")
    elif not isinstance(ended.outcome, Cancelled) or ended.outcome.by == "user":
        parts.append(messages.outcome(ended.outcome, rehearsal=attempt.started.rehearsal is not None))
        if isinstance(ended.outcome, Lost):
            parts[-1] += ", which costs no remedy"
    if ended is not None and ended.held:
        parts.append(f"memory was not released: {ended.held}")
    return "; ".join(parts)


def _phases(attempt: AttemptView) -> tuple[PhaseMark, ...]:
    """Return the phases that reported their end, then the one that failed."""
    diagnosed, ended = attempt.diagnosed, attempt.ended
    failed = diagnosed.phase.value if diagnosed is not None and diagnosed.phase is not Phase.NONE else ""
    passed = {phase for step in attempt.steps for phase in step.peaks}
    passed |= set(ended.peaks) if ended is not None else set()
    names = sorted(passed, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    marks = [PhaseMark(phase=name) for name in names if name != failed]
    return (*marks, PhaseMark(phase=failed, failed=True)) if failed else tuple(marks)
