"""The simulation's own memory: what each phase holds, by formulas that no policy shares.

They follow published accounts (Korthikanti et al. 2022 for what a layer keeps, ZeRO for what is sharded) and
the order in which the frameworks' own code moves things; each is then scaled by a hidden coefficient.
"""

from __future__ import annotations

import numpy as np

from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement
from benchmarks.simulation.columns import Column, Columns
from benchmarks.simulation.world import GIB, Event, World

# Order in which a step meets them; the engine starts once, before the first.
PHASES = (
    Phase.ROLLOUT_INIT,
    Phase.ROLLOUT,
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.WEIGHT_SYNC,
)
ENGINE_PHASES = (Phase.ROLLOUT_INIT, Phase.ROLLOUT)


def parameters(world: World) -> tuple[float, float]:
    """Return the parameters outside and inside of experts."""
    m = world.model
    attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    dense_layers = m.dense_layers if m.experts else m.layers
    dense = m.layers * (attention + 2 * m.hidden) + dense_layers * 3 * m.hidden * m.intermediate
    sparse = m.layers - m.dense_layers if m.experts else 0
    dense += sparse * 3 * m.hidden * m.shared_intermediate
    dense += m.vocab * m.hidden * (1 if m.tied else 2)
    return float(dense), float(sparse * m.experts * 3 * m.hidden * m.expert_intermediate)


def trainer(world: World, c: Columns) -> dict[str, Column]:
    """Return the trainer's memory of one device: weights, gradients, optimizer state, passes, logits."""
    m, lay, own = world.model, world.accepted.profile.layout, world.coefficients
    dense, experts = parameters(world)
    tp, pp = c["tensor"], lay.pipeline_parallel
    one = np.ones_like(c["tokens"])
    megatron = lay.strategy == "megatron"
    if megatron:
        local = (dense / tp + experts / (lay.expert_parallel * one)) / pp
        weights, grads = local * lay.compute_bytes, local * lay.gradient_bytes
        spread = max(1.0, lay.shards)
        state = local * lay.optimizer_bytes / spread
        gathered = 0 * one
        stepping = 0.15 * state / max(1, lay.optimizer_bytes) * 4
    else:
        everything = dense + experts
        weights = one * everything * lay.parameter_bytes / lay.shards
        grads = one * everything * lay.gradient_bytes / lay.shards
        state = one * everything * lay.optimizer_bytes / lay.shards
        layer = (everything - m.vocab * m.hidden * (1 if m.tied else 2)) / m.layers
        head = m.vocab * m.hidden * lay.compute_bytes
        gathered = one * (2 * layer * lay.compute_bytes + head) * (1.0 if lay.shards > 1 else 0.5)
        stepping = one * everything * 4.0 / lay.shards * 0.9
    state = state * own.optimizer
    if lay.lora_rank:
        share = 2 * lay.lora_rank / m.hidden
        grads, state, stepping = grads * share, state * share, stepping * share
    wide = (
        m.experts_per_token * m.expert_intermediate + m.shared_intermediate if m.experts else m.intermediate
    )
    heads = m.heads * m.head_dim + 2 * m.kv_heads * m.head_dim
    kept_layer = 2.0 * (10 * m.hidden + 1.5 * heads + 2 * m.heads * m.head_dim + 4 * wide)
    input_layer = 2.0 * m.hidden
    working = 2.0 * (5 * m.hidden + heads + 3.0 * wide)
    layers = m.layers * (1.0 if pp == 1 else 0.9)  # the first stage keeps one micro-batch for each stage
    per_tp = tp if megatron else one
    tokens = c["tokens"] * own.fill
    kept = np.choose(
        c["recompute"].astype(int),
        [kept_layer * layers * one, 0.72 * kept_layer * layers * one, (input_layer * layers) * one],
    )
    kept = kept * tokens / per_tp * own.activation
    moved = np.where(c["activation_offload"] > 0, np.maximum(0.0, kept - 2 * kept / m.layers), 0.0)
    recomputed = np.where(c["recompute"] > 1, (kept_layer + working) * tokens / per_tp * own.activation, 0.0)
    logit = m.vocab / per_tp * own.logits
    entropy = 1.0 * lay.entropy
    chunk = np.where(c["logprob_chunk"] > 0, np.minimum(1.0, c["logprob_chunk"] / tokens), 1.0)
    whole = 0.5  # of an fp32 copy: what the head itself writes, in the type of the pass
    with_entropy = entropy * (1.0 - 0.9 * c["entropy_chunking"])
    staying = np.where(c["loss_recompute"] > 0, 0.0, 1.0) + entropy * (1.0 - c["entropy_recompute"])
    ahead = whole + chunk + staying + with_entropy * c["entropy_recompute"]
    behind = 2.0 * chunk + staying + c["loss_recompute"] * whole
    ahead = np.where(c["fused_kernels"] > 0, 0.08, ahead)
    behind = np.where(c["fused_kernels"] > 0, 0.12, behind)
    training = tokens * logit * lay.logits_bytes
    scored = c["logprob_tokens"] * own.fill
    score_chunk = np.where(c["logprob_chunk"] > 0, np.minimum(1.0, c["logprob_chunk"] / scored), 1.0)
    scoring = whole + 2.0 * score_chunk + with_entropy
    scoring = np.where(c["fused_kernels"] > 0, 0.08, scoring)
    return {
        "weights": weights,
        "grads": grads,
        "state": state,
        "gathered": gathered,
        "stepping": stepping,
        "kept": kept - moved,
        "moved": moved,
        "recomputed": recomputed,
        "logits_ahead": training * ahead,
        "logits_behind": training * behind,
        "scored": working * scored / per_tp * own.activation * 1.6,
        "scoring_logits": scored * logit * lay.logits_bytes * scoring,
        "reference": weights * (1.0 if lay.reference and not lay.reference_offload else 0.0),
    }


