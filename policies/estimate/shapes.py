"""Figures that follow from a model's shape alone: parameters, and the bytes that a layer keeps per token."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autotune.policies.values.architecture.model import Model

FP32 = 4
_FP8 = 1
_MODELS = 64  # whose counts are cached: every estimate of a job uses the same ones
_RSQRT = 4  # bytes that a norm keeps per row in addition to its tensors
_CHUNK = (
    64  # rows of the triangular matrix that the chunked delta rule keeps (fla/ops/gated_delta_rule/chunk.py)
)
_RANK = 16  # of Mamba's time steps: a sixteenth of the hidden size (Jamba's `mamba_dt_rank: auto`)


class Parameters(NamedTuple):
    """Parameter counts of one model; layers are averages if they differ."""

    embedding: int
    head: int  # 0 when tied
    attention: float  # per layer: attention, linear attention and state spaces
    mlp: float  # per layer: dense MLP, shared experts and router
    experts: float  # per layer, all of them
    norms: float  # per layer
    final_norm: int
    layers: int
    largest: int  # the largest single tensor; transformers holds a layer's experts in one
    largest_apart: int  # the same if every expert has tensors of its own: in Megatron, and in checkpoints
    tower: int = 0  # encoders of images and sound

    @property
    def layer(self) -> float:
        """Parameters of one layer."""
        return self.attention + self.mlp + self.experts + self.norms

    @property
    def total(self) -> float:
        """Parameters of the model."""
        return self.embedding + self.head + self.final_norm + self.layers * self.layer + self.tower


class Shares(NamedTuple):
    """The shares of a model's layers that have each part."""

    attention: float  # attention that keeps keys and values
    linear: float  # linear attention, a state space or short convolutions
    dense: float  # an MLP without experts
    sparse: float  # experts


def shares(model: Model) -> Shares:
    """Return the shares of a model's layers that have each part."""
    mlps = model.mlp_layers or model.layers
    sparse = max(0, mlps - model.dense_layers) if model.experts else 0
    return Shares(
        attention=cache_layers(model) / model.layers,
        linear=model.linear_layers / model.layers,
        dense=(mlps - sparse) / model.layers,
        sparse=sparse / model.layers,
    )


def cache_layers(model: Model) -> int:
    """Return the number of layers that keep keys and values, which linear attention does not."""
    return min(model.layers, model.attention_layers or model.layers)


@lru_cache(_MODELS)
def parameters(model: Model) -> Parameters:
    """Return the parameter counts of a model (transformers 5.19, models/<family>/modeling_*.py)."""
    embedding = model.vocab * model.hidden
    bias = 2 if model.norm == "layer" else 1
    share = shares(model)
    attention, largest_attention = _attention(model)
    linear, largest_linear = _linear(model)
    dense, largest_dense = _mlp(model, model.intermediate)
    shared, _ = _mlp(model, model.shared_intermediate)
    router = model.experts * (model.hidden + model.expert_bias) + model.hidden * model.shared_gate
    rows = model.expert_hidden or model.hidden
    latent = 2 * model.hidden * rows if model.expert_hidden else 0
    matrices = 3 if model.gated else 2
    one_expert = matrices * rows * model.expert_intermediate
    one_expert += ((matrices - 1) * model.expert_intermediate + rows) * model.expert_bias
    fused_experts = model.experts * (matrices - 1) * model.expert_intermediate * rows
    single = max(embedding, largest_attention, largest_linear, largest_dense if share.dense else 0)
    norm_rows = model.norms_per_layer * model.hidden * bias + share.attention * _qk_norms(model)
    return Parameters(
        embedding=embedding,
        head=0 if model.tied else embedding,
        attention=share.attention * attention + share.linear * linear,
        mlp=share.dense * dense + share.sparse * (shared + router + latent),
        experts=share.sparse * model.experts * one_expert,
        norms=norm_rows,
        final_norm=model.hidden * bias,
        layers=model.layers,
        largest=max(single, fused_experts),
        largest_apart=max(single, 2 * model.expert_intermediate * rows if model.experts else 0),
        tower=model.tower,
    )


