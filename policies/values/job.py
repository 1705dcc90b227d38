"""A parsed job.yaml, and the cluster that it runs on."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, TypeAlias

import msgspec

from autotune.policies.values.architecture.model import Model
from autotune.policies.values.provenance import OwnCode
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value


class ClusterSpec(Value, frozen=True, kw_only=True):
    """`cluster:` of a job; null sizes are measured."""

    address: str | None = None  # None: an existing cluster, otherwise our own; "auto", "local" or host:port
    nodes: int = 1  # nodes that the job uses
    gpus_per_node: int | None = None  # None: as many as the cluster reports
    gpu_memory_bytes: int | None = None  # memory of one GPU; None: measured
    host_memory_bytes: int | None = None  # host memory of one node; None: measured on the cluster
    gpu: str | None = None  # a name of the table of GPUs, for decisions made without the cluster
    wait_for_nodes_s: float | None = None  # None: 30 min if an autoscaler starts nodes, otherwise not at all


class Then(StrEnum):
    """What follows the goal."""

    CONTINUE = "continue"
    STOP = "stop"


class Goal(Value, frozen=True, kw_only=True):
    """`goal:` of a job: `steps` consecutive steps with `headroom` of every memory free."""

    steps: int = 20  # consecutive training steps without a failure that make a configuration stable
    headroom: float = 0.05  # share of capacity
    then: Then = Then.CONTINUE


class Preflight(StrEnum):
    """What an estimate may do before the first launch."""

    APPLY = "apply"
    ADVISE = "advise"
    OFF = "off"


class Forecasting(StrEnum):
    """What is done about memory that grows from step to step."""

    OFF = "off"
    TELL = "tell"
    ACT = "act"


# `save_every: auto` means every SAVE_STEPS steps or every SAVE_S seconds, whichever is rarer.
SAVE_STEPS, SAVE_S = 10, 1200


ASSUMED_SHAPE = "assumed"  # `shape_from` begins so if the shape follows from a name alone


class MeanLengths(Value, frozen=True, kw_only=True):
    """`lengths:` of a job: mean tokens of a sequence; None if the user does not know them."""

    # prompts; None: measured in the job's data, otherwise assumed from the longest allowed
    prompt: int | None = None
    response: int | None = None  # responses, all turns together; None: assumed from the longest allowed


class PromptSample(Value, frozen=True, kw_only=True):
    """The length of a training's prompts as a sample of its data shows it."""

    mean: int  # tokens, computed from the bytes of their text
    source: str  # in words


class Recovery(Value, frozen=True, kw_only=True):
    """`recovery:` of a job: budgets and permissions."""

    relaunches: int = 12  # maximum of relaunches after failures of the job, since it last saved new steps
    # maximum of relaunches after losses of a node, since it last saved new steps
    infrastructure_retries: int = 3
    silence_s: float | None = None  # None: 45 min, after the first step max(15 min, 5 x median step)
    stall_s: float | Literal["off"] | None = None  # None: by work, see the driver's hang detector
    allow: tuple[Effect, ...] = (Effect.EXACT, Effect.NUMERIC)
    deny: tuple[str, ...] = ()  # remedy or knob names
    preflight: Preflight = Preflight.APPLY
    # whether a job that reached its goal is stopped to continue with a faster configuration
    climb: bool = False
    forecast: Forecasting = Forecasting.TELL
    in_place: bool | None = None  # None: if the framework can
    save_every: int | None = None  # steps; None: auto
    # time of the run, in seconds, after which no relaunch begins; None: no limit
    duration_s: float | None = None


class Search(Value, frozen=True, kw_only=True):
    """`search:` of a job."""

    trials: int = 40  # maximum number of trials
    duration_s: float = 28800.0  # time limit of the search, in seconds
    probe_steps: int = 5  # training steps of a trial
    confirm: int = 2  # runs of the best configuration, of `goal.steps` steps each, before it wins
    parallel: int = 1  # trials that run at the same time
    vary: tuple[str, ...] | None = None  # names of the knobs to vary; None: all that change speed or memory
    min_gain: float = 0.01  # smallest relative gain in throughput that counts as an improvement


class Occasion(StrEnum):
    """What happened to a run, as far as a person waits for it."""

    STABLE = "stable"  # the goal was reached, with a configuration for the first time
    GAVE_UP = "gave-up"  # nothing legal is left to try, or a budget is spent
    FAILED = "failed"  # the job's own failure, or one that is not understood
    FINISHED = "finished"  # the training is complete, or stopped at the goal as asked
    INFRASTRUCTURE = (
        "infrastructure"  # the run waits for a person: cluster, memory, disk or the driver failed
    )


class Notify(Value, frozen=True, kw_only=True):
    """`notify:` of a job: where a person is reached, and about what."""

    on: tuple[Occasion, ...] = tuple(Occasion)
    # argv, run without a shell, with the notification as JSON on stdin; empty: none
    command: tuple[str, ...] = ()
    # URL that receives the notification as JSON by POST; masked if it is a secret; None: no webhook
    webhook: str | None = None
    apprise: tuple[str, ...] = ()  # URLs of the Apprise library


class Tracker(StrEnum):
    """An experiment tracker in whose run an attempt can be annotated."""

    WANDB = "wandb"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


