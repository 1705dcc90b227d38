"""Experts under Megatron: rows on their way to them, and what selective recomputation leaves of a layer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.parts import Floats
from autotune.policies.estimate.shapes import Kept, kept_by_layer, shares
from autotune.policies.values.architecture.model import Layout, Model

_FP8 = 1


def gathered_rows(layout: Layout, tensor: Floats) -> Floats:
    """Return how many times a device has the rows that sequence parallelism would leave it.

    Where an expert is split, its ranks gather each other's rows (moe/token_dispatcher.py, tp_size).
    """
    result: Floats = np.minimum(max(1, layout.expert_tensor_parallel), tensor)
    return result


class Moving(NamedTuple):
    """Bytes per token of routed rows at the widest instant of a layer, on one device."""

    scored: Floats  # without gradients, with what the experts compute from them
    forward: Floats  # beside what the experts keep for backward
    backward: Floats  # gradients


def moving(model: Model, load: Load) -> Moving:
    """Return what a dispatcher of tokens holds; nothing without experts and outside of Megatron.

    Rows that were permuted and those received stay to the end of the layer, because its function holds them
    by name (megatron/core/transformer/moe/moe_layer.py, token_dispatcher.py). Routing is taken as even.
    DeepEP's own buffers, which PyTorch does not allocate, are not counted.
    """
    layout, size = load.layout, load.layout.compute_bytes
    if layout.strategy != "megatron" or not shares(model).sparse:
        return Moving(*(np.zeros(load.count),) * 3)
    gates = 2 if model.gated else 1  # the products before the activation, in one tensor
    row = size * (model.expert_hidden or model.hidden) / load.tensor
    copies = gathered_rows(layout, load.tensor)
    sent = row * model.experts_per_token
    entering = sent * copies  # of the rank's own experts, and as much leaves them
    inner = size * model.experts_per_token * model.expert_intermediate / load.tensor
    held, returned = _held(layout, row=row, sent=sent, copies=copies, local=model.experts)
    computing = held + entering  # while the experts' last product runs
    return Moving(
        scored=entering + np.maximum(computing + (gates + 1) * inner, computing + returned),
        forward=computing + returned,
        backward=2.0 * entering + gates * inner,
    )


def _held(layout: Layout, *, row: Floats, sent: Floats, copies: Floats, local: int) -> tuple[Floats, Floats]:
    """Return what stays of a dispatch beside the experts' input, and what their sorted result takes."""
    ranks = layout.expert_parallel * copies
    alone = ranks == 1
    if layout.dispatcher == "allgather":
        # Every rank has the tokens of all ranks, and a sum of its experts' results for each of them.
        return np.where(alone, 0.0, row * ranks), row * ranks
    if layout.dispatcher == "flex":
        # A token goes once to each rank that has one of its experts.
        chosen = sent / row
        received = row * ranks * (1.0 - (1.0 - 1.0 / layout.expert_parallel) ** chosen)
        return received, received
    received = sent * (layout.expert_parallel > 1)
    if layout.expert_parallel >= local:
        # With one expert a rank nothing is sorted: what is received, or gathered, is the experts' input.
        return sent + received * (copies > 1), 0.0 * sent
    return sent + received, sent * copies


def recomputed(model: Model, layout: Layout) -> Kept:
    """Return bytes per token of what the modules that a layer computes again do not keep.

    Attention's core, which `recompute_modules` names by default, is not among them (Megatron's
    transformer_config.py, recompute_modules, and the modules that read it).
    """
    size, share, modules = layout.compute_bytes, shares(model), layout.recompute_modules
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
        # A norm of its own: before experts, and before latent attention's projections.
        whole += size * model.hidden * share.sparse
        whole += narrow * model.hidden * share.attention * bool(model.kv_lora_rank)
    if "mla_up_proj" in modules and model.kv_lora_rank:
        heads = model.heads * (2 * model.head_dim + (model.value_head_dim or model.head_dim))
        split += share.attention * size * heads
    return Kept(whole=whole, split=split, experts=routed, rows=rows)
