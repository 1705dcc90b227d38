"""The two protocols of this package: a framework renders commands, a runner starts them somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import msgspec

from autotune.policies.certificate.contents import Training
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.command import Command
from autotune.policies.values.failure import Component
from autotune.policies.values.job import Cluster, Job, Tracker
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker, Sample
from autotune.policies.values.profile import Profile
from autotune.policies.values.provenance import CodeQuery, Origin
from autotune.policies.values.rehearsing import STEPS, Met, Part
from autotune.policies.values.value import Value

# Settings that decide how much memory a job takes, by words in their names.
DECIDES_MEMORY = re.compile(
    r"batch[-_]size|max_token_len|max[-_]tokens|(?:memory|mem)[-_]\w*(?:utilization|fraction)"
    r"|(?:tensor|pipeline|context|expert|sequence)[-_](?:model[-_])?parallel|offload|checkpointing|recompute"
    r"|zero_stage|deepspeed|fsdp|max[-_]\w*(?:length|len|seqs)$|num_generations|rollout\.n$|n[-_]samples|colocate"
    r"|use_dynamic_bsz|enforce_eager|cuda[-_]?graph|vllm_mode|sleep|remove_padding|packing|use-dynamic-batch|dtype|lora_rank|max_num_batched_tokens|chunk"
)
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*|[0-9]+[KMGT]iB")
_NO_TEXT = ("true", "false", "null", "on", "off", "yes", "no", "y", "n")


class Problem(Value, frozen=True, kw_only=True):
    """Something wrong in a job's settings, found before anything starts."""

    path: tuple[str | int, ...]  # keys into job.yaml, such as ("settings", "samples")
    message: str
    hint: str = ""
    origin: Origin = Origin.EXACT  # of the rule that it breaks; one that is assumed refuses no job


