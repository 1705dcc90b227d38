"""The journal's rows, and the actions that follow from them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from autotune.policies.values.diagnosis import CURED, FORESEEN, Diagnosis, Facts, Finding, Line
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Cluster, Job, Occasion
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.observation import HOST, MemoryGrowth, Outcome, Peak, Unit
from autotune.policies.values.priors import Learned
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import Part, Rehearsal
from autotune.policies.values.remedy import Remedy
from autotune.policies.values.value import Value

SURE = 0.9  # chance from which on a failure is reported as expected, and acted on


class TrainingCompleted(Value, frozen=True, kw_only=True, tag="completed", tag_field="verdict"):
    """The training ran to its end."""

    marginal: bool = False  # less memory stayed free than `goal.headroom` when the goal was reached
    faster: Remedy | None = None  # a faster configuration, predicted to fit in the memory that stayed free
    growth: MemoryGrowth | None = None  # because of which the run was restarted


class Stable(Value, frozen=True, kw_only=True, tag="stable", tag_field="verdict"):
    """The goal was reached and the job asked to stop there."""

    marginal: bool = False  # less memory stayed free than `goal.headroom`
    faster: Remedy | None = None
    growth: MemoryGrowth | None = None


class Rehearsed(Value, frozen=True, kw_only=True, tag="rehearsed", tag_field="verdict"):
    """The rehearsal that was asked for got through; no training follows it."""

    cured: bool = False  # with other knobs than the job's own


class GaveUp(Value, frozen=True, kw_only=True, tag="gave_up", tag_field="verdict"):
    """Nothing legal is left to try, or a budget is spent."""

    reason: str  # in words, such as the spent budget or the failure without a remedy
    nearest: str = ""  # by how much the nearest configuration misses
    would_help: tuple[str, ...] = ()  # changes that only the user may make


class NeedsHuman(Value, frozen=True, kw_only=True, tag="needs_human", tag_field="verdict"):
    """The job's own failure: not memory, or not understood."""

    diagnosis: Diagnosis


class Infrastructure(Value, frozen=True, kw_only=True, tag="infrastructure", tag_field="verdict"):
    """The cluster failed more often than the job allows, or holds memory that is not ours."""

    reason: str  # in words: what was lost or is unreachable, how often, and a hint


class Interrupted(Value, frozen=True, kw_only=True, tag="interrupted", tag_field="verdict"):
    """The user ended it; the run can be resumed."""

    by: str  # signal that ended the driver, `SIGINT` or `SIGTERM`; or `user`
    requested: bool = False  # with `autotune stop`


Verdict: TypeAlias = (
    TrainingCompleted | Stable | Rehearsed | GaveUp | NeedsHuman | Infrastructure | Interrupted
)


class EventBase(Value, frozen=True, kw_only=True):
    """The fields of every row."""

    at: str = ""  # UTC, ISO 8601, milliseconds
    attempt: int = 0  # 1-based; 0: the run itself
    after_s: float | None = None  # in which a driver was at work since the previous row; None: by `at`


class Policy(StrEnum):
    """What ranks the candidates of a run."""

    LADDER = "ladder"  # their order alone
    ESTIMATE = "estimate"


class Accepted(EventBase, frozen=True, kw_only=True, tag="accepted", tag_field="type"):
    """A run starts: everything decisions depend on."""

    run: str  # id of the run, also the name of its folder
    job: Job
    profile: Profile
    cluster: Cluster
    schema: int = 1  # version of the format of events.jsonl
    # of Python and of packages where the driver runs, by name; or `not installed`
    versions: dict[str, str] = {}
    policy: Policy = Policy.ESTIMATE
    learned: Learned | None = None  # from earlier runs of jobs of the same kind
    mode: str = "launch"  # launch | search | rehearse
    rehearsal: Rehearsal | None = None  # with which the run begins


class Started(EventBase, frozen=True, kw_only=True, tag="started", tag_field="type"):
    """An attempt is about to be started (the intent, written before the effect)."""

    knobs: Knobs
    command: tuple[str, ...] = ()  # argv that the attempt is started with
    resume: bool = False  # whether it may continue from a checkpoint
    trial: int | None = None  # of a search
    longest: bool = False  # every sequence was forced to the job's longest length
    rehearsal: Part | None = None  # it is not part of the training

    @property
    def trains(self) -> bool:
        """Whether it is an attempt at the training itself, not a trial or a rehearsal."""
        return self.trial is None and self.rehearsal is None


