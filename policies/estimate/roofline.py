"""Estimate the seconds of each phase by a roofline model, to rank candidates rather than as a promise."""

from __future__ import annotations

import numpy as np

from autotune.policies.estimate.constants import Card, constant
from autotune.policies.estimate.engine import kv_token_bytes
from autotune.policies.estimate.experts import computed_again, exchanged_rows
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.passes import Pass
from autotune.policies.estimate.shapes import active_parameters, cache_layers, parameters
from autotune.policies.estimate.training import State
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster
from autotune.policies.values.profile import Placement


def seconds(
    model: Model, load: Load, *, cluster: Cluster, card: Card, state: State, run: Pass, pool_tokens: Floats
) -> dict[str, Floats]:
    """Return the seconds of each phase of a step."""
    layout = load.layout
    result = _training(model, load, cluster=cluster, card=card, state=state, run=run)
    result["rollout"] = _rollout(model, load, card=card, pool_tokens=pool_tokens)
    whole = parameters(model).total * layout.engine_bytes
    buckets = np.ceil(whole / np.maximum(1.0, load.sync_buffer))
    link = _link(load, cluster=cluster, card=card)
    moved = state.weights * load.param_offload / constant("pcie")
    result["weight_sync"] = moved + np.where(
        load.disk, 2.0 * whole / constant("disk") + 1.0, 2.0 * whole / link + 5e-3 * buckets
    )
    return result


def step_seconds(load: Load, phases: dict[str, Floats]) -> Floats:
    """Return a step's seconds; in an asynchronous job training and generation overlap."""
    training = phases["log_prob"] + phases["forward"] + phases["backward"] + phases["optimizer"]
    if load.placement is Placement.ASYNCHRONOUS:
        return np.maximum(phases["rollout"], training) + phases["weight_sync"]
    return phases["rollout"] + training + phases["weight_sync"]


def _training(
    model: Model, load: Load, *, cluster: Cluster, card: Card, state: State, run: Pass
) -> dict[str, Floats]:
    layout = load.layout
    tokens = load.step_tokens
    per_token = (
        2.0 * active_parameters(model)
        + 2.0 * cache_layers(model) * model.heads * model.head_dim * load.sequence
    )
    divisor = load.tensor * layout.pipeline_parallel
    forward = per_token * tokens / divisor / (card.flops * constant("efficiency_training"))
    scoring = per_token * tokens / divisor / (card.flops * constant("efficiency_prefill"))
    one_layer = constant("kernels_per_layer") * constant("launch_s")
    one_layer = one_layer + constant("unit_s") * layout.strategy.startswith("fsdp")
    launches = model.layers / layout.pipeline_parallel * one_layer
    passes, score_passes = load.passes, load.score_passes
    gathering = np.zeros(load.count)
    if layout.strategy.startswith("fsdp"):
        inside = load.shards * load.tensor <= max(1, cluster.gpus_per_node)
        link = np.where(inside, card.link * constant("link"), _link(load, cluster=cluster, card=card))
        gathering = (load.shards > 1) * state.local * layout.compute_bytes / link
    # All-reduces of tensor parallelism and all-to-alls of Ulysses are not hidden behind compute.
    rows = tokens * model.hidden * layout.compute_bytes
    exchanged = rows * model.layers * (4.0 * (load.tensor > 1) + 2.0 * (load.split > 1))
    exchanged = exchanged / (card.link * constant("link"))
    if layout.strategy == "megatron":
        # Each rank sends in one direction what it receives in the other: half of an all-reduce's traffic.
        near = load.expert * layout.expert_tensor_parallel <= max(1, cluster.gpus_per_node)
        link = np.where(
            near,
            2.0 * card.link * constant("link"),
            min(2.0 * card.link * constant("link"), constant("fabric")),
        )
        width = (model.expert_hidden or model.hidden) * layout.compute_bytes
        exchanged = exchanged + tokens * width * exchanged_rows(model, load) / link
    computing = np.maximum(forward, passes * launches)
    forward = _hidden_behind(computing, passes * gathering) + exchanged
    bubble = 1.0 + (layout.pipeline_parallel - 1) / np.maximum(1.0, passes)
    partly = constant("selective") * (load.recompute_selective | load.recompute_modules)
    partly = partly + load.recompute_modules * computed_again(model, layout.more_modules)
    again = np.where(load.recompute_full, 1.0, partly)
    again = again + 0.05 * load.loss_recompute + 0.02 * load.entropy_recompute + 0.02 * load.entropy_chunking
    # Backward gathers what forward freed, and scatters as much; what stayed gathered is only scattered.
    backward = forward * (1.0 + again) + np.where(load.reshard, forward, computing + exchanged)
    backward = backward + 0.5 * 2.0 * run.offloaded * passes / constant("pcie")
    chunks = np.where(load.chunk < load.usual_tokens, load.usual_tokens / load.chunk, 0.0)
    chunked = chunks * passes * 4.0 * constant("launch_s") + 0.01 * forward * (chunks > 0)
    scored = (
        _hidden_behind(np.maximum(scoring, score_passes * launches), score_passes * gathering) + exchanged
    )
    scored = scored * (1.0 + layout.reference)
    margin = np.where(load.fused, 0.97, 1.0) * bubble * (1.0 + layout.critic)
    transfer = 2.0 * load.param_offload * state.weights / constant("pcie")
    streams = np.where(load.from_host, passes * 2.0, 1.0)
    return {
        "log_prob": scored * margin + transfer,
        "forward": forward * margin + chunked + transfer * streams,
        "backward": backward * margin + chunked,
        "optimizer": _optimizer(load, card=card, state=state),
    }


