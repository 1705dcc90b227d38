"""The content of a report: the values behind every table and chart. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autotune.policies.values.knobs import Setting
from autotune.policies.values.value import Value

_T = TypeVar("_T")


def ends_of(rows: Sequence[_T], first: int, last: int) -> list[_T]:
    """Return the first and the last rows of a long list, all rows of a shorter one."""
    return list(rows) if len(rows) <= first + last else [*rows[:first], *rows[-last:]]


class Change(Value, frozen=True, kw_only=True):
    """A setting of the job that is not as written any more, in the framework's spelling."""

    # name of the setting in the framework's spelling, or a knob's name if the framework has none
    setting: str
    before: tuple[str, ...]  # lines as its user types them; empty: the job did not set it
    after: tuple[str, ...]  # lines with the value that the run uses now
    why: str = ""  # the failure or the other reason for the change; empty: none is on record


class Fact(Value, frozen=True, kw_only=True):
    """A named value."""

    name: str  # label of the value
    value: str  # the value as text


class Spent(Value, frozen=True, kw_only=True):
    """What a part of the time was spent on."""

    # activity, e.g. `attempts that failed`, `freeing memory`, `becoming stable`; of trials, their purpose or
    # result
    what: str
    seconds: float  # time spent on it, in seconds
    gpu_hours: float  # GPU hours occupied in that time, whether used or idle


class Conclusion(Value, frozen=True, kw_only=True):
    """How the run ended."""

    # completed | stable | rehearsed | gave_up | needs_human | infrastructure | interrupted | unfinished
    status: str
    tone: str  # good | warn | bad
    headline: str  # the outcome in one sentence
    # how far the nearest configuration misses, or the lines of the log that decided; empty: none
    details: tuple[str, ...] = ()
    would_help: tuple[str, ...] = ()  # changes that only the user may make, if the run gave up; empty: none
    faster: str = ""  # why another configuration is predicted to be faster; empty: none is
    changes: tuple[Change, ...] = ()
    changes_of: str = ""  # which configuration they lead to
    commands: tuple[Fact, ...] = ()  # purpose and command
    facts: tuple[Fact, ...] = ()
    spent: tuple[Spent, ...] = ()
    gpus: int = 0  # number of GPUs in the cluster; 0: none


class LogLine(Value, frozen=True, kw_only=True):
    """A line of an attempt's log."""

    number: int  # line number in the log, from 1
    text: str  # content of the line, without secrets; cut after 400 characters
    failed: bool = False  # the line of the failure


class PhaseMark(Value, frozen=True, kw_only=True):
    """A phase that an attempt passed, or in which it failed."""

    phase: str  # name of the phase, e.g. `rollout` or `backward`
    failed: bool = False  # whether the attempt failed in this phase


class Candidate(Value, frozen=True, kw_only=True):
    """A remedy that could have followed a failure."""

    remedy: str  # name of the remedy, as in `autotune remedies`
    change: str  # the knobs that it changes, e.g. `microbatch_size 8 → 4`
    taken: bool  # whether the run applied it
    why: str  # why it was taken or passed over; empty: no reason is known


class AttemptStory(Value, frozen=True, kw_only=True):
    """One attempt of a launch."""

    number: int  # number of the attempt in the run, from 1
    tone: str  # good (reached the goal, or completed) | warn (little memory free, or no result) | bad
    # knobs changed since the previous attempt, e.g. `microbatch_size 8 → 4`; `as written` for the job's own
    change: str
    remedy: str = ""  # name of the remedy that led to the attempt; empty: none
    reason: str = ""  # why the attempt has these settings; empty: no decision is on record
    costs: str = ""  # what the remedy frees and what it slows; empty: no remedy
    phases: tuple[PhaseMark, ...] = ()
    # last completed step and the total, e.g. `3/20`, or `3` if the total is unknown; empty: no step
    steps: str = ""
    cause: str = ""  # cause, phase and step of the failure in words; empty: the attempt did not fail
    # sizes that the failure message names, e.g. `needed 2.00 GiB, 1.20 GiB was free`; empty: none
    figures: str = ""
    outcome: str = ""  # how the attempt ended, in words; with the measured figures if it reached the goal
    seconds: float | None = None  # None: still running, or unknown
    unwatched: bool = False  # no driver observed its end: it ran for `seconds` or longer
    log: str = ""  # path in the run's folder, with the line
    lines: tuple[LogLine, ...] = ()
    candidates: tuple[Candidate, ...] = ()