class Progressed(EventBase, frozen=True, kw_only=True, tag="progressed", tag_field="type"):
    """A training step is complete."""

    step: int  # number of the completed step, from the log
    of: int | None = None  # steps of the whole training; None: the log does not give it
    seconds: float | None = None  # duration of the step; None for an attempt's first, or unknown
    tokens_per_second: float | None = None  # throughput of the step; None: not measured
    peaks: dict[str, Peak] = {}  # phase -> peak since the attempt's last step
    resumed_from: int | None = None  # step of the checkpoint, on the first step after a load; otherwise None
    saved: int | None = None  # step of the attempt's last checkpoint so far
    loss: float | None = None  # from the log, if it is finite
    scores: dict[str, float] = {}  # `loss` and `reward` by the log, whatever their names there


class FailureSeen(EventBase, frozen=True, kw_only=True, tag="failure_seen", tag_field="type"):
    """A failure was seen while the job may still be running: a line, and what bears it out."""

    finding: Finding
    witness: str = ""  # what confirms the line, such as "process 1234, which printed it, ended"


class Foreseen(EventBase, frozen=True, kw_only=True, tag="foreseen", tag_field="type"):
    """A memory that grows from step to step is expected to run out, or no longer."""

    cause: Cause  # gpu-oom | host-oom
    phase: Phase  # for the host: the one in which it was fullest
    seen_at: int  # the step after which the forecast was made or withdrawn
    holds: bool = True  # False: it is no longer expected
    step: int | None = None  # 50 % chance that it ran out by then
    earliest: int | None = None  # 5 % chance that it ran out by then
    latest: int | None = None  # 95 %, or the last step considered
    of: int | None = None  # steps of the training
    chance: float = 0.0  # that it runs out by the last step considered
    since: int | None = None  # step since which it grows at this rate
    used_bytes: int = 0  # of a usual step, now
    limit_bytes: int = 0  # at which it counts as run out: capacity less a margin
    per_step_bytes: int = 0  # growth
    at_end_bytes: int = 0  # predicted for the last step considered
    lengths: bool = False  # it grows with the lengths of the responses
    component: Component = Component.TRAINER
    upper_bound: bool = False  # reported by the driver or an allocator: may include a cache
    process: str = ""  # the one whose host memory grows most; empty: unknown
    own_limit: bool = False  # of that process, not of the host: `ulimit -v`, `ulimit -d`

    @property
    def memory(self) -> str:
        """The memory it is about: a phase's device memory, or the host's whatever the phase."""
        return HOST if self.cause is Cause.HOST_OOM else self.phase.value

    @property
    def soonest(self) -> int:
        """The step by which it may run out: the earliest likely one, otherwise the expected one."""
        return self.earliest or self.step or 0

    @property
    def diagnosis(self) -> Diagnosis:
        """The expected failure, as if it had happened."""
        text = f"expected to run out of memory at step {self.step}, as seen after step {self.seen_at}"
        return Diagnosis(
            cause=self.cause,
            phase=self.phase,
            component=self.component,
            step=self.step,
            evidence=(Line(line=0, text=text, rule=FORESEEN),),
            facts=Facts(
                requested_bytes=max(0, self.at_end_bytes - self.used_bytes),
                free_bytes=max(0, self.limit_bytes - self.used_bytes),
                capacity_bytes=self.limit_bytes,
            )
            if self.cause is Cause.GPU_OOM
            else Facts(),
            confidence=round(self.chance, 3),
        )