Annotate: TypeAlias = Literal["none", "auto"] | tuple[Tracker, ...]  # auto: every tracker that the job uses


class Launcher(Value, frozen=True, kw_only=True):
    """How the file of a launcher shards a trainer: DeepSpeed's JSON, accelerate's YAML."""

    sharding: str = ""  # zero0 to zero3, fsdp1, fsdp2, multi_gpu for a whole copy per process; empty: unknown
    optimizer_on_host: bool = False  # the file offloads the optimizer's state to host memory
    parameters_on_host: bool = False  # the file offloads the weights to host memory
    processes: int = 0  # of all nodes; 0 if the file does not say
    source: str = ""  # the file, as the job names it; empty without one
    is_json: bool = False  # DeepSpeed's own file: flags of accelerate change nothing in it
    is_assumed: bool = False  # the file cannot be read here: its name suggests the sharding


class Job(Value, frozen=True, kw_only=True):
    """A parsed job.yaml; `settings` are the framework's own, under its own names."""

    name: str  # name of the job, used in every table
    framework: str  # RL framework that runs the job, such as `verl`; `command`: any script
    framework_version: str | None = None  # stated, or detected where the framework is installed
    version_from: str = ""  # where `framework_version` was detected, in words; empty if the job states it
    own_code: OwnCode | None = None  # what was read from the code of the framework that the job runs
    engine_versions: dict[str, str] = {}  # of inference engines that are installed where the job runs
    notes: tuple[str, ...] = ()  # remarks for the user about the job as parsed
    literals: tuple[
        str, ...
    ] = ()  # dotted keys of values that look like placeholders and that the file marks as literal
    unfilled: tuple[str, ...] = ()  # settings that are left out because their placeholders are not filled in
    command: tuple[str, ...] = ()  # argv that starts the framework; empty: the framework's usual one
    server: tuple[str, ...] = ()  # command of the training's inference server, which autotune does not start
    python: str | None = None  # interpreter of the framework; None: the one that runs autotune
    # the framework's own, by name; values of `{env: NAME}` are recorded by name
    settings: dict[str, Any] = {}
    config: str | None = None  # path of the framework's own YAML file
    # folder, `config.json` or hub name, or its shape as a mapping; None: the model that `settings` name
    model: str | dict[str, int | str] | None = None
    shape: Model | None = None  # read from `model`, or from the model that the settings name
    shape_from: str = ""  # where `shape` was read, in words
    document: dict[str, Any] = {}  # the contents of the file `config`
    launcher: Launcher = Launcher()  # from the accelerate or DeepSpeed file that the job names
    cluster: ClusterSpec = ClusterSpec()
    env: dict[str, str] = {}  # environment variables of the job; secret values are masked
    log_limit_bytes: int = 1 << 30  # on disk, of the logs of all attempts of a run
    variables: dict[str, str] = {}  # the values substituted for `{env: NAME}`; never recorded
    workdir: str = "."  # absolute once parsed
    resume: bool = False  # whether the first attempt may continue a checkpoint that is already there
    lengths: MeanLengths = MeanLengths()
    prompts: PromptSample | None = None  # of the data that the settings name, if `lengths` states no mean
    goal: Goal = Goal()
    recovery: Recovery = Recovery()
    search: Search = Search()
    notify: Notify = Notify()
    # trackers in which each attempt is annotated; `auto`: those that the job uses
    annotate: Annotate = "none"

    @property
    def assumes_shape(self) -> bool:
        """Whether the shape of the model follows from a name alone."""
        return self.shape_from.startswith(ASSUMED_SHAPE)

    def with_notes(self, *notes: str) -> Job:
        """Return the job with more notes for its user."""
        return msgspec.structs.replace(self, notes=(*self.notes, *notes))


# Why `expandable_segments` of PYTORCH_CUDA_ALLOC_CONF has no effect, by what the name of a device contains.
_OTHER_MAKERS = (
    ("amd", "PyTorch releases before March 2026 ignore expandable segments on ROCm (pytorch/pytorch#177974)"),
    (
        "ascend",
        "Ascend reads PYTORCH_NPU_ALLOC_CONF: write expandable_segments:True there, in the job's `env`",
    ),
    ("gaudi", "Gaudi does not use the CUDA allocator of PyTorch"),
    ("intel", "Intel GPUs do not use the CUDA allocator of PyTorch; PYTORCH_ALLOC_CONF reaches theirs"),
)


def no_expandable_segments(gpu_name: str) -> str:
    """Return why expandable segments have no effect on a GPU; empty if they may have, as on NVIDIA's."""
    name = gpu_name.lower()
    return next((why for maker, why in _OTHER_MAKERS if maker in name), "")


class Cluster(Value, frozen=True, kw_only=True):
    """What was measured of the cluster before the first launch."""

    address: str  # GCS address host:port, or "local"
    nodes: int  # only those with GPUs, if there are any
    gpus_per_node: int  # fewest that a node offers; 0 without GPUs
    gpu_memory_bytes: int  # of the smallest GPU; 0 without GPUs
    host_memory_bytes: int  # of the smallest node
    gpu_name: str = ""  # model of the GPUs, such as `NVIDIA H100 80GB HBM3`; empty: unknown

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        return self.nodes * self.gpus_per_node
