"""The two protocols of this package: `Framework` renders commands, `Runner` starts them."""

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
from autotune.policies.values.formatting import show_value
from autotune.policies.values.job import Cluster, Job, Tracker
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker, Sample
from autotune.policies.values.profile import Profile
from autotune.policies.values.provenance import CodeQuery, Origin
from autotune.policies.values.rehearsing import STEPS, Met, Part
from autotune.policies.values.value import Value

# Words in the names of settings that determine how much memory a job takes.
DECIDES_MEMORY = re.compile(
    r"batch[-_]size|max_token_len|max[-_]tokens|(?:memory|mem)[-_]\w*(?:utilization|fraction)"
    r"|(?:tensor|pipeline|context|expert|sequence)[-_](?:model[-_])?parallel|offload|checkpointing|recompute"
    r"|zero_stage|deepspeed|fsdp|max[-_]\w*(?:length|len|seqs)$|num_generations|rollout\.n$|n[-_]samples|colocate"
    r"|use_dynamic_bsz|enforce_eager|cuda[-_]?graph|vllm_mode|sleep|remove_padding|packing|use-dynamic-batch|dtype|lora_rank|max_num_batched_tokens|chunk"
)
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*|[0-9]+[KMGT]iB")
_NO_TEXT = ("true", "false", "null", "on", "off", "yes", "no", "y", "n")


class Problem(Value, frozen=True, kw_only=True):
    """A problem in a job's settings, reported before anything starts."""

    path: tuple[str | int, ...]  # keys into job.yaml, such as ("settings", "samples")
    message: str
    hint: str = ""
    origin: Origin = Origin.EXACT  # of the violated rule; an assumed rule refuses no job


