"""The status of runs: what `status` and `report` read of a run's folder."""

from __future__ import annotations

from msgspec.structs import replace

from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of, timestamp
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory, summary, waiting
from autotune.orchestrator.run.journal import Tail
from autotune.orchestrator.run.lock import Owner, Watch
from autotune.orchestrator.run.memory_record import MemorySpan, so_far
from autotune.orchestrator.run.waiting import Waiting
from autotune.orchestrator.run_states import DISPLAYS
from autotune.policies.forecast.time_left import TimeLeft, step_seconds
from autotune.policies.values.events import Accepted, CuredInPlace, Foreseen, Started, Tried
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import MemoryGrowth
from autotune.policies.values.run.state import RunState, with_driver
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value


class AttemptStatus(Value, frozen=True, kw_only=True):
    """One attempt in `autotune status`."""

    attempt: int  # number of the attempt in the run, from 1
    change: str  # knobs changed since the previous attempt, e.g. `microbatch_size 8 → 4`; or `as written`
    seconds: float | None  # None: unknown
    status: str  # state or end, e.g. `RUNNING step 3/20`, `training complete` or `✗` and the failure
    cause: str | None = None  # of its failure; None: it has none
    phase: str | None = None  # phase in which it failed, or `none` if that is unknown; null: no failure
    unwatched: bool = False  # no driver observed its end: it ran for `seconds` or longer
    cured: tuple[CuredInPlace, ...] = ()  # failures that the job itself survived
    foreseen: tuple[Foreseen, ...] = ()  # memories that are forecast to run out in it
    memory: tuple[MemorySpan, ...] = ()  # per node, from its start to now; only for a single run
    growth: MemoryGrowth | None = None  # because of which the same settings were started again


class TrialStatus(Value, frozen=True, kw_only=True):
    """One trial of a search in `autotune status`."""

    trial: int  # number of the trial in the search, from 0
    change: str  # knobs that differ from the job, e.g. `microbatch_size 8 → 4`; `as written` if none do
    seconds: float | None  # without a result: as in `AttemptStatus`
    status: str  # result, or the state of its running attempt, in words
    unwatched: bool = False  # no driver observes it: it ran for `seconds` or longer


class RunStatus(Value, frozen=True, kw_only=True):
    """One run in `autotune status`."""

    run: str  # id of the run, also the name of its folder
    name: str = ""  # name of the job; empty: unknown
    framework: str = ""  # name of the framework, e.g. `verl`, as in the job file; empty: unknown
    cluster: str = ""  # its GPUs, e.g. `8×H100`, or nodes without GPUs, e.g. `1×CPU`; empty: unknown
    submitted: str = ""  # when the job was accepted: UTC, ISO 8601; empty: not accepted yet
    total_s: float = 0.0  # seconds from acceptance of the job to now, or without a driver to the last event
    running_s: float = 0.0  # seconds that attempts ran, summed over all of them, also those of trials
    # NOT STARTED | STARTING | WAITING n/m nodes | REHEARSING | RUNNING | RECOVERING | STABLE |
    # SEARCHING | COMPLETED | REHEARSED | GAVE UP | FAILED | LOST | STOPPED | INTERRUPTED | DAMAGED
    status: str = "STARTING"
    running: bool = False  # it has a driver, as far as can be detected
    driver: str = ""  # description of a driver on another machine, or that cannot be read
    attempts: tuple[AttemptStatus, ...] = ()  # without those of a search's trials
    trials: tuple[TrialStatus, ...] = ()  # of a search
    edits: tuple[str, ...] = ()  # the user's changes of the job since the launch
    problem: str = ""  # why its journal cannot be read
    waiting: Waiting | None = None  # for nodes of the cluster; without a driver: it waited in vain
    left: TimeLeft | None = None  # while it runs, once enough is known
    step_s: tuple[float, ...] = ()  # latest step times of the only running attempt, without its first
    tokens_per_second: float | None = None  # in its last step
    scores: dict[str, float] = {}  # `loss` and `reward` of its last step, if the log prints them