def _optimizer(load: Load, *, card: Card, state: State) -> Floats:
    layout = load.layout
    resident = 2.0 * (state.weights + state.gradients + state.optimizer) / card.bandwidth
    trained = state.optimizer / max(1.0, layout.optimizer_bytes)
    updating = trained / constant("cpu_adam") + 2.0 * state.gradients / constant("pcie")
    updating = updating * np.where(load.optimizer_overlap, 0.6, 1.0)
    if not load.gpus:
        updating = 2.0 * resident
    loading = 2.0 * state.optimizer / constant("pcie")
    slow = load.host_update * updating + (load.optimizer_away - load.host_update) * loading
    # The time of an update in host memory already includes its gradients.
    moved = 2.0 * (load.grad_offload & ~load.from_host) * state.gradients / constant("pcie")
    return resident + slow + moved


def _rollout(model: Model, load: Load, *, card: Card, pool_tokens: Floats) -> Floats:
    layout = load.layout
    devices = layout.engine_ranks or layout.ranks
    engines = np.maximum(1.0, devices / load.rollout_tensor)
    sequences = layout.sequences or load.step_sequences * load.replicas
    share = np.maximum(1.0, sequences / engines)
    response = load.lengths.response or load.sequence / 4
    prompt = max(1.0, load.lengths.mean - response)
    length = prompt + response / 2
    batch = np.minimum(np.minimum(share, load.concurrency), np.maximum(1.0, pool_tokens / length))
    steps = np.maximum(share * response / batch, layout.response_tokens or response)
    weights = parameters(model).total * layout.engine_bytes
    running = np.minimum(batch, share * response / steps)  # towards the end few are left
    read = weights / load.rollout_tensor + running * length * kv_token_bytes(model, load)
    compute = running * 2.0 * active_parameters(model) / load.rollout_tensor / card.flops
    eager = np.where(load.graphs_off, 1.0, np.where(load.graphs_limited & (batch > 32), 0.5, 0.0)) * load.gpus
    step = np.maximum(read / (card.bandwidth * constant("efficiency_bandwidth")), compute)
    step = step + constant("decode_overhead_s") + eager * model.layers * constant("decode_eager_s")
    # Two all-reduces per layer: each takes time to start, and its bytes cross the GPUs' links.
    hops = (load.rollout_tensor > 1) * model.layers * 2.0
    sent_s = hops * model.hidden * layout.compute_bytes / (card.link * constant("link"))
    step = step + hops * 8e-6 + running * sent_s
    prefill = share * prompt * 2.0 * active_parameters(model) / load.rollout_tensor
    chunks = share * prompt / np.maximum(1.0, load.prefill)
    prefill_s = prefill / (card.flops * constant("efficiency_prefill")) + chunks * constant(
        "decode_overhead_s"
    )
    result: Floats = steps * step + prefill_s + share * prompt * sent_s
    return result


def _link(load: Load, *, cluster: Cluster, card: Card) -> float:
    """Return the bytes per second of a collective over all ranks."""
    inside = card.link * constant("link")
    return inside if load.layout.ranks <= max(1, cluster.gpus_per_node) else min(inside, constant("fabric"))


def _hidden_behind(compute: Floats, transfer: Floats) -> Floats:
    return np.maximum(compute, transfer) + 0.1 * np.minimum(compute, transfer)
