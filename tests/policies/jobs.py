"""A job whose model is known: Qwen3-8B, GRPO under verl on four H100, as in the tour of the product."""

from __future__ import annotations

from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Accepted, Diagnosed, Ended, Event
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Cluster, Goal, Job, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed, Peak
from autotune.policies.values.profile import AtLeast, FixedDuringRun, Grid, Placement, Profile, Support
from autotune.policies.values.remedy import Effect

GIB = 1 << 30
MODEL = Model(
    layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12_288,
    vocab=151_936,
    family="qwen3",
    qk_norm="head",
)
CLUSTER = Cluster(
    address="local",
    nodes=1,
    gpus_per_node=4,
    gpu_memory_bytes=int(79.19 * GIB),
    host_memory_bytes=940 * GIB,
    gpu_name="H100",
)
LAYOUT = Layout(
    strategy="fsdp",
    ranks=4,
    shards=4,
    engine_ranks=4,
    engine_sleeps=True,
    sequences=512,
    prompt_tokens=1024,
    response_tokens=4096,
)
KNOBS = Knobs(
    concurrency=256,
    memory_fraction=0.6,
    rollout_tensor_parallel=1,
    cuda_graphs="full",
    max_batched_tokens=8192,
    tokens_per_microbatch=16_384,
    dynamic_batching=True,
    recompute="full",
    activation_offload=False,
    param_offload=False,
    optimizer_offload=False,
    fused_kernels=False,
    logprob_tokens=16_384,
    sync_buffer=2 << 30,
)
_TWO = Grid(values=(False, True))
_GRIDS = {
    "concurrency": Grid(minimum=1, multiple=1),
    "memory_fraction": Grid(minimum=0.1, maximum=0.95, multiple=0.01),
    "rollout_tensor_parallel": Grid(values=(1, 2, 4)),
    "cuda_graphs": Grid(values=("full", "off")),
    "max_batched_tokens": Grid(minimum=512, multiple=512),
    "tokens_per_microbatch": Grid(minimum=256, multiple=256),
    "recompute": Grid(values=("off", "full")),
    "activation_offload": _TWO,
    "param_offload": _TWO,
    "optimizer_offload": _TWO,
    "logprob_tokens": Grid(minimum=256, multiple=256),
    "sync_buffer": Grid(minimum=64 << 20, maximum=4 << 30, multiple=64 << 20),
}
SUPPORTED = {name: Support(setting=f"verl.{name}", grid=grid) for name, grid in _GRIDS.items()} | {
    "fused_kernels": Support(setting="verl.fused_kernels", grid=_TWO, effect=Effect.NUMERIC)
}
LONGEST = LAYOUT.prompt_tokens + LAYOUT.response_tokens


def profile(knobs: Knobs = KNOBS, *, layout: Layout = LAYOUT, supported: dict[str, Support] | None = None):
    return Profile(
        framework="verl",
        knobs=knobs,
        supported=SUPPORTED if supported is None else supported,
        constraints=(
            AtLeast(knob="tokens_per_microbatch", value=LONGEST, why="a pass holds a whole sequence"),
            AtLeast(knob="logprob_tokens", value=LONGEST, why="a pass holds a whole sequence"),
            FixedDuringRun(knob="tensor_parallel", why="checkpoints are sharded by it"),
        ),
        placement=Placement.COLOCATED,
        engine="vllm",
        longest_sequence=layout.prompt_tokens + layout.response_tokens,
        layout=layout,
    )


def accepted(
    of: Profile | None = None,
    *,
    recovery: Recovery | None = None,
    goal: Goal | None = None,
    cluster: Cluster = CLUSTER,
    model: Model | None = MODEL,
) -> Accepted:
    job = Job(
        name="qwen3-8b-grpo",
        framework="verl",
        shape=model,
        recovery=recovery or Recovery(),
        goal=goal or Goal(),
    )
    return Accepted(run="7c1e", job=job, profile=of or profile(), cluster=cluster)


def peaks(*, upper_bound: bool = False, **used: float) -> dict[str, Peak]:
    return {
        phase: Peak(used_bytes=int(size), capacity_bytes=CLUSTER.gpu_memory_bytes, upper_bound=upper_bound)
        for phase, size in used.items()
    }


def diagnosed(
    phase: Phase,
    *,
    cause: Cause = Cause.GPU_OOM,
    requested: int | None = None,
    free: int | None = None,
    step: int | None = None,
    phase_shown: bool = False,
) -> Diagnosed:
    engine = phase in (Phase.ROLLOUT, Phase.ROLLOUT_INIT)
    capacity = CLUSTER.gpu_memory_bytes if cause is Cause.GPU_OOM else None
    return Diagnosed(
        cause=cause,
        phase=phase,
        phase_shown=phase_shown,
        component=Component.ROLLOUT if engine else Component.TRAINER,
        step=step,
        facts=Facts(requested_bytes=requested, free_bytes=free, capacity_bytes=capacity),
    )


def fails(
    phase: Phase,
    *,
    cause: Cause = Cause.GPU_OOM,
    requested: int | None = None,
    free: int | None = None,
    passed: dict[str, Peak] | None = None,
    phase_shown: bool = False,
) -> tuple[Event, ...]:
    return (
        Ended(outcome=Crashed(exit_code=1), peaks=passed or {}),
        diagnosed(phase, cause=cause, requested=requested, free=free, phase_shown=phase_shown),
    )
