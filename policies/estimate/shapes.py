"""Counts that follow from a model's shape alone: parameters, and what a layer keeps per token."""

from __future__ import annotations

from typing import NamedTuple

from autotune.policies.values.model import Model

FP32 = 4
_RSQRT = 4  # bytes a norm keeps per row beside its tensors


class Parameters(NamedTuple):
    """Parameter counts of one model; layers are averages where they differ."""

    embedding: int
    head: int  # 0 when tied
    attention: float  # per layer
    mlp: float  # per layer: dense MLP, shared experts and router
    experts: float  # per layer, all of them
    norms: int  # per layer
    final_norm: int
    layers: int
    largest: int  # the largest single tensor; transformers holds a layer's experts in one
    largest_apart: int  # the same where every expert has tensors of its own: in Megatron, and in checkpoints

    @property
    def layer(self) -> float:
        """Parameters of one layer."""
        return self.attention + self.mlp + self.experts + self.norms

    @property
    def total(self) -> float:
        """Parameters of the model."""
        return self.embedding + self.head + self.final_norm + self.layers * self.layer


def parameters(model: Model) -> Parameters:
    """Return the parameter counts of a model (transformers 5.19, models/<family>/modeling_*.py)."""
    embedding = model.vocab * model.hidden
    bias = 2 if model.norm == "layer" else 1
    attention, largest_attention = _attention(model)
    dense, largest_dense = _mlp(model, model.intermediate)
    sparse_layers = model.layers - model.dense_layers if model.experts else 0
    shared, _ = _mlp(model, model.shared_intermediate)
    router = model.experts * model.hidden + (model.hidden if model.shared_gate else 0)
    one_expert, _ = _mlp(model, model.expert_intermediate)
    share = sparse_layers / model.layers
    fused_experts = model.experts * 2 * model.expert_intermediate * model.hidden
    single = max(embedding, largest_attention, largest_dense if share < 1 else 0)
    norm_rows = model.norms_per_layer * model.hidden * bias + _qk_norms(model)
    return Parameters(
        embedding=embedding,
        head=0 if model.tied else embedding,
        attention=attention,
        mlp=(1 - share) * dense + share * (shared + router),
        experts=share * model.experts * one_expert,
        norms=norm_rows,
        final_norm=model.hidden * bias,
        layers=model.layers,
        largest=max(single, fused_experts),
        largest_apart=max(single, 2 * model.expert_intermediate * model.hidden if model.experts else 0),
    )


def active_parameters(model: Model) -> float:
    """Return the parameters that one token meets, without the embedding."""
    count = parameters(model)
    experts = count.experts * model.experts_per_token / model.experts if model.experts else 0.0
    layer = count.attention + count.mlp + experts
    return count.layers * layer + model.vocab * model.hidden


