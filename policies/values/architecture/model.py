"""The shape of the trained model, and its layout on the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from autotune.policies.values.architecture.families import FAMILIES, QKV_ONLY
from autotune.policies.values.architecture.fields import count, flag, wrong
from autotune.policies.values.architecture.hybrid import (
    layer_kinds,
    mixed,
    short_intermediate,
    sliding,
    sparse_layers,
    unknown_kinds,
)
from autotune.policies.values.architecture.towers import tower_of
from autotune.policies.values.value import Value


class Model(Value, frozen=True, kw_only=True):
    """Shape of a causal language model, from a Hugging Face `config.json` or written in the job."""

    layers: int  # transformer layers, those of all kinds together
    hidden: int  # size of the residual stream
    heads: int  # attention heads of a layer, for queries
    kv_heads: int  # heads for keys and values; fewer than `heads` with grouped-query attention
    head_dim: int  # size of one head of queries and keys
    intermediate: int  # inner size of the MLP of a dense layer
    vocab: int  # entries of the vocabulary, as the embedding has them
    tied: bool = False  # the output layer shares the weights of the input embedding
    experts: int = 0  # routed experts of a layer; 0: a dense model
    experts_per_token: int = 0  # routed experts that compute each token
    expert_intermediate: int = 0  # inner size of one routed expert
    expert_hidden: int = 0  # input size of the routed experts, after a projection; 0: the hidden size
    shared_intermediate: int = 0  # of all shared experts together
    shared_gate: bool = False  # a one-row projection weighs the shared experts
    dense_layers: int = 0  # of a model with experts: layers without
    qkv_bias: bool = False  # the projections of queries, keys and values have a bias
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False  # the projections of the MLP have a bias
    gated: bool = True  # the MLP has a gate and an up projection
    qk_norm: str = ""  # "" | head (over one head) | all (over all heads at once) | l2 (without weights)
    norms_per_layer: int = 2  # of the hidden size
    norm: str = "rms"  # rms | rms32 (scaled in fp32) | layer (with bias) | layer32 (in fp32, without)
    fused_qkv: bool = False  # q, k and v are one matrix
    fused_gate: bool = False  # gate and up are one matrix
    partial_rotary: bool = False  # only a part of each head is rotated, so its parts are concatenated
    sliding_window: int = 0  # tokens; 0: full attention everywhere
    sliding_layers: int = 0  # layers that use it
    q_lora_rank: int = 0  # multi-head latent attention
    kv_lora_rank: int = 0  # 0: ordinary attention
    rope_head_dim: int = 0  # of latent attention: the rotated part of a head
    value_head_dim: int = 0  # of latent attention
    attention_layers: int = 0  # that keep keys and values; 0: all
    mlp_layers: int = 0  # that have an MLP or experts; 0: all
    linear_layers: int = 0  # of linear attention, a state space or short convolutions
    linear: str = ""  # "" | delta (gated delta rule) | mamba | mamba2 | conv
    linear_keys: int = 0  # heads of the keys; a state space's groups
    linear_key_dim: int = 0  # of one head; a state space's state
    linear_values: int = 0  # heads of the values
    linear_value_dim: int = 0  # of one head
    linear_conv: int = 0  # kernel size, in tokens, of the convolution before it
    attention_gate: bool = False  # the query projection also computes a gate of the same size
    sinks: bool = False  # attention has one learned logit per head
    softcap: bool = False  # the logits are bounded by a tanh
    router_fp32: bool = False  # the experts' router computes in fp32
    expert_bias: bool = False  # the router and the projections of the experts have a bias
    clamped_gate: bool = False  # the experts' gate is clamped and scaled step by step
    all_experts: bool = False  # every expert computes every token
    tower: int = 0  # parameters of the encoders of images and sound, not counted in the above
    family: str = ""  # `model_type` of the config
    unknown: str = ""  # parts of the model that are not counted here, in words


_MOMENTS = 8  # bytes per parameter of Adam's two averages in fp32


class Layout(Value, frozen=True, kw_only=True):
    """How a job is spread and what it holds: what an estimate needs beyond the knobs.

    Sizes of tensor, sequence and context parallelism and of the engine's tensor parallelism are knobs.
    """

    strategy: str = "none"  # none (one rank) | ddp | fsdp | fsdp2 | megatron
    ranks: int = 1  # devices of the trainer
    # ranks over which FSDP or a distributed optimizer spreads one copy of the state; ddp: ZeRO-1 and ZeRO-2
    shards: int = 1
    shards_gradients: bool = False  # ddp: a rank keeps only its shard of the gradients too (ZeRO-2)
    # DeepSpeed's buffers for gradients in flight: alive in backward, with ZeRO-3 always; 0: no DeepSpeed
    reduce_bucket_bytes: float = 0
    gradients_stay: bool = False  # in a buffer that exists between steps too, as Megatron's does
    # ZeRO++: ranks that share a second copy of the weights, from the first micro-batch to the update; 0: none
    secondary_shards: int = 0
    update_parameters: int = 0  # of a rank, updated at once (ZeRO-3's sub_group_size); 0: all
    pipeline_parallel: int = 1  # stages of the trainer's pipeline
    pipeline_chunks: int = 1  # of layers, into which a stage is split if stages are interleaved
    pipeline_group: int = 0  # micro-batches that a chunk processes in a row; 0: the number of stages
    pipeline_ahead: int = 0  # further chunks computed forward before the first backward
    first_stage_layers: int = 0  # 0: as many as the others have
    last_stage_layers: int = 0  # 0: as many as the others have
    stage_layers: tuple[int, ...] = ()  # of each stage, if the job lists them
    predicting_layers: int = 0  # of multi-token prediction, beside the model's own
    predicting_after: int = 0  # stages after the one that has them
    predicting_loss: bool = False  # their logits and loss are computed
    embedding_is_layer: bool = False  # if layers are spread evenly: the first stage has one less
    loss_is_layer: bool = False  # ... and the last
    expert_parallel: int = 1  # ranks over which the experts are spread
    expert_tensor_parallel: int = 1  # ranks over which each expert is split
    expert_shards: int = 0  # ranks over which a distributed optimizer spreads the experts; 0: as all else
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"  # Megatron's, of tokens to experts
    engine_ranks: int = 0  # devices of all rollout engines together; colocated: the trainer's own
    parameter_bytes: int = 4  # per resident (sharded) parameter: 4 if FSDP keeps fp32
    compute_bytes: int = 2  # per parameter and activation in forward and backward
    autocast: bool = False  # weights and residual stream stay in fp32, products are cast (torch.autocast)
    autocast_head: bool = True  # ... the head's too, as a whole; else its kernel casts tiles
    gradient_bytes: int = 4  # per parameter
    reduce_bytes: int = 0  # per parameter in a reduce-scatter's input; 0: as gradient_bytes
    optimizer_bytes: int = 8  # per parameter; 12 with an fp32 master copy of its own
    fp8: bool = False  # Transformer Engine computes the products of the layers in fp8
    fp8_weights: bool = False  # ... and keeps their weights in fp8 alone, once for each direction
    logits_bytes: int = 4  # per logit
    engine_bytes: float = 2  # per parameter inside the engine
    kv_bytes: float = 2  # per element of the engine's cache
    pool_bytes: float = 0  # of the KV pool on a device, whatever the engine's share; 0: what the share leaves
    reference: bool = False  # a frozen copy computes log-probs
    reference_bytes: int = 0  # per resident parameter of it; 0: compute_bytes
    reference_offload: bool = False  # ... and is in host memory except while it computes them
    critic: bool = False  # a second model of the same shape is trained
    critic_offload: bool = False  # its state is in host memory while it is not used
    lora_rank: int = 0  # 0: all parameters are trained
    entropy: bool = False  # the loss or its metrics compute the entropy of the logits
    engine_sleeps: bool = False  # the engine frees its memory while training runs
    engine_weights_on_host: bool = True  # ... and keeps its weights in host memory until it wakes
    wakes_whole: bool = False  # ... and its pool wakes with its weights, before these are updated
    embedding_apart: bool = True  # FSDP2 gathers an untied embedding separately; else with the root
    head_apart: bool = False  # FSDP2 gathers an untied head separately; else with the root
    reshard_after_forward: bool = (
        True  # else all weights stay gathered from a layer's forward to its backward
    )
    reshards_root: bool = False  # ... and the root's parameters, at once; torch's default keeps them whole
    reduces_last: bool = False  # gradients stay whole on every rank until the last micro-batch
    sequence_parallel: bool = (
        True  # FSDP: tensor parallelism splits the residual stream too (AReaL, torchtitan)
    )
    expandable_segments: bool = False  # the framework itself enables them for the trainer
    trainer_sleeps: bool = False  # gradients and optimizer go to host memory too while the engine works
    weights_sleep: bool = False  # ... the weights do, whatever the knobs say
    sends_from_host: bool = False  # ... and all of it stays there while it sends copies of its weights
    masters_stay: bool = False  # ... but the optimizer's copy of the weights stays on the device
    # An optimizer in host memory works on copies of fp32 weights that stay on the device (Megatron).
    masters_beside: bool = False
    optimizer_stays_offloaded: bool = False  # offloaded state is used from host memory, not loaded back
    optimizer_passes_through: bool = False  # ... one tensor at a time, and the update is on the device
    # Offloaded weights are gathered layer by layer from host memory, where gradients and optimizer are too.
    parameters_stay_offloaded: bool = False
    grad_offload_takes_optimizer: bool = False  # ... to the host between updates (DeepSpeed's offload_states)
    # ... and weights, permanently: they are gathered from host memory, where the update runs
    # (CPUOffloadPolicy).
    grad_offload_takes_all: bool = False
    critic_follows: bool = False  # the trainer's own settings offload the critic's state too
    tokens_before_split: bool = (
        False  # token budgets count before sequence and context parallelism split them
    )
    padded: bool = False  # micro-batches are padded to their longest sequence
    padded_to_limit: bool = False  # or to the job's longest length
    masked_attention: bool = False  # attention reads a dense mask: heads are repeated, layers keep the mask
    selective_share: float = 0.0  # of a layer that selective recomputation keeps; 0: all but attention's core
    # Selective recomputation by operation: a layer keeps attention and every second product (torchtitan).
    selective_operations: bool = False
    keeps_hybrids: bool = False  # Megatron before 0.18 recomputes no layer of a model with state spaces
    # Megatron: modules that selective recomputation recomputes; empty: attention's core
    recompute_modules: tuple[str, ...] = ()
    more_modules: tuple[str, ...] = ()  # ... and those that the mode `modules` recomputes
    offload_modules: tuple[str, ...] = ()  # Megatron: whose inputs `activation_offload` moves to the host
    logits_in_place: bool = False  # the loss and its gradient overwrite the logits
    loss: Literal["softmax", "kernel", "cast_kernel", "pieces", "rows", "logprob"] = (
        "softmax"  # what it keeps: policies/estimate/passes.py
    )
    compiled_loss: bool = True  # `kernel`: the entropy is one compiled function
    scaled_logits: bool = False  # `kernel`: a temperature other than 1 divides the logits
    scored_sequences: float = 1.0  # of a scoring micro-batch, for each of a training one
    logits_share: float = 1.0  # share of a micro-batch's tokens whose logits are computed
    chunked_head: bool = False  # chunks of logits begin at the head; else its whole output exists
    per_tensor_optimizer: bool = False  # temporaries of the largest tensor; else of all (foreach)
    optimizer_temporary_bytes: float = 4  # per parameter while the optimizer runs
    sync_buckets: int = 2  # transfer buffers alive at once in a weight sync
    sends_tensors: bool = False  # weights are sent one by one, in no buckets
    gathers_whole: bool = False  # a weight sync first gathers the whole model on every device
    copies_shards: bool = False  # ... or copies its shards (FSDP1's sharded state dict)
    # Page-locked copies of weights in host memory: of each tensor, or Megatron's buffers; empty: not
    # page-locked
    pinned: Literal["", "tensors", "buffers"] = ""
    # Every rank builds the whole model in host memory before it is sharded; empty: one rank per node does
    loads: Literal["", "ranks"] = ""
    # What a rank stages in host memory while it saves: its shard, that of its data-parallel group (gathered),
    # rank 0 the whole model, or none of these.
    staged: Literal["shard", "gathered", "whole", "none"] = "shard"
    saves_optimizer: bool = True  # a checkpoint has the optimizer's state too
    # Experts chosen in a rollout are replayed: a rank has those of its replica's part, and a compact copy
    # for the tokens that it computes (recorded; whole in runs of earlier versions).
    routing: Literal["", "parts", "recorded", "whole"] = ""
    loads_whole: bool = False  # every GPU holds the whole model before it is sharded
    sequences: int = 0  # samples of one step, over all ranks
    mini_batch: int = 0  # samples of one update of the weights, over all ranks; 0: all of a step
    prompt_tokens: int = 0  # longest
    response_tokens: int = 0  # longest, of all turns together
    prompt_mean: float = 0.0  # tokens; 0: unknown
    response_mean: float = 0.0  # tokens; 0: unknown

    @property
    def masters(self) -> float:
        """Share of the optimizer state that is Megatron's fp32 copy of the weights."""
        masters = max(0, self.optimizer_bytes - _MOMENTS) if self.strategy == "megatron" else 0
        return masters / max(1, self.optimizer_bytes)

    @property
    def parts_gradients(self) -> bool:
        """Whether DeepSpeed shards gradients; an optimizer in host memory then uses what is reduced."""
        return bool(self.reduce_bucket_bytes) and (self.shards_gradients or self.strategy.startswith("fsdp"))


