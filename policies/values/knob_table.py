"""KNOB_TABLE: the framework-independent facts of a knob: unit, order of values, memory that it saves."""

from __future__ import annotations

from enum import Enum, StrEnum
from functools import partial

from autotune.policies.values.failure import ENGINE_PHASES, Cause, Phase
from autotune.policies.values.knobs import Setting
from autotune.policies.values.profile import Placement
from autotune.policies.values.value import Value


class Unit(Enum):
    """The unit of a knob's values."""

    REQUESTS = "requests"
    SEQUENCES = "sequences"
    PASS_TOKENS = "tokens of a pass"  # noqa: S105 - a unit
    CHUNK_TOKENS = "tokens of a chunk"
    LENGTH = "tokens of a sequence"
    RANKS = "ranks"
    PROCESSES = "processes"
    STEPS = "steps"
    BYTES = "bytes"
    SHARE = "share"
    SWITCH = "switch"
    MODE = "mode"


class Part(Enum):
    """The part of a job that a knob belongs to."""

    ENGINE = "engine"
    TRAINER = "trainer"
    WEIGHT_SYNC = "weight sync"
    HOST = "host"  # changes host memory only
    RUN = "run"
    DIAGNOSTICS = "diagnostics"  # changes no memory


class Memory(Enum):
    """A memory that a knob can save."""

    GPU = "gpu"
    HOST = "host"
    POOL = "pool"  # of an engine: the tokens of all running requests
    POOL_AT_START = "pool at start"  # of an engine: one sequence must fit
    GROWTH = "growth"  # what accumulates from step to step


class Way(StrEnum):
    """A direction along the values of a knob: numbers by size, a switch from off to on, modes as listed."""

    DOWN = "lower"
    UP = "raise"


_MEMORY_OF = {
    Cause.GPU_OOM: Memory.GPU,
    Cause.HOST_OOM: Memory.HOST,
    Cause.KV_POOL: Memory.POOL,
    Cause.POOL_TOO_SMALL: Memory.POOL_AT_START,
}


class Condition(Value, frozen=True, kw_only=True):
    """Another knob's values that a knob needs to have an effect."""

    knob: str
    values: tuple[Setting, ...]