def lora_parameters(model: Model, rank: int) -> float:
    """Return the trained parameters of adapters of `rank` on every projection of attention and MLP."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inner = model.intermediate or model.expert_intermediate
    sides = 2 * (model.hidden + wide) + 2 * (model.hidden + narrow) + 3 * (model.hidden + inner)
    return float(rank * sides * model.layers)


def _qk_norms(model: Model) -> int:
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    latent = model.q_lora_rank + model.kv_lora_rank
    return latent + {"head": 2 * model.head_dim, "all": wide + narrow}.get(model.qk_norm, 0)


def _attention(model: Model) -> tuple[float, int]:
    hidden, wide, narrow = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.kv_lora_rank:
        value = model.value_head_dim or model.head_dim
        plain = model.head_dim - model.rope_head_dim
        query = model.q_lora_rank * (hidden + wide) if model.q_lora_rank else hidden * wide
        down = hidden * (model.kv_lora_rank + model.rope_head_dim)
        up = model.kv_lora_rank * model.heads * (plain + value)
        out = model.heads * value * hidden
        return float(query + down + up + out), max(up, out, model.q_lora_rank * wide)
    weights = 2 * hidden * wide + 2 * hidden * narrow
    biases = (wide + 2 * narrow) * model.qkv_bias + hidden * model.output_bias
    largest = hidden * (wide + 2 * narrow) if model.fused_qkv else hidden * wide
    return float(weights + biases), largest


def _mlp(model: Model, inner: int) -> tuple[float, int]:
    matrices = 3 if model.gated else 2
    biases = ((matrices - 1) * inner + model.hidden) * model.mlp_bias if inner else 0
    largest = model.hidden * inner * (2 if model.fused_gate else 1)
    return float(matrices * model.hidden * inner + biases), largest


class Kept(NamedTuple):
    """Bytes per token that one layer keeps between forward and backward."""

    whole: float  # on every tensor-parallel rank; split by Megatron's sequence parallelism
    split: float  # divided by tensor parallelism
    experts: float  # of routed tokens


def kept_by_layer(
    model: Model, *, element_bytes: int, repeated_kv: bool = False, fused: bool = False
) -> Kept:
    """Return what autograd saves in one layer of the model as transformers writes it.

    Each term is a saved tensor of models/llama/modeling_llama.py and its siblings under torch's autograd: a
    matrix product saves its input, an RMS norm the fp32 copy of its input, and the normalised rows for its
    weight, a product of two tensors both, attention its operands, its result and one log-sum per head.
    `repeated_kv`: keys and values are repeated for grouped heads, as with a mask. `fused` is a model whose
    norms, gates and rotations are single kernels that keep their inputs alone (Liger, Transformer Engine).
    """
    size = element_bytes
    hidden, wide, narrow = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    value = model.heads * model.value_head_dim if model.kv_lora_rank else wide
    if model.kv_lora_rank:
        narrow = wide
    norm = _norm(model, element_bytes=size, fused=fused)
    linear_inputs = 2 * size * hidden if model.norms_per_layer > 1 else size * hidden
    whole = linear_inputs + model.norms_per_layer * (norm * hidden + _RSQRT)
    if model.kv_lora_rank:
        whole += (norm + size) * (model.q_lora_rank + model.kv_lora_rank)
    keys: float = wide if repeated_kv or model.kv_lora_rank else narrow
    values = value if repeated_kv or model.kv_lora_rank else narrow
    split = size * (wide + keys + values + value) + FP32 * model.heads
    if model.fused_qkv and not fused and values == narrow:
        split += size * (wide + narrow)  # the values are a view that keeps all of the matrix's output
    if model.partial_rotary and not fused:
        split += size * value
    if model.qk_norm == "head":
        split += norm * (wide + narrow) + _RSQRT * (model.heads + model.kv_heads)
    elif model.qk_norm == "all":
        whole += norm * (wide + narrow) + 2 * _RSQRT
    sparse = (model.layers - model.dense_layers) / model.layers if model.experts else 0.0
    tensors = (4 if model.gated else 2) - (1 if fused else 0)
    split += (1 - sparse) * tensors * size * model.intermediate
    split += sparse * tensors * size * model.shared_intermediate
    # Megatron weighs the experts' rows inside of them, so their results are not kept (moe/experts.py).
    rows = (1 if fused else 2) * hidden + tensors * model.expert_intermediate
    experts = sparse * model.experts_per_token * size * rows
    experts += sparse * 2 * FP32 * model.experts
    return Kept(whole, split, experts)


def kept_at_the_end(model: Model, *, element_bytes: int, fused: bool = False) -> float:
    """Return bytes per token that the final norm and the head keep."""
    return (_norm(model, element_bytes=element_bytes, fused=fused) + element_bytes) * model.hidden + _RSQRT


def _norm(model: Model, *, element_bytes: int, fused: bool) -> int:
    if fused or model.norm == "layer":
        return element_bytes
    return FP32 + (FP32 if model.norm == "rms32" else element_bytes)


def working_set(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token that one layer needs at its widest instant without keeping anything.

    The product of gate and up while both are alive, the rows that enter the layer and its MLP, the residual,
    and the embeddings that the model's own frame still holds.
    """
    wide = model.heads * model.head_dim
    attention = 3 * wide + 2 * model.kv_heads * model.head_dim
    return element_bytes * (4.0 * model.hidden + max(attention, _inner_rows(model, 3 if model.gated else 2)))


def gradient_set(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token of the gradients alive at once in one layer, beyond the activations they free.

    In the product of gate and up: the incoming one and those of both factors; the product itself is gone.
    """
    wide = model.heads * model.head_dim
    return element_bytes * (2.0 * model.hidden + max(2 * wide, _inner_rows(model, 2)))


def last_matrix(model: Model) -> int:
    """Return the parameters of a layer's last product, whose gradient is the first to exist."""
    sparse = model.experts > 0 and model.dense_layers < model.layers
    inner = model.experts * model.expert_intermediate if sparse else model.intermediate
    return model.hidden * inner


def _inner_rows(model: Model, tensors: int) -> int:
    if model.experts and model.dense_layers < model.layers:
        routed = model.experts_per_token * (2 * model.hidden + tensors * model.expert_intermediate)
        return tensors * model.shared_intermediate + routed
    return tensors * model.intermediate
