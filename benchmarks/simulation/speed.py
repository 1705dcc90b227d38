"""The simulation's own clock: the seconds of a step."""

from __future__ import annotations

import numpy as np

from autotune.policies.values.profile import Placement
from benchmarks.simulation.columns import Column, Columns
from benchmarks.simulation.truth import engine, parameters, trainer
from benchmarks.simulation.world import GIB, World


def step_seconds(world: World, c: Columns) -> Column:
    """Return the seconds of one training step of each configuration."""
    rollout, scoring, training, sync = parts(world, c)
    if world.accepted.profile.placement is Placement.ASYNCHRONOUS:
        return np.maximum(rollout, scoring + training) + sync
    return rollout + scoring + training + sync


def parts(world: World, c: Columns) -> tuple[Column, Column, Column, Column]:
    """Return the seconds of generation, scoring, training and weight sync."""
    m, lay, own, card = world.model, world.accepted.profile.layout, world.coefficients, world.card
    t = trainer(world, c)
    e = engine(world, c, t)
    dense, experts = parameters(world)
    active = dense + experts * (m.experts_per_token / m.experts if m.experts else 0)
    mean_sequence = world.mean_sequence
    total = lay.sequences * mean_sequence
    # Generation: decoding is bound by what is read per token, replicas share the sequences.
    tp = c["rollout_tp"]
    replicas = np.maximum(1.0, (lay.engine_ranks or lay.ranks) / tp)
    held = np.maximum(1.0, e["pool_tokens"] / mean_sequence)
    own_share = np.maximum(1.0, lay.sequences / replicas)
    running = np.minimum(np.minimum(c["concurrency"], held), own_share)
    read = e["weights"] * (0.35 + 0.65 * np.minimum(1.0, running / 16) if m.experts else 1.0)
    read = read + running * 0.6 * mean_sequence * e["token"]
    hop = np.where(tp > 1, m.layers * 2 * 12e-6 * np.log2(np.maximum(2, tp)), 0.0)
    hop = hop + np.where(tp > world.accepted.cluster.gpus_per_node, m.layers * 60e-6, 0.0)
    launch = np.choose(c["graphs"].astype(int), [28e-6, 16e-6, 6e-6]) * m.layers * 10
    compute = 2 * active * running / (card.teraflops * 1e12 * 0.55 * tp)
    latency = np.maximum(read / (card.bandwidth_gib_s * GIB * own.decode_speed), compute) + hop + launch
    waves = own_share / running
    rollout = own.responses * lay.response_tokens * latency * (0.35 + 0.65 * waves) * 1.25
    rollout = rollout + 2 * active * lay.sequences * own.prompts * lay.prompt_tokens / (
        card.teraflops * 1e12 * 0.5 * max(1, lay.engine_ranks or lay.ranks)
    )
    # Passes of the trainer.
    flops = card.teraflops * 1e12 * 0.46 * own.train_speed
    per_device = total / lay.ranks
    between = (
        45.0 if card.link_gib_s > 100 else 10.0
    )  # GiB/s per device: InfiniBand, or what servers without it have
    link = min(card.link_gib_s, between) if world.accepted.cluster.nodes > 1 else card.link_gib_s
    link = link * GIB * own.link_speed
    gathering = (
        (dense + experts) * lay.compute_bytes / link if lay.shards > 1 and lay.strategy != "megatron" else 0.0
    )
    fill = own.fill

    def passes(tokens: Column, *, factor: Column, gathers: float) -> Column:
        number = np.ceil(per_device / np.maximum(1.0, tokens * fill))
        busy = factor * 2 * active * per_device / flops * (1 + 600 / tokens)
        return np.maximum(busy, 0.75 * gathers * gathering * number) + number * own.pass_overhead * m.layers

    one = np.ones_like(tp)
    scoring = passes(c["logprob_tokens"], factor=one, gathers=1.0) * (2.0 if lay.reference else 1.0)
    again = np.choose(c["recompute"].astype(int), [3.0 * one, 3.12 * one, 4.0 * one])
    again = again + 0.06 * c["entropy_recompute"] + 0.05 * c["loss_recompute"]
    training = passes(c["tokens"], factor=again, gathers=3.0)
    training = training * (1 - 0.04 * c["fused_kernels"])
    pcie = card.pcie_gib_s * GIB * 0.8
    number = np.ceil(per_device / np.maximum(1.0, c["tokens"] * fill))
    training = training + 0.55 * 2 * t["moved"] * number / pcie
    state_trip = t["state"] / pcie * (3.0 if world.state_on_cpu else 2.0)
    training = training + c["optimizer_offload"] * state_trip
    resting = t["weights"] / pcie
    sending = (dense + experts) * 2 / (link * 0.25) / max(1, lay.ranks // 4) + 1.0
    sync: Column = sending * (1 + 0.1 * (c["sync_buffer"] < 256 << 20)) + c["disk_sync"] * (
        dense + experts
    ) * 4 / (2 * GIB)
    return (
        rollout,
        scoring + c["param_offload"] * resting * 2,
        training + c["param_offload"] * resting * 2,
        sync,
    )
