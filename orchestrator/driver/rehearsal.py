"""The rehearsal before a training: the job of its attempts, and the folder of their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from autotune.launchers.base import Framework
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.errors import UserError, reason_of
from autotune.orchestrator.run.directory import Mode, RunRequest
from autotune.policies.values.events import Started
from autotune.policies.values.job import Goal, Job, Then
from autotune.policies.values.rehearsing import STEPS, LateEvent, Part, Rehearsal


def planned(framework: Framework, job: Job, request: RunRequest) -> Rehearsal | None:
    """Return the rehearsal that a run starts with; None if there is none.

    Raises Failure if the user requested one that the job does not allow. A search, which starts with one
    unless the user forbids it, then does without.
    """
    if not request.rehearse:
        return None
    events = framework.meets(job)
    if not events and request.mode is Mode.SEARCH:
        return None
    if not events:
        raise UserError(
            f"a job of {framework.name} cannot be rehearsed as it is written",
            hint="`autotune plan job.yaml` says why",
        )
    met = {each.event for each in events if each.met}
    longest, own = (
        framework.rehearsal(job, folder="/rehearsal", part=Part.WORST, longest=forced)
        for forced in (True, False)
    )
    steps = framework.last_step(job) or framework.training(job).steps or job.goal.steps
    return Rehearsal(
        forces=LateEvent.LENGTH in met and longest != own,
        reloads=LateEvent.RELOAD in met,
        steps=min(steps, job.goal.steps) if job.goal.then is Then.STOP else steps,
        only=request.mode is Mode.REHEARSE,
    )


def job_of(context: RunContext, started: Started) -> Job:
    """Return the job that an attempt runs: the user's, or a part of its rehearsal."""
    part = started.rehearsal
    if part is None:
        return context.job
    begun = {started.attempt: started} | {
        attempt.number: attempt.started for attempt in context.journal.view.attempts.values()
    }
    first = max(n for n, each in begun.items() if each.rehearsal is Part.WORST and n <= started.attempt)
    folder, job = str(_folder(context) / str(first)), context.rehearses or context.job
    return short(context.framework, job, folder=folder, part=part, longest=started.longest)


def short(framework: Framework, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
    """Return the job as a part of its rehearsal, with a goal that none of its steps reaches."""
    result = framework.rehearsal(job, folder=folder, part=part, longest=longest)
    # Some frameworks count several steps per step of a rehearsal.
    steps = 1 + max(framework.last_step(result) or 0, *STEPS.values())
    return msgspec.structs.replace(result, goal=Goal(steps=steps, headroom=job.goal.headroom))


def clear(context: RunContext) -> None:
    """Remove the checkpoints of rehearsals since the training last started, if any.

    Reports where they are if they cannot be removed, as the driver may not see the job's file system.
    """
    view = context.journal.view
    trained = max((attempt.number for attempt in view.training), default=0)
    since = [a for a in view.launched if a.started.rehearsal is not None and a.number > trained]
    if not since:
        return
    folder = _folder(context)
    try:
        shutil.rmtree(folder)  # does not follow links
    except FileNotFoundError:
        if any(attempt.saved is not None for attempt in since):
            context.observer.say(
                f"{folder} of the rehearsal cannot be seen from here: remove it on the cluster"
            )
    except OSError as error:
        reason = reason_of(error)
        context.observer.say(f"the rehearsal's files stay in {folder}: {reason}")


def _folder(context: RunContext) -> Path:
    return Path(context.job.workdir) / "rehearsals" / context.folder.id
