"""Megatron's modules: rows sent to experts, recomputed activations, offloaded activations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import Kept, active_parameters, kept_by_layer, shares
from autotune.policies.values.architecture.model import Layout, Model

_FP8 = 1
# DeepEP: channels (half its multiprocessors), ranks of a node, bytes of a row beside its values (origin and
# 128 experts, weights and scales); rows of a channel and rank by the largest number of ranks, and per node.
_DEEPEP_CHANNELS, _DEEPEP_NODE, _DEEPEP_NAMES, _DEEPEP_WORKSPACE = 10, 8, 8 + 128 * (8 + 4 + 4), 32 << 20
_DEEPEP_ROWS, _DEEPEP_MOST, _DEEPEP_REMOTE = ((8, 256), (64, 288), (96, 480), (128, 560)), 720, 128


def gathered_rows(layout: Layout, tensor: Floats) -> Floats:
    """Return the factor by which a device holds more rows than sequence parallelism gives it.

    The ranks of a split expert gather each other's rows (moe/token_dispatcher.py, tp_size).
    """
    result: Floats = np.minimum(max(1, layout.expert_tensor_parallel), tensor)
    return result


class Moving(NamedTuple):
    """Bytes per token of routed rows at the widest instant of a layer, on one device."""

    scored: Floats  # without gradients, with what the experts compute from them
    forward: Floats  # in addition to what the experts keep for backward
    backward: Floats  # gradients


def moving(model: Model, load: Load) -> Moving:
    """Return the rows that Megatron's token dispatcher holds; zero without experts or Megatron.

    Permuted and received rows live until the end of the layer, because its function references them
    (megatron/core/transformer/moe/moe_layer.py, token_dispatcher.py). Routing is assumed to be even.
    """
    layout, size = load.layout, load.layout.compute_bytes
    if layout.strategy != "megatron" or not shares(model).sparse:
        return Moving(*(np.zeros(load.count),) * 3)
    gates = 2 if model.gated else 1  # the products before the activation, in one tensor
    row = size * (model.expert_hidden or model.hidden) / load.tensor
    copies = gathered_rows(layout, load.tensor)
    sent = row * model.experts_per_token
    entering = sent * copies  # of the rank's own experts; as much leaves them
    inner = size * model.experts_per_token * model.expert_intermediate / load.tensor
    held, returned = _held(load, row=row, sent=sent, copies=copies, local=model.experts)
    computing = held + entering  # while the experts' last product runs
    return Moving(
        scored=entering + np.maximum(computing + (gates + 1) * inner, computing + returned),
        forward=computing + returned,
        backward=2.0 * entering + gates * inner,
    )


def _held(load: Load, *, row: Floats, sent: Floats, copies: Floats, local: int) -> tuple[Floats, Floats]:
    """Return the bytes of a dispatch that stay beside the experts' input, and of their sorted result."""
    ranks = load.expert * copies
    if load.layout.dispatcher == "allgather":
        # Every rank has the tokens of all ranks, and a sum of its experts' results for each of them.
        return np.where(ranks == 1, 0.0, row * ranks), row * ranks
    if load.layout.dispatcher == "flex":
        received = row * copies * _ranks_of_a_token(load, sent / row)
        return received, received
    received = sent * (load.expert > 1)
    # With one expert per rank nothing is sorted: the received, or gathered, rows are the experts' input.
    single = load.expert >= local
    return (
        np.where(single, sent + received * (copies > 1), sent + received),
        np.where(single, 0.0, sent * copies),
    )


def dispatch_buffers(model: Model, load: Load) -> Floats:
    """Return the bytes of DeepEP's buffers on a device, outside of PyTorch; 0 without `flex`.

    Its own sizes for 20 multiprocessors and rows of 16 bits (deep_ep/buffers/legacy.py, get_dispatch_config;
    csrc/legacy/config.hpp, get_nvl_buffer_size_hint and get_rdma_buffer_size_hint), which Megatron takes
    (megatron/core/transformer/moe/fused_a2a.py, get_buffer).
    """
    layout = load.layout
    ranks = load.expert * gathered_rows(layout, load.tensor)
    if layout.strategy != "megatron" or layout.dispatcher != "flex" or not shares(model).sparse:
        return np.zeros(load.count)
    row = 2.0 * (model.expert_hidden or model.hidden) + _DEEPEP_NAMES
    most = np.array([ranks <= largest for largest, _ in _DEEPEP_ROWS])
    rows = np.select(most, [kept for _, kept in _DEEPEP_ROWS], _DEEPEP_MOST)
    nodes = np.maximum(1.0, ranks / _DEEPEP_NODE)
    between = 2.0 * _DEEPEP_REMOTE * nodes * (nodes > 1)
    result: Floats = _DEEPEP_CHANNELS * row * (np.minimum(ranks, _DEEPEP_NODE) * rows + between)
    return np.where(ranks > 1, result + _DEEPEP_WORKSPACE, 0.0)


