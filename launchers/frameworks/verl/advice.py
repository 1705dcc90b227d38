"""What verl's guide to memory failures says, as the code of verl 0.9.1 stands."""

from __future__ import annotations

from autotune.launchers.base import Advice, Status
from autotune.launchers.frameworks.core.advice import advice
from autotune.launchers.frameworks.verl.advice_state import STATE
from autotune.launchers.frameworks.verl.config import ACTOR, MODEL, REF, ROLLOUT

_WORKS, _REPLACED, _OBSOLETE = Status.WORKS, Status.REPLACED, Status.OBSOLETE
_IMPOSSIBLE = Status.IMPOSSIBLE
_CRITIC_TOKENS = "++critic.ppo_infer_max_token_len_per_gpu"


_ROLLOUT: tuple[Advice, ...] = (
    advice(
        "reduce_mem_fraction",
        "rollout",
        f"{ROLLOUT}.gpu_memory_utilization, 0.5 to 0.7 without and 0.8 to 0.9 with offload",
        _WORKS,
        "vLLM takes a share of the whole card; SGLang gets it as mem_fraction_static, its share of weights "
        "and pool together; the engine sleeps during training, so the share binds while it generates",
        constraint="0 < x <= 1; an engine that refuses to start for want of pool needs more, not less",
        effect="the engine's pool",
        cost="generation, when fewer requests fit",
    ),
    advice(
        "reduce_mem_fraction",
        "backward",
        f"{ROLLOUT}.gpu_memory_utilization, to cure the trainer",
        _IMPOSSIBLE,
        f"with {ROLLOUT}.free_cache_engine the pool is given back before scoring begins, so a smaller one "
        "frees nothing there",
        instead="a remedy of the training pass; the share counts again in the weight sync",
    ),
    advice(
        "disable_cuda_graph",
        "rollout_init",
        f"{ROLLOUT}.enforce_eager: true",
        _WORKS,
        "captured graphs stay on the card even while the engine sleeps; SGLang gets it as disable_cuda_graph",
        effect="1 to 3 GiB, in training too",
        cost="decoding of small batches by 10 to 30 %",
    ),
    advice(
        "disable_cuda_graph",
        "rollout_init",
        f"{ROLLOUT}.cudagraph_capture_sizes: [1, 2, 4, 8, 16, 32]",
        _WORKS,
        "vLLM alone reads it",
        instead=f"with SGLang ++{ROLLOUT}.engine_kwargs.sglang.cuda_graph_max_bs",
        constraint="ignored with enforce_eager",
        effect="the larger graphs",
        cost="decoding of large batches",
    ),
    advice(
        "tensor_parallel",
        "rollout",
        f"{ROLLOUT}.tensor_model_parallel_size",
        _WORKS,
        "the default is 2",
        constraint="divides the GPUs and the attention heads",
        effect="weights and pool per card",
        cost="generation; fewer engines side by side",
    ),
)

