"""A job's candidates as arrays: every knob with its default filled in, one entry per configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.lengths import (
    UNBOUNDED,
    Assumption,
    Grouping,
    Lengths,
    lengths_of,
    longest_of,
)
from autotune.policies.estimate.parts import Flags, Floats
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Cluster, Goal, no_expandable_segments
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The input of the formulas; sizes in bytes, token counts per rank."""

    count: int
    layout: Layout
    placement: Placement
    gpus: bool
    sequence: float  # longest, prompt and response
    assumption: Assumption
    lengths: Lengths
    training: Grouping
    scoring: Grouping
    # parallelism
    tensor: Floats
    split: Floats  # ranks that share the tokens of a sequence
    replicas: Floats  # data-parallel copies of the model
    shards: Floats
    expert: Floats  # ranks that experts are spread over
    expert_shards: Floats  # ... and that spread one copy of an expert's state; 0: as all else
    reshard: Flags  # a layer's gathered weights are freed after its forward
    # training
    tokens: Floats  # of a micro-batch, under `assumption`
    scored: Floats
    usual_tokens: Floats  # of a typical micro-batch
    accumulated: Floats  # micro-batches of one update
    passes: Floats  # of one step
    score_passes: Floats
    step_tokens: Floats  # of one rank, all micro-batches
    step_sequences: Floats  # of one replica of the model
    recompute_selective: Flags
    recompute_modules: Flags
    recompute_full: Flags
    activation_offload: Flags
    param_offload: Flags
    grad_offload: Flags
    from_host: Flags  # weights are gathered from host memory, where gradients and optimizer are too
    optimizer_offload: Floats  # share of the state that is in host memory
    host_update: Floats  # ... and is updated there
    passing_update: Floats  # ... or passes through the device for its update, a tensor at a time
    optimizer_away: Floats  # ... between updates
    masters_beside: Floats  # share of the state that stays on the device beside an optimizer in host memory
    streamed: Flags  # gradients go to host memory as they are reduced
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
    engine_sleep: Flags
    layered_sync: Flags  # no device gathers the whole model for a sync
    disk: Flags
    sync_buffer: Floats
    backup: Flags
    workers: Floats
    async_save: Flags
    multimodal_cache: Floats  # of each process of an engine
    expandable: Flags
    margin: Floats
    # devices
    trainer_budgeted: bool  # a part of a GPU, in which only the memory of PyTorch's allocator counts
    engine_budgeted: bool

    @property
    def critic_away(self) -> tuple[Floats, Floats]:
        """Shares of a critic's weights and optimizer that are in host memory while it is not used."""
        layout = self.layout
        follows = float(layout.critic_follows)
        parts = (self.param_offload, self.optimizer_away)
        weights, optimizer = (np.maximum(layout.critic_offload, part * follows) for part in parts)
        return weights, optimizer


