"""Device memory of a rollout engine: weights, KV pool, captured graphs, and what it keeps while it sleeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats, instant
from autotune.policies.estimate.shapes import FP32, cache_layers, parameters, working_set
from autotune.policies.values.architecture.model import Model

_SAMPLER_COPIES = 2  # fp32 logits and their probabilities for one token of every running request
_POOLLESS = frozenset({"light", "replay"})
_NO_ENGINE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine's parts on one device, by state, and the size of its pool."""

    starting: Floats
    running: Floats
    receiving: Floats  # during a weight sync
    training: Floats  # while the trainer uses the same device
    pool_tokens: Floats


def engine_of(model: Model, load: Load, *, engine: str, capacity: float, beside: Floats) -> Engine:
    """Return an engine's use of a device of `capacity` bytes that already holds the parts `beside`.

    vLLM's fraction is a share of the whole device and covers what its worker adds: weights, the larger of a
    full chunk and a sampler with every request, its communicators, and the pool. It excludes the CUDA
    context, which exists before its first snapshot, and graphs, which are captured after its profile
    (gpu_worker.py, mem_utils.py). SGLang's is a share of the memory that is free at its start and covers
    weights and pool (kv_cache_configurator.py).
    """
    if engine == _NO_ENGINE:
        return _nothing(load.count)
    layout, pooled = load.layout, engine not in _POOLLESS
    weights = parameters(model).total / load.rollout_tensor * layout.engine_bytes
    outside = np.where(load.rollout_tensor > 1, constant("collectives"), 0.0) + constant("context")
    outside = outside * (not load.engine_budgeted)
    base = constant("engine_base") * pooled + np.zeros(load.count)
    if not load.gpus:
        outside = constant("cpu_process") + np.zeros(load.count)
        base = constant("engine_base_cpu") * pooled + np.zeros(load.count)
    element = int(max(1, layout.engine_bytes))
    # vLLM profiles a full chunk when it starts; SGLang allocates what the running requests need.
    prompts = load.concurrency * float(layout.prompt_tokens or load.sequence)
    rows = load.prefill if engine == "vllm" else np.minimum(load.prefill, prompts)
    passing = rows * working_set(model, element_bytes=element) / load.rollout_tensor
    sampling = load.concurrency * model.vocab * 4.0 * _SAMPLER_COPIES
    per_token = kv_token_bytes(model, load)
    warmed = np.zeros(load.count)
    if not pooled:
        pool = np.minimum(load.concurrency, max(1, layout.sequences)) * load.sequence * per_token
        pool = pool * (engine == "light")
    elif engine == "vllm":
        # The sampler runs after the layers' activations are freed, and at the start again after the graphs;
        # the profile includes the buffers.
        warmed = sampling
        passing, sampling = np.where(passing > sampling, (passing, 0.0 * sampling), (0.0 * passing, sampling))
        base = np.zeros(load.count)
        inside = outside - constant("context") if load.gpus else outside
        pool = np.maximum(0.0, load.fraction * capacity - weights - passing - sampling - inside)
        if layout.pool_bytes:  # kv_cache_memory_bytes, for which the share is not read (gpu_worker.py)
            pool = np.full(load.count, layout.pool_bytes)
    else:
        free = np.maximum(0.0, capacity - beside.sum(axis=0) - outside)
        pool = np.maximum(0.0, load.fraction * free - weights)
    graphs = np.zeros(load.count)
    if load.gpus and pooled:
        limited, full = constant("graph_limited_batch"), constant("graph_full_batch")
        captured = np.where(load.graphs_off, 0.0, np.where(load.graphs_limited, limited, full))
        graphs = ~load.graphs_off * constant("graph_base") + constant("graph_per_batch") * captured
        if engine == "vllm":
            graphs = constant("vllm_graphs") * captured / full
    n = load.count
    running = instant(
        n,
        weights=weights,
        kv_pool=pool,
        graphs=graphs,
        activations=passing,
        logits=sampling,
        buffers=base,
        outside=outside,
    )
    reserved = pool * pooled  # a cache that grows with the responses does not exist yet
    starting = instant(
        n, weights=weights, kv_pool=reserved, graphs=graphs, logits=warmed, buffers=base, outside=outside
    )
    sent = parameters(model).largest * layout.engine_bytes if layout.sends_tensors else load.sync_buffer
    bucket = np.where(load.disk, 0.0, sent) * pooled
    # The order of a colocated sync: a sleeping engine's weights wake, are updated, and the pool wakes last.
    woken = instant(n, weights=weights, graphs=graphs, buffers=bucket + base, outside=outside)
    in_part = load.engine_sleep & (not layout.wakes_whole)
    receiving = np.where(in_part, woken, starting + instant(n, buffers=bucket))
    asleep = instant(n, graphs=graphs, residue=constant("residue") + np.zeros(n), outside=outside)
    training = np.where(load.engine_sleep, asleep, starting)
    return Engine(
        starting=starting,
        running=running,
        receiving=receiving,
        training=training,
        pool_tokens=(_tokens(model, load, pool, engine) if pooled else pool) / per_token,
    )


def _tokens(model: Model, load: Load, pool: Floats, engine: str) -> Floats:
    """Return the bytes of a pool that hold keys and values, beside the states of linear layers.

    SGLang sets aside a share for states (kv_cache_configurator.py, _handle_max_mamba_cache; its default
    mamba_full_memory_ratio). vLLM takes a request's state out of the pool's blocks
    (v1/core/single_type_kv_cache_manager.py, MambaManager): here of requests of the longest length.
    """
    if not model.linear_layers:
        return pool
    if engine == "sglang":
        return pool / (1.0 + constant("state_ratio"))
    keys = load.sequence * kv_token_bytes(model, load)
    return pool * keys / (keys + state_bytes(model, load))


def state_bytes(model: Model, load: Load) -> Floats:
    """Return the bytes of a request's states in a device's pool: recurrent ones in fp32, and convolutions'.

    transformers 5.19 modeling_qwen3_next.py (delta rule), modeling_mamba2.py, modeling_mamba.py,
    modeling_lfm2.py; the engines keep the same (vllm/model_executor/layers/mamba/mamba_utils.py).
    """
    values = float(model.linear_values * model.linear_value_dim)
    window = 2.0 * model.linear_keys * model.linear_key_dim + values
    convolution = window * max(0, model.linear_conv - 1) * load.layout.compute_bytes
    every = model.linear_layers * (values * model.linear_key_dim * FP32 + convolution)
    result: Floats = every / load.rollout_tensor
    return result


def _nothing(count: int) -> Engine:
    """Return the `Engine` of a job without one: no memory, and a pool without limit."""
    nothing = instant(count)
    return Engine(
        starting=nothing,
        running=nothing,
        receiving=nothing,
        training=nothing,
        pool_tokens=np.full(count, np.inf),
    )


def kv_token_bytes(model: Model, load: Load) -> Floats:
    """Return the bytes of one token in a device's KV pool; layers with a window count like the others."""
    if model.kv_lora_rank:
        row = float(model.kv_lora_rank + model.rope_head_dim) + np.zeros(load.count)  # the latent, not split
    else:
        heads = np.maximum(1.0, model.kv_heads / load.rollout_tensor)  # fewer than ranks: repeated
        row = 2.0 * heads * model.head_dim
    return cache_layers(model) * row * load.layout.kv_bytes
