"""The attempts of a launch, one row each: what changed and why, its progress, its alternatives.

The journal records what was decided, not what was rejected: the remedies that could have followed a failure
are computed again by the same policies from the history at that time.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.document import AttemptStory, Candidate, LogLine, PhaseMark, ends_of
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_duration, show_gib
from autotune.policies.recovery.outlook import Outlook, measures, outlook, trusted
from autotune.policies.recovery.permissions import relapse_of, started_before
from autotune.policies.recovery.ranking import Ranked, assess, overflowing
from autotune.policies.recovery.refused_changes import is_refused, without_refused
from autotune.policies.remedies.allow_deny import denied
from autotune.policies.remedies.ladder import candidates
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import Decided, Diagnosed, History, Policy
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import RESUMED, Run, accepted_of, fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Lost
from autotune.policies.values.remedy import Effect, Remedy
from autotune.policies.values.run.view import AttemptView, RunView

_FIRST, _LAST = 20, 80  # shown attempts
_WEIGHED = 12  # last attempts whose alternatives are ranked again
_ORDER = tuple(phase.value for phase in Phase)


def story_of(
    run: directory.RunFolder, past: Past, view: RunView, logs: LogReading
) -> tuple[tuple[AttemptStory, ...], int]:
    """Return the attempts of a launch, without a search's trials, and the number of attempts not shown."""
    launched = view.launched
    chosen = ends_of(launched, _FIRST, _LAST)
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
    weighed = weighed and started.rehearsal is None  # other rules, too, handle failures of a rehearsal
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
    """Return the phases with recorded peaks, then the one that failed."""
    diagnosed, ended = attempt.diagnosed, attempt.ended
    failed = diagnosed.phase.value if diagnosed is not None and diagnosed.phase is not Phase.NONE else ""
    passed = {phase for step in attempt.steps for phase in step.peaks}
    passed |= set(ended.peaks) if ended is not None else set()
    names = sorted(passed, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    marks = [PhaseMark(phase=name) for name in names if name != failed]
    return (*marks, PhaseMark(phase=failed, failed=True)) if failed else tuple(marks)


_MOST_ROWS = 16
_NOISE = 0.04  # predicted step times that differ by a smaller share are equal, as in the ranking


def alternatives(past: Past, place: int, diagnosed: Diagnosed) -> tuple[Candidate, ...]:
    """Return the ladder's remedies for the failure at index `place` of the history, the taken one first."""
    decided = next((e for e in islice(past.history, place, None) if isinstance(e, Decided)), None)
    taken = decided.remedy if decided is not None else None
    run = without_refused(past.run(place + 1))
    if not run.attempts or run.attempts[-1].diagnosis is None:
        return ()
    present = run.attempts[-1].knobs
    view = _outlook_of(run, diagnosed, past, place + 1)
    chosen = assess(view, taken.apply(present)) if view is not None and taken is not None else None
    rows = []
    if taken is not None:
        rows.append(_row(present, taken, taken=True, why=_why_taken(chosen)))
    for remedy in candidates(run.accepted.profile, present, diagnosed, started=started_before(run)):
        if remedy.changes and (taken is None or remedy.changes != taken.changes):
            why = _why_not(run, view, present, remedy, chosen, taken)
            rows.append(_row(present, remedy, taken=False, why=why))
    return tuple(rows[:_MOST_ROWS])


def _outlook_of(run: Run, diagnosis: Diagnosis, past: Past, count: int) -> Outlook | None:
    """Return the outlook that ranked the remedies of this failure; None if the estimate was not used."""
    shared = run.accepted.policy is Policy.ESTIMATE and not run.refused
    view = past.view(count) if shared else outlook(run)
    if view is None or not trusted(view.run, diagnosis) or not measures(view, diagnosis):
        return None
    return view


def _row(present: Knobs, remedy: Remedy, *, taken: bool, why: str) -> Candidate:
    change = messages.setting_changes(present, remedy.apply(present))
    return Candidate(remedy=remedy.name, change=change, taken=taken, why=why)


def _why_taken(chosen: Ranked | None) -> str:
    if chosen is None:
        return "the cheapest that is permitted and repeats no earlier failure"
    return f"about {_seconds(chosen)} a step, chance of another failure {chosen.risk:.0%}, as predicted"


def _why_not(
    run: Run,
    view: Outlook | None,
    present: Knobs,
    remedy: Remedy,
    chosen: Ranked | None,
    taken: Remedy | None,
) -> str:
    accepted, after = run.accepted, remedy.apply(present)
    if denied(accepted.job.recovery, accepted.profile, present, remedy):
        return "`recovery.allow` or `recovery.deny` of the job excludes it"
    if is_refused(run, after):
        return "the job refused this change before"
    relapse = relapse_of(run, after)
    if relapse is not None:
        return f"would repeat the failure of attempt #{relapse.number}"
    if view is None:
        if taken is not None and remedy.changes.keys() <= taken.changes.keys():
            same = remedy.changes.items() <= taken.changes.items()
            return "part of the one taken" if same else "another step of what the one taken turns"
        return "not the next on the ladder"
    own = assess(view, after)
    misses = overflowing(view, own)
    if misses:
        where, missing = misses[0]
        return f"predicted to be {show_gib(missing)} short in {where}"
    if chosen is None:
        return ""
    if own.step_s > chosen.step_s * (1 + _NOISE):
        return f"predicted slower: {_seconds(own)} a step"
    if own.risk > chosen.risk:
        return f"chance of another failure {own.risk:.0%}, as predicted"
    if taken is not None and taken.effect is Effect.EXACT and remedy.effect is not Effect.EXACT:
        return "predicted to fit too, but alters rounding (numeric)"
    return f"predicted to fit too, at about {_seconds(own)} a step; ranked lower"


def _seconds(ranked: Ranked) -> str:
    return f"{ranked.step_s:.3g} s"


class Past:
    """Prefixes of a history, by their number of events."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._runs: dict[int, Run] = {}
        self._views: dict[int, Outlook | None] = {}

    def run(self, count: int) -> Run:
        """Return the run after the first `count` events."""
        if count not in self._runs:
            self._runs[count] = fold(self.history[:count])
        return self._runs[count]

    def whole(self) -> Run:
        """Return the run after all events."""
        return self.run(len(self.history))

    def view(self, count: int) -> Outlook | None:
        """Return the outlook after `count` events, also for a run that does not use the estimate."""
        while count > 1 and _shows_nothing(self.history, count - 1):
            count -= 1  # so that a failure and the next attempt share their outlook
        if count not in self._views:
            self._views[count] = _view_of(self.run(count))
        return self._views[count]

    def is_modelled(self) -> bool:
        """Return whether there is an estimate for the run's job."""
        return _view_of(msgspec.structs.replace(self.whole(), attempts=())) is not None


def _view_of(run: Run) -> Outlook | None:
    accepted = msgspec.structs.replace(run.accepted, policy=Policy.ESTIMATE)
    return outlook(msgspec.structs.replace(run, accepted=accepted))


def _shows_nothing(history: History, place: int) -> bool:
    event = history[place]
    return isinstance(event, Decided) and event.reason != RESUMED