def load_of(
    profile: Profile,
    cluster: Cluster,
    candidates: Sequence[Knobs],
    *,
    assumption: Assumption = Assumption.EXPECTED,
    steps: int = Goal().steps,
) -> Load:
    """Return the candidates of one job as arrays; `steps`: over which the largest micro-batch is expected."""
    layout, own = profile.layout, profile.knobs
    columns = _Columns(own, candidates)
    sequence = longest_of(profile)
    tensor = columns.number("tensor_parallel", 1)
    ulysses = (
        columns.number("sequence_parallel", 1) if layout.strategy != "megatron" else np.ones(columns.count)
    )
    split = ulysses * columns.number("context_parallel", 1)
    replicas = np.maximum(1.0, layout.ranks / (tensor * split * layout.pipeline_parallel))
    base = own.tensor_parallel or 1
    shards = np.maximum(1.0, columns.number("shard_group", layout.shards) * base / tensor)
    expert = columns.number("expert_parallel", layout.expert_parallel)
    lengths = lengths_of(layout, longest=sequence)
    limit = columns.number("tokens_per_microbatch", UNBOUNDED)
    scored_limit = columns.number("logprob_tokens", UNBOUNDED)
    scored_limit = np.where(scored_limit < UNBOUNDED, scored_limit, limit)
    in_pass = columns.number("microbatch_size", UNBOUNDED)
    budgeted = columns.flag("dynamic_batching", default=own.tokens_per_microbatch is not None)
    # If the number of sequences is unknown, eight micro-batches are assumed.
    rows = (
        np.ceil(layout.sequences / replicas)
        if layout.sequences
        else 8.0
        * np.maximum(1.0, np.where(budgeted & (limit < UNBOUNDED), limit * split / sequence, in_pass))
    )
    rows = np.where(rows < UNBOUNDED, rows, 8.0)
    update = np.ceil(layout.mini_batch / replicas) if layout.mini_batch else rows
    update = np.minimum(update, rows)

    def grouping(budget: Floats, sequences: Floats, counted: Floats) -> Grouping:
        return Grouping(
            update=sequences,
            dynamic=budgeted & (budget < UNBOUNDED),
            budget=budget if layout.tokens_before_split else budget * split,
            sequences=counted,
            padded=layout.padded,
            updates=steps * replicas * np.maximum(1.0, rows / sequences),
        )

    training = grouping(limit, update, in_pass)
    scoring = grouping(scored_limit, rows, np.maximum(1.0, in_pass * layout.scored_sequences))
    usual = training.tokens(lengths, Assumption.TYPICAL)
    accumulated = training.passes(lengths, usual)
    one = sequence if layout.padded else lengths.mean
    # verl's Megatron has both: with a fraction of zero no Adam runs on the CPU, and offload moves all of it.
    part = columns.number("optimizer_offload_fraction", 1.0)
    offloaded = np.where(columns.flag("optimizer_offload"), np.where(part > 0, part, 1.0), 0.0)
    moved, with_state = columns.flag("grad_offload"), layout.grad_offload_takes_optimizer
    everything = moved & layout.grad_offload_takes_all
    parked = columns.flag("param_offload") | everything
    from_host = parked & layout.parameters_stay_offloaded | everything
    offloaded = np.maximum(offloaded, from_host)
    movable = 1.0 - layout.masters * (layout.masters_stay and not layout.masters_beside)
    default_fraction = constant("vllm_fraction" if profile.engine == "vllm" else "engine_fraction")
    gpus = cluster.gpus_per_node > 0 or cluster.gpu_memory_bytes > 0
    staying = offloaded * layout.optimizer_stays_offloaded
    chunk = constant("engine_prefill" if gpus else "engine_prefill_cpu")
    host_update = np.where(from_host, 1.0, staying * (not layout.optimizer_passes_through))
    return Load(
        count=columns.count,
        layout=layout,
        placement=profile.placement,
        gpus=gpus,
        sequence=sequence,
        assumption=assumption,
        lengths=lengths,
        training=training,
        scoring=scoring,
        tensor=tensor,
        split=split,
        replicas=replicas,
        shards=shards,
        expert=expert,
        expert_shards=layout.expert_shards * layout.expert_parallel / expert,
        reshard=columns.flag("reshard_after_forward", default=layout.reshard_after_forward),
        tokens=training.tokens(lengths, assumption) / split,
        scored=scoring.tokens(lengths, assumption) / split,
        usual_tokens=usual / split,
        accumulated=accumulated,
        passes=accumulated * np.maximum(1.0, np.ceil(rows / update)),
        score_passes=scoring.passes(lengths, scoring.tokens(lengths, Assumption.TYPICAL)),
        step_tokens=rows * one / split,
        step_sequences=rows,
        recompute_selective=columns.has_mode("recompute", "selective"),
        recompute_modules=columns.has_mode("recompute", "modules"),
        recompute_full=columns.has_mode("recompute", "full") & (not layout.keeps_hybrids),
        activation_offload=columns.flag("activation_offload"),
        param_offload=parked,
        grad_offload=moved,
        from_host=from_host,
        optimizer_offload=offloaded,
        host_update=host_update,
        masters_beside=host_update * (layout.masters * layout.masters_beside),
        passing_update=staying * layout.optimizer_passes_through * ~from_host,
        optimizer_away=np.maximum(offloaded, moved & with_state) * movable,
        streamed=from_host
        | (moved & layout.optimizer_stays_offloaded & (not with_state))
        | ((offloaded > 0) & layout.parts_gradients),
        optimizer_overlap=columns.flag("optimizer_offload_overlap"),
        fused=columns.flag("fused_kernels"),
        loss_recompute=columns.flag("loss_recompute"),
        chunk=columns.number("logprob_chunk", UNBOUNDED),
        efficient_load=columns.flag("memory_efficient_load"),
        entropy_chunking=columns.flag("entropy_chunking"),
        entropy_recompute=columns.flag("entropy_recompute"),
        concurrency=columns.number("concurrency", 256),
        fraction=columns.number("memory_fraction", default_fraction),
        rollout_tensor=columns.number("rollout_tensor_parallel", 1),
        graphs_off=columns.has_mode("cuda_graphs", "off"),
        graphs_limited=columns.has_mode("cuda_graphs", "limited"),
        prefill=columns.number("max_batched_tokens", chunk),
        engine_sleep=columns.flag("engine_sleep", default=layout.engine_sleeps),
        layered_sync=columns.flag("layered_sync", default=not layout.gathers_whole),
        disk=columns.has_mode("sync_mode", "disk"),
        sync_buffer=columns.number("sync_buffer", constant("sync_bucket")),
        backup=columns.flag("weights_backup"),
        workers=columns.number("dataloader_workers", 0),
        async_save=columns.flag("async_save"),
        multimodal_cache=columns.number("multimodal_cache", 0),
        expandable=(columns.has_mode("allocator", "expandable") | layout.expandable_segments)
        & (not no_expandable_segments(cluster.gpu_name)),
        margin=columns.number("memory_margin", 0),
        trainer_budgeted=gpus and profile.trainer_budget_bytes is not None,
        engine_budgeted=gpus and profile.engine_budget_bytes is not None,
    )