def _ranks_of_a_token(load: Load, chosen: Floats | float) -> Floats:
    """Return the expected number of ranks that have one of a token's experts, drawn uniformly."""
    result: Floats = load.expert * (1.0 - (1.0 - 1.0 / load.expert) ** chosen)
    return result


def exchanged_rows(model: Model, load: Load) -> Floats:
    """Return the rows of hidden size that a token sends to and receives from other ranks in a forward.

    A row is sent once per expert, with `flex` once per rank, with `allgather` to all ranks
    (moe/token_dispatcher.py). Rows that stay on their own rank do not count.
    """
    chosen = float(model.experts_per_token)
    sent = {"flex": _ranks_of_a_token(load, chosen), "allgather": load.expert}.get(
        load.layout.dispatcher, chosen
    )
    layers = shares(model).sparse * model.layers / load.layout.pipeline_parallel
    result: Floats = 2.0 * sent * (1.0 - 1.0 / load.expert) * layers / load.tensor
    return result


def recomputed(model: Model, layout: Layout, modules: tuple[str, ...]) -> Kept:
    """Return the bytes per token that a layer does not keep because `modules` are recomputed.

    Attention's core, the default of `recompute_modules`, is not included (Megatron's transformer_config.py,
    recompute_modules, and the modules that read it).
    """
    size, share = layout.compute_bytes, shares(model)
    narrow = _FP8 if layout.fp8 else size
    gates = 2 if model.gated else 1  # the products before the activation, in one tensor
    experts = model.experts_per_token * share.sparse
    whole = split = routed = rows = 0.0
    if "moe" in modules:
        kept = kept_by_layer(model, element_bytes=size, fused=True, fp8=layout.fp8)
        routed, rows = kept.experts, kept.rows
    elif "moe_act" in modules:
        routed = experts * narrow * model.expert_intermediate
    if "moe" in modules or "shared_experts" in modules:
        split += share.sparse * (gates * size + narrow) * model.shared_intermediate
    if "mlp" in modules:
        split += share.dense * (gates * size + narrow) * model.intermediate
        whole += share.dense * narrow * model.hidden
    if "layernorm" in modules:
        # A separate norm: before experts, and before latent attention's projections.
        whole += size * model.hidden * share.sparse
        whole += narrow * model.hidden * share.attention * bool(model.kv_lora_rank)
    if "mla_up_proj" in modules and model.kv_lora_rank:
        heads = model.heads * (2 * model.head_dim + (model.value_head_dim or model.head_dim))
        split += share.attention * size * heads
    return Kept(whole=whole, split=split, experts=routed, rows=rows)


def computed_again(model: Model, modules: tuple[str, ...]) -> float:
    """Return the share of a forward's products that recomputed modules repeat; other operations count 0."""
    share, each = shares(model), 3 if model.gated else 2
    rows = each * model.hidden
    dense = share.dense * rows * model.intermediate
    shared = share.sparse * rows * model.shared_intermediate
    routed = share.sparse * each * (model.expert_hidden or model.hidden)
    routed *= model.experts_per_token * model.expert_intermediate
    again = dense * ("mlp" in modules) + routed * ("moe" in modules)
    again += shared * ("moe" in modules or "shared_experts" in modules)
    return model.layers * again / active_parameters(model)


def leaving(model: Model, layout: Layout) -> Kept:
    """Return bytes per token of the inputs of `offload_modules` (Megatron's fine-grained offloading).

    The inputs of attention are its queries, keys and values; the input of its projection is its result.
    """
    size, share, modules = layout.compute_bytes, shares(model), layout.offload_modules
    narrow = _FP8 if layout.fp8 else size
    result = model.heads * (model.value_head_dim or model.head_dim)
    queries = model.heads * model.head_dim
    keys = queries + result if model.kv_lora_rank else 2 * model.kv_heads * model.head_dim
    split = share.attention * size * (queries + keys) * ("core_attn" in modules)
    split += share.attention * size * result * ("attn_proj" in modules)
    whole = (
        size
        * model.hidden
        * (share.attention * ("qkv_linear" in modules) + share.sparse * ("mlp_norm" in modules))
    )
    routed = share.sparse * model.experts_per_token
    entering = routed * narrow * (model.expert_hidden or model.hidden) * ("expert_fc1" in modules)
    products = routed * (2 if model.gated else 1) * size * model.expert_intermediate * ("moe_act" in modules)
    return Kept(whole=whole, split=split, experts=entering + products, rows=entering)