def active_parameters(model: Model) -> float:
    """Return the active parameters per token, without the embedding."""
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
    weights = (2 + model.attention_gate) * hidden * wide + 2 * hidden * narrow + model.heads * model.sinks
    biases = (wide + 2 * narrow) * model.qkv_bias + hidden * model.output_bias
    largest = hidden * (wide + 2 * narrow) if model.fused_qkv else hidden * wide * (1 + model.attention_gate)
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
    rows: float = 0.0  # of `experts`, the rows that the experts' first product keeps


@lru_cache(_MODELS)
def kept_by_layer(
    model: Model,
    *,
    element_bytes: int,
    repeated_kv: bool = False,
    fused: bool = False,
    fp8: bool = False,
    stream_bytes: int = 0,
) -> Kept:
    """Return the bytes that autograd saves in one layer of the model's code in transformers.

    Each term is a saved tensor of models/llama/modeling_llama.py and its siblings under torch's autograd: a
    matrix product saves its input, an RMS norm the fp32 copy of its input, and the normalised rows for its
    weight, a product of two tensors both, attention its operands, its result and one log-sum per head.
    `repeated_kv`: keys and values are repeated for grouped heads, as with a mask. `fused`: norms, gates and
    rotations are single kernels that keep only their inputs (Liger, Transformer Engine). `fp8`: a product
    keeps its input in fp8; what attention, norms and router keep is unchanged. `stream_bytes`: per element of
    the residual stream if it is wider than the products, as with autocast; each product then keeps a copy of
    its input (0: as `element_bytes`).
    """
    size, share = element_bytes, shares(model)
    hidden, wide, narrow = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = _norm(model, element_bytes=size, fused=fused)
    mixers = share.attention + share.linear
    inputs = size * hidden * (mixers + share.dense + share.sparse if model.norms_per_layer > 1 else 1)
    stream_norm = norm
    if stream_bytes and stream_bytes != size:
        inputs = size * hidden * _products_of_stream(model)
        stream_norm = _norm(model, element_bytes=stream_bytes, fused=fused)
    whole = inputs + model.norms_per_layer * (stream_norm * hidden + _RSQRT)
    split = share.linear * _linear_kept(model, element_bytes=size)
    if model.kv_lora_rank:
        whole += share.attention * (norm + size) * (model.q_lora_rank + model.kv_lora_rank)
    split += share.attention * (
        _kept_by_heads(model, size=size, repeated_kv=repeated_kv, fused=fused) + FP32 * model.heads
    )
    if model.qk_norm in ("head", "l2"):
        per_element = norm if model.qk_norm == "head" else FP32
        heads = per_element * (wide + narrow) + _RSQRT * (model.heads + model.kv_heads)
        split += share.attention * heads
    elif model.qk_norm == "all":
        whole += share.attention * (norm * (wide + narrow) + 2 * _RSQRT)
    tensors = (4 if model.gated else 2) - (1 if fused else 0)
    split += share.dense * tensors * size * model.intermediate
    split += share.sparse * tensors * size * model.shared_intermediate
    # Megatron applies the routing weights inside the experts, so their results are not kept (moe/experts.py).
    routed = model.experts if model.all_experts and not fused else model.experts_per_token
    stepwise = 3 if model.clamped_gate and not fused else 0
    entering = share.sparse * routed * size * (model.expert_hidden or hidden)
    inner = (tensors + stepwise) * model.expert_intermediate
    experts = (1 if fused else 2) * entering + share.sparse * routed * size * inner
    if model.router_fp32 and not fused:
        whole += share.sparse * FP32 * hidden
    experts += share.sparse * 2 * FP32 * model.experts
    if fp8:
        saved = size - _FP8
        whole -= saved * hidden * (share.attention + share.dense)
        # Attention keeps its result, and the product after it another copy.
        split += share.attention * _FP8 * model.heads * (model.value_head_dim or model.head_dim)
        if model.gated:
            split -= saved * (share.dense * model.intermediate + share.sparse * model.shared_intermediate)
            entering -= share.sparse * routed * saved * (model.expert_hidden or hidden)
            experts -= (
                share.sparse * routed * saved * ((model.expert_hidden or hidden) + model.expert_intermediate)
            )
    return Kept(whole, split, experts, entering)