def by_length(load: Load) -> Load:
    """Return the candidates three times: as they are, with longer and with shorter sequences.

    The mean length differs by one standard deviation of its uncertainty.
    """
    others = [lengths_of(load.layout, longest=load.sequence, deviation=each) for each in (1.0, -1.0)]
    tokens = [load.training.tokens(lengths, load.assumption) / load.split for lengths in others]
    scored = [load.scoring.tokens(lengths, load.assumption) / load.split for lengths in others]
    arrays: dict[str, Any] = {
        field.name: np.concatenate((value, value, value))
        for field in fields(load)
        if isinstance(value := getattr(load, field.name), np.ndarray)
    }
    arrays["tokens"] = np.concatenate((load.tokens, *tokens))
    arrays["scored"] = np.concatenate((load.scored, *scored))
    return replace(load, count=3 * load.count, **arrays)


class _Columns:
    """Reads one knob of all candidates; the job's own value if a candidate has none."""

    def __init__(self, own: Knobs, candidates: Sequence[Knobs]) -> None:
        self._own = own
        self.count = len(candidates)
        values = zip(*map(msgspec.structs.astuple, candidates), strict=True)
        self._values = dict(zip(Knobs.__struct_fields__, values, strict=bool(candidates)))

    def number(self, name: str, default: float) -> Floats:
        own = getattr(self._own, name)
        fallback = default if own is None else own
        return self._array(name, lambda value: fallback if value is None else value, np.float64)

    def flag(self, name: str, *, default: bool = False) -> Flags:
        return self.number(name, float(default)) > 0

    def has_mode(self, name: str, mode: str) -> Flags:
        """Return which candidates have a mode; one that the knob table does not list counts as the first."""
        row = KNOB_TABLE[name]
        own, order = getattr(self._own, name) or row.default, row.order
        fallback = own if own in order else order[0]
        return self._array(
            name, lambda value: ((value or own) if (value or own) in order else fallback) == mode, np.bool_
        )

    def _array(self, name: str, convert: Callable[[Any], Any], kind: type[T]) -> np.ndarray[Any, np.dtype[T]]:
        """Return the knob of all candidates; `convert` is called once for each value that occurs."""
        values = self._values.get(name, ())
        converted = {value: convert(value) for value in set(values)}
        if len(converted) == 1:
            (value,) = converted.values()
            return np.full(self.count, value, dtype=kind)
        return np.array([converted[value] for value in values], dtype=kind)
