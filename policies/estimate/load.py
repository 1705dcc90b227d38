"""A job's candidates as arrays: every knob with its default filled in, one entry per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.parts import Flags, Floats
from autotune.policies.values.job import Cluster
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.model import Layout
from autotune.policies.values.profile import Placement, Profile

_UNBOUNDED = 1e18
# Sequences without padding are not all as long as the job allows: of many in one pass about this share is
# filled. The largest batches that verl documents for 80 GB (examples/tuning) imply 0.3 to 0.6 of 22 to 128
# sequences, and the whole of 16 and fewer.
_FILLED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the formulas read; sizes in bytes, token counts per rank."""

    count: int
    layout: Layout
    placement: Placement
    gpus: bool
    sequence: float  # longest, prompt and response
    # parallelism
    tensor: Floats
    split: Floats  # ranks that share the tokens of a sequence
    replicas: Floats  # data-parallel copies of the model
    shards: Floats
    # training
    tokens: Floats
    scored: Floats
    passes: Floats
    score_passes: Floats
    step_tokens: Floats  # of one rank, all micro-batches, at full length
    recompute_selective: Flags
    recompute_full: Flags
    activation_offload: Flags
    param_offload: Flags
    grad_offload: Flags
    optimizer_offload: Floats  # share
    optimizer_overlap: Flags
    fused: Flags
    loss_recompute: Flags
    efficient_load: Flags
    chunk: Floats
    entropy_chunking: Flags
    entropy_recompute: Flags
    # rollout
    concurrency: Floats
    fraction: Floats
    rollout_tensor: Floats
    graphs_off: Flags
    graphs_limited: Flags
    prefill: Floats
    # weight sync, host, allocator
    disk: Flags
    sync_buffer: Floats
    backup: Flags
    workers: Floats
    expandable: Flags
    margin: Floats


def load_of(profile: Profile, cluster: Cluster, candidates: Sequence[Knobs]) -> Load:
    """Return the candidates of one job as arrays."""
    layout, own = profile.layout, profile.knobs
    columns = _Columns(own, candidates)
    sequence = float(profile.longest_sequence or layout.prompt_tokens + layout.response_tokens or 1)
    tensor = columns.number("tensor_parallel", 1)
    ulysses = (
        columns.number("sequence_parallel", 1) if layout.strategy != "megatron" else np.ones(columns.count)
    )
    split = ulysses * columns.number("context_parallel", 1)
    replicas = np.maximum(1.0, layout.ranks / (tensor * split * layout.pipeline_parallel))
    base = own.tensor_parallel or 1
    shards = np.maximum(1.0, layout.shards * base / tensor)
    rows = np.ceil(layout.sequences / replicas) if layout.sequences else np.full(columns.count, _UNBOUNDED)
    dynamic = columns.flag("dynamic_batching", default=own.tokens_per_microbatch is not None)
    whole = rows * sequence

    def pass_tokens(limit: Floats) -> Floats:
        """Return one micro-batch's tokens on one rank."""
        before = limit if layout.tokens_before_split else limit * split
        in_pass = columns.number("microbatch_size", _UNBOUNDED)
        by_rows = in_pass * sequence
        if not layout.padded:
            by_rows = by_rows * np.minimum(1.0, _FILLED + 1.0 / np.sqrt(in_pass))
        group = np.where(dynamic & (limit < _UNBOUNDED), before, by_rows)
        if layout.padded:
            group = np.floor(group / sequence) * sequence
        return np.minimum(np.maximum(group, sequence), whole) / split

    limit = columns.number("tokens_per_microbatch", _UNBOUNDED)
    scored = columns.number("logprob_tokens", _UNBOUNDED)
    tokens = pass_tokens(limit)
    tokens_scored = pass_tokens(np.where(scored < _UNBOUNDED, scored, limit))
    step_tokens = np.where(whole < _UNBOUNDED, whole, tokens * split * 8) / split
    offload = columns.flag("optimizer_offload")
    # verl's Megatron has both: a fraction of zero is no Adam on the CPU, and offload still moves all of it.
    part = columns.number("optimizer_offload_fraction", 1.0)
    default_fraction = constant("vllm_fraction" if profile.engine == "vllm" else "engine_fraction")
    gpus = cluster.gpus_per_node > 0 or cluster.gpu_memory_bytes > 0
    chunk = constant("engine_prefill" if gpus else "engine_prefill_cpu")
    return Load(
        count=columns.count,
        layout=layout,
        placement=profile.placement,
        gpus=gpus,
        sequence=sequence,
        tensor=tensor,
        split=split,
        replicas=replicas,
        shards=shards,
        tokens=tokens,
        scored=tokens_scored,
        passes=np.maximum(1.0, np.ceil(step_tokens / tokens)),
        score_passes=np.maximum(1.0, np.ceil(step_tokens / tokens_scored)),
        step_tokens=step_tokens,
        recompute_selective=columns.has_mode("recompute", "selective"),
        recompute_full=columns.has_mode("recompute", "full"),
        activation_offload=columns.flag("activation_offload"),
        param_offload=columns.flag("param_offload"),
        grad_offload=columns.flag("grad_offload"),
        optimizer_offload=np.where(offload, np.where(part > 0, part, 1.0), 0.0),
        optimizer_overlap=columns.flag("optimizer_offload_overlap"),
        fused=columns.flag("fused_kernels"),
        loss_recompute=columns.flag("loss_recompute"),
        efficient_load=columns.flag("memory_efficient_load"),
        chunk=columns.number("logprob_chunk", _UNBOUNDED),
        entropy_chunking=columns.flag("entropy_chunking"),
        entropy_recompute=columns.flag("entropy_recompute"),
        concurrency=columns.number("concurrency", 256),
        fraction=columns.number("memory_fraction", default_fraction),
        rollout_tensor=columns.number("rollout_tensor_parallel", 1),
        graphs_off=columns.has_mode("cuda_graphs", "off"),
        graphs_limited=columns.has_mode("cuda_graphs", "limited"),
        prefill=columns.number("max_batched_tokens", chunk),
        disk=columns.has_mode("sync_mode", "disk"),
        sync_buffer=columns.number("sync_buffer", constant("sync_bucket")),
        backup=columns.flag("weights_backup"),
        workers=columns.number("dataloader_workers", 0),
        expandable=columns.has_mode("allocator", "expandable"),
        margin=columns.number("memory_margin", 0),
    )


class _Columns:
    """Reads one knob of all candidates; the job's own value stands where a candidate has none."""

    def __init__(self, own: Knobs, candidates: Sequence[Knobs]) -> None:
        self._own = own
        self._candidates = candidates
        self.count = len(candidates)

    def number(self, name: str, default: float) -> Floats:
        own = getattr(self._own, name)
        fallback = default if own is None else own
        result = [getattr(knobs, name) for knobs in self._candidates]
        return np.array([fallback if value is None else value for value in result], dtype=np.float64)

    def flag(self, name: str, *, default: bool = False) -> Flags:
        return self.number(name, float(default)) > 0

    def has_mode(self, name: str, mode: str) -> Flags:
        """Return which candidates have a mode; one that the knob table does not list counts as the first."""
        row = KNOB_TABLE[name]
        own = getattr(self._own, name) or row.default
        fallback = own if own in row.order else row.order[0]
        modes = [getattr(knobs, name) or own for knobs in self._candidates]
        return np.array([(each if each in row.order else fallback) == mode for each in modes], dtype=np.bool_)
