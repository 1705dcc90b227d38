"""A notification: what happened to a run, as a document for programs and as one line for a person."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run import directory, export
from autotune.orchestrator.run_states import display_of
from autotune.orchestrator.units import show_duration
from autotune.policies.explain.secrets import one_line
from autotune.policies.values.events import (
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    NeedsHuman,
    Notified,
    Rehearsed,
    Verdict,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Occasion
from autotune.policies.values.knobs import Setting, changed
from autotune.policies.values.run.view import RunView
from autotune.policies.values.value import Value

_LONGEST = 500  # characters of a text; a document has to fit into a pipe and into a chat


class Due(Value, frozen=True, kw_only=True):
    """Something that a person is to be notified of."""

    occasion: Occasion
    about: GoalReached | Finished | None = None  # None: the driver ended without a row
    reason: str = ""  # why it did

    @property
    def of(self) -> str:
        """The time of the row that it is about, which tells rows apart."""
        return "" if self.about is None else self.about.at


class Notification(Value, frozen=True, kw_only=True):
    """What happened to a run. Texts hold no secrets and no control characters."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    occasion: Occasion
    text: str  # one line for a person
    job: str  # name of the job
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    run: str  # id of the run, also the name of its folder
    mode: str  # launch | search | rehearse
    host: str  # of the driver
    folder: str  # of the run, on that host
    at: str  # UTC, ISO 8601
    seconds: float  # since the run was accepted
    attempt: int  # 1-based; 0: none has begun
    attempts: int  # that have begun, trials and rehearsals included
    step: int | None  # last completed
    steps: int | None  # of the training
    cause: Cause | None  # of the job's own failure
    phase: Phase | None
    reason: str  # why the run ended without success
    evidence: tuple[str, ...]  # the lines of the log that decided: untrusted text
    changes: dict[str, tuple[Setting, Setting]]  # knob -> as written and now
    would_help: tuple[str, ...]  # changes that are the user's to make
    marginal: bool | None  # whether less memory is free than the goal asks for; None: no goal was reached
    headroom: float | None  # smallest free share over phases
    # speed when the goal was reached; null: not measured, or no goal was reached
    tokens_per_second: float | None
    next: str  # the command that goes on


def due(view: RunView, notified: Sequence[Notified]) -> tuple[Due, ...]:
    """Return what a person is to be notified of.

    The goal counts once per configuration, so that a relaunch of a stable one, or of what the job itself made
    of it, is no news; trials of a search do not count. An end counts unless the run continued since.
    """
    known = {row.of for row in notified}
    knobs = {attempt.number: attempt.knobs for attempt in view.training}
    goals = [goal for goal in view.goals if goal.attempt in knobs]
    proven = {knobs[goal.attempt] for goal in goals if goal.at in known}
    news = [
        Due(occasion=Occasion.STABLE, about=goal)
        for goal in goals[-1:]
        if goal.at not in known and knobs[goal.attempt] not in proven
    ]
    last = view.finished
    if last is not None and last.at not in known:
        occasion = display_of(last.verdict).occasion
        if occasion is not None:
            news.append(Due(occasion=occasion, about=last))
    return tuple(news)


def notification(run: directory.RunFolder, view: RunView, news: Due, *, at: str) -> Notification:
    """Return the document of what happened, `at` being the time where no row has one."""
    accepted, latest, step = view.accepted, view.latest, view.step
    assert accepted is not None
    verdict = news.about.verdict if isinstance(news.about, Finished) else None
    goal = view.goals[-1] if view.goals else None
    present = accepted.profile.knobs if latest is None else latest.started.knobs
    knobs = export.stable_knobs(view) or present
    at = news.of or at
    seconds = max(0.0, seconds_of(at) - seconds_of(accepted.at))
    result = verdict.diagnosis if isinstance(verdict, NeedsHuman) else None
    succeeded = news.occasion in (Occasion.STABLE, Occasion.FINISHED)
    reason = _text(_reason(verdict) or news.reason)
    return Notification(
        occasion=news.occasion,
        text=_text(f"{accepted.job.name}: {_sentence(news, view, seconds=seconds)}"),
        job=accepted.job.name,
        framework=accepted.job.framework,
        run=run.id,
        mode=accepted.mode,
        host=socket.gethostname(),
        folder=_text(os.fsdecode(run.path.absolute())),
        at=at,
        seconds=round(seconds, 3),
        attempt=0 if latest is None else latest.number,
        attempts=len(view.attempts),
        step=None if step is None else step.step,
        steps=None if step is None else step.of,
        cause=None if result is None else result.cause,
        phase=None if result is None else result.phase,
        reason="" if succeeded else reason,
        evidence=() if result is None else tuple(_text(line.text) for line in result.evidence[:3]),
        changes=changed(accepted.profile.knobs, knobs),
        would_help=verdict.would_help if isinstance(verdict, GaveUp) else (),
        marginal=goal.marginal if goal is not None and succeeded else None,
        headroom=goal.headroom if goal is not None and succeeded and goal.peaks else None,
        tokens_per_second=goal.tokens_per_second if goal is not None and succeeded else None,
        next=_next(news.occasion, run),
    )


def _sentence(due: Due, view: RunView, *, seconds: float) -> str:
    match due.about:
        case GoalReached(step=step, marginal=marginal, headroom=headroom, peaks=peaks):
            little = " with little free memory" if marginal else ""
            free = f" ({headroom:.1%} of the fullest memory free)" if peaks else ""
            return f"stable at step {step}{little}{free}"
        case Finished(verdict=Infrastructure(reason=reason)):
            return f"waits for a person: {reason}"
        case Finished(verdict=Rehearsed(cured=True)):
            return f"rehearsed, with other settings than written, in {show_duration(seconds)}"
        case Finished(verdict=verdict):
            attempts, tried = len(view.attempts), view.tried
            words = messages.verdict(verdict, attempts=attempts, seconds=seconds, tried=tried)
            return f"{words[:1].lower()}{words[1:]}"
        case None:
            return f"waits for a person: {due.reason}"


def _reason(verdict: Verdict | None) -> str:
    match verdict:
        case GaveUp(reason=reason) | Infrastructure(reason=reason):
            return reason
        case NeedsHuman(diagnosis=diagnosed):
            return messages.diagnosis(diagnosed)
        case _:
            return ""


def _next(occasion: Occasion, run: directory.RunFolder) -> str:
    """Return the command that goes on, for a reader who may stand in any folder."""
    match occasion:
        case Occasion.STABLE:
            return run.call_anywhere("status")
        case Occasion.FINISHED:
            return run.call_anywhere("report")
        case Occasion.GAVE_UP | Occasion.FAILED:
            return run.call_anywhere("resume", "--edit")
        case Occasion.INFRASTRUCTURE:
            return run.call_anywhere("resume")


def _text(text: str) -> str:
    return one_line(text, longest=_LONGEST)