def engine(world: World, c: Columns, t: dict[str, Column]) -> dict[str, Column]:
    """Return the engine's memory of one device: weights, pool, graphs, batches; and its pool in tokens."""
    m, lay, own = world.model, world.accepted.profile.layout, world.coefficients
    profile = world.accepted.profile
    cap = world.accepted.cluster.gpu_memory_bytes
    tp = c["rollout_tp"]
    weights = sum(parameters(world)) * lay.engine_bytes / tp
    context = 0.75 * GIB * own.context
    shared = profile.placement is Placement.COLOCATED and not world.trainer_sleeps
    present = np.where(c["param_offload"] > 0, 0.0, t["weights"] + t["reference"]) * shared
    graphs = np.choose(c["graphs"].astype(int), [0.0 * tp, 0.35 + 0 * tp, 1.0 + 0 * tp])
    graphs = graphs * (0.45 + 0.55 * np.minimum(1.0, c["concurrency"] / 256))
    graphs = graphs * (0.7 * GIB + m.layers * 14e6 + m.hidden * 60e3 / tp) * own.graphs
    wide = m.experts_per_token * m.expert_intermediate if m.experts else m.intermediate
    batch = c["batched"] * 2.0 * (4 * m.hidden + 2.5 * wide / tp) * own.engine_batch
    batch = batch + np.minimum(c["concurrency"], 512) * m.vocab * 4.0 * 1.5 * own.engine_batch
    token = 2.0 * m.layers * np.maximum(1.0, m.kv_heads / tp) * m.head_dim * lay.kv_bytes
    if profile.engine == "vllm":
        static = c["fraction"] * cap - batch  # the context is older than what vLLM counts
    else:
        static = c["fraction"] * (cap - present - context)
    pool = static - weights
    return {
        "weights": weights,
        "static": np.maximum(static, weights),
        "graphs": graphs,
        "batch": batch,
        "context": context + 0 * tp,
        "pool_tokens": pool / token,
        "token": token,
    }


