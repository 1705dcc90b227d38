"""The attempts of a launch, one row each: what changed and why, how far it came, why it ended."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.alternatives import alternatives
from autotune.orchestrator.report.document import AttemptStory, LogLine, PhaseMark
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.report.past import Past
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_duration
from autotune.policies.values.events import (
    CuredInPlace,
    Decided,
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    History,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import accepted_of, settled
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Lost

_FIRST, _LAST = 20, 80  # attempts that are told
_WEIGHED = 12  # failures whose alternatives are weighed anew
_ORDER = tuple(phase.value for phase in Phase)


def story_of(run: directory.RunFolder, past: Past, logs: LogReading) -> tuple[tuple[AttemptStory, ...], int]:
    """Return the attempts of a launch, the trials of a search left out, and how many are not shown."""
    history = past.history
    started = [(place, e) for place, e in enumerate(history) if isinstance(e, Started) and e.trial is None]
    shown = started if len(started) <= _FIRST + _LAST else [*started[:_FIRST], *started[-_LAST:]]
    by_attempt: dict[int, list[tuple[int, Event]]] = {}
    for place, event in enumerate(history):
        by_attempt.setdefault(event.attempt, []).append((place, event))
    before = {e.attempt: old for (_, old), (_, e) in pairwise(started)}
    first = accepted_of(history).profile.knobs
    came_to = {e.attempt: e.knobs for e in settled(history) if isinstance(e, Started)}
    rows = []
    for row, (place, event) in enumerate(shown):
        previous = before.get(event.attempt)
        rows.append(
            _attempt(
                run,
                past,
                event,
                decided=_decision(history, place),
                previous=first if previous is None else came_to[previous.attempt],
                rows=by_attempt[event.attempt],
                logs=logs,
                weighed=row >= len(shown) - _WEIGHED,
            )
        )
    return tuple(rows), len(started) - len(shown)


def _decision(history: History, place: int) -> Decided | None:
    """Return what led to the attempt that started at a place."""
    for event in reversed(history[:place]):
        if isinstance(event, Decided):
            return event
        if isinstance(event, (Started, Ended)):
            return None
    return None


def _attempt(
    run: directory.RunFolder,
    past: Past,
    started: Started,
    *,
    decided: Decided | None,
    previous: Knobs,
    rows: list[tuple[int, Event]],
    logs: LogReading,
    weighed: bool,
) -> AttemptStory:
    first = accepted_of(past.history).profile.knobs
    change = messages.attempt(started, before=previous, first=first)
    weighed = weighed and started.rehearsal is None  # its failure is answered by other rules too
    failures = [(place, e) for place, e in rows if isinstance(e, Diagnosed)]
    place, diagnosed = failures[0] if failures else (0, None)
    ended = next((e for _, e in rows if isinstance(e, Ended)), None)
    goal = next((e for _, e in reversed(rows) if isinstance(e, GoalReached)), None)
    steps = [e for _, e in rows if isinstance(e, Progressed)]
    cured = [messages.cured(e) for _, e in rows if isinstance(e, CuredInPlace)]
    story = AttemptStory(
        number=started.attempt,
        tone=_tone(ended, goal, diagnosed),
        change=change,
        remedy=decided.remedy.name if decided is not None and decided.remedy is not None else "",
        reason="; ".join(filter(None, (_reason(decided), *cured))),
        costs=messages.remedy_costs(decided.remedy) if decided is not None and decided.remedy else "",
        phases=_phases(steps, ended, diagnosed),
        steps=messages.step_of(steps[-1].step, steps[-1].of) if steps else "",
        outcome=_outcome(ended, goal, rehearsal=started.rehearsal is not None),
        seconds=None if ended is None else ended.seconds,
        log=f"attempts/{started.attempt:04d}/run.log",
    )
    if diagnosed is None:
        return story
    line = diagnosed.evidence[0] if diagnosed.evidence else None
    lines = logs.context(run.attempt(started.attempt), line.line) if line is not None else ()
    if not any(each.failed for each in lines):
        lines = tuple(
            LogLine(number=each.line, text=plain(each.text)[:400], failed=place == 0)
            for place, each in enumerate(diagnosed.evidence[:5])
        )
    return msgspec.structs.replace(
        story,
        cause=messages.diagnosis(diagnosed),
        figures=messages.figures(diagnosed.facts),
        log=f"{story.log}:{line.line}" if line is not None else story.log,
        lines=lines,
        candidates=alternatives(past, place, diagnosed) if weighed and diagnosed.cause.is_memory else (),
    )


def _tone(ended: Ended | None, goal: GoalReached | None, diagnosed: Diagnosed | None) -> str:
    if diagnosed is not None:
        return "bad"
    if goal is not None:
        return "warn" if goal.marginal else "good"
    if ended is not None and isinstance(ended.outcome, Completed):
        return "good"
    return "warn"


def _reason(decided: Decided | None) -> str:
    if decided is None:
        return ""
    text = decided.remedy.reason if decided.remedy is not None else decided.reason
    wait = f" (after {show_duration(decided.not_before_s)})" if decided.not_before_s else ""
    return f"{text}{wait}"


def _outcome(ended: Ended | None, goal: GoalReached | None, *, rehearsal: bool) -> str:
    parts = [] if goal is None else [messages.goal(goal).replace("   ", " · ")]
    if ended is None:
        parts.append("no end on record")
    elif not isinstance(ended.outcome, Cancelled) or ended.outcome.by == "user":
        parts.append(messages.outcome(ended.outcome, rehearsal=rehearsal))
        if isinstance(ended.outcome, Lost):
            parts[-1] += ", which costs no remedy"
    if ended is not None and ended.held:
        parts.append(f"memory was not released: {ended.held}")
    return "; ".join(parts)


def _phases(
    steps: list[Progressed], ended: Ended | None, diagnosed: Diagnosed | None
) -> tuple[PhaseMark, ...]:
    """Return the phases that reported their end, then the one that failed."""
    failed = diagnosed.phase.value if diagnosed is not None and diagnosed.phase is not Phase.NONE else ""
    passed = {phase for step in steps for phase in step.peaks}
    passed |= set(ended.peaks) if ended is not None else set()
    names = sorted(passed, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    marks = [PhaseMark(phase=name) for name in names if name != failed]
    return (*marks, PhaseMark(phase=failed, failed=True)) if failed else tuple(marks)
