"""An annotation: what became of an attempt and what follows, as a document, a line and a table."""

from __future__ import annotations

import os
import socket

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.run import directory
from autotune.policies.explain.secrets import one_line
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import plain
from autotune.policies.values.knobs import Setting, changed
from autotune.policies.values.observation import Cancelled, Completed
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

_LONGEST = 450  # characters of a line: MLflow's oldest servers take 500


class Annotation(Value, frozen=True, kw_only=True):
    """What `annotate` writes of one attempt. Texts hold no secrets."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    text: str  # one line
    run: str  # id of the run, also the name of its folder
    job: str  # name of the job
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    attempt: int  # number of the attempt in the run, from 1
    begun: str  # UTC, ISO 8601
    ended: str  # end of the attempt: UTC, ISO 8601
    outcome: str  # in words
    failed: bool  # whether it failed; false if it completed, or autotune or its user stopped it
    cause: Cause | None  # of a failure
    phase: Phase | None
    step: int | None  # last completed
    stable_at: int | None  # step at which the goal was reached
    knobs: dict[str, Setting]  # with which it ended, as far as they are set
    changes: dict[str, tuple[Setting, Setting]]  # knob -> in the attempt before and in this one
    cured: tuple[str, ...]  # failures that the job itself got over
    next: str  # what follows, and why
    next_changes: dict[str, tuple[Setting, Setting]]  # knob -> in this attempt and in the next
    host: str  # of the driver
    folder: str  # of the run, on that host


def ended(view: RunView) -> tuple[AttemptView, ...]:
    """Return the attempts at the training that are over; no trial and no rehearsal has a run of its own."""
    return tuple(attempt for attempt in view.training if attempt.ended is not None)


def annotation(run: directory.RunFolder, view: RunView, number: int) -> Annotation:
    """Return the document of an attempt that is over."""
    training, accepted = view.training, view.accepted
    place = next(index for index, each in enumerate(training) if each.number == number)
    attempt = training[place]
    end, diagnosed, goal, knobs = attempt.ended, attempt.diagnosed, attempt.goal, attempt.knobs
    assert accepted is not None and end is not None
    before = training[place - 1].knobs if place else accepted.profile.knobs
    changes = changed(before, attempt.started.knobs)
    reason, remedy = _follows(attempt, view)
    after = changed(knobs, remedy.apply(knobs)) if remedy is not None else {}
    follows = ": ".join(filter(None, (messages.arrows(after), reason)))
    cured = tuple(_line(messages.cured(cure)) for cure in attempt.cures)
    outcome = messages.diagnosis(plain(diagnosed)) if diagnosed is not None else messages.outcome(end.outcome)
    failed = diagnosed is not None or not isinstance(end.outcome, Completed | Cancelled)
    stable = f"; stable at step {goal.step}" if goal is not None else ""
    change = f"; with {messages.arrows(changes)}" if changes else ""
    text = f"attempt {number}: {outcome}{stable}{change}{f'; next: {follows}' if follows else ''}"
    return Annotation(
        text=_line(text),
        run=run.id,
        job=accepted.job.name,
        framework=accepted.job.framework,
        attempt=number,
        begun=attempt.started.at,
        ended=end.at,
        outcome=_line(outcome),
        failed=failed,
        cause=None if diagnosed is None else diagnosed.cause,
        phase=None if diagnosed is None else diagnosed.phase,
        step=end.step,
        stable_at=None if goal is None else goal.step,
        knobs={name: value for name, value in msgspec.structs.asdict(knobs).items() if value is not None},
        changes=changes,
        cured=cured,
        next=_line(follows),
        next_changes=after,
        host=socket.gethostname(),
        folder=_line(os.fsdecode(run.path.absolute())),
    )


def markdown(document: Annotation) -> str:
    """Return an annotation as a table, for trackers that show Markdown."""
    rows = {
        "run": document.run,
        "attempt": str(document.attempt),
        "outcome": document.outcome,
        "last step": "" if document.step is None else str(document.step),
        "stable at step": "" if document.stable_at is None else str(document.stable_at),
        "changed before it": messages.arrows(document.changes),
        "cured in place": "; ".join(document.cured),
        "next": document.next,
        "folder": f"{document.host}:{document.folder}",
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value]
    return "\n".join(["| autotune | |", "|---|---|", *lines])


def _follows(attempt: AttemptView, view: RunView) -> tuple[str, Remedy | None]:
    """Return what follows an attempt in words, and the change that is made for it."""
    if attempt.next is not None:
        return attempt.next.reason, attempt.next.remedy
    last = view.finished
    own = last is not None and last.attempt == attempt.number
    return getattr(view.verdict, "reason", "") if own else "", None


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _line(text: str) -> str:
    return one_line(text, longest=_LONGEST)
