"""The nouns of the product: every value that passes between its parts, frozen and serialisable."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from autotune.policies.values.model import Layout as Layout
from autotune.policies.values.model import Model as Model
from autotune.policies.values.value import Value as Value


class Cause(StrEnum):
    """Why a run ended; causes are kept apart because their cures are opposite."""

    GPU_OOM = "gpu-oom"
    HOST_OOM = "host-oom"
    KV_POOL = "kv-pool"  # a token pool ran dry and crashed
    POOL_TOO_SMALL = "pool-too-small"  # a start-up refusal: the pool must grow
    SHM = "shm"
    OBJECT_STORE = "object-store"
    DISK = "disk"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"
    CONFIG = "config"
    CODE = "code"
    UNKNOWN = "unknown"

    @property
    def is_memory(self) -> bool:
        """Whether some memory was too small for the configuration."""
        return self in _RESOURCES

    @property
    def is_oom(self) -> bool:
        """Whether memory was exhausted at run time."""
        return self.is_memory and self is not Cause.POOL_TOO_SMALL

    @property
    def resource(self) -> str:
        """The memory concerned: gpu, host, gpu_pool, shm, object_store or none."""
        return _RESOURCES.get(self, "none")


_RESOURCES = {
    Cause.GPU_OOM: "gpu",
    Cause.HOST_OOM: "host",
    Cause.KV_POOL: "gpu_pool",
    Cause.POOL_TOO_SMALL: "gpu_pool",
    Cause.SHM: "shm",
    Cause.OBJECT_STORE: "object_store",
}
# Share of a node's memory at which Ray kills processes.
HOST_LIMIT = 0.95


class Phase(StrEnum):
    """What the job was doing; validation is `rollout`, wake-up of an engine is `weight_sync`."""

    INIT = "init"
    ROLLOUT_INIT = "rollout_init"
    ROLLOUT = "rollout"
    LOG_PROB = "log_prob"  # also critic values, reference, scoring
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    WEIGHT_SYNC = "weight_sync"
    COMM = "comm"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    NONE = "none"


class Component(StrEnum):
    """Which part of the job failed."""

    TRAINER = "trainer"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"
    ROLLOUT = "rollout"
    DRIVER = "driver"
    DATA = "data"
    UNKNOWN = "unknown"


class Effect(StrEnum):
    """How far a change may alter the numbers; nothing stronger than NUMERIC is ever applied."""

    EXACT = "exact"  # same update for the same samples up to summation order
    NUMERIC = "numeric"  # rounding: fused kernels, CPU Adam


class Placement(StrEnum):
    """Whether training and generation share the devices."""

    COLOCATED = "colocated"
    SEPARATE = "separate"
    ASYNCHRONOUS = "asynchronous"


# --------------------------------------------------------------------------- the job


class ClusterSpec(Value, frozen=True, kw_only=True):
    """`cluster:` of a job; null sizes are measured."""

    address: str | None = None  # None: an existing cluster, else our own; "auto", "local" or host:port
    nodes: int = 1
    gpus_per_node: int | None = None  # None: as many as the cluster reports
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None


class Then(StrEnum):
    """What follows the goal."""

    CONTINUE = "continue"
    STOP = "stop"


class Goal(Value, frozen=True, kw_only=True):
    """`goal:` of a job: `steps` consecutive steps with `headroom` of every memory free."""

    steps: int = 20
    headroom: float = 0.05  # share of capacity
    then: Then = Then.CONTINUE


class Preflight(StrEnum):
    """What an estimate may do before the first launch."""

    APPLY = "apply"
    ADVISE = "advise"
    OFF = "off"


# What `save_every: auto` means: the rarer of the two.
SAVE_STEPS, SAVE_S = 10, 1200


class Recovery(Value, frozen=True, kw_only=True):
    """`recovery:` of a job: budgets and permissions."""

    relaunches: int = 12
    infrastructure_retries: int = 3
    silence_s: float | None = None  # None: the rule of DESIGN: max(15 min, 5 x median step)
    allow: tuple[Effect, ...] = (Effect.EXACT, Effect.NUMERIC)
    deny: tuple[str, ...] = ()  # remedy or knob names
    preflight: Preflight = Preflight.APPLY
    climb: bool = False
    save_every: int | None = None  # steps; None: auto
    duration_s: float | None = None


class Search(Value, frozen=True, kw_only=True):
    """`search:` of a job."""

    trials: int = 40
    duration_s: float = 28800.0
    probe_steps: int = 5
    confirm: int = 2
    parallel: int = 1
    vary: tuple[str, ...] | None = None
    min_gain: float = 0.01


class Job(Value, frozen=True, kw_only=True):
    """A parsed job.yaml; `settings` are the framework's own, under its own names."""

    name: str
    framework: str
    command: tuple[str, ...] = ()
    python: str | None = None
    settings: dict[str, Any] = {}
    config: str | None = None  # path of the framework's own YAML file
    model: str | dict[str, int] | None = None
    shape: Model | None = None  # read from `model`, or from the model that the settings name
    document: dict[str, Any] = {}  # what the file `config` holds
    cluster: ClusterSpec = ClusterSpec()
    env: dict[str, str] = {}
    workdir: str = "."  # absolute once parsed
    resume: bool = False
    goal: Goal = Goal()
    recovery: Recovery = Recovery()
    search: Search = Search()


