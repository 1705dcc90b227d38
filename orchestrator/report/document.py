"""The content of a report: the values behind every table and chart. Sizes in bytes, times in seconds."""

from __future__ import annotations

from autotune.policies.values.knobs import Setting
from autotune.policies.values.value import Value


class Change(Value, frozen=True, kw_only=True):
    """A setting of the job that is not as written any more, in the framework's spelling."""

    setting: str
    before: tuple[str, ...]  # lines as its user types them; empty: the job did not set it
    after: tuple[str, ...]
    why: str = ""


class Fact(Value, frozen=True, kw_only=True):
    """A named value."""

    name: str
    value: str


class Spent(Value, frozen=True, kw_only=True):
    """What a part of the time was spent on."""

    what: str
    seconds: float
    gpu_hours: float


class Conclusion(Value, frozen=True, kw_only=True):
    """How the run ended."""

    status: str  # completed | stable | gave_up | needs_human | infrastructure | interrupted | unfinished
    tone: str  # good | warn | bad
    headline: str
    details: tuple[str, ...] = ()
    would_help: tuple[str, ...] = ()
    faster: str = ""
    changes: tuple[Change, ...] = ()
    changes_of: str = ""  # which configuration they lead to
    commands: tuple[Fact, ...] = ()  # purpose and command
    facts: tuple[Fact, ...] = ()
    spent: tuple[Spent, ...] = ()
    gpus: int = 0


class LogLine(Value, frozen=True, kw_only=True):
    """A line of an attempt's log."""

    number: int
    text: str
    failed: bool = False  # the line of the failure


class PhaseMark(Value, frozen=True, kw_only=True):
    """A phase that an attempt passed, or in which it failed."""

    phase: str
    failed: bool = False


class Candidate(Value, frozen=True, kw_only=True):
    """A remedy that could have followed a failure."""

    remedy: str
    change: str
    taken: bool
    why: str


class AttemptStory(Value, frozen=True, kw_only=True):
    """One attempt of a launch."""

    number: int
    tone: str
    change: str
    remedy: str = ""
    reason: str = ""
    costs: str = ""
    phases: tuple[PhaseMark, ...] = ()
    steps: str = ""
    cause: str = ""
    figures: str = ""
    outcome: str = ""
    seconds: float | None = None  # None: still running, or unknown
    unwatched: bool = False  # no driver observed its end: it ran for `seconds` or longer
    log: str = ""  # path in the run's folder, with the line
    lines: tuple[LogLine, ...] = ()
    candidates: tuple[Candidate, ...] = ()


class Forecast(Value, frozen=True, kw_only=True):
    """The peak of a phase as the estimate saw it before an attempt."""

    bytes: float
    error: float  # that nine of ten measured peaks keep to; 0 before the first attempt: not calibrated
    capacity: float | None
    parts: dict[str, float]  # before calibration


class Reading(Value, frozen=True, kw_only=True):
    """The peak of a phase as it was measured."""

    bytes: int
    capacity: int | None
    upper_bound: bool = False  # includes memory that an allocator only reserved


class AttemptMemory(Value, frozen=True, kw_only=True):
    """Peaks of one attempt by phase."""

    number: int
    change: str
    predicted: dict[str, Forecast] = {}
    measured: dict[str, Reading] = {}
    needed: dict[str, int] = {}  # by the failed phase, from its message


class Comparison(Value, frozen=True, kw_only=True):
    """A prediction and its measurement."""

    attempt: int
    phase: str
    predicted: float
    error: float
    measured: int

    @property
    def difference(self) -> float:
        """The prediction's error as a share of what was measured."""
        return self.predicted / self.measured - 1


class Factor(Value, frozen=True, kw_only=True):
    """By how much the run corrected a part of the estimate."""

    name: str
    mean: float
    error: float


class Memory(Value, frozen=True, kw_only=True):
    """Peaks of the attempts, predicted and measured."""

    note: str = ""
    phases: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    attempts: tuple[AttemptMemory, ...] = ()
    chosen: int = 0  # number of the attempt shown first
    comparisons: tuple[Comparison, ...] = ()
    factors: tuple[Factor, ...] = ()
    calibrated_by: int = 0  # earlier runs


class Series(Value, frozen=True, kw_only=True):
    """Memory of one device over the time since the attempt started."""

    name: str
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    capacity: int | None = None
    host: bool = False


class PhaseSpan(Value, frozen=True, kw_only=True):
    """When a phase was under way, in seconds since the attempt started."""

    phase: str
    begin: float
    end: float


class Timeline(Value, frozen=True, kw_only=True):
    """The measured memory of one attempt."""

    attempt: int
    series: tuple[Series, ...] = ()
    left_out: int = 0
    phases: tuple[PhaseSpan, ...] = ()
    steps: tuple[tuple[int, float], ...] = ()  # number, end


class Losses(Value, frozen=True, kw_only=True):
    """The loss of every step of an attempt."""

    attempt: int
    trial: int | None
    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


class TrialRow(Value, frozen=True, kw_only=True):
    """One trial of a search."""

    trial: int
    attempt: int
    purpose: str
    result: str
    fits: bool
    change: str
    knobs: dict[str, Setting]  # varied by the search
    rate: float | None
    noise: float | None
    headroom: float | None
    seconds: float
    gpu_hours: float
    reason: str
    front: bool = False
    best: bool = False


class SearchStory(Value, frozen=True, kw_only=True):
    """The trials of a search."""

    unit: str
    varied: tuple[str, ...]
    trials: tuple[TrialRow, ...]
    importance: dict[str, float] = {}
    goal_headroom: float = 0.0
    summary: str = ""


class TrainingProof(Value, frozen=True, kw_only=True):
    """What shows that the training stayed the job's own."""

    settings: tuple[Fact, ...] = ()  # of the job, that define what is trained
    turned: tuple[Fact, ...] = ()  # knobs changed by any attempt, and how much they may alter numbers
    losses: tuple[Losses, ...] = ()


class AttemptEvidence(Value, frozen=True, kw_only=True):
    """What the run's folder holds of one attempt."""

    number: int
    trial: int | None
    command: str
    files: tuple[str, ...]  # relative to the run's folder


class Evidence(Value, frozen=True, kw_only=True):
    """Where every claim comes from."""

    folder: str
    files: tuple[str, ...] = ()
    events: dict[str, int] = {}  # rows of the journal by type
    attempts: tuple[AttemptEvidence, ...] = ()
    left_out: int = 0
    environment: tuple[Fact, ...] = ()
    unsupported: tuple[Fact, ...] = ()  # knobs that the framework or the job does not offer


class Report(Value, frozen=True, kw_only=True):
    """One run."""

    schema: int = 1
    run: str
    name: str
    framework: str
    cluster: str
    mode: str
    submitted: str
    conclusion: Conclusion
    story: tuple[AttemptStory, ...] = ()
    story_left_out: int = 0
    memory: Memory = Memory()
    timeline: Timeline | None = None
    search: SearchStory | None = None
    training: TrainingProof = TrainingProof()
    evidence: Evidence
