"""What is concluded from a run: evidence and its diagnosis."""

from __future__ import annotations

from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import Outcome
from autotune.policies.values.value import Value

_ROOM_LEFT = 0.8  # share of host memory in use up to which it was not the host that ran out
_HELD_SHARE = 0.25  # of a card held outside a process before that is named as the reason of its failure

FORESEEN = "autotune-forecast"  # the rule of a line that says what is expected
CURED = "autotune-cured"  # the rule of a line that says what the job itself cured
BUILTIN_FAILURE = "builtin-failure"  # the rule of the built-in job's own record of a failure


class Line(Value, frozen=True, kw_only=True):
    """A line of a log that a rule recognised."""

    line: int  # 1-based line number in the log
    text: str
    rule: str


class Holder(Value, frozen=True, kw_only=True):
    """A process that a log shows to hold memory of a card or of a node."""

    pid: int | None = None
    held_bytes: int
    command: str = ""
    killed: bool = False  # by the kernel or Ray, which may choose a small one


class Facts(Value, frozen=True, kw_only=True):
    """Figures of a failure message, in bytes; None if it does not say."""

    requested_bytes: int | None = None
    free_bytes: int | None = None
    capacity_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    outside_bytes: int | None = None
    allowed_bytes: int | None = None  # of the device, for the process's allocator; of a node, for Ray's jobs
    device: str | None = None  # cpu-budget | cuda | None
    validation: bool = False
    loading: bool = False  # an engine was loading its weights: neither its pool nor its graphs existed
    states: bool = False  # a trainer was making or loading the state of its optimizer
    profiling: bool = False  # an engine was measuring its largest batch: it had its weights and no pool
    holders: tuple[Holder, ...] = ()  # of a node's memory, as the log lists them, the largest first

    @property
    def limit_bytes(self) -> int | None:
        """What the process may use of the device: all of it, or what its allocator is allowed."""
        known = [size for size in (self.allowed_bytes, self.capacity_bytes) if size is not None]
        return min(known, default=None)

    @property
    def room_bytes(self) -> int | None:
        """What the process could still take: what is free, or less where its allocator is allowed less."""
        free, allowed, used = self.free_bytes, self.allowed_bytes, self.allocated_bytes
        if used is not None:
            used += self.reserved_unallocated_bytes or 0
        elif self.capacity_bytes is not None and free is not None:
            used = self.capacity_bytes - free
        return free if free is None or allowed is None or used is None else max(0, min(free, allowed - used))

    @property
    def impossible(self) -> bool:
        """Whether the request is larger than the device: no memory that others give back would do."""
        requested, limit = self.requested_bytes, self.limit_bytes
        return requested is not None and limit is not None and requested > limit

    @property
    def held_by_others_bytes(self) -> int:
        """The device memory outside the process that failed; 0 where it explains no failure."""
        outside, capacity = self.outside_bytes, self.capacity_bytes
        return outside if outside and capacity and outside >= _HELD_SHARE * capacity else 0


class Finding(Value, frozen=True, kw_only=True):
    """A rule's match in a log, with what the scanner knew at that moment."""

    cause: Cause | None  # None: a consequence of something else
    line: Line
    fatal: str  # always | unless_progress | never
    phase: Phase = Phase.NONE
    phase_shown: bool = False  # by a record, by frames of the failure, or by what its process had begun
    component: Component = Component.UNKNOWN
    rank: int | None = None
    step: int | None = None
    facts: Facts = Facts()
    source: str = ""
    caught: bool = False  # the log says that the program dealt with it: it matters where nothing else does


class Evidence(Value, frozen=True, kw_only=True):
    """What is kept of a run to say why it died: bounded, whatever the size of the log."""

    findings: tuple[Finding, ...] = ()  # in order of appearance, causes and consequences
    last_errors: tuple[Line, ...] = ()  # distinct error lines that no rule knows
    last_phase: Phase = Phase.NONE  # the last phase marker that was not closed
    last_step: int | None = None
    steps: int | None = None  # of the whole training, where the log or the job says it
    lines: int = 0
    outcome: Outcome | None = None
    host_peak_share: float | None = None  # used / limit within 5 s of the death
    host_growth: int | None = None  # bytes of host memory that its processes gained with each step at the end


class Diagnosis(Value, frozen=True, kw_only=True):
    """The first cause of a failure, with its evidence."""

    cause: Cause
    phase: Phase = Phase.NONE
    phase_shown: bool = False  # by a record, by frames of the failure, or by what its process had begun
    component: Component = Component.UNKNOWN
    rank: int | None = None
    step: int | None = None
    evidence: tuple[Line, ...] = ()
    facts: Facts = Facts()
    fragmentation: bool = False
    confidence: float = 1.0
    consequences: int = 0  # further failures that follow from the first
    other_ranks: tuple[int, ...] = ()  # that failed after it, as far as they are kept
    streak: int = 1  # equal failures in a row without a new step, this one included: cuts grow with it
    reason: str = ""  # how the job ended, where its log does not say why
    host_share: float | None = None  # used of the host's memory when an allocation in it failed
    host_growth: int | None = None  # bytes that the job's processes gained with each step until then

    @property
    def own_limit(self) -> str:
        """Why host memory ran out on a host that had plenty; empty where it had not, or nobody measured."""
        if self.host_share is None or self.host_share > _ROOM_LEFT:
            return ""
        return (
            f"only {self.host_share:.0%} of the host's memory was in use: the process has a limit of its own "
            "(`ulimit -v`, its container), or asked for more than the rest at once"
        )

    @property
    def expected(self) -> bool:
        """Whether the failure was foreseen and has not happened."""
        return any(line.rule == FORESEEN for line in self.evidence)

    @property
    def step_text(self) -> str:
        """`step 3` where a record of the failure names it, else `after step 2`, the last that was done."""
        if self.step is None:
            return ""
        named = bool(self.evidence) and self.evidence[0].rule in (BUILTIN_FAILURE, FORESEEN)
        return f"step {self.step}" if named else f"after step {self.step}"