class Cluster(Value, frozen=True, kw_only=True):
    """What was measured of the cluster before the first launch."""

    address: str  # GCS address host:port, or "local"
    nodes: int
    gpus_per_node: int
    gpu_memory_bytes: int  # smallest card; 0 without GPUs
    host_memory_bytes: int  # smallest node
    gpu_name: str = ""


# --------------------------------------------------------------------------- knobs


class Knobs(Value, frozen=True, kw_only=True):
    """The closed vocabulary of what may change; None means the framework's own default."""

    # rollout
    concurrency: int | None = None
    memory_fraction: float | None = None
    rollout_tensor_parallel: int | None = None
    cuda_graphs: str | None = None  # full | limited | off
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    # training
    tokens_per_microbatch: int | None = None
    microbatch_size: int | None = None
    dynamic_batching: bool | None = None
    recompute: str | None = None  # off | selective | full
    activation_offload: bool | None = None
    param_offload: bool | None = None
    grad_offload: bool | None = None
    optimizer_offload: bool | None = None
    optimizer_offload_fraction: float | None = None
    optimizer_offload_overlap: bool | None = None
    sequence_parallel: int | None = None
    context_parallel: int | None = None
    tensor_parallel: int | None = None
    sharding: str | None = None  # fsdp | fsdp2 | ...
    fused_kernels: bool | None = None
    loss_recompute: bool | None = None
    # scoring
    logprob_tokens: int | None = None
    logprob_chunk: int | None = None
    entropy_chunking: bool | None = None
    entropy_recompute: bool | None = None
    # weight sync
    sync_mode: str | None = None  # memory | disk
    sync_buffer: int | None = None  # bytes
    # host
    host_allocator: str | None = None
    weights_backup: bool | None = None
    dataloader_workers: int | None = None
    # allocator
    allocator: str | None = None  # default | expandable
    memory_margin: int | None = None  # bytes
    # run
    restart_every: int | None = None  # steps
    # diagnostics
    memory_snapshot: bool | None = None
    nccl_memory_check: bool | None = None
    memory_profile: bool | None = None


Setting: TypeAlias = int | float | bool | str | None
KNOBS: tuple[str, ...] = tuple(Knobs.__struct_fields__)


def changed(before: Knobs, after: Knobs) -> dict[str, tuple[Setting, Setting]]:
    """Return the knobs in which `after` differs, as name -> (before, after)."""
    values = zip(KNOBS, msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True)
    return {name: (old, new) for name, old, new in values if old != new}


# --------------------------------------------------------------------------- profile


class Grid(Value, frozen=True, kw_only=True):
    """Legal values of a knob: an explicit list, or a range with a step (`multiple`)."""

    values: tuple[int | float | bool | str, ...] = ()  # in the order: more memory -> less memory
    minimum: float | None = None
    maximum: float | None = None
    multiple: float | None = None


class Support(Value, frozen=True, kw_only=True):
    """How a framework offers a knob."""

    setting: str  # the framework's own name of it
    grid: Grid
    effect: Effect = Effect.EXACT
    phases: tuple[Phase, ...] = ()  # in which it changes the device memory in use; empty: in all


class AtLeast(Value, frozen=True, kw_only=True, tag="at_least", tag_field="kind"):
    """`knob` may not go below `value`."""

    knob: str
    value: float
    why: str


class AtMost(Value, frozen=True, kw_only=True, tag="at_most", tag_field="kind"):
    """`knob` may not go above `value`."""

    knob: str
    value: float
    why: str


class Divides(Value, frozen=True, kw_only=True, tag="divides", tag_field="kind"):
    """The value of `knob` must divide `of`."""

    knob: str
    of: int
    why: str


class Requires(Value, frozen=True, kw_only=True, tag="requires", tag_field="kind"):
    """`knob` = `value` is legal only while `other` is one of `values`."""

    knob: str
    value: int | float | bool | str
    other: str
    values: tuple[int | float | bool | str | None, ...]
    why: str


class FixedDuringRun(Value, frozen=True, kw_only=True, tag="fixed_during_run", tag_field="kind"):
    """Changing `knob` would break resuming from a checkpoint."""

    knob: str
    why: str


Constraint: TypeAlias = AtLeast | AtMost | Divides | Requires | FixedDuringRun


class Profile(Value, frozen=True, kw_only=True):
    """What a framework tells the policies about one job: a pure value."""

    framework: str
    knobs: Knobs  # the job's own, with the framework's defaults filled in
    supported: dict[str, Support]
    unsupported: dict[str, str] = {}  # knob -> why not
    constraints: tuple[Constraint, ...] = ()
    placement: Placement = Placement.COLOCATED
    resident: dict[str, tuple[str, ...]] = {}  # phase -> components that hold device memory in it
    engine: str = "sglang"
    engine_version: str = ""
    longest_sequence: int | None = None  # tokens
    trainer_budget_bytes: int | None = None  # device budget of a trainer rank without a GPU
    engine_budget_bytes: int | None = None
    resumable: bool = True
    layout: Layout = Layout()
    warnings: tuple[str, ...] = ()  # what the user should know before the launch, one sentence each


# --------------------------------------------------------------------------- launching


class File(Value, frozen=True, kw_only=True):
    """A small text file that an attempt needs beside its command."""

    name: str
    text: str


class Command(Value, frozen=True, kw_only=True):
    """What a framework renders: printable, golden-testable, started by a runner.

    `{attempt}` in argv, env and file texts stands for the folder that holds `files`; the runner fills it in
    on the node where the command starts, and `command.sh` does so for a run by hand.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str = "."
    files: tuple[File, ...] = ()
    ray_native: bool = True  # takes its GPUs from Ray itself