class Knob(Value, frozen=True, kw_only=True):
    """One knob of `Knobs`; facts that differ by framework, as legal values, are in `Profile.supported`."""

    name: str
    unit: Unit
    part: Part
    saves: dict[Memory, Way] = {}  # the direction that needs less of a memory; unknown for those left out
    phases: tuple[Phase, ...] = ()  # in which it changes device memory; empty: all
    idle_in: tuple[Phase, ...] = ()  # those of them in which it does not
    modes: tuple[str, ...] = ()  # in order
    unset: str = ""  # the mode if the knob has no value
    follows: str = ""  # the knob whose value applies if this one has none
    only_with: Condition | None = None
    kept_asleep: dict[str, int] = {}  # engine -> bytes, at most, that it keeps on the device while it sleeps
    smallest: float | None = None  # value that a search tries
    largest: float | None = None
    searched: bool = True  # its value may change the speed of a step
    estimated: bool = True  # the estimate distinguishes its values
    last: bool = False  # recovery varies it only where no configuration fits without

    @property
    def order(self) -> tuple[Setting, ...]:
        """The values of a switch or of a mode in order; empty for numbers."""
        return (False, True) if self.unit is Unit.SWITCH else self.modes

    @property
    def default(self) -> Setting:
        """The value that an unset switch or mode amounts to; None for numbers."""
        return False if self.unit is Unit.SWITCH else self.unset or None

    def towards(self, memory: Memory) -> tuple[Setting, ...]:
        """Return the values of a switch or of a mode, from the most memory needed to the least."""
        return self.order[::-1] if self.saves.get(memory) is Way.DOWN else self.order

    def turn(self, memory: Memory) -> str:
        """Return how a memory is saved: lower, raise, more, on, off, the mode to use, or either."""
        way = self.saves.get(memory)
        if self.unit is Unit.SWITCH:
            return "off" if way is Way.DOWN else "on"
        if way is None:
            return "either"
        if self.unit is Unit.MODE:
            most, *_, least = self.towards(memory)
            return "on" if most == "off" else str(least)
        return "more" if self.unit is Unit.RANKS and way is Way.UP else way.value

    def way(self, cause: Cause) -> Way | None:
        """Return the direction that needs less of the memory of a failure; None: unknown, or neither does."""
        memory = _MEMORY_OF.get(cause)
        return None if memory is None else self.saves.get(memory)

    def asks_no_less(self, cause: Cause, before: Setting, after: Setting) -> bool:
        """Return whether `after` certainly needs no less than `before` of the memory of a failure."""
        memory = _MEMORY_OF.get(cause)
        return before == after if memory is None else not self.asks_less(memory, before, after)

    def asks_less(self, memory: Memory, before: Setting, after: Setting) -> bool:
        """Return whether `after` may need less of a memory than `before`."""
        first, second = self._place(before), self._place(after)
        if first is None or second is None or memory not in self.saves:
            return before != after
        return second < first if self.saves[memory] is Way.DOWN else second > first

    def acts(self, cause: Cause, phase: Phase, placement: Placement) -> bool:
        """Return whether it may change the use of the memory that ran out in a phase."""
        colocated = placement is Placement.COLOCATED
        if self.part in (Part.DIAGNOSTICS, Part.RUN):
            return False
        if cause is Cause.HOST_OOM and self.part is Part.ENGINE:
            # Requests exist only during a rollout; ranks are processes, which always exist.
            return self.unit is Unit.RANKS or (Memory.HOST in self.saves and phase in WITH_REQUESTS)
        if cause in (Cause.KV_POOL, Cause.POOL_TOO_SMALL):
            return self.part is Part.ENGINE or (colocated and self.part is Part.TRAINER)
        if cause is not Cause.GPU_OOM:
            return True
        if self.part is Part.ENGINE and colocated:
            return True
        if self.part is Part.TRAINER and not colocated and phase in ENGINE_PHASES:
            return False
        return self.part is not Part.HOST and self.holds(phase)

    def holds(self, phase: Phase) -> bool:
        """Return whether the memory that it changes exists in a phase, on the device or on the host."""
        everywhere = not self.phases or phase is Phase.NONE
        return phase not in self.idle_in and (everywhere or phase in self.phases)

    def _place(self, value: Setting) -> float | None:
        if self.order:
            present = self.default if value is None else value
            return self.order.index(present) if present in self.order else None
        return None if value is None or isinstance(value, str) else float(value)


_WITH_ENGINE = (*ENGINE_PHASES, Phase.WEIGHT_SYNC, Phase.COMM)
WITH_REQUESTS = (Phase.ROLLOUT, Phase.NONE)  # a failure of unknown phase may be one of them
# Phases in which a trainer has its GPU to itself while the engine on it sleeps.
BESIDE_ENGINE = (
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.WEIGHT_SYNC,
    Phase.COMM,
    Phase.CHECKPOINT,
)
_SYNC_PHASES = (Phase.WEIGHT_SYNC, Phase.COMM)
_LOWER = {Memory.GPU: Way.DOWN}
_HIGHER = {Memory.GPU: Way.UP}
_LOWER_BOTH = {Memory.GPU: Way.DOWN, Memory.HOST: Way.DOWN}
_TO_HOST = {Memory.GPU: Way.UP, Memory.HOST: Way.DOWN}
_BY_TOKENS = Condition(knob="dynamic_batching", values=(True, None))
_BY_SEQUENCES = Condition(knob="dynamic_batching", values=(False, None))
_OFFLOADED = Condition(knob="optimizer_offload", values=(True,))

# The update follows the micro-batches, whose activations and logits are freed by then.
_pass_knob = partial(Knob, part=Part.TRAINER, idle_in=(Phase.OPTIMIZER,))
_engine_knob = partial(Knob, part=Part.ENGINE, phases=_WITH_ENGINE)
_diagnostic = partial(Knob, unit=Unit.SWITCH, part=Part.DIAGNOSTICS, searched=False, estimated=False)