class RunReader:
    """Follows one run; a finished run is read once, other runs incrementally."""

    def __init__(self, run: directory.RunFolder, *, keeps: bool = True) -> None:
        """Follow `run`; `keeps` allows storing a summary next to the journal of a finished run."""
        self.run, self._keeps = run, keeps
        self._watch = Watch(run.path)
        self._tail = Tail(run.path / "events.jsonl")
        self._stamp: summary.Stamp | None = None
        self._over: RunStatus | None = None  # as of `_stamp`

    def look(self, *, now: float, memory: bool = False) -> RunStatus:
        """Return the status of the run; with `memory`, also the memory of its attempts.

        If the journal cannot be read, the status has a `problem`.
        """
        stamp = summary.stamp_of(self.run.path)
        if stamp is None or stamp != self._stamp:
            self._stamp, self._over = stamp, None
            if stamp is not None and self._keeps:
                kept = summary.read(self.run.path, RunStatus, stamp=stamp)
                self._over = kept and replace(kept, run=self.run.id)  # the folder may be a copy
        status = self._over or self._read(now=now)
        if self._over is None and self._tail.view.state.is_terminal:
            self._over = status
            self._tail = Tail(self._tail.path)  # drop the events, only the status is needed
            if stamp is not None and self._keeps:
                summary.keep(self.run.path, status, stamp=stamp)
        if memory:
            folders = {a.attempt: self.run.attempt(a.attempt).path for a in status.attempts}
            attempts = tuple(replace(a, memory=so_far(folders[a.attempt])) for a in status.attempts)
            status = replace(status, attempts=attempts)
        return _with_waiting(self.run, status)

    def _read(self, *, now: float) -> RunStatus:
        holder = self._watch.owner()
        driven = holder is not None
        try:
            self._tail.update()
        except Failure as failure:
            damaged = DISPLAYS[RunState.UNREADABLE].word
            return RunStatus(run=self.run.id, status=damaged, running=driven, problem=failure.message)
        view = self._tail.view
        if view.accepted is None:
            return _status_at_start(self.run, driven=driven)
        status = _status_of(self.run, view, driven=driven, now=now)
        if not status.running:
            return status
        if holder is not None and not holder.can_be_signalled:
            status = replace(status, driver=_driver_elsewhere(holder, beat_at=self._watch.beat_at))
        from autotune.orchestrator.terminal.live_view import time_left_of

        status = replace(status, left=time_left_of(view, now=now))
        if len(view.unended) != 1:
            return status
        attempt = view.attempts[view.unended[0]]
        if (last := attempt.last) is not None:
            status = replace(status, tokens_per_second=last.tokens_per_second, scores=last.scores)
        return replace(status, step_s=step_seconds(attempt))


def _with_waiting(run: directory.RunFolder, status: RunStatus) -> RunStatus:
    """Return the status of a run with the nodes that it waits for or waited for in vain."""
    row = waiting.read(run.path) if status.running or not status.attempts else None
    if row is None:
        return status
    word = f"{DISPLAYS[RunState.WAITING].word} {row.nodes}/{row.wanted} nodes"
    return replace(status, status=word if status.running else status.status, waiting=row)


def _driver_elsewhere(holder: Owner, *, beat_at: float) -> str:
    """Describe a driver that cannot be checked from here; the reader has to judge whether it is alive."""
    if not holder.is_known:
        return "whether one is at work cannot be read"
    return f"pid {holder.pid} on {holder.host}, last heartbeat {timestamp(beat_at)} (file server's clock)"


def _status_at_start(run: directory.RunFolder, *, driven: bool) -> RunStatus:
    job = _job_of(run)
    return RunStatus(
        run=run.id,
        name=job.name if job is not None else "",
        framework=job.framework if job is not None else "",
        status=DISPLAYS[with_driver(RunState.NOT_STARTED, driven=driven)].word,
        running=driven,
    )


