"""The knobs of the built-in job, each a setting of the same name."""

from __future__ import annotations

from typing import NamedTuple

from autotune.launchers.builtin.config.settings import Settings
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.tabular.table import SWITCH, Row, Table
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent


class Case(NamedTuple):
    """The settings of a job, and whether its trainer has GPUs that it shares with no engine."""

    settings: Settings
    has_gpus_apart: bool

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.settings.prompt_tokens + self.settings.response_tokens


_SEQUENCE = "a pass holds at least one sequence, prompt_tokens + response_tokens = {value}"

# fmt: off
ROWS: tuple[Row[Case], ...] = (
    Row(knob="concurrency", key="concurrency", grid=Grid(minimum=1)),
    Row(knob="memory_fraction", key="memory_fraction", grid=Grid(minimum=0.02, maximum=0.98, multiple=0.01)),
    Row(knob="max_batched_tokens", key="max_batched_tokens", grid=Grid(minimum=16, multiple=16),
        when=lambda c: c.settings.max_batched_tokens is not None),
    Row(knob="tokens_per_microbatch", key="tokens_per_microbatch", grid=Grid(minimum=1),
        at_least={_SEQUENCE: lambda c: c.sequence}),
    Row(knob="microbatch_size", key="microbatch_size", grid=Grid(minimum=1),
        when=lambda c: c.settings.microbatch_size is not None),
    Row(knob="recompute", key="recompute", grid=Grid(values=("off", "full"))),
    Row(knob="activation_offload", key="activation_offload", grid=SWITCH),
    Row(knob="param_offload", key="param_offload", grid=SWITCH),
    Row(knob="optimizer_offload", key="optimizer_offload", grid=SWITCH),
    Row(knob="loss_recompute", key="loss_recompute", grid=SWITCH),
    Row(knob="logprob_tokens", key="logprob_tokens", grid=Grid(minimum=1),
        at_least={_SEQUENCE: lambda c: c.sequence}),
    Row(knob="logprob_chunk", key="logprob_chunk", grid=Grid(minimum=16, multiple=16)),
    Row(knob="sync_mode", key="sync_mode", grid=Grid(values=("memory", "disk"))),
    Row(knob="sync_buffer", key="sync_buffer", grid=Grid(minimum=1 << 20, multiple=1 << 20),
        at_most={"a larger bucket frees nothing": lambda c: c.settings.sync_buffer}),
    Row(knob="dataloader_workers", key="dataloader_workers", grid=Grid(minimum=0)),
    Row(knob="allocator", key="allocator", grid=Grid(values=("default", "expandable")),
        when=lambda c: c.has_gpus_apart),
)

ABSENT: dict[KnobName, str] = {
    "rollout_tensor_parallel": "an engine is one process; add engines instead",
    "cuda_graphs": "the CPU engine has none, and the GPU engine keeps SGLang's default",
    "engine_sleep": "an engine on the trainer's GPU always sleeps while the trainer works",
    "max_model_len": "it is the longest sequence of the task, which is the user's",
    "dynamic_batching": "a token budget and a sequence count are both honoured",
    "grad_offload": "gradients live for one step and are freed by it",
    "optimizer_offload_fraction": "the optimizer state is offloaded whole",
    "optimizer_offload_overlap": "the state is mapped, there is no copy to overlap",
    "sequence_parallel": "the trainer shards parameters, not sequences",
    "context_parallel": "the trainer shards parameters, not sequences",
    "tensor_parallel": "the trainer shards parameters with FSDP2",
    "layered_sync": "it trains no adapters",
    "async_save": "a checkpoint is written before the next step begins",
    "multimodal_cache": "its task is text alone",
    "sharding": "FSDP2 whenever there is more than one rank",
    "expert_parallel": "its models have no experts",
    "pipeline_parallel": "FSDP2 has no stages",
    "shard_group": "the state is spread over all ranks",
    "reshard_after_forward": "gathered weights are always freed after a layer's forward",
    "fused_kernels": "there are none for this model",
    "entropy_chunking": "the loss has no entropy term",
    "entropy_recompute": "the loss has no entropy term",
    "memory_efficient_load": "every rank loads the whole model once and shards it, there is no setting for it",
    "host_allocator": "its allocator settings are part of how peaks are measured",
    "weights_backup": "it keeps none",
    "memory_margin": "there is no allocator margin",
    "restart_every": "it leaks nothing that a restart would free",
    "memory_snapshot": "peaks per phase are always recorded",
    "nccl_memory_check": "peaks per phase are always recorded",
    "memory_profile": "peaks per phase are always recorded",
}
REHEARSAL = Rehearsal(
    saves={"save_every": 2},
    unmet={
        LateEvent.SAVE: "save_every is 0, so the job writes no checkpoint",
        LateEvent.RELOAD: "save_every is 0, so the job writes no checkpoint",
        LateEvent.VALIDATION: "the job has no validation",
    },
)
# fmt: on

TABLE: Table[Case] = Table(rows=ROWS, rehearsal=REHEARSAL, absent=ABSENT)