# The fields that a family's code determines; the others are read from its config.
_OF_FAMILIES = (
    "gated",
    "norms_per_layer",
    "norm",
    "fused_qkv",
    "fused_gate",
    "partial_rotary",
    "attention_gate",
    "sinks",
    "softcap",
    "router_fp32",
    "expert_bias",
    "clamped_gate",
    "all_experts",
)
# The allowed values of the fields that hold a name.
CHOICES: dict[str, tuple[str, ...]] = {
    "qk_norm": ("", "head", "all", "l2"),
    "norm": ("rms", "rms32", "layer", "layer32"),
    "linear": ("", "delta", "mamba", "mamba2", "conv"),
    "family": ("", *FAMILIES),
}


def model_from_config(config: Mapping[str, Any]) -> Model:
    """Return the shape that a Hugging Face config.json describes; raises ValueError if it is invalid."""
    if not isinstance(config, Mapping):
        raise wrong("the config", config, "mapping of names to values")
    nested = config.get("text_config")
    tower, encoders = tower_of(config)
    if isinstance(nested, Mapping):
        config = {**{key: value for key, value in config.items() if key != "text_config"}, **nested}
    family = config.get("model_type", "")
    if not isinstance(family, str):
        raise wrong("model_type", family, "name")
    known = FAMILIES.get(family, {})
    hidden = count(config, "hidden_size", "n_embd", "d_model")
    heads = count(config, "num_attention_heads", "n_head")
    layers = count(config, "num_hidden_layers", "n_layer")
    kv_heads = count(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are no multiple of {kv_heads} key-value heads")
    latent = count(config, "kv_lora_rank", default=0)
    head_dim = _head_dim(config, known, hidden=hidden, heads=heads, latent=latent)
    kinds = layer_kinds(config, family=family, layers=layers)
    attention_bias = flag(config, "attention_bias") or flag(config, "use_bias")
    window, short = sliding(config, kinds, known=known, layers=layers)
    experts = _experts(config, kinds, family=family, layers=layers, known=known)
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_intermediate(config, family, hidden=hidden, experts=bool(experts)),
        vocab=count(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings", default=known.get("tied", False)),
        **experts,
        **mixed(config, kinds, family=family, known=known, layers=layers, hidden=hidden),
        qkv_bias=flag(config, "qkv_bias", default=known.get("qkv_bias", attention_bias)),
        output_bias=flag(
            config,
            "attention_out_bias",
            default=known.get("output_bias", attention_bias and family not in QKV_ONLY),
        ),
        mlp_bias=flag(config, "mlp_bias") or flag(config, "use_bias"),
        qk_norm=known.get("qk_norm", "head" if flag(config, "use_qk_norm") else ""),
        **{name: known[name] for name in _OF_FAMILIES if name in known},
        sliding_window=window,
        sliding_layers=short,
        q_lora_rank=count(config, "q_lora_rank", default=0),
        kv_lora_rank=latent,
        rope_head_dim=count(config, "qk_rope_head_dim", default=0) if latent else 0,
        value_head_dim=count(config, "v_head_dim", default=0) if latent else 0,
        tower=tower,
        family=family,
        unknown=_unknown(family, kinds, encoders),
    )


def model_from_shape(shape: Mapping[str, int | str]) -> Model:
    """Return the model that a job's own `{hidden: ..., layers: ...}` describes; raises ValueError.

    `family` supplies the facts of its code; explicitly stated values take precedence.
    """
    for name in ("layers", "hidden", "heads", "intermediate", "vocab"):
        if not shape.get(name):
            raise ValueError(f"{name} is missing")
    for name, allowed in CHOICES.items():
        if shape.get(name, "") not in (*allowed, ""):
            raise ValueError(f"{name} is {shape[name]!r}, no one of {', '.join(filter(None, allowed))}")
    known = FAMILIES.get(str(shape.get("family", "")), {})
    own = {name: value for name, value in known.items() if name in Model.__struct_fields__}
    values: dict[str, Any] = {"kv_heads": shape["heads"], **own, **shape}
    values.setdefault("head_dim", int(shape["hidden"]) // int(shape["heads"]))
    if values["heads"] % max(1, values["kv_heads"]):
        raise ValueError(f"{values['heads']} heads are no multiple of {values['kv_heads']} kv_heads")
    try:
        return msgspec.convert(values, Model, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _head_dim(
    config: Mapping[str, Any], known: Mapping[str, Any], *, hidden: int, heads: int, latent: int
) -> int:
    if latent:
        rotated = count(config, "qk_rope_head_dim")
        return count(config, "qk_nope_head_dim") + rotated
    present = count(config, "head_dim", default=int(known.get("head_dim", 0)))
    if not present and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is no multiple of {heads} attention heads")
    return present or hidden // heads


def _intermediate(config: Mapping[str, Any], family: str, *, hidden: int, experts: bool) -> int:
    if family == "lfm2":
        return short_intermediate(config)
    if family == "granitemoehybrid" and not experts:
        return count(config, "shared_intermediate_size", "intermediate_size")
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner")
    return count(config, *names, default=0 if experts else 4 * hidden)


def _experts(
    config: Mapping[str, Any], kinds: tuple[str, ...], *, family: str, layers: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    experts = count(config, "num_experts", "n_routed_experts", "num_local_experts", default=0)
    sparse = sparse_layers(config, kinds, family=family, layers=layers)
    if experts <= 1 or sparse == 0:
        return {}
    per_token = count(config, "num_experts_per_tok", "experts_per_token", "moe_topk", default=1)
    if per_token > experts:
        raise ValueError(f"{per_token} experts per token out of {experts}")
    width = count(config, "moe_intermediate_size", "intermediate_size")
    shared = count(
        config,
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=width if family.startswith("llama4") else 0,
    )
    shared = shared or width * count(config, "n_shared_experts", "num_shared_experts", default=0)
    with_mlp = sum(kind in ("mlp", "moe") for kind in kinds) if "moe" in kinds else layers
    dense = count(config, "first_k_dense_replace", default=0) if sparse is None else with_mlp - sparse
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "expert_intermediate": width,
        "expert_hidden": count(config, "moe_latent_size", default=0),
        "shared_intermediate": shared,
        "shared_gate": bool(shared) and known.get("shared_gate", False),
        "dense_layers": min(dense, layers),
    }


def _unknown(family: str, kinds: tuple[str, ...], encoders: str) -> str:
    """Describe the parts of the model that the estimate omits; no family counts as a known one."""
    result = [f"the family {family}"] if family and family not in FAMILIES else []
    result += [f"layers of the kind {kind}" for kind in unknown_kinds(kinds, family=family)]
    return ", ".join([*result, *([encoders] if encoders else [])])