class CuredInPlace(EventBase, frozen=True, kw_only=True, tag="cured_in_place", tag_field="type"):
    """A phase ran out of memory, and the job itself continued with a smaller setting; no step was lost."""

    cause: Cause
    phase: Phase
    component: Component = Component.TRAINER
    rank: int | None = None  # that failed; None: unknown
    step: int  # in progress
    facts: Facts = Facts()
    knob: str  # name of the changed knob
    before: Setting  # its value when memory ran out
    after: Setting  # its smaller value from then on

    def apply(self, knobs: Knobs) -> Knobs:
        """Return the knobs with which the job continued."""
        return msgspec.structs.replace(knobs, **{self.knob: self.after})

    @property
    def diagnosis(self) -> Diagnosis:
        """The failure of the configuration before the cure."""
        text = f"out of memory in step {self.step}; the job went on with {self.knob} {self.after}"
        return Diagnosis(
            cause=self.cause,
            phase=self.phase,
            phase_shown=True,
            component=self.component,
            rank=self.rank,
            step=self.step,
            evidence=(Line(line=0, text=text, rule=CURED),),
            facts=self.facts,
        )


class GoalReached(EventBase, frozen=True, kw_only=True, tag="goal_reached", tag_field="type"):
    """`goal.steps` consecutive steps are done."""

    step: int  # last of these steps
    marginal: bool  # `headroom` is less than `goal.headroom` of the job
    headroom: float  # smallest free share over phases; 1.0 when nothing was reported
    peaks: dict[str, Peak] = {}  # by phase: the largest use of memory in these steps
    tokens_per_second: float | None = None  # throughput of the last step; None: not measured


class StopRequested(EventBase, frozen=True, kw_only=True, tag="stop_requested", tag_field="type"):
    """The attempt is being stopped."""

    by: str  # user | failure | goal | hang | climb | forecast
    reason: str = ""  # in words, or the name of a signal; empty: none besides `by`


class Ended(EventBase, frozen=True, kw_only=True, tag="ended", tag_field="type"):
    """The attempt is over, its processes are gone and its memory is back (or that failed: `held`)."""

    outcome: Outcome
    seconds: float | None = (
        0.0  # if `unwatched`, a minimum: until the last sign of life; None: there was none
    )
    step: int | None = None  # last completed step
    saved: int | None = None  # step of its last checkpoint
    stop_s: float | None = None  # request -> processes gone
    drain_s: float | None = None  # processes gone -> memory back
    held: str = ""  # who holds memory that did not come back
    foreign: bool = False  # that is GPU memory, and no process of the attempt is left
    peaks: dict[str, Peak] = {}  # of phases after its last completed step
    unreached: str = ""  # what did not answer, so that processes or memory of the attempt may be left there
    unwatched: bool = False  # no driver was at work when it ended, so the time is unknown


class Diagnosed(Diagnosis, frozen=True, kw_only=True, tag="diagnosed", tag_field="type"):
    """Why the attempt failed."""

    at: str = ""  # UTC, ISO 8601, milliseconds
    attempt: int = 0  # number of the attempt that failed, 1-based
    # seconds in which a driver was at work since the previous row; None: by `at`
    after_s: float | None = None
    nearest: str = ""  # empty: the verdict has it


class Decided(EventBase, frozen=True, kw_only=True, tag="decided", tag_field="type"):
    """What follows an attempt, and why."""

    remedy: Remedy | None = None
    reason: str = ""  # why the run goes on in this way, in words
    not_before_s: float = 0.0  # wait before the next start, in seconds after this row; 0: none
    growth: MemoryGrowth | None = None  # why the attempt is restarted; no failure of its settings


class Edited(EventBase, frozen=True, kw_only=True, tag="edited", tag_field="type"):
    """The user changed the job and continues, or the run left its cluster: its budgets start from zero."""

    job: Job
    profile: Profile
    cluster: Cluster
    file: str = ""  # path of the changed job; empty: the run left its cluster
    changes: dict[str, tuple[Any, Any]] = {}  # dotted key of job.yaml -> value before and after
    knobs: bool = False  # knobs are among them: the next attempt uses the values in the changed job
    forgets: bool = False  # what is trained may have changed: earlier failures say nothing about it

    def apply(self, accepted: Accepted) -> Accepted:
        """Return the first row of the run with the changed job."""
        return msgspec.structs.replace(accepted, job=self.job, profile=self.profile, cluster=self.cluster)


class Finished(EventBase, frozen=True, kw_only=True, tag="finished", tag_field="type"):
    """The run is over."""

    verdict: Verdict
    gone: bool = False  # checked on every node: no process of the run was left