def _products_of_stream(model: Model) -> float:
    """Return how many products of a layer read the residual stream, without those of routed experts."""
    share = shares(model)
    attention = 2 if model.kv_lora_rank else 1 if model.fused_qkv else 3
    inner = 2 if model.gated and not model.fused_gate else 1
    sparse = 1 + (inner + model.shared_gate if model.shared_intermediate else 0)
    return share.attention * attention + share.linear + share.dense * inner + share.sparse * sparse


def _kept_by_heads(model: Model, *, size: int, repeated_kv: bool, fused: bool) -> float:
    """Return bytes per token of attention's operands and its result."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.kv_lora_rank:
        value = model.heads * model.value_head_dim
        # The values are a view of one matrix's output, which also has the keys' part without rotation.
        viewed = value if fused else value + model.heads * (model.head_dim - model.rope_head_dim)
        return float(size * (2 * wide + viewed + value))
    # A single head of keys is used by all queries without a copy.
    keys = wide if repeated_kv and model.kv_heads > 1 else narrow
    kept = float(size * (2 * wide + 2 * keys))
    if model.fused_qkv and not fused and keys == narrow:
        kept += size * (wide + narrow)  # the values are a view that keeps all of the matrix's output
    if model.partial_rotary and not fused:
        kept += size * wide
    if model.attention_gate:
        kept += size * 2 * wide
    return kept


def kept_at_the_end(model: Model, *, element_bytes: int, fused: bool = False, stream_bytes: int = 0) -> float:
    """Return bytes per token that the final norm and the head keep, and the tanh that bounds the logits."""
    norm = _norm(model, element_bytes=stream_bytes or element_bytes, fused=fused)
    bounded = element_bytes * model.vocab * (model.softcap and not fused)
    return (norm + element_bytes) * model.hidden + _RSQRT + bounded


def _norm(model: Model, *, element_bytes: int, fused: bool) -> int:
    if fused or model.norm == "layer":
        return element_bytes
    if model.norm == "layer32":
        return 3 * FP32  # the centred rows, once for the variance and once for the scale, and the normalised
    return FP32 + (FP32 if model.norm == "rms32" else element_bytes)


@lru_cache(_MODELS)
def kept_by_operation(model: Model, *, element_bytes: int) -> tuple[float, float]:
    """Return bytes per token that a layer keeps if only attention and every second product are saved.

    These are its input and, counted from the first product on, the results of q, v, gate and down, as in
    torchtitan's activation_checkpoint.py and AReaL's Archon; grouped products of experts are recomputed. The
    first value is of the residual stream, the second is split by tensor parallelism.
    """
    share, gates = shares(model), 1 if model.gated else 0
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inner = share.dense * model.intermediate + share.sparse * model.shared_intermediate
    products = (2 * wide + narrow) * share.attention + _linear_rows(model) / 2 * share.linear + gates * inner
    whole = model.hidden * (1 + share.dense + share.sparse * (model.shared_intermediate > 0))
    return float(element_bytes * whole), element_bytes * products + FP32 * model.heads * share.attention


@lru_cache(_MODELS)
def working_set(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token that one layer needs at its widest instant without keeping anything.

    These are the product of gate and up while both are alive, the rows that enter the layer and its MLP, the
    residual, and the embeddings that the model's own stack frame still holds.
    """
    wide = model.heads * model.head_dim
    attention = 3 * wide + 2 * model.kv_heads * model.head_dim
    inner = _inner_rows(model, 3 if model.gated else 2)
    return element_bytes * (4.0 * model.hidden + max(attention, inner, _linear_rows(model)))


