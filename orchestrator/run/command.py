"""The command of an attempt: a framework's own, with what a run adds that the job leaves open."""

from __future__ import annotations

from autotune.launchers.base import Framework
from autotune.policies.recovery.checkpoint_interval import with_saves
from autotune.policies.values.command import Command
from autotune.policies.values.events import History
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs


def command_of(
    framework: Framework, job: Job, knobs: Knobs, *, history: History, run: str, attempt: int, resume: bool
) -> Command:
    """Render an attempt after what `history` shows of the run's steps."""
    told = job if framework.saves_by_time else with_saves(job, history, knobs)
    return framework.command(told, knobs, run=run, attempt=attempt, resume=resume)
