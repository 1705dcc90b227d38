"""Configurations as columns of numbers, so that the truth of many is one computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.policies.values.knobs import Knobs
from benchmarks.simulation.world import World

Column: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = dict[str, Column]

_RECOMPUTE = {"off": 0, "selective": 1, "full": 2}
_GRAPHS = {"off": 0, "limited": 1, "full": 2}
_FLAGS = (
    "activation_offload",
    "param_offload",
    "optimizer_offload",
    "grad_offload",
    "fused_kernels",
    "loss_recompute",
    "entropy_chunking",
    "entropy_recompute",
    "weights_backup",
)


def columns(world: World, configurations: Sequence[Knobs]) -> Columns:
    """Return what matters of the configurations to the simulation, one row each."""
    profile, model = world.accepted.profile, world.model
    longest = profile.longest_sequence or 4096

    def column(values: list[float]) -> Column:
        return np.array(values, dtype=float)

    result: Columns = {
        name: column([float(getattr(k, name) is True) for k in configurations]) for name in _FLAGS
    }
    tokens = [
        float(
            (k.microbatch_size or 1) * longest
            if k.dynamic_batching is False
            else k.tokens_per_microbatch or longest
        )
        for k in configurations
    ]
    there = [_on_one_replica(world, k, longest=longest) for k in configurations]
    scored = [float(k.logprob_tokens or t) for k, t in zip(configurations, tokens, strict=True)]
    result |= {
        "tokens": np.minimum(column(tokens), column(there)),
        "logprob_tokens": np.minimum(column(scored), column(there)),
        "logprob_chunk": column([float(k.logprob_chunk or 0) for k in configurations]),
        "recompute": column([_RECOMPUTE[k.recompute or "off"] for k in configurations]),
        "graphs": column([_GRAPHS[k.cuda_graphs or "full"] for k in configurations]),
        "fraction": column([k.memory_fraction or 0.8 for k in configurations]),
        "concurrency": column([float(k.concurrency or 256) for k in configurations]),
        "batched": column([float(k.max_batched_tokens or 8192) for k in configurations]),
        "rollout_tp": column([float(k.rollout_tensor_parallel or 1) for k in configurations]),
        "tensor": column([float(k.tensor_parallel or 1) for k in configurations]),
        "expandable": column([float(k.allocator == "expandable") for k in configurations]),
        "disk_sync": column([float(k.sync_mode == "disk") for k in configurations]),
        "sync_buffer": column([float(k.sync_buffer or 512 << 20) for k in configurations]),
        "workers": column([float(k.dataloader_workers or 0) for k in configurations]),
        "restart_every": column([float(k.restart_every or 0) for k in configurations]),
    }
    result["layers"] = np.full(len(tokens), float(model.layers))
    return result


def _on_one_replica(world: World, knobs: Knobs, *, longest: int) -> float:
    """Return the tokens of a step on one copy of the model: a budget beyond them is not filled."""
    layout = world.accepted.profile.layout
    copies = max(1, layout.ranks // ((knobs.tensor_parallel or 1) * layout.pipeline_parallel))
    sequences = max(1.0, layout.sequences / copies)
    # Of few sequences some are long together.
    return max(float(longest), sequences * world.mean_sequence * (1 + 0.8 / np.sqrt(sequences)))