class Forecast(Value, frozen=True, kw_only=True):
    """The peak of a phase as the estimate saw it before an attempt."""

    bytes: float  # predicted peak in bytes, after calibration
    error: float  # that nine of ten measured peaks keep to; 0 before the first attempt: not calibrated
    capacity: float | None  # memory of the device in bytes; null: unknown
    parts: dict[str, float]  # before calibration


class Reading(Value, frozen=True, kw_only=True):
    """The peak of a phase as it was measured."""

    bytes: int  # measured peak in bytes
    capacity: int | None  # memory of the device in bytes; null: unknown
    upper_bound: bool = False  # includes memory that an allocator only reserved


class AttemptMemory(Value, frozen=True, kw_only=True):
    """Peaks of one attempt by phase."""

    number: int  # number of the attempt in the run, from 1
    change: str  # knobs changed since the previous attempt; `as before` if there are none
    predicted: dict[str, Forecast] = {}  # by phase, the peak predicted before the attempt; empty: no estimate
    measured: dict[str, Reading] = {}  # by phase, the largest peak of all steps; empty: none was reported
    needed: dict[str, int] = {}  # by the failed phase, from its message


class Comparison(Value, frozen=True, kw_only=True):
    """A prediction and its measurement."""

    attempt: int  # number of the attempt in the run, from 1
    phase: str  # name of the phase, e.g. `backward`
    predicted: float  # peak predicted before the attempt, in bytes
    error: float  # bytes by which nine of ten predictions differ at most; 0: not calibrated
    measured: int  # measured peak in bytes

    @property
    def difference(self) -> float:
        """The prediction's error as a share of what was measured."""
        return self.predicted / self.measured - 1


class Factor(Value, frozen=True, kw_only=True):
    """By how much the run corrected a part of the estimate."""

    name: str  # group of phases (or `host`) and part of the estimate, e.g. `train.activations`
    mean: float  # multiplier for the part; 1: the estimate was right
    error: float  # standard deviation of the multiplier


class Memory(Value, frozen=True, kw_only=True):
    """Peaks of the attempts, predicted and measured."""

    note: str = ""  # why there is no estimate, or that the run did not use it; empty: neither
    # names of all phases with a predicted or measured peak, in the order of a step
    phases: tuple[str, ...] = ()
    # names of the parts that predicted peaks consist of, e.g. `weights`; empty: no estimate
    parts: tuple[str, ...] = ()
    attempts: tuple[AttemptMemory, ...] = ()
    chosen: int = 0  # number of the attempt shown first
    comparisons: tuple[Comparison, ...] = ()
    factors: tuple[Factor, ...] = ()
    calibrated_by: int = 0  # earlier runs


class Series(Value, frozen=True, kw_only=True):
    """Memory of one device over the time since the attempt started."""

    name: str  # node with GPU index or `host`, or a process with its pid where no GPU was measured
    seconds: tuple[float, ...]  # time of each point, in seconds since the attempt started
    bytes: tuple[int, ...]  # memory in use at each point, in bytes
    capacity: int | None = None  # size of the memory, or a process's limit, in bytes; null: unknown
    host: bool = False  # whether it is the host memory of a node


class PhaseSpan(Value, frozen=True, kw_only=True):
    """When a phase was under way, in seconds since the attempt started."""

    phase: str  # name of the phase, e.g. `rollout`
    begin: float  # start in seconds
    end: float  # end in seconds


class Timeline(Value, frozen=True, kw_only=True):
    """The measured memory of one attempt."""

    attempt: int  # number of the attempt in the run, from 1
    series: tuple[Series, ...] = ()
    left_out: int = 0  # number of GPUs and nodes left out of `series`, those with the lowest peaks
    phases: tuple[PhaseSpan, ...] = ()
    steps: tuple[tuple[int, float], ...] = ()  # number, end


