"""What is observed of a run: samples of memory, markers in its logs and outcomes."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.value import Value

HOST = "host"  # names the memory of a node; a phase names that of its devices
_OF_NODES = {HOST: "host memory", "shm": "shared memory", "object_store": "Ray's object store"}
_OWNERS = {
    Component.ROLLOUT: "engine",
    Component.REF: "reference model",
    Component.REWARD: "reward model",
    Component.DATA: "data workers",
}


class ProcessMemory(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of one process of the attempt."""

    pid: int
    name: str
    rss_bytes: int
    cpu_share: float = 0.0  # cores used by it and its descendants since the last sample
    gpu: bool = False  # it or a descendant is known to run on a GPU
    limit_bytes: int = 0  # its own limit (`ulimit -v`, `ulimit -d`); 0: none
    limited_bytes: int = 0  # what counts against that limit


class GpuMemory(Value, frozen=True, kw_only=True):
    """Memory of one GPU, as NVML reports it."""

    index: int
    used_bytes: int
    total_bytes: int
    ours_bytes: int  # held by processes of the attempt; 0 in containers, where NVML may not name them
    of_attempt: bool = False  # whether the attempt is known to run on it


class Sample(Value, frozen=True, kw_only=True):
    """One reading of one node."""

    at: float  # Unix seconds
    node: str
    host_used_bytes: int
    host_total_bytes: int
    gpus: tuple[GpuMemory, ...] = ()
    processes: tuple[ProcessMemory, ...] = ()
    cpu_share: float = 0.0  # cores used by the attempt's processes since the last sample
    gpu_share: float = 0.0  # highest utilisation of a GPU, 0 to 1; only of the attempt's GPUs if known


class Peak(Value, frozen=True, kw_only=True):
    """Largest use of a memory in a phase."""

    used_bytes: int  # the most in use at once
    capacity_bytes: int  # 0: unlimited
    component: Component = Component.TRAINER
    upper_bound: bool = False  # a caching allocator's reservation, not what is in use


class MemoryGrowth(Value, frozen=True, kw_only=True):
    """Memory that a process gains with its steps until it runs out; a fresh process begins without it."""

    memory: str  # host, shm or object_store, or the phase in which a GPU ran out
    steps: int  # that one process completes before it runs out
    per_step_bytes: int = 0  # 0: not measured
    component: Component = Component.UNKNOWN
    process: str = ""  # the process that grows most; empty: unknown
    own_limit: bool = False  # the process runs out of a limit of its own, not of the host's memory

    @property
    def on_gpu(self) -> bool:
        """Whether the memory is that of GPUs, not of a node."""
        return self.memory not in _OF_NODES

    @property
    def text(self) -> str:
        """What grew, by how much per step and in which process."""
        where = "" if self.memory == Phase.NONE else f" in {self.memory}"
        memory = _OF_NODES.get(self.memory, f"GPU memory{where}")
        memory = "memory" if self.own_limit else memory
        known = self.component is not Component.UNKNOWN
        owner = f" of the {_OWNERS.get(self.component, self.component.value)}" if known else ""
        owner = f" of process {self.process}" if self.process else owner
        if not self.per_step_bytes:
            return f"{memory}{owner} ran out after {self.steps} good steps of a process"
        rate = show_gib(self.per_step_bytes)
        return f"{memory}{owner} grows by {rate} a step and runs out after {self.steps} steps of a process"


class PhaseStarted(Value, frozen=True, kw_only=True, tag="phase_started", tag_field="kind"):
    """A marker: a phase starts."""

    phase: Phase
    step: int


class PhaseEnded(Value, frozen=True, kw_only=True, tag="phase_ended", tag_field="kind"):
    """A marker: a phase is over."""

    phase: Phase
    step: int
    seconds: float
    peak: Peak | None = None


class StepDone(Value, frozen=True, kw_only=True, tag="step_done", tag_field="kind"):
    """A marker: a training step is complete."""

    step: int
    of: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    metrics: dict[str, float] = {}
    peaks: dict[str, Peak] = {}  # phase -> peak, if the line of the step reports them
    saved: bool = False  # the line says that a checkpoint after this step is complete


class StepTokens(Value, frozen=True, kw_only=True, tag="step_tokens", tag_field="kind"):
    """A marker: the tokens that the last completed step trained on, prompts included, of all ranks."""

    tokens: float


class UpdateDone(Value, frozen=True, kw_only=True, tag="update_done", tag_field="kind"):
    """A marker: one update of the weights in the current step is complete."""

    loss: float


class Resumed(Value, frozen=True, kw_only=True, tag="resumed", tag_field="kind"):
    """A marker: the job continues from a checkpoint written after `step`."""

    step: int


class Saved(Value, frozen=True, kw_only=True, tag="saved", tag_field="kind"):
    """A marker: a checkpoint after `step` is complete; None: after the current step, or the last."""

    step: int | None
    last: bool = False  # without `step`: it is after the last completed step


class TrainingDone(Value, frozen=True, kw_only=True, tag="training_done", tag_field="kind"):
    """A marker: the job reports that it is finished."""

    step: int


Marker: TypeAlias = (
    PhaseStarted | PhaseEnded | StepDone | StepTokens | UpdateDone | Resumed | Saved | TrainingDone
)


class Completed(Value, frozen=True, kw_only=True, tag="completed", tag_field="outcome"):
    """The job ran to its end."""


class Crashed(Value, frozen=True, kw_only=True, tag="crashed", tag_field="outcome"):
    """The job ended by itself with an error."""

    exit_code: int | None = None  # of the main process; None: killed by a signal, or unknown
    signal: int | None = None  # number of the signal that killed it; None: none, or unknown

    @property
    def text(self) -> str:
        """How it ended, in words."""
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        if self.exit_code == 0:
            return "exited with code 0 before its last step"
        return f"exited with code {self.exit_code}" if self.exit_code is not None else "ended"


class Hung(Value, frozen=True, kw_only=True, tag="hung", tag_field="outcome"):
    """The job was silent, or without a step, for longer than allowed and was stopped."""

    silent_s: float  # seconds since its last output or work; 0 if no driver was at work then
    reason: str = ""  # what it lacked, and for how long


class Lost(Value, frozen=True, kw_only=True, tag="lost", tag_field="outcome"):
    """The cluster took the job away; costs no remedy."""

    reason: str  # in words, such as the node that is gone
    killed: bool = False  # a bare SIGKILL: nothing says who sent it


class Cancelled(Value, frozen=True, kw_only=True, tag="cancelled", tag_field="outcome"):
    """We or the user stopped the job; a failure seen before the stop decides what follows."""

    by: str  # user | failure | goal | climb | forecast


Outcome: TypeAlias = Completed | Crashed | Hung | Lost | Cancelled


class Unit(StrEnum):
    """What a speed counts."""

    TOKENS = "tok/s"
    STEPS = "steps/s"


class Speed(Value, frozen=True, kw_only=True):
    """The measured speed of steps."""

    per_second: float
    unit: Unit
    noise: float = 0.0  # relative standard error