ROWS: tuple[Knob, ...] = (
    # --------------------------------------------------------------------- rollout
    _engine_knob(name="concurrency", unit=Unit.REQUESTS, saves=_LOWER_BOTH | {Memory.POOL: Way.DOWN}),
    _engine_knob(
        name="memory_fraction",
        unit=Unit.SHARE,
        saves=_LOWER | {Memory.POOL: Way.UP, Memory.POOL_AT_START: Way.UP},
        smallest=0.1,
        largest=0.95,
    ),
    _engine_knob(name="rollout_tensor_parallel", unit=Unit.RANKS, saves=_HIGHER),
    _engine_knob(
        name="cuda_graphs",
        unit=Unit.MODE,
        saves=_LOWER,
        modes=("off", "limited", "full"),
        unset="full",
        # verl's guide: vLLM frees weights and pool only. Its start-up logs name 0.11 to 0.96 GiB of graphs.
        kept_asleep={"vllm": 1 << 30},
    ),
    _engine_knob(name="max_batched_tokens", unit=Unit.PASS_TOKENS, saves=_LOWER),
    _engine_knob(name="max_model_len", unit=Unit.LENGTH, saves=_LOWER),
    Knob(
        name="engine_sleep",
        unit=Unit.SWITCH,
        part=Part.ENGINE,
        phases=BESIDE_ENGINE,
        saves=_HIGHER,
        searched=False,
    ),
    # --------------------------------------------------------------------- training
    _pass_knob(
        name="tokens_per_microbatch",
        unit=Unit.PASS_TOKENS,
        saves=_LOWER,
        only_with=_BY_TOKENS,
    ),
    _pass_knob(
        name="microbatch_size",
        unit=Unit.SEQUENCES,
        saves=_LOWER_BOTH,
        only_with=_BY_SEQUENCES,
    ),
    _pass_knob(name="dynamic_batching", unit=Unit.SWITCH),
    _pass_knob(
        name="recompute",
        unit=Unit.MODE,
        saves=_HIGHER,
        modes=("off", "selective", "modules", "full"),
        unset="off",
    ),
    _pass_knob(name="activation_offload", unit=Unit.SWITCH, saves=_TO_HOST),
    Knob(name="param_offload", unit=Unit.SWITCH, part=Part.TRAINER, saves=_TO_HOST),
    Knob(name="grad_offload", unit=Unit.SWITCH, part=Part.TRAINER, saves=_TO_HOST),
    Knob(name="optimizer_offload", unit=Unit.SWITCH, part=Part.TRAINER, saves=_TO_HOST),
    Knob(
        name="optimizer_offload_fraction",
        unit=Unit.SHARE,
        part=Part.TRAINER,
        saves=_TO_HOST,
        only_with=_OFFLOADED,
        smallest=0.1,
        largest=1.0,
        estimated=False,  # a degree of `optimizer_offload`, which is
    ),
    Knob(
        name="optimizer_offload_overlap",
        unit=Unit.SWITCH,
        part=Part.TRAINER,
        only_with=_OFFLOADED,
    ),
    Knob(name="sequence_parallel", unit=Unit.RANKS, part=Part.TRAINER, saves=_HIGHER),
    Knob(name="context_parallel", unit=Unit.RANKS, part=Part.TRAINER, saves=_HIGHER),
    Knob(name="tensor_parallel", unit=Unit.RANKS, part=Part.TRAINER, saves=_HIGHER),
    Knob(name="expert_parallel", unit=Unit.RANKS, part=Part.TRAINER, saves=_HIGHER, searched=False),
    Knob(
        name="pipeline_parallel",
        unit=Unit.RANKS,
        part=Part.TRAINER,
        saves=_HIGHER,
        searched=False,
        last=True,
    ),
    Knob(name="sharding", unit=Unit.MODE, part=Part.TRAINER, searched=False),
    Knob(name="shard_group", unit=Unit.RANKS, part=Part.TRAINER, saves=_HIGHER, searched=False),
    _pass_knob(name="reshard_after_forward", unit=Unit.SWITCH, saves=_HIGHER, searched=False),
    _pass_knob(name="fused_kernels", unit=Unit.SWITCH, saves=_HIGHER),
    _pass_knob(name="loss_recompute", unit=Unit.SWITCH, saves=_HIGHER),
    Knob(
        name="memory_efficient_load",
        unit=Unit.SWITCH,
        part=Part.TRAINER,
        phases=(Phase.INIT, Phase.RESUME),
        saves=_TO_HOST,
        searched=False,
    ),
    # --------------------------------------------------------------------- log-probs
    _pass_knob(
        name="logprob_tokens",
        unit=Unit.PASS_TOKENS,
        phases=(Phase.LOG_PROB,),
        saves=_LOWER,
        follows="tokens_per_microbatch",
    ),
    _pass_knob(name="logprob_chunk", unit=Unit.CHUNK_TOKENS, saves=_LOWER, smallest=256),
    _pass_knob(name="entropy_chunking", unit=Unit.SWITCH, saves=_HIGHER),
    _pass_knob(name="entropy_recompute", unit=Unit.SWITCH, saves=_HIGHER),
    # --------------------------------------------------------------------- weight sync
    Knob(
        name="sync_mode",
        unit=Unit.MODE,
        part=Part.WEIGHT_SYNC,
        phases=_SYNC_PHASES,
        saves=_HIGHER,
        modes=("memory", "disk"),
        unset="memory",
    ),
    Knob(
        name="sync_buffer",
        unit=Unit.BYTES,
        part=Part.WEIGHT_SYNC,
        phases=_SYNC_PHASES,
        saves=_LOWER,
        only_with=Condition(knob="sync_mode", values=("memory", None)),
        smallest=1 << 20,
    ),
    Knob(
        name="layered_sync",
        unit=Unit.SWITCH,
        part=Part.WEIGHT_SYNC,
        phases=_SYNC_PHASES,
        saves=_HIGHER,
        searched=False,
    ),
    # --------------------------------------------------------------------- host
    Knob(
        name="host_allocator",
        unit=Unit.MODE,
        part=Part.HOST,
        saves={Memory.HOST: Way.UP},
        modes=("default", "jemalloc"),
        unset="default",
        searched=False,
        estimated=False,
    ),
    Knob(
        name="weights_backup",
        unit=Unit.SWITCH,
        part=Part.HOST,
        saves={Memory.HOST: Way.DOWN},
    ),
    Knob(name="dataloader_workers", unit=Unit.PROCESSES, part=Part.HOST, saves={Memory.HOST: Way.DOWN}),
    Knob(
        name="async_save",
        unit=Unit.SWITCH,
        part=Part.HOST,
        saves={Memory.HOST: Way.DOWN},
        searched=False,
    ),
    Knob(
        name="multimodal_cache",
        unit=Unit.BYTES,
        part=Part.HOST,
        saves={Memory.HOST: Way.DOWN},
        searched=False,
    ),
    # --------------------------------------------------------------------- allocator
    Knob(
        name="allocator",
        unit=Unit.MODE,
        part=Part.TRAINER,
        saves=_HIGHER,
        modes=("default", "expandable"),
        unset="default",
    ),
    # More of it helps NCCL and less of it PyTorch: neither direction saves memory as such.
    Knob(name="memory_margin", unit=Unit.BYTES, part=Part.TRAINER, smallest=1 << 28, estimated=False),
    # --------------------------------------------------------------------- run
    Knob(
        name="restart_every",
        unit=Unit.STEPS,
        part=Part.RUN,
        saves={Memory.GROWTH: Way.DOWN},
        searched=False,
        estimated=False,
    ),
    # --------------------------------------------------------------------- diagnostics
    _diagnostic(name="memory_snapshot"),
    _diagnostic(name="nccl_memory_check"),
    _diagnostic(name="memory_profile"),
)
KNOB_TABLE: dict[str, Knob] = {row.name: row for row in ROWS}
ENGINE_KNOBS = frozenset(row.name for row in ROWS if row.part is Part.ENGINE)