def device_peaks(
    world: World, c: Columns, *, started: bool = True, waking: bool = True
) -> dict[Phase, tuple[Column, Column]]:
    """Return each phase's long-lived and short-lived bytes on the device that holds most.

    `started`: an optimizer step was made, so that its state exists. `waking`: a weight sync wakes the engine.
    """
    lay, own, profile = world.accepted.profile.layout, world.coefficients, world.accepted.profile
    t = trainer(world, c)
    e = engine(world, c, t)
    colocated = profile.placement is Placement.COLOCATED
    zero = 0 * c["tokens"]
    state = t["state"] * (1.0 if started else 0.0)
    resting_state = np.where(c["optimizer_offload"] > 0, 0.0, state)
    stepping_state = zero if world.state_on_cpu else t["state"]
    stepping_state = np.where(c["optimizer_offload"] > 0, stepping_state, t["state"])
    # Megatron's gradients have a buffer of their own, which leaves the card with the weights.
    away = (c["param_offload"] > 0) | (c["grad_offload"] > 0)
    buffered = np.where(away, 0.0, t["grads"]) * (lay.strategy == "megatron")
    resting = np.where(c["param_offload"] > 0, 0.0, t["weights"]) + resting_state + t["reference"] + buffered
    resting = resting * (0.0 if world.trainer_sleeps else 1.0)
    context = (1.25 + 0.15 * np.log2(max(1, lay.ranks))) * GIB * own.context
    asleep = e["context"] + e["graphs"]
    awake = e["static"] + e["graphs"] + e["context"] + (e["batch"] if profile.engine == "vllm" else 0)
    beside = (asleep if lay.engine_sleeps else awake) * colocated
    here = resting * colocated + (context * (0.5 if world.trainer_sleeps else 1.0)) * colocated
    engine_start = np.where(
        c["param_offload"] > 0, 0.0, (t["weights"] + t["reference"]) * (not world.trainer_sleeps)
    )
    long_rollout = here + e["static"] + e["graphs"] + e["context"]
    base = context + beside + t["weights"] + t["reference"] + resting_state
    # An offloaded state that steps on the device is fetched for the whole update, once it exists.
    fetched = np.where(c["optimizer_offload"] > 0, zero if world.state_on_cpu else state, 0.0)
    train = base + fetched + t["grads"]  # in forward those of the micro-batches before it
    kept = t["kept"] + t["gathered"]
    critic = 1.15 if lay.critic and not lay.critic_offload else 1.0
    base, train = base * critic, train * critic
    bucket = np.where(c["disk_sync"] > 0, 0.25 * t["gathered"], c["sync_buffer"] * 2.2 + 0.6 * t["gathered"])
    sync_engine = (e["weights"] + e["graphs"] + e["context"]) * colocated if lay.engine_sleeps else beside
    result = {
        Phase.ROLLOUT_INIT: (
            (context + engine_start) * colocated + e["static"] + e["context"],
            e["graphs"] + 0.5 * e["batch"],
        ),
        Phase.ROLLOUT: (long_rollout, e["batch"]),
        Phase.LOG_PROB: (base + buffered, t["scored"] + t["scoring_logits"] + t["gathered"]),
        Phase.FORWARD: (train, kept + t["logits_ahead"]),
        Phase.BACKWARD: (train, kept + np.maximum(t["recomputed"], t["logits_behind"])),
        Phase.OPTIMIZER: (
            context + beside + t["weights"] + t["reference"] + t["grads"] + stepping_state,
            t["stepping"],
        ),
        Phase.WEIGHT_SYNC: _wakes(
            context + sync_engine + t["weights"] + t["reference"] + resting_state + buffered,
            bucket * own.sync,
            woken=long_rollout if waking else zero,
        ),
    }
    return {
        phase: (long + own.context_bytes + own.fragmented * (long + short), short)
        for phase, (long, short) in result.items()
    }


def _wakes(long: Column, short: Column, *, woken: Column) -> tuple[Column, Column]:
    """Return the larger of sending the weights and waking the whole engine afterwards."""
    sending = long + short
    return np.maximum(sending, woken) - short, short


def wakes(world: World, c: Columns) -> bool:
    """Return whether it is the waking engine, not the sending trainer, that holds most in a weight sync."""
    sent, woken = (device_peaks(world, c, waking=waking)[Phase.WEIGHT_SYNC] for waking in (False, True))
    return bool(sum(woken)[0] > sum(sent)[0])


def host_bytes(world: World, c: Columns) -> Column:
    """Return the host memory of the fullest node."""
    lay, own = world.accepted.profile.layout, world.coefficients
    t = trainer(world, c)
    per_node = world.accepted.cluster.gpus_per_node
    moved = np.where(c["param_offload"] > 0, t["weights"], 0) + np.where(
        c["optimizer_offload"] > 0, t["state"] * 1.08, 0
    )
    if world.trainer_sleeps:
        moved = np.maximum(moved, 0) + t["weights"] + np.where(c["optimizer_offload"] > 0, 0, t["state"])
    moved = moved + t["moved"] * 1.1
    moved = moved + (t["weights"] if lay.reference and lay.reference_offload else 0)
    model = sum(parameters(world)) * 2.0
    loading = sum(parameters(world)) * max(2, lay.parameter_bytes) * 0.8
    fixed = 8 * GIB + per_node * 6.5 * GIB + loading + model * c["weights_backup"]
    return own.host * fixed + per_node * moved + c["workers"] * 1.6 * GIB


def late_bytes(world: World, c: Columns, phase: Phase, step: int, *, short: Column) -> Column:
    """Return what a phase needs beyond its usual peak at a step of the attempt."""
    own = world.coefficients
    lost = short * own.reserve * np.where(c["expandable"] > 0, 0.35, 1.0)
    since = step
    for late in world.late:
        match late.event:
            case Event.LONGEST:
                if since >= late.step and phase in (Phase.FORWARD, Phase.BACKWARD, Phase.LOG_PROB):
                    lost = lost + late.size * short
            case Event.FRAGMENTATION:
                if phase not in ENGINE_PHASES:
                    share = 1 - np.exp(-3.0 * since / late.step)
                    lost = lost + late.size * share * np.where(c["expandable"] > 0, 0.2, 1.0)
            case Event.LEAK:
                if phase not in ENGINE_PHASES:
                    age = np.where(c["restart_every"] > 0, np.minimum(since, c["restart_every"]), since)
                    lost = lost + late.size * age
            case Event.RESIDUE:
                if phase not in ENGINE_PHASES:
                    lost = lost + late.size * min(1.0, since / late.step)
    return lost
