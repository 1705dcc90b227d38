"""What an earlier run of a job proved and measured, and what a search's duration allows by that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from autotune.orchestrator.config.loader import written
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_nodes import Document
from autotune.orchestrator.errors import Failure, JobErrors, UserError
from autotune.orchestrator.run import directory, export
from autotune.orchestrator.units import counted, show_duration
from autotune.policies.forecast.time_left import unix_seconds
from autotune.policies.search import schedule
from autotune.policies.values.job import Cluster, Job, Notify, Search
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

_RECENT_S = 3600.0  # age up to which a proof counts for a new search
_RUNS = 50  # newest runs of a folder that are looked at


class EarlierRun(Value, frozen=True, kw_only=True):
    """A run that proved the same job with the same settings."""

    id: str
    age_s: float  # since the last step of the proof
    pace: schedule.Pace
    cluster: Cluster

    @property
    def is_recent(self) -> bool:
        """Whether a new search need not repeat the proof."""
        return self.age_s <= _RECENT_S


def earlier_run(root: Path, text: str, *, now: float) -> EarlierRun | None:
    """Return the newest run below `root` that proved the job of a text; None if there is none."""
    own = _trained(text)
    if own is None:
        return None
    runs: tuple[directory.RunFolder, ...] = ()
    with suppress(Failure):
        runs = directory.runs(root)
    for run in reversed(runs[-_RUNS:]):
        with suppress(Failure, OSError, UnicodeDecodeError):
            if (result := _proof(run, own, now=now)) is not None:
                return result
    return None


def least_s(job: Job, earlier: EarlierRun) -> float:
    """Return the seconds that a search of a job spends at least before its first trial."""
    steps = job.search.probe_steps if earlier.is_recent else job.goal.steps
    return earlier.pace.seconds(steps)


def allowed(job: Job, earlier: EarlierRun) -> str:
    """Return what the duration of a search allows, by an earlier run's times."""
    trial_s, base_s = earlier.pace.seconds(job.search.probe_steps), least_s(job, earlier)
    most = min(job.search.trials, int((job.search.duration_s - base_s) / trial_s))
    times = f"the start takes about {show_duration(base_s)}, a trial {show_duration(trial_s)}"
    enough = f"enough for about {counted(most, 'trial')}" if most else "hardly enough for a trial"
    return f"by run {earlier.id}, {times}; {show_duration(job.search.duration_s)} are {enough}"


def refuse_too_short(job: Job, earlier: EarlierRun, *, text: str, file: str, option: str | None) -> None:
    """Raise Failure if the duration of a search certainly leaves no trial, by an earlier run's times.

    `option`: the `--duration` of the command line, if it was given.
    """
    trial_s, base_s = earlier.pace.seconds(job.search.probe_steps), least_s(job, earlier)
    duration_s = job.search.duration_s
    if base_s + schedule.shortest_s(trial_s) < duration_s:
        return
    message = (
        f"{option or show_duration(duration_s)} leaves no time for a trial: by run {earlier.id}, "
        f"the start takes about {show_duration(base_s)} and a trial {show_duration(trial_s)}"
    )
    one_s, all_s = (base_s + count * trial_s for count in (1, job.search.trials))
    hint = f"allow {show_duration(1.2 * one_s)} or more for one trial"
    hint += f", {show_duration(1.2 * all_s)} for {job.search.trials}" if job.search.trials > 1 else ""
    if option is not None:
        raise UserError(f"--duration: {message}", hint=hint)
    document = Document(text, file, literal=LITERAL)
    document.complain(
        f"`search.duration`: {message}", document.entry(("search", "duration")).value, hint=hint
    )
    raise JobErrors(tuple(document.complaints))


def same_hardware(one: Cluster, other: Cluster) -> bool:
    """Return whether two clusters differ in nothing but their address."""
    return msgspec.structs.replace(one, address="") == msgspec.structs.replace(other, address="")


def _trained(text: str) -> Job | None:
    """Return the job of a text without what changes nothing of its attempts; None if it is invalid."""
    job = written(text)
    if job is None:
        return None
    return msgspec.structs.replace(job, search=Search(), notify=Notify(), annotate="none", workdir=".")


def _proof(run: directory.RunFolder, own: Job, *, now: float) -> EarlierRun | None:
    """Return what a run proved of the job `own`; None if it did not."""
    as_written = _trained(run.job_text) == own
    stable = run.path / export.STABLE
    if not as_written and not (stable.is_file() and _trained(stable.read_text()) == own):
        return None
    view = RunView(directory.checked(run).history())
    if view.accepted is None:
        return None
    knobs = view.accepted.profile.knobs if as_written else export.stable_knobs(view)
    for attempt in _held(view, goal_steps=own.goal.steps):
        pace = schedule.pace_of(attempt)
        if attempt.knobs == attempt.started.knobs == knobs and pace is not None and attempt.last is not None:
            age_s = max(0.0, now - unix_seconds(attempt.last.at))
            return EarlierRun(id=run.id, age_s=age_s, pace=pace, cluster=view.accepted.cluster)
    return None


def _held(view: RunView, *, goal_steps: int) -> Iterator[AttemptView]:
    """Yield the attempts that ran at least `goal_steps` steps without running out of memory, newest first."""
    for attempt in reversed(view.attempts.values()):
        if attempt.proven and attempt.started.rehearsal is None and len(attempt.steps) >= goal_steps:
            yield attempt
