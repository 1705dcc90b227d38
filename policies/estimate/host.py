"""Host memory of one node: processes, offloaded state, copies for weight syncs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import GIB, constant
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats, instant
from autotune.policies.estimate.passes import Pass
from autotune.policies.estimate.pinned import of_buffers, of_engine, of_tensors, of_zero
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
    """The number of processes of each kind on a node."""

    trainers: float
    engines: float


def node_of(load: Load, cluster: Cluster) -> Node:
    """Return the number of the job's ranks on one node; nodes are filled one after the other."""
    places = cluster.gpus_per_node or max(1, load.layout.ranks + load.layout.engine_ranks)
    engines = load.layout.engine_ranks
    if load.placement is Placement.COLOCATED and load.gpus:
        engines = min(engines or load.layout.ranks, places)
        return Node(trainers=float(min(load.layout.ranks, places)), engines=float(engines))
    trainers = min(load.layout.ranks, places)
    return Node(trainers=float(trainers), engines=float(min(engines, max(0, places - trainers) or engines)))


def host_phases(
    model: Model, load: Load, *, node: Node, state: State, run: Pass, engine: str
) -> dict[str, Floats]:
    """Return a node's host memory by phase, as (part, configuration); `engine`: the engine's name."""
    layout, n = load.layout, load.count
    process = constant("process") if load.gpus else _CPU_PROCESS
    serving = constant("engine_process") if load.gpus else _CPU_ENGINE
    driver = constant("driver") if load.gpus else _CPU_DRIVER
    fixed = node.trainers * process + node.engines * serving + driver
    outside = fixed + np.minimum(load.workers, 64) * constant("worker")
    # vLLM's cache of processed inputs, in each engine (vllm/multimodal/cache.py).
    outside = outside + node.engines / load.rollout_tensor * load.multimodal_cache * bool(model.tower)
    batch = load.step_sequences * load.replicas * load.sequence * constant("token_row")
    whole = parameters(model).total
    asleep = np.where(load.param_offload, 0.0, state.weights * layout.weights_sleep)
    # Megatron's buffers keep their copy after they are loaded back (param_and_grad_buffer.py,
    # offload_to_cpu).
    copied = asleep * (layout.strategy == "megatron")
    parked = np.where(load.param_offload, state.weights, copied)
    until_woken = node.trainers * (asleep - copied)
    frozen = layout.reference and layout.reference_offload and not layout.lora_rank
    reference = (
        frozen
        * state.local
        / np.where(state.weights < state.local * layout.parameter_bytes, load.shards, 1.0)
    )
    width = layout.reference_bytes or layout.compute_bytes
    reference = reference * width * _locked(model, load, state, width=width)
    # FSDP page-locks what its own offload policy moves, not what a framework moves.
    own_copies = (layout.strategy == "megatron") | load.from_host
    parked = parked * np.where(own_copies, _locked(model, load, state, width=layout.parameter_bytes), 1.0)
    weights_away, optimizer_away = load.critic_away
    critic = layout.critic * (weights_away * state.weights + optimizer_away * state.optimizer)
    backup = np.where(load.backup, state.local * layout.compute_bytes, 0.0)
    backup = backup * _locked(model, load, state, width=layout.compute_bytes)
    sleeping = stays = np.zeros(n)
    if layout.engine_weights_on_host and load.placement is Placement.COLOCATED:
        sleeping = load.engine_sleep * whole / load.rollout_tensor * layout.engine_bytes * node.engines
    if engine == "vllm":  # PyTorch keeps the blocks when the engine wakes
        sleeping, stays = 0.0 * sleeping, sleeping * of_engine(model, load)
    sleeps = load.param_offload & layout.trainer_sleeps
    away = load.grad_offload | sleeps | load.streamed
    share = np.where(sleeps, 1.0, load.optimizer_away)
    # A CPU optimizer keeps fp32 gradients too: Megatron's (hybrid_optimizer.py, cpu_copy_map_grad)
    # and DeepSpeed's (stage_1_and_2.py, single_partition_of_fp32_groups).
    own = layout.strategy in ("megatron", "ddp") or layout.reduce_bucket_bytes > 0
    copies = own * load.host_update * state.optimizer / max(1, layout.optimizer_bytes) * FP32
    # Megatron's CPU optimizer page-locks its fp32 weights and gradients (hybrid_optimizer.py).
    locked = of_tensors(model, load, width=FP32) if layout.strategy == "megatron" else np.ones(n)
    copies = copies * locked
    rounding = (locked - 1.0) * load.host_update * FP32 / max(1, layout.optimizer_bytes)
    blocks, copied_blocks = of_zero(model, load, state) if layout.reduce_bucket_bytes else (0.0, 0.0)
    made = instant(
        n,
        weights=node.trainers * (parked + reference + critic + backup + blocks) + stays,
        gradients=node.trainers * (np.where(away, state.gradients, 0.0) + copies + copied_blocks),
        optimizer=node.trainers * state.optimizer * (share + rounding),
        buffers=batch + _routing(model, load, node),
        outside=outside,
    )
    staged = instant(n, buffers=_staged(model, load, node, state))
    resting = made + staged * load.async_save  # it is written while the training continues
    passing = resting + instant(n, weights=sleeping + node.trainers * load.from_host * state.copies)
    training = passing + instant(n, activations=node.trainers * run.offloaded)
    full_copy = np.full(n, whole * layout.compute_bytes)
    # FSDP reads the whole model once per node; a rank of Megatron reads its own part; an unsharded rank reads
    # everything, as does every rank if the framework builds the model in each process.
    every = layout.loads == "ranks" or layout.strategy in ("none", "ddp")
    megatron = layout.strategy == "megatron"
    read = node.trainers * state.local if megatron else np.full(n, whole * (node.trainers if every else 1.0))
    # Rank 0 then holds the built model in addition to the file's weights.
    beside = np.where(load.efficient_load & layout.loads_whole, whole * layout.compute_bytes, 0.0)
    loading = instant(n, weights=read * max(layout.parameter_bytes, layout.compute_bytes) + beside)
    # Megatron loads into an existing optimizer; others create theirs from a loaded model.
    begun = instant(n, weights=node.trainers * reference + stays, buffers=batch, outside=outside)
    return {
        "init": (made if megatron else begun) + loading,
        "rollout_init": made
        + instant(n, weights=until_woken + node.engines / np.maximum(1.0, load.rollout_tensor) * GIB),
        "rollout": resting + instant(n, weights=until_woken),
        "log_prob": passing,
        "forward": training,
        "backward": training,
        "optimizer": passing,
        "weight_sync": resting + instant(n, buffers=np.where(load.disk, full_copy, 0.0)),
        "checkpoint": made + staged,
    }