class Purpose(StrEnum):
    """What a trial of a search is for."""

    PROBE = "probe"  # whether it fits, on the longest sequences that can be forced
    CONFIRM = "confirm"  # whether it holds for goal.steps


class Result(StrEnum):
    """How a trial ended."""

    FITS = "fits"
    FAILS = "fails"  # a memory ran out
    REFUSED = "refused"  # the job does not run with these settings
    SLOW = "slow"  # stopped early: it cannot become the fastest
    LOST = "lost"  # the cluster's fault; it says nothing about the settings
    GATED = "gated"  # never run: predicted, or known, not to fit


class Tried(EventBase, frozen=True, kw_only=True, tag="tried", tag_field="type"):
    """What a search learned about one configuration."""

    trial: int  # its number in the search, from 0
    knobs: Knobs
    purpose: Purpose
    result: Result
    tokens_per_second: float | None = None  # median after the warm-up
    steps_per_second: float | None = None  # the same if the log gives no tokens; at most one of both is set
    noise: float | None = None  # relative standard error of it
    headroom: float | None = None  # smallest free share over phases
    constraints: dict[str, float] = {}  # phase -> use above what is allowed, in units of the limit
    extrapolated: bool = False  # the longest sequences could not be forced
    reason: str = ""  # in words, such as why it failed or was not run; empty: none
    seconds: float = 0.0  # duration of the trial; 0: it ran not as a trial, or not at all
    gpu_hours: float = 0.0  # GPUs of the trial times its duration
    wait_s: float = 0.0  # after a loss: seconds until the next trial begins
    proposed_by: str = ""  # start | estimate | sampler

    @property
    def unit(self) -> Unit | None:
        """The unit of its rate; None if it was not measured."""
        if self.tokens_per_second is not None:
            return Unit.TOKENS
        return None if self.steps_per_second is None else Unit.STEPS

    @property
    def rate(self) -> float:
        """Its speed in that unit, 0 if it was not measured."""
        return self.tokens_per_second or self.steps_per_second or 0.0


Event: TypeAlias = (
    Accepted
    | Started
    | Progressed
    | FailureSeen
    | Foreseen
    | CuredInPlace
    | GoalReached
    | StopRequested
    | Ended
    | Diagnosed
    | Decided
    | Edited
    | Tried
    | Finished
)
History: TypeAlias = tuple[Event, ...]


class Notified(EventBase, frozen=True, kw_only=True, tag="notified", tag_field="type"):
    """A notification was sent or failed. It is not part of the history that decisions depend on."""

    occasion: Occasion
    of: str = ""  # `at` of the row that it is about; empty: the driver ended without one
    by: tuple[str, ...] = ()  # channels that accepted it: command, webhook, apprise.0
    failed: dict[str, str] = {}  # channel -> why it failed


class DriverBegan(EventBase, frozen=True, kw_only=True, tag="driver_began", tag_field="type"):
    """Another driver took up the run; what an earlier one writes after this row does not count."""

    host: str  # hostname of the driver's machine
    pid: int  # process id of the driver there


Row: TypeAlias = Event | Notified | DriverBegan  # a line of events.jsonl


class Launch(Value, frozen=True, kw_only=True, tag="launch", tag_field="action"):
    """Start the next attempt with these knobs."""

    knobs: Knobs
    reason: str
    remedy: Remedy | None = None
    not_before_s: float = 0.0  # backoff, seconds from the decision
    rehearsal: Part | None = None  # not the training itself
    longest: bool = False  # with every sequence forced to the job's longest length
    growth: MemoryGrowth | None = None  # why the attempt before is restarted; no failure of its settings


class Await(Value, frozen=True, kw_only=True, tag="await", tag_field="action"):
    """Nothing to do until the next observation."""


class Stop(Value, frozen=True, kw_only=True, tag="stop", tag_field="action"):
    """Stop the running attempt."""

    by: str
    reason: str


class Finish(Value, frozen=True, kw_only=True, tag="finish", tag_field="action"):
    """The run is over."""

    verdict: Verdict


Action: TypeAlias = Launch | Await | Stop | Finish