class Losses(Value, frozen=True, kw_only=True):
    """The loss of every step of an attempt."""

    attempt: int  # number of the attempt in the run, from 1
    trial: int | None  # number of the search's trial, from 0; null: no trial
    metric: str  # name of the metric in the log, e.g. `actor/pg_loss`
    steps: tuple[int, ...]  # numbers of the steps, evenly thinned to at most 1,000
    values: tuple[float, ...]  # loss of each of these steps


class TrialRow(Value, frozen=True, kw_only=True):
    """One trial of a search."""

    trial: int  # number of the trial in the search, from 0
    attempt: int  # number of the attempt that ran it; 0: it never ran
    purpose: str  # probe (whether it fits) | confirm (whether it holds for the steps of the goal)
    result: str  # fits | fails | refused | slow | lost | gated (never run: predicted, or known, not to fit)
    fits: bool  # whether `result` is `fits`
    change: str  # knobs that differ from the job, e.g. `microbatch_size 8 → 4`; `as written` if none do
    knobs: dict[str, Setting]  # varied by the search
    rate: float | None  # median speed in the search's `unit`; null: not measured
    noise: float | None  # relative standard error of the speed; null: not measured
    headroom: float | None  # smallest share of a memory that stayed free, 0 to 1; null: none is measured
    seconds: float  # duration in seconds; 0: it did not run for the search
    gpu_hours: float  # GPU hours that it occupied
    reason: str  # why it failed, was refused or never ran; empty: none of these
    front: bool = False  # whether no other trial has both more speed and more headroom
    best: bool = False  # whether it is the configuration that the search recommends


class SearchStory(Value, frozen=True, kw_only=True):
    """The trials of a search."""

    unit: str  # of the trials' speeds: tok/s | steps/s; empty: none was measured
    varied: tuple[str, ...]  # knobs with more than one value among the trials
    trials: tuple[TrialRow, ...]
    # knob -> relative importance for the speed, 0 to 1, by Optuna; empty: too few results, or no Optuna
    importance: dict[str, float] = {}
    goal_headroom: float = 0.0  # share of every memory that the goal asks to stay free, 0 to 1
    summary: str = ""  # the fastest trial and its gain over the start, in words


class TrainingProof(Value, frozen=True, kw_only=True):
    """What shows that the training stayed the job's own."""

    settings: tuple[Fact, ...] = ()  # of the job, that define what is trained
    turned: tuple[Fact, ...] = ()  # knobs changed by any attempt, and how much they may alter numbers
    losses: tuple[Losses, ...] = ()


class AttemptEvidence(Value, frozen=True, kw_only=True):
    """What the run's folder holds of one attempt."""

    number: int  # number of the attempt in the run, from 1
    trial: int | None  # number of the search's trial, from 0; null: no trial
    command: str  # the command line, quoted for a shell and without secrets; cut after 16,384 characters
    files: tuple[str, ...]  # relative to the run's folder


class Evidence(Value, frozen=True, kw_only=True):
    """Where every claim comes from."""

    folder: str  # absolute path of the run's folder
    files: tuple[str, ...] = ()  # names of the files directly in the folder
    events: dict[str, int] = {}  # rows of the journal by type
    attempts: tuple[AttemptEvidence, ...] = ()
    left_out: int = 0  # number of attempts that are not in `attempts`
    environment: tuple[Fact, ...] = ()
    unsupported: tuple[Fact, ...] = ()  # knobs that the framework or the job does not offer


class Report(Value, frozen=True, kw_only=True):
    """One run."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    run: str  # id of the run, also the name of its folder
    name: str  # name of the job
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    cluster: str  # GPUs and their memory, e.g. `8 × H100 (79.19 GiB)`
    mode: str  # launch | search | rehearse
    submitted: str  # when the job was accepted: UTC, ISO 8601
    conclusion: Conclusion
    story: tuple[AttemptStory, ...] = ()
    story_left_out: int = 0  # number of attempts that are not in `story`
    memory: Memory = Memory()
    timeline: Timeline | None = None
    search: SearchStory | None = None
    training: TrainingProof = TrainingProof()
    evidence: Evidence