def _locked(model: Model, load: Load, state: State, *, width: float) -> Floats:
    """Return the factor by which page-locked copies of weights of `width` bytes exceed them; 1 if none is."""
    match load.layout.pinned:
        case "buffers":
            return of_buffers(state, width=width)
        case "tensors":
            return of_tensors(model, load, width=width)
    return np.ones(load.count)


def _staged(model: Model, load: Load, node: Node, state: State) -> Floats:
    """Return the bytes of a checkpoint that a node holds while it is written.

    Megatron's torch_dist and FSDP's sharded state dicts stage a rank's whole part before the first byte is
    written (megatron/core/dist_checkpointing/strategies/filesystem_async.py, preload_tensors;
    ShardedStateDictConfig's offload_to_cpu), also in an asynchronous save (docs/measured/gpu.md). State that
    is updated in host memory is written from there; state that is only parked there goes through the device.
    With a fully reshardable optimizer every rank gathers the state of its data-parallel group in host memory,
    and copies each part that it writes (distrib_optimizer.py, get_parameter_state_dp_zero; _clone_if_needed).
    """
    layout = load.layout
    if layout.staged == "whole":
        return np.full(load.count, parameters(model).total * layout.compute_bytes)
    optimizer = state.optimizer * (1.0 - load.host_update)
    if layout.staged == "gathered":
        optimizer = 2.0 * state.local * layout.optimizer_bytes
    part = state.weights * ~load.from_host + optimizer * layout.saves_optimizer
    return node.trainers * part * (layout.staged != "none")


def _routing(model: Model, load: Load, node: Node) -> Floats:
    """Return the bytes of the experts that a step's rollout chose, which the trainer replays.

    The driver has one copy, Ray's object store another; if engines run ahead, the driver also has those of
    the next step; a rank has its replica's part.
    """
    layout, layers = load.layout, model.layers - model.dense_layers
    if not (layout.routing and model.experts):
        return np.zeros(load.count)
    tokens = load.step_sequences * load.replicas * load.lengths.mean
    one = tokens * layers * model.experts_per_token * constant("routed_id")
    recorded = (layout.routing != "parts") / (load.tensor * load.split)
    ahead = float(load.placement is Placement.ASYNCHRONOUS)
    result: Floats = one * (2.0 + ahead + node.trainers / load.replicas * (1.0 + recorded))
    return result
