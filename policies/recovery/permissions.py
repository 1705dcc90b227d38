"""Which configurations may run: legal, neither refused nor excluded, and no repeat of an earlier failure."""

from __future__ import annotations

from autotune.policies.recovery.refused_changes import is_refused
from autotune.policies.remedies.allow_deny import denial, legal
from autotune.policies.remedies.repeats import repeats
from autotune.policies.values.events import Launch
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.knob_table import ROWS, Knob, Memory, Way
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part


def exclusion(run: Run, action: Launch) -> str:
    """Return the name in the job's `recovery` that excludes a launch; empty if it is permitted.

    Configurations that ran before, and the job's own, are excluded at most by the name of the remedy.
    """
    accepted, name = run.accepted, "" if action.remedy is None else action.remedy.name
    before = run.attempts[-1].knobs if run.attempts else accepted.profile.knobs
    known = (accepted.profile.knobs, *(a.knobs for a in run.attempts))
    after = before if action.knobs in known else action.knobs
    return denial(accepted.job.recovery, accepted.profile, before, after, name=name)


def may_follow(run: Run, present: Knobs, proposed: Knobs, *, started: bool | None = None) -> bool:
    """Return whether a configuration is legal and permitted after the present one, with no refused change.

    `started`: whether a checkpoint may exist; None: by the run's history.
    """
    accepted, started = run.accepted, started_before(run) if started is None else started
    return not is_refused(run, proposed) and legal(
        accepted.profile, accepted.job.recovery, present, proposed, started=started
    )


def may_cure(run: Run, present: Knobs, proposed: Knobs) -> bool:
    """Return whether a configuration may follow the present one, and repeats no earlier failure."""
    return may_follow(run, present, proposed) and relapse_of(run, proposed) is None


def started_before(run: Run) -> bool:
    """Return whether a checkpoint may exist from which the next attempt resumes."""
    if run.attempts and run.attempts[-1].rehearsal is Part.WORST:
        return False  # a rehearsal starts anew
    return run.accepted.job.resume or run.saved or run.best_step is not None


def relapse_of(run: Run, proposed: Knobs, *, rehearsed: bool = False) -> Attempt | None:
    """Return the latest attempt whose failure `proposed` would repeat; None if there is none.

    `rehearsed`: failures of a rehearsal before the run count too.
    """
    for attempt in reversed((*run.rehearsed, *run.attempts) if rehearsed else run.attempts):
        if attempt.diagnosis is None or not attempt.out_of_memory:
            continue
        again = repeats(run.accepted.profile, attempt.knobs, attempt.diagnosis, proposed)
        if again or keeps_offload(run, attempt, proposed):
            return attempt
    return None


def own_offloads(run: Run, knobs: Knobs) -> tuple[Knob, ...]:
    """Return the knobs by which a configuration holds more in host memory than the job as written."""
    written = run.accepted.profile.knobs
    return tuple(
        row
        for row in ROWS
        if row.saves.get(Memory.GPU) is Way.UP
        and row.saves.get(Memory.HOST) is Way.DOWN
        and row.asks_less(Memory.HOST, getattr(knobs, row.name), getattr(written, row.name))
    )


def undoes_offload(run: Run, before: Knobs, after: Knobs) -> bool:
    """Return whether a change undoes some of the offloading to the host that relaunches added."""
    return any(
        row.asks_less(Memory.HOST, getattr(before, row.name), getattr(after, row.name))
        for row in own_offloads(run, before)
    )


def keeps_offload(run: Run, attempt: Attempt, proposed: Knobs) -> bool:
    """Return whether `proposed` keeps all that relaunches had offloaded to a host when it ran out.

    Such offloading must be undone, even if other changes need less of the host; the device gets another
    remedy.
    """
    if attempt.diagnosis is None or attempt.diagnosis.cause is not Cause.HOST_OOM:
        return False
    phase = attempt.diagnosis.phase
    own = [row for row in own_offloads(run, attempt.knobs) if row.holds(phase)]
    return bool(own) and not undoes_offload(run, attempt.knobs, proposed)