@lru_cache(_MODELS)
def gradient_set(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token of the gradients alive at once in one layer, beyond the activations they free.

    In the product of gate and up: the incoming one and those of both factors; the product itself is freed.
    """
    wide = model.heads * model.head_dim
    return element_bytes * (
        2.0 * model.hidden + max(2 * wide, _inner_rows(model, 2), _linear_rows(model) // 2)
    )


def last_matrix(model: Model) -> int:
    """Return the parameters of a layer's last product, whose gradient is the first to exist."""
    inner = model.experts * model.expert_intermediate if shares(model).sparse else model.intermediate
    return model.hidden * inner


def _inner_rows(model: Model, tensors: int) -> int:
    if shares(model).sparse:
        routed = model.experts_per_token * (2 * model.hidden + tensors * model.expert_intermediate)
        return tensors * model.shared_intermediate + routed
    return tensors * model.intermediate


# ------------------------------------------- linear attention, state spaces and short convolutions


def _linear(model: Model) -> tuple[float, int]:
    """Return the parameters of one layer of linear attention and its largest tensor (transformers 5.19).

    Keys and values are those of linear attention; of a state space, groups are the heads of keys and the
    state is their size.
    """
    hidden, conv = model.hidden, model.linear_conv
    keys, values = _keys(model), _values(model)
    if model.linear == "delta":
        projected = 2 * keys + 2 * values
        small = 2 * hidden * model.linear_values + 2 * model.linear_values + model.linear_value_dim
        conv_rows = conv * (2 * keys + values)
        largest = hidden * (2 * keys + values)
        return float(hidden * (projected + values) + small + conv_rows), max(largest, values * hidden)
    if model.linear == "mamba2":
        convolved = values + 2 * keys
        projected = values + convolved + model.linear_values
        small = 3 * model.linear_values + values + convolved * (conv + 1)
        return float(hidden * (projected + values) + small), hidden * projected
    if model.linear == "mamba":
        rank, state = -(-hidden // _RANK), model.linear_key_dim
        steps = values * (rank + 2 * state) + rank * values + values + rank + 2 * state
        own = values * state + values + values * (conv + 1)
        return float(3 * hidden * values + steps + own), 2 * hidden * values
    if model.linear == "conv":
        return float(4 * hidden * hidden + conv * hidden), 3 * hidden * hidden
    return 0.0, 0


def _linear_kept(model: Model, *, element_bytes: int) -> float:
    """Return bytes per token that autograd keeps in one such layer, beyond the input of its projections.

    These are the tensors that the fused kernels save: `chunk_gated_delta_rule`, `causal_conv1d_fn` and
    `FusedRMSNormGated` for the delta rule, `mamba_split_conv1d_scan_combined` for Mamba-2,
    `selective_scan_fn` for Mamba.
    """
    size, keys, values = element_bytes, _keys(model), _values(model)
    if model.linear == "delta":
        repeated = model.linear_values * model.linear_key_dim
        # The convolution's input, normalised queries and keys, the values, the triangle of each chunk, the
        # output, its gate, and the input of the last projection.
        rows = (2 * keys + values) + 2 * repeated + _CHUNK * model.linear_values + 4 * values
        return float(size * rows + 6 * FP32 * model.linear_values)
    if model.linear == "mamba2":
        return float(size * (3 * values + 2 * keys + model.linear_values) + FP32)
    if model.linear == "mamba":
        return float(size * (6 * values + 2 * model.linear_key_dim))
    if model.linear == "conv":
        return float(size * 6 * model.hidden)
    return 0.0


def _linear_rows(model: Model) -> int:
    """Return the elements per token that one such layer holds at its widest instant."""
    keys, values = _keys(model), _values(model)
    return 2 * keys + 4 * values if model.linear_layers else 0


def _keys(model: Model) -> int:
    return model.linear_keys * model.linear_key_dim


def _values(model: Model) -> int:
    return model.linear_values * model.linear_value_dim
