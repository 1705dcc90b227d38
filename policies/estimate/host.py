"""Host memory of one node: processes, what was moved off the devices, copies for syncs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import GIB, constant
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats, instant
from autotune.policies.estimate.passes import Pass
from autotune.policies.estimate.shapes import FP32, parameters
from autotune.policies.estimate.training import State
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster
from autotune.policies.values.profile import Placement

_CPU_PROCESS = 0.6 * GIB  # resident memory of torch, transformers and Ray in one rank
_CPU_ENGINE = 1.8 * GIB  # SGLang's three processes on the CPU
_CPU_DRIVER = 1.5 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """How many processes of each kind share a node."""

    trainers: float
    engines: float


def node_of(load: Load, cluster: Cluster) -> Node:
    """Return how the job's ranks fall on one node; nodes are filled one after the other."""
    places = cluster.gpus_per_node or max(1, load.layout.ranks + load.layout.engine_ranks)
    engines = load.layout.engine_ranks
    if load.placement is Placement.COLOCATED and load.gpus:
        engines = min(engines or load.layout.ranks, places)
        return Node(trainers=float(min(load.layout.ranks, places)), engines=float(engines))
    trainers = min(load.layout.ranks, places)
    return Node(trainers=float(trainers), engines=float(min(engines, max(0, places - trainers) or engines)))


def host_phases(model: Model, load: Load, *, node: Node, state: State, run: Pass) -> dict[str, Floats]:
    """Return a node's host memory by phase."""
    layout, n = load.layout, load.count
    process = constant("process") if load.gpus else _CPU_PROCESS
    engine = constant("engine_process") if load.gpus else _CPU_ENGINE
    driver = constant("driver") if load.gpus else _CPU_DRIVER
    fixed = node.trainers * process + node.engines * engine + driver
    outside = fixed + np.minimum(load.workers, 64) * constant("worker")
    batch = load.step_sequences * load.replicas * load.sequence * constant("token_row")
    whole = parameters(model).total
    asleep = np.where(load.param_offload, 0.0, state.weights * layout.weights_sleep)
    # Megatron's buffers keep their copy when they wake (param_and_grad_buffer.py, offload_to_cpu).
    copied = asleep * (layout.strategy == "megatron")
    parked = np.where(load.param_offload, state.weights, copied)
    until_woken = node.trainers * (asleep - copied)
    frozen = layout.reference and layout.reference_offload and not layout.lora_rank
    reference = (
        frozen
        * state.local
        / np.where(state.weights < state.local * layout.parameter_bytes, load.shards, 1.0)
    )
    reference = reference * (layout.reference_bytes or layout.compute_bytes)
    critic = (layout.critic and layout.critic_offload) * (state.weights + state.optimizer)
    critic = critic + (layout.critic and layout.critic_follows) * state.optimizer * load.optimizer_away
    backup = np.where(load.backup, state.local * layout.compute_bytes, 0.0)
    sleeping = np.zeros(n)
    if layout.engine_sleeps and layout.engine_weights_on_host and load.placement is Placement.COLOCATED:
        sleeping = whole / load.rollout_tensor * layout.engine_bytes * node.engines
    sleeps = load.param_offload & layout.trainer_sleeps
    away = load.grad_offload | sleeps | load.streamed
    share = np.where(sleeps, 1.0, load.optimizer_away)
    # A CPU optimizer keeps fp32 gradients too: Megatron's (hybrid_optimizer.py, cpu_copy_map_grad)
    # and DeepSpeed's (stage_1_and_2.py, single_partition_of_fp32_groups).
    own = layout.strategy in ("megatron", "ddp") or layout.reduce_bucket_bytes > 0
    copies = own * load.host_update * state.optimizer / max(1, layout.optimizer_bytes) * FP32
    resting = instant(
        n,
        weights=node.trainers * (parked + reference + critic + backup) * constant("pinned"),
        gradients=node.trainers * (np.where(away, state.gradients, 0.0) + copies),
        optimizer=node.trainers * state.optimizer * share,
        buffers=batch,
        outside=outside,
    )
    passing = resting + instant(n, weights=sleeping + node.trainers * load.from_host * state.copies)
    training = passing + instant(n, activations=node.trainers * run.offloaded)
    full_copy = np.full(n, whole * layout.compute_bytes)
    # FSDP reads the whole model on a node; a rank of Megatron reads its own part.
    read = node.trainers * state.local if layout.strategy == "megatron" else np.full(n, whole)
    # Rank 0 then holds the built model beside the file's weights.
    beside = np.where(load.efficient_load & layout.loads_whole, whole * layout.compute_bytes, 0.0)
    loading = instant(n, weights=read * max(layout.parameter_bytes, layout.compute_bytes) + beside)
    return {
        "init": resting + loading,
        "rollout_init": resting
        + instant(n, weights=until_woken + node.engines / np.maximum(1.0, load.rollout_tensor) * GIB),
        "rollout": resting + instant(n, weights=until_woken),
        "log_prob": passing,
        "forward": training,
        "backward": training,
        "optimizer": passing,
        "weight_sync": resting + instant(n, buffers=np.where(load.disk, full_copy, 0.0)),
        "checkpoint": resting + instant(n, buffers=node.trainers * (state.weights + state.optimizer) * 0.5),
    }