def _status_of(run: directory.RunFolder, view: RunView, *, driven: bool, now: float) -> RunStatus:
    """Return the status of an accepted run, without the parts that only the live view knows."""
    accepted, last = view.accepted, view.last
    assert view.first is not None and accepted is not None and last is not None
    over = view.state.is_terminal
    end = seconds_of(last.at) if over or not driven else now
    first = view.first.profile.knobs
    return RunStatus(
        run=run.id,
        name=accepted.job.name,
        framework=accepted.job.framework,
        cluster=_short_place(accepted),
        submitted=accepted.at,
        total_s=max(0.0, end - seconds_of(accepted.at)),
        running_s=sum(_seconds(attempt, now=end) or 0.0 for attempt in view.attempts.values()),
        status=DISPLAYS[with_driver(view.state, driven=driven)].word,
        running=driven and not over,
        attempts=tuple(
            AttemptStatus(
                attempt=attempt.number,
                change=messages.attempt(attempt.started, before=attempt.before, first=first),
                seconds=_seconds(attempt, now=end),
                status=_attempt_status(attempt, driven=driven),
                cause=None if attempt.diagnosed is None else attempt.diagnosed.cause,
                phase=None if attempt.diagnosed is None else attempt.diagnosed.phase,
                unwatched=_unwatched(attempt, driven=driven),
                foreseen=_forecasts(attempt),
                growth=None if attempt.next is None else attempt.next.growth,
                cured=tuple(attempt.cures),
            )
            for attempt in view.launched
        ),
        trials=tuple(
            _trial(view, view.trial_rows[trial], first=accepted.profile.knobs, now=end, driven=driven)
            for trial in sorted(view.trial_rows)
        ),
        edits=tuple(messages.edits(edit) for edit in view.edits),
    )


def _job_of(run: directory.RunFolder) -> Job | None:
    from autotune.orchestrator.config.loader import written  # slow, and rarely needed

    try:
        return written(run.job_text)
    except (OSError, UnicodeDecodeError):
        return None


def _seconds(attempt: AttemptView, *, now: float) -> float | None:
    """Return the seconds that an attempt took, or has been running until `now`."""
    if attempt.ended is not None:
        return attempt.ended.seconds
    return max(0.0, now - seconds_of(attempt.started.at))


def _unwatched(attempt: AttemptView, *, driven: bool) -> bool:
    return not driven if attempt.ended is None else attempt.ended.unwatched


def _forecasts(attempt: AttemptView) -> tuple[Foreseen, ...]:
    """Return the memories that are forecast to run out in a running attempt."""
    if attempt.ended is not None:
        return ()
    return tuple(forecast for forecast in attempt.forecasts.values() if forecast.holds)


def _trial(view: RunView, row: Started | Tried, *, first: Knobs, now: float, driven: bool) -> TrialStatus:
    """Return the status of a trial, from its result or from its running attempt."""
    assert row.trial is not None
    change = messages.setting_changes(first, row.knobs) or "as written"
    if isinstance(row, Tried):
        status = messages.trial_result(row)
        return TrialStatus(trial=row.trial, change=change, seconds=row.seconds, status=status)
    attempt = view.attempts[row.attempt]
    return TrialStatus(
        trial=row.trial,
        change=change,
        seconds=_seconds(attempt, now=now),
        status=_attempt_status(attempt, driven=driven),
        unwatched=_unwatched(attempt, driven=driven),
    )


def _attempt_status(attempt: AttemptView, *, driven: bool) -> str:
    if attempt.diagnosed is not None:
        return f"✗ {messages.diagnosis(attempt.diagnosed)}"
    if attempt.ended is not None:
        return messages.outcome(attempt.ended.outcome, rehearsal=attempt.started.rehearsal is not None)
    word, last = "RUNNING" if driven else "UNWATCHED", attempt.last
    return word if last is None else f"{word} step {messages.step_of(last.step, last.of)}"


def _short_place(accepted: Accepted) -> str:
    cluster = accepted.cluster
    gpus = cluster.gpus
    return f"{gpus}×{cluster.gpu_name or 'GPU'}" if gpus else f"{cluster.nodes}×CPU"
