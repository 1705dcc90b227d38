"""A model so small that its bytes are counted by hand, and a job that trains it on four devices."""

from __future__ import annotations

from msgspec.structs import replace

from autotune.policies.estimate.load import Load, load_of
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, Estimates, estimates
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile

GIB = 1 << 30
TOY = Model(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32)
# A layer: queries and output 2 x 8 x 8, keys and values 2 x 8 x 4, MLP 3 x 8 x 16, two norms of 8.
LAYER = 128 + 64 + 384 + 16
LOCAL = 2 * LAYER + 32 * 8 + 32 * 8  # 1,696 with embedding and head: what ranks share
WHOLE = LOCAL + 8  # ... and the final norm
NODE = Cluster(
    address="local",
    nodes=1,
    gpus_per_node=4,
    gpu_memory_bytes=80 * GIB,
    host_memory_bytes=1024 * GIB,
    gpu_name="H100",
)
CPU = replace(NODE, gpus_per_node=0, gpu_memory_bytes=0, gpu_name="")
# Every update has four sequences of 32 tokens, one on each rank.
LAYOUT = Layout(strategy="fsdp2", ranks=4, shards=4, engine_ranks=4, sequences=4, prompt_tokens=32)
MEGATRON = replace(LAYOUT, strategy="megatron", parameter_bytes=2, optimizer_bytes=12)
KNOBS = Knobs(microbatch_size=1, concurrency=4, recompute="off")


def job(
    layout: Layout = LAYOUT,
    *,
    placement: Placement = Placement.COLOCATED,
    engine: str = "none",
) -> Profile:
    return Profile(
        framework="any", knobs=KNOBS, supported={}, placement=placement, engine=engine, layout=layout
    )


def load(
    layout: Layout = LAYOUT,
    *,
    placement: Placement = Placement.COLOCATED,
    engine: str = "none",
    cluster: Cluster = NODE,
    **knobs: object,
) -> Load:
    return load_of(job(layout, placement=placement, engine=engine), cluster, [replace(KNOBS, **knobs)])


def estimated(
    layout: Layout = LAYOUT,
    *,
    placement: Placement = Placement.COLOCATED,
    engine: str = "none",
    cluster: Cluster = NODE,
    model: Model = TOY,
    **knobs: object,
) -> Estimates:
    of = job(layout, placement=placement, engine=engine)
    return estimates(of, cluster, model, [replace(KNOBS, **knobs)])


def by_phase(estimate: Estimates, part: str, *, host: bool = False) -> dict[Phase, float]:
    """Return the bytes of one part in every phase, of the first configuration."""
    sizes = estimate.host_parts if host else estimate.gpu_parts
    return {phase: float(sizes[row, PARTS.index(part), 0]) for row, phase in enumerate(PHASES)}