_PASSES: tuple[Advice, ...] = (
    advice(
        "reduce_micro_batch",
        "backward",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu: 1",
        _WORKS,
        "the loss is normalised by the whole batch, so the split changes the order of summation only",
        constraint="read only while use_dynamic_bsz is off; divides the mini-batch of a rank",
        effect="activations and logits",
        cost="training by a few per cent",
    ),
    advice(
        "dynamic batching",
        "backward",
        f"{ACTOR}.use_dynamic_bsz: true",
        _WORKS,
        "scoring follows it, and the micro-batch sizes are no longer read",
        effect="activations and logits of uneven batches",
        cost="nothing; it is often faster",
    ),
    advice(
        "reduce_tokens_per_mb",
        "backward",
        f"{ACTOR}.ppo_max_token_len_per_gpu: 8192",
        _WORKS,
        "the limit of one micro-batch, times the ranks that share its sequences; twice the longest sequence, "
        "as the guide has it, is not demanded",
        constraint="limit x Ulysses size >= max_prompt_length + max_response_length, else verl stops at the "
        "first longer sequence",
        effect="activations and logits",
        cost="training by a few per cent",
    ),
    advice(
        "reduce_tokens_per_mb",
        "log_prob",
        "larger batches in forward-only passes",
        _WORKS,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu bounds the actor's scoring, with LoRA the reference's; "
        f"{REF}.log_prob_max_token_len_per_gpu that of a reference of its own; both follow the actor's limit "
        "where they are not set",
        constraint="as the actor's limit",
        effect="logits and entropy of scoring",
        cost="scoring by a few per cent",
    ),
    advice(
        "reduce_micro_batch",
        "backward",
        "critic.ppo_micro_batch_size_per_gpu: 2",
        _OBSOLETE,
        "its engine always fills micro-batches by tokens; a static job still has to name it",
        instead=_CRITIC_TOKENS,
    ),
    advice(
        "reduce_tokens_per_mb",
        "backward",
        "critic.ppo_max_token_len_per_gpu: 16384",
        _REPLACED,
        "the trainer copies another field over it, for values and update alike; the default is 32768",
        instead=_CRITIC_TOKENS,
        constraint="as the actor's limit, with critic.fsdp.ulysses_sequence_parallel_size",
        effect="activations of the critic",
        cost="the critic by a few per cent",
    ),
    advice(
        "recompute",
        "backward",
        f"{MODEL}.enable_gradient_checkpointing: true",
        _WORKS,
        "it is on by default; Megatron's engine does not read it",
        effect="most activations",
        cost="training by 20 to 30 %",
    ),
    advice(
        "recompute",
        "backward",
        "critic.model.enable_gradient_checkpointing: true",
        _WORKS,
        "it is on by default",
        effect="most activations of the critic",
        cost="the critic by 20 to 30 %",
    ),
    advice(
        "recompute",
        "backward",
        "megatron.override_transformer_config.recompute_{method: uniform, granularity: full, num_layers: 1}",
        _WORKS,
        "the three go together; selective is the milder mode; critic.megatron has its own",
        constraint="model_engine: megatron",
        effect="most activations",
        cost="training by 20 to 30 %, selective by about 5 %",
    ),
    advice(
        "offload_activations",
        "backward",
        f"{MODEL}.enable_activation_offload and critic.model.enable_activation_offload",
        _WORKS,
        "kept activations wait in host memory",
        constraint="strategy fsdp or fsdp2; Megatron's engine ignores it",
        effect="kept activations, to host memory",
        cost="training, by transfers",
    ),
    advice(
        "chunk_logits",
        "log_prob",
        f"{REF}.entropy_from_logits_with_chunking: true",
        _REPLACED,
        "the reference computes no entropy; the actor's scoring always does",
        instead=f"{ACTOR}.entropy_from_logits_with_chunking",
        constraint="without effect under fused kernels",
        effect="all but 2048 tokens of the entropy's copy of the logits",
        cost="scoring by 1 to 3 %",
    ),
    advice(
        "loss_recompute",
        "backward",
        f"{ACTOR}.entropy_checkpointing: true",
        _WORKS,
        "it matters only where the update computes the entropy: entropy_coeff or calculate_entropy",
        constraint="FSDP only",
        effect="the entropy's copy of the logits between forward and backward",
        cost="backward by a few per cent",
    ),
    advice(
        "fused_kernels",
        "backward",
        f"{MODEL}.use_liger: true",
        _REPLACED,
        "Liger's fused cross entropy is switched off in RL, so the logits stay whole; its norms and "
        "rotations remain",
        instead=f"{MODEL}.use_fused_kernels",
        constraint="use_remove_padding; not with calculate_sum_pi_squared",
        effect="the logits of a pass",
        cost="nothing; results differ by rounding",
    ),
    advice(
        "fused_kernels",
        "any",
        "model.use_liger: true, in supervised training",
        _OBSOLETE,
        "it belongs to another trainer",
    ),
    advice(
        "sequence_parallel",
        "backward",
        f"{ACTOR}.ulysses_sequence_parallel_size: 2",
        _WORKS,
        "verl marks the key as old, but only this one reaches the reference too; verl multiplies the token "
        "limit per GPU by it, so memory shrinks only with a lower limit, which is written along",
        constraint="divides attention heads and GPUs, shares the key-value heads evenly, use_remove_padding",
        effect="half of each sequence's activations and logits",
        cost="training, by all-to-all",
    ),
    advice(
        "sequence_parallel",
        "backward",
        "critic.ulysses_sequence_parallel_size: 2",
        _REPLACED,
        "nothing forwards it to the engine",
        instead="critic.fsdp.ulysses_sequence_parallel_size",
    ),
)

ADVICE: tuple[Advice, ...] = (*_ROLLOUT, *_PASSES, *STATE)
