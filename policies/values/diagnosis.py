"""The evidence of a run and the diagnosis made of it."""

from __future__ import annotations

from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.observation import Outcome
from autotune.policies.values.value import Value

_ROOM_LEFT = 0.8  # share of host memory in use up to which the host itself did not run out
_HELD_SHARE = 0.25  # share of a GPU held outside a process from which on it explains a failure

FORESEEN = "autotune-forecast"  # the rule of a line that reports a forecast
CURED = "autotune-cured"  # the rule of a line that reports a cure in place
BUILTIN_FAILURE = "builtin-failure"  # the rule of the built-in job's own record of a failure


class Line(Value, frozen=True, kw_only=True):
    """A line of a log that a rule recognised."""

    line: int  # 1-based line number in the log
    text: str  # the line, cut to 2000 characters; or what autotune observed, for its own rules
    rule: str  # name, for `autotune explain --rule`; `outcome`: how the job ended; empty: no rule


class Holder(Value, frozen=True, kw_only=True):
    """A process that a log shows to hold memory of a card or of a node."""

    pid: int | None = None  # process id on its node; None: not a single process
    held_bytes: int  # memory that it holds
    command: str = ""  # name of the process as printed, or a container or Slurm step; empty: unknown
    killed: bool = False  # by the kernel or Ray, which may choose a small one


class Facts(Value, frozen=True, kw_only=True):
    """Figures of a failure message, in bytes; None if it does not say."""

    requested_bytes: int | None = None  # size of the allocation that failed
    free_bytes: int | None = None  # free memory of the device, or of the node
    capacity_bytes: int | None = None  # total memory of the device, or of the node
    allocated_bytes: int | None = None  # in use by the tensors of the process that failed
    reserved_unallocated_bytes: int | None = None  # reserved by its allocator, in use by no tensor
    outside_bytes: int | None = None  # in use on the device outside that allocator, computed from the others
    allowed_bytes: int | None = None  # limit of the process's allocator on a device; of Ray's jobs on a node
    device: str | None = None  # cpu-budget | cuda | None
    validation: bool = False  # the failure happened during a validation
    loading: bool = False  # an engine was loading its weights: neither its pool nor its graphs existed
    states: bool = False  # a trainer was creating or loading its optimizer state
    waking: bool = False  # a sleeping engine was taking back its own memory
    profiling: bool = False  # an engine was profiling its largest batch: it had its weights and no pool
    sampling: bool = False  # its sampler or pooler ran out then, which computes a row for each request
    holders: tuple[Holder, ...] = ()  # of a node's memory, as listed in the log, largest first
    asleep_bytes: int | None = None  # in use on a whole device when an engine first went to sleep

    @property
    def limit_bytes(self) -> int | None:
        """Device memory that the process may use: capacity or its allocator's limit; None if unknown."""
        known = [size for size in (self.allowed_bytes, self.capacity_bytes) if size is not None]
        return min(known, default=None)

    @property
    def room_bytes(self) -> int | None:
        """Device memory that the process could still allocate: what is free, within its allocator's limit."""
        free, allowed, used = self.free_bytes, self.allowed_bytes, self.allocated_bytes
        if used is not None:
            used += self.reserved_unallocated_bytes or 0
        elif self.capacity_bytes is not None and free is not None:
            used = self.capacity_bytes - free
        return free if free is None or allowed is None or used is None else max(0, min(free, allowed - used))

    @property
    def impossible(self) -> bool:
        """Whether the request exceeds what the process may use, so that no freed memory would suffice."""
        requested, limit = self.requested_bytes, self.limit_bytes
        return requested is not None and limit is not None and requested > limit

    @property
    def held_by_others_bytes(self) -> int:
        """Device memory held outside the process that failed; 0 if too small to explain a failure."""
        outside, capacity = self.outside_bytes, self.capacity_bytes
        return outside if outside and capacity and outside >= _HELD_SHARE * capacity else 0