def refusals(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return the problems that refuse a job: those whose rules are known to apply to it."""
    return tuple(problem for problem in problems if not problem.origin.is_assumed)


class Status(StrEnum):
    """Whether a remedy of a public guide still works."""

    WORKS = "works"
    REPLACED = "replaced"  # another setting does it today
    OBSOLETE = "obsolete"  # no longer needed, or without effect
    IMPOSSIBLE = "impossible"  # never worked, or would change what is trained


class Advice(Value, frozen=True):
    """A remedy of the public guides and its status in the framework's current code."""

    remedy: str  # a name of autotune.policies.remedies.ladder, otherwise the guide's own words
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

    `orchestrator/annotate/tracker_runs.py` defines the keys of `place`.
    """

    tracker: Tracker
    place: dict[str, str] = {}  # from the settings; keys that they do not set are left out
    lines: tuple[str, ...] = ()  # log lines that complete it: `Saving tensorboard log to {folder}.`


class Prompts(Value, frozen=True, kw_only=True):
    """The training's prompt data, as named by the job's settings."""

    files: tuple[str, ...]  # paths, or names on a hub
    field: str  # the field of a row with the prompt: a text or chat messages


def _typed(value: Any) -> str:
    """Return a value as YAML; a text gets quotes only where YAML would read it as another type."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT:
        return value
    return msgspec.json.encode(value).decode()


class Framework(Protocol):
    """What to run: pure knowledge of one framework, in a folder of `frameworks/`.

    Methods with a body are defaults.
    """

    name: str
    saves_by_time: bool  # autotune's default checkpoint interval is in seconds, otherwise in steps
    announces_end: bool  # it prints a line at the end of training; exit code 0 without it is no success
    # The end line is printed only on success, so that fewer steps than expected are no failure.
    done_is_final: bool = False

    distribution: str = ""  # the package whose metadata gives the installed version
    version_file: str = ""  # the file of a checkout that contains only the version
    releases: tuple[str, ...] = ()  # with facts on record; empty if the framework has no releases
    modules: tuple[str, ...] = ()  # that the interpreter must import on every node
    builds_on: str = ""  # the key of a config file that names the files it extends
    # Pattern of a setting that autotune adds to an attempt's command -> why.
    reasons: ClassVar[Mapping[str, str]] = {}
    passes_settings: bool = True  # whether the command's words are the job's settings
    loss: str = ""  # name of the loss among a step's metrics; empty: it prints none
    longest_request: str = ""  # the setting of the longest request that vLLM serves; empty: it has none
    without_critic: ClassVar[Mapping[str, Any]] = {}  # settings of a job that trains no critic
    environment_settings: tuple[str, ...] = ()  # settings that are environment variables of the job

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Remedies of public guides that no knob covers, or that the framework's current code contradicts."""
        return ()

    @property
    def scoring_settings(self) -> Mapping[str, str]:
        """By knob, the setting of passes that compute log-probs, where training has another one."""
        return {}

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Starting settings from a public guide, by name."""
        return {}

    def settings_of(self, job: Job, component: Component, text: str) -> Mapping[str, str] | None:
        """Return, by knob, the settings of a model other than the actor; None if the actor's settings apply.

        `text`: the job's log, whose stack frames show which model ran in which release's workers.
        """
        return None

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's own settings."""

    def modules_of(self, job: Job) -> tuple[str, ...]:
        """Return the modules that the job's interpreter must import, the framework's own first."""
        return self.modules

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return the names to look up in the installed framework's code; None if there are none."""
        return None

    def foreign(self, job: Job) -> tuple[str, ...]:
        """Return the settings that no release on record has: the job runs a fork."""
        return ()

    def recorded_version(self, job: Job) -> str:
        """Return the release on record that stands for the job's own; empty: the nearest of `releases`."""
        return ""

    def release_by_settings(self, job: Job) -> str:
        """Return the release on record that the names of a job's settings imply; empty if none."""
        return ""

    def defaults(self, job: Job) -> Mapping[str, Any]:
        """Return the defaults on record of settings that the job does not set, in its release."""
        return {}

    def lacking(self, job: Job) -> tuple[str, ...]:
        """Return the job's settings that its release does not have, by the facts on record."""
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
        """Return the model's shape if the settings give it, otherwise `job.shape`."""
        return job.shape

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return what the policies need to know of the job; its shape may be unknown."""

    def gpus(self, job: Job) -> int | None:
        """Return how many GPUs the job's settings request; None if it uses what the cluster has."""
        return None

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job with settings for other GPUs; None if its layout is unknown."""
        return None

    def training(self, job: Job) -> Training:
        """Return the settings that define what is trained, as far as the job states them."""
        return Training()

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render an attempt's command; in argv `{python}` is the interpreter, `{attempt}` its folder."""

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the framework settings, under its own names, that apply `knobs`.

        Only those that differ from the job as written.
        """

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return the experiment trackers that the job's settings enable."""
        return ()

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as a user of the framework types them: overrides, flags or YAML lines."""
        return tuple(f"{name}: {_typed(value)}" for name, value in settings.items())

    def word(self, name: str, value: Any) -> str:
        """Return one setting as a command line has it."""
        (word, *_) = self.words({name: value}) or ("",)
        is_whole = re.fullmatch(rf"[+-]*{re.escape(name.lstrip('+-'))}([=\s].*)?", word, re.DOTALL)
        return word if is_whole and not word.startswith(name + " ") else f"--{name} {show_value(value)}"

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings that the head of a log prints, under the framework's own names."""
        return {}

    def marker(self, line: str) -> Marker | None:
        """Return the progress that a log line reports, if any."""

    def marks(self, text: bytes) -> bool:
        """Return whether any line of a UTF-8 text may report progress; if not, its lines need no parsing."""
        return True

    def last_step(self, job: Job) -> int | None:
        """Return the last step of the training if the settings name it."""
        return None

    def replay(self, before: Job, after: Job) -> Command | None:
        """Return the command that trains the same samples under both settings and compares them, if any.

        Its last output line is a `Comparison` as JSON. It needs no cluster and no GPU, and runs no code that
        the jobs name.
        """
        return None

    def can_force_longest(self, job: Job) -> bool:
        """Return whether a trial can force every sequence to its maximum length."""
        return False

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job as a trial of `steps` steps with its own names, folders and loggers.

        `longest` forces every sequence to its maximum length if the framework can.
        """

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return which late events a rehearsal of the job covers; empty if it cannot be rehearsed."""
        return ()

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return the job as a part of its rehearsal: a trial that also saves and validates.

        It writes checkpoints only below `folder`, which both parts share. Called only if `meets` is not
        empty.
        """
        return self.trial(job, folder=folder, steps=STEPS[part], longest=longest)


OWN_SOURCE = "autotune"  # source of autotune's own records; job output never has it


class Chunk(Value, frozen=True, kw_only=True):
    """New bytes of one log; the source of the framework's own output is ''."""

    source: str
    data: bytes
    file: str = ""  # a name of the file that stays valid after the handle; empty: none
    end: int = 0  # offset in the file after `data`
    dropped: int = 0  # bytes before `data` that were lost unread


class Exit(Value, frozen=True, kw_only=True):
    """How the framework's main process ended."""

    code: int | None = None
    signal: int | None = None
    at: float = 0.0  # Unix seconds
    ran_s: float | None = None  # seconds by the monotonic clock; None: unknown

    @property
    def killed_by(self) -> int | None:
        """The signal that ended it; a shell reports signal n of its child as exit code 128 + n."""
        if self.signal is None and self.code is not None and self.code > 128:
            return self.code - 128
        return self.signal


class Observed(Value, frozen=True, kw_only=True):
    """New data since the last poll; data of an unresponsive node arrives once it answers again."""

    chunks: tuple[Chunk, ...] = ()
    samples: tuple[Sample, ...] = ()
    exit: Exit | None = None  # repeated by every later poll
    ending: bool = False  # the process has exited; its last output is still being read
    lost: str = ""  # why the attempt is lost: its supervisor, one of its nodes or the cluster is gone
    killed_for_memory: tuple[str, ...] = ()  # Ray's message if its memory monitor killed the supervisor
    silent_s: float = 0.0  # seconds without an answer of the supervisor; unrelated to the job's own output
    behind: bool = False  # more data can be read immediately
    notes: tuple[str, ...] = ()  # lines for the user: a node stopped answering, answers again, joined or left


class Drain(Value, frozen=True, kw_only=True):
    """Whether the memory of an ended attempt was released."""

    clear: bool
    seconds: float
    held: str = ""  # who still holds memory, with pid and user
    foreign: bool = False  # only GPU memory is held, and no process of the attempt is left
    unknown: str = ""  # what did not answer, so that its memory is unknown


class Capacity(Value, frozen=True, kw_only=True):
    """How many of the nodes that a job needs a cluster has."""

    ready: bool  # all nodes are there and their GPUs are free
    nodes: int  # number of nodes, free or not
    wanted: int
    gpus: int  # per node; 0: none needed
    note: str = ""  # what the cluster's autoscaler is doing or why it fails


class Handle(Protocol):
    """One attempt, wherever it runs."""

    def poll(self) -> Observed:
        """Return what is new, after seconds at most; after an attach, what follows its offsets."""

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Confirm that files are recorded up to these offsets, so that an attach needs no earlier bytes."""

    def stop(self, *, grace_s: float) -> float:
        """Stop the attempt on every node that answers and return the seconds it took; safe to repeat.

        SIGTERM first, SIGKILL after `grace_s`. Raises Unreachable if no node answers.
        """

    def drain(self, *, timeout_s: float) -> Drain:
        """Kill what is left of the attempt and wait until all its memory is released."""

    def release(self) -> None:
        """End the attempt's supervisor and samplers; the handle cannot be used afterwards."""


class Runner(Protocol):
    """Where attempts run."""

    @property
    def address(self) -> str:
        """The address at which other processes reach the cluster."""

    @property
    def note(self) -> str:
        """A line for the user about the chosen cluster; empty if the job names it."""

    def capacity(self, *, gpus: int | None, joining: bool) -> Capacity | None:
        """Request the nodes that the job needs and return how many are there; None if no more can join.

        `gpus` is the number per node, None if it follows the nodes. Nodes can join a cluster with an
        autoscaler, and any cluster if `joining`. Raises Unreachable when the cluster does not answer.
        """

    def withdraw(self) -> None:
        """Stop requesting nodes; those that joined for the job are kept until `close`."""

    def cluster(self) -> Cluster:
        """Return the cluster as measured."""

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> Handle:
        """Start an attempt; raises Unreachable if the cluster cannot run it."""

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> Handle | None:
        """Return the attempt that a supervisor still runs, if any.

        Its files are read from the offsets in `read`, others from the start.
        """

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """Kill the processes of a run that have no live supervisor; return which they were."""

    def end_all(self, *, run: str) -> tuple[str, ...]:
        """Kill every process of a run on every node; return those that survive SIGKILL.

        Raises Unreachable, naming the nodes, if some do not answer.
        """

    def close(self) -> None:
        """Disconnect; a local cluster that autotune started ends."""


class Unreachable(Exception):  # noqa: N818 - a state of the world, named as the user reads it
    """The cluster cannot be used: it does not answer, has too few GPUs or no supervisor."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