def refusals(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the problems for which a job is refused: those of rules that are known to hold for it."""
    return tuple(problem for problem in problems if not problem.origin.is_assumed)


class Status(StrEnum):
    """What became of a remedy that a public guide names."""

    WORKS = "works"
    REPLACED = "replaced"  # another setting does it today
    OBSOLETE = "obsolete"  # no longer needed, or without effect
    IMPOSSIBLE = "impossible"  # never worked, or would change what is trained


class Advice(Value, frozen=True):
    """A remedy of the public guides and its status in the framework's current code."""

    remedy: str  # a name of autotune.policies.remedies.ladder, or the guide's own words where none exists
    phase: str  # a Phase, or "any"
    setting: str  # as the guide writes it
    status: Status
    reason: str
    instead: str = ""  # the setting that does it today
    constraint: str = ""
    effect: str = ""  # what it frees, and in which memory
    cost: str = ""  # what it slows


class Tracked(Value, frozen=True, kw_only=True):
    """An experiment tracker that a framework writes to, and where it keeps the run of a job.

    The names of a place are those of `orchestrator/annotate/places.py`.
    """

    tracker: Tracker
    place: dict[str, str] = {}  # as the settings say; a name is left out where they do not
    lines: tuple[str, ...] = ()  # of the log, which say more of it: `Saving tensorboard log to {folder}.`


class Prompts(Value, frozen=True, kw_only=True):
    """The data of a training's prompts, as the settings of a job name it."""

    files: tuple[str, ...]  # paths, or names on a hub
    field: str  # of a row, that holds the prompt: a text or chat messages


def _typed(value: Any) -> str:
    """Return a value as it is typed in YAML: text in quotes only where it could be read as something else."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    return msgspec.json.encode(value).decode()


class Framework(Protocol):
    """What to run: pure knowledge of one framework, one folder under `frameworks/`.

    A method with a body is what holds of a framework that says nothing else.
    """

    name: str
    saves_by_time: bool  # where the job says nothing of checkpoints; the others are told a number of steps
    announces_end: bool  # a line says that the training is done; without it, exit code 0 is no success
    # Its end line is printed after success only, so a smaller step count is no failure.
    done_is_final: bool = False

    distribution: str = ""  # its package, by which an installed version is found
    version_file: str = ""  # in a checkout, the file that holds nothing but the version
    releases: tuple[str, ...] = ()  # whose settings are known; empty where one version stands for all
    modules: tuple[str, ...] = ()  # that its interpreter must be able to import on every node
    builds_on: str = ""  # the key of its file of settings that names the files which that one extends
    reasons: ClassVar[
        Mapping[str, str]
    ] = {}  # why an attempt's command has a setting that the job lacks, by pattern
    passes_settings: bool = True  # whether the words of a command are the job's settings
    loss: str = ""  # the metric of a step that is its loss; empty: its lines show none

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What the guides say beyond, or against, the supported knobs."""
        return ()

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that a guide offers as a start, by name."""
        return {}

    def settings_of(self, job: Job, component: Component, text: str) -> Mapping[str, str] | None:
        """Return the settings that act on a part other than the actor, by knob; None where all of them do.

        `text`: the log of the job, whose frames show which part ran in which release's workers.
        """
        return None

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's own settings."""

    def modules_of(self, job: Job) -> tuple[str, ...]:
        """Return the modules that a job's interpreter must be able to import, its framework's own first."""
        return self.modules

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return what to read of the framework's code that the job would run; None if nothing."""
        return None

    def foreign(self, job: Job) -> tuple[str, ...]:
        """Return the settings that no release on record has, so that they are of a fork's own program."""
        return ()

    def release_by_settings(self, job: Job) -> str:
        """Return the known release that the names of a job's settings tell; empty where none does."""
        return ""

    def defaults(self, job: Job) -> Mapping[str, Any]:
        """Return the values of settings that the job does not write, in its release, as far as on record."""
        return {}

    def lacking(self, job: Job) -> tuple[str, ...]:
        """Return the settings of the job that its release does not have, as far as on record."""
        return ()

    def model_path(self, job: Job) -> str | None:
        """Return the folder or hub name of the model that the job's settings name."""

    def prompts(self, job: Job) -> Prompts | None:
        """Return the data of the training's prompts; None if no setting names it."""
        return None

    def checkpoint_folder(self, job: Job) -> str | None:
        """Return the absolute folder of the job's checkpoints; None if no setting names it."""
        return None

    def shape(self, job: Job) -> Model | None:
        """Return the model's shape if the settings state it; `job.shape` otherwise."""
        return job.shape

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return what the policies need to know of the job; its shape may be unknown."""

    def gpus(self, job: Job) -> int | None:
        """Return how many GPUs the job's settings ask for; None where their number follows the cluster."""
        return None

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job with settings that ask for other GPUs; None where no layout of it is known."""
        return None

    def training(self, job: Job) -> Training:
        """Return what is trained, as far as the job's settings state it."""
        return Training()

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt; `{python}` in argv is the interpreter, `{attempt}` the folder of its files."""

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the framework's own settings, under its own names, that make the job use `knobs`.

        Only what differs from the job as written.
        """

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return the trackers that the job uses, as its settings or lines that the framework prints say."""
        return ()

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as a user of the framework types them: overrides, flags or lines."""
        return tuple(f"{name}: {_typed(value)}" for name, value in settings.items())

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings that the beginning of one of its logs shows, under its own names."""
        return {}

    def marker(self, line: str) -> Marker | None:
        """Return the progress that a log line reports, if any."""

    def marks(self, text: bytes) -> bool:
        """Return whether any line of a text in UTF-8 may report progress; false saves reading its lines."""
        return True

    def last_step(self, job: Job) -> int | None:
        """Return the step that completes the training, where the settings name it."""
        return None

    def replay(self, before: Job, after: Job) -> Command | None:
        """Return what trains the same samples with both settings and prints how they compare, if anything.

        Its last line is one `Comparison` as JSON. It needs no cluster and no card, and runs nothing that
        the jobs name.
        """
        return None

    def can_force_longest(self, job: Job) -> bool:
        """Return whether a trial can make every sequence as long as the job allows."""
        return False

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job as a trial runs it: `steps` steps under names, folders and loggers of its own.

        `longest` forces every sequence to its full length, where that is possible.
        """

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return which late events a rehearsal of the job covers; empty if it cannot be rehearsed."""
        return ()

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return the job as a part of its rehearsal runs it: a trial that also saves and validates.

        Its checkpoints go below `folder`, which both parts share, and nowhere else. Asked only of a job that
        meets something.
        """
        return self.trial(job, folder=folder, steps=STEPS[part], longest=longest)


OWN_SOURCE = "autotune"  # of records by autotune's own code, which no output of a job can have


class Chunk(Value, frozen=True, kw_only=True):
    """New bytes of one log; the framework's own output has the source ''."""

    source: str
    data: bytes
    file: str = ""  # which file it is from, by a name that outlives the handle; empty: none that does
    end: int = 0  # its offset in the file after `data`
    dropped: int = 0  # bytes before `data` that are gone unread


class Exit(Value, frozen=True, kw_only=True):
    """How the framework's main process ended."""

    code: int | None = None
    signal: int | None = None
    at: float = 0.0  # Unix seconds
    ran_s: float | None = None  # by a clock that nobody sets; None: not known

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it; a shell reports signal n of its child as exit code 128 + n."""
        if self.signal is None and self.code is not None and self.code > 128:
            return self.code - 128
        return self.signal


class Observed(Value, frozen=True, kw_only=True):
    """What is new since the last poll; what a node wrote while it was silent comes once it answers again."""

    chunks: tuple[Chunk, ...] = ()
    samples: tuple[Sample, ...] = ()
    exit: Exit | None = None  # repeated by every later poll
    ending: bool = False  # it has ended, and its last words are awaited
    lost: str = ""  # what took the attempt away: its supervisor, a node where it ran or its cluster is gone
    killed_for_memory: tuple[str, ...] = ()  # Ray's own words, where its memory monitor took the supervisor
    silent_s: float = 0.0  # how long the supervisor has not answered; 0 where it did: no silence of the job's
    behind: bool = False  # there is more to read at once
    notes: tuple[str, ...] = ()  # lines for the user: a node that fell silent, answers again, joined or left


class Drain(Value, frozen=True, kw_only=True):
    """Whether the memory of an ended attempt was released."""

    clear: bool
    seconds: float
    held: str = ""  # who holds what, with pid and user, when not clear
    foreign: bool = False  # all of that is memory of cards, and no process of the attempt is left
    unknown: str = ""  # what did not answer, so that nothing is known of its memory


class Capacity(Value, frozen=True, kw_only=True):
    """How far a cluster has the nodes that a job needs."""

    ready: bool  # they are there and their GPUs are free
    nodes: int  # that are there, whether free or not
    wanted: int
    gpus: int  # that each of them has; 0: none is needed
    note: str = ""  # what the cluster's autoscaler does or fails to do, in words


class Handle(Protocol):
    """One attempt, wherever it runs."""

    def poll(self) -> Observed:
        """Return what is new, after seconds at most; after an attach, what follows its offsets."""

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Take note that files are safely recorded up to these offsets.

        So much of them need not be kept for an attach.
        """

    def stop(self, *, grace_s: float) -> float:
        """End the whole attempt on every node that answers and return the seconds it took; safe to repeat.

        Politely first, by SIGKILL after `grace_s`. Raises Unreachable where nothing can be asked to end.
        """

    def drain(self, *, timeout_s: float) -> Drain:
        """Wait until no memory of the attempt is held any more, killing what is left of it."""

    def release(self) -> None:
        """Give up the attempt's supervisor and samplers; the handle is of no use afterwards."""


class Runner(Protocol):
    """Where attempts run."""

    @property
    def address(self) -> str:
        """The address that other processes reach it by."""

    @property
    def note(self) -> str:
        """A line for the user about the place that was chosen; empty where the job names it."""

    def capacity(self, *, gpus: int | None, joining: bool) -> Capacity | None:
        """Request the nodes that the job needs and return how many are there; None where none may come.

        `gpus` is what each needs, None where only the nodes tell. Nodes may come to a cluster with an
        autoscaler, with `joining` to any other. Raises Unreachable when the cluster does not answer.
        """

    def withdraw(self) -> None:
        """Request no nodes any more; those that came for the job are kept until `close`."""

    def cluster(self) -> Cluster:
        """Return what was measured of the place."""

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> Handle:
        """Start an attempt; raises Unreachable when the place cannot take it."""

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> Handle | None:
        """Return the attempt that is still supervised, if any.

        Its files are read from the offsets `read`, those that it does not name from the start.
        """

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """End what is left of a run without a living supervisor; return what was ended."""

    def end_all(self, *, run: str) -> tuple[str, ...]:
        """End every process of a run on every node; return those that even SIGKILL left.

        Raises Unreachable, which names them, where nodes do not answer.
        """

    def close(self) -> None:
        """Leave the place; our own local cluster ends with it."""


class Unreachable(Exception):  # noqa: N818 - a state of the world, named as the user reads it
    """The place to run cannot be used: no cluster, too few GPUs, no supervisor."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