class Finding(Value, frozen=True, kw_only=True):
    """A rule's match in a log, with what the scanner knew at that moment."""

    cause: Cause | None  # None: a consequence of another failure
    line: Line
    fatal: str  # always | unless_progress | never
    phase: Phase = Phase.NONE
    phase_shown: bool = False  # by a record, the failure's stack frames, or what its process had begun
    component: Component = Component.UNKNOWN
    rank: int | None = None  # rank of the process that wrote it; None: unknown
    step: int | None = None  # last completed before it, or named in it; None: unknown
    facts: Facts = Facts()
    source: str = ""  # the log that it is from, where several are merged; empty: there is one
    caught: bool = False  # the log says that the program handled it: it counts only if nothing else does


class Evidence(Value, frozen=True, kw_only=True):
    """What is kept of a run to say why it died: bounded, whatever the size of the log."""

    findings: tuple[Finding, ...] = ()  # in order of appearance, causes and consequences
    last_errors: tuple[Line, ...] = ()  # distinct error lines that no rule knows
    last_phase: Phase = Phase.NONE  # the last phase marker that was not closed
    asleep_bytes: int | None = None  # in use on a device when an engine first went to sleep
    last_step: int | None = None
    steps: int | None = None  # of the whole training, if the log or the job gives it
    lines: int = 0
    outcome: Outcome | None = None
    host_peak_share: float | None = None  # used / limit within 5 s of the death
    host_growth: int | None = None  # bytes of host memory by which its processes grew per step at the end
    process_limit_bytes: int = 0  # the smallest limit of a process's own memory (`ulimit -v`); 0: none
    start: int = 0  # the line at which this start of the job begins, after a failed one; 0: the log's first
    again: int = 0  # the line at which the job was started again, without a failure since; 0: it was not
    earlier: Evidence | None = None  # of the start before this one, if the log has several


class Diagnosis(Value, frozen=True, kw_only=True):
    """The first cause of a failure, with its evidence."""

    cause: Cause
    phase: Phase = Phase.NONE
    phase_shown: bool = False  # by a record, the failure's stack frames, or what its process had begun
    component: Component = Component.UNKNOWN
    rank: int | None = None  # rank that failed first; None: unknown
    step: int | None = None  # training step in which it failed, or the last completed one; None: unknown
    evidence: tuple[Line, ...] = ()
    facts: Facts = Facts()
    fragmentation: bool = False  # memory that the allocator reserved but could not use explains the failure
    confidence: float = 1.0  # how sure the cause is, 0 to 1; 0: unknown
    consequences: int = 0  # further failures that follow from the first
    other_ranks: tuple[int, ...] = ()  # that failed after it, as far as recorded
    streak: int = 1  # equal failures in a row without a new step, with this one: changes grow with it
    reason: str = ""  # how the job ended, if its log does not say why
    host_share: float | None = None  # of host memory in use when a host allocation failed
    host_growth: int | None = None  # bytes per step by which the job's processes grew until then
    process_limit_bytes: int = 0  # of a process's own memory (`ulimit -v`); 0: none is known

    @property
    def own_limit(self) -> str:
        """Why an allocation failed on a host with free memory; empty if it had none or was not measured."""
        if self.host_share is None or self.host_share > _ROOM_LEFT:
            return ""
        used = f"only {self.host_share:.0%} of the host's memory was in use"
        if self.process_limit_bytes:
            limit = show_gib(self.process_limit_bytes)
            return f"{used}: the process is limited to {limit} (`ulimit -v` or `ulimit -d`)"
        return (
            f"{used}: the process has a limit of its own "
            "(`ulimit -v`, its container), or asked for more than the rest at once"
        )

    @property
    def expected(self) -> bool:
        """Whether the failure was predicted and has not happened."""
        return any(line.rule == FORESEEN for line in self.evidence)

    @property
    def step_text(self) -> str:
        """`step 3` if a record of the failure names it, otherwise `after step 2`, the last completed step."""
        if self.step is None:
            return ""
        named = bool(self.evidence) and self.evidence[0].rule in (BUILTIN_FAILURE, FORESEEN)
        return f"step {self.step}" if named else f"after step {self.step}"
