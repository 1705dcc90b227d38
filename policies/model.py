"""What is trained, and how it is spread over the devices."""

from __future__ import annotations

from policies.value import Value


class Model(Value, frozen=True, kw_only=True):
    """Shape of a causal language model, from a Hugging Face `config.json` or written in the job."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0


class Layout(Value, frozen=True, kw_only=True):
    """How a job is spread and what it holds: what an estimate needs beyond the knobs.

    Sizes of tensor, sequence and context parallelism and of the engine's tensor parallelism are knobs.
    """

    strategy: str = "none"  # none (one rank) | ddp | fsdp | fsdp2 | megatron
    ranks: int = 1  # devices of the trainer
    shards: int = 1  # ranks over which FSDP or a distributed optimizer spreads one copy of the state
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    engine_ranks: int = 0  # devices of all rollout engines together; colocated: the trainer's own
    parameter_bytes: int = 4  # per resident (sharded) parameter: 4 where FSDP keeps fp32
    compute_bytes: int = 2  # per parameter and activation inside a pass
    gradient_bytes: int = 4  # per parameter
    optimizer_bytes: int = 8  # per parameter; 12 with an fp32 master copy of its own
    logits_bytes: int = 4  # per logit
    engine_bytes: float = 2  # per parameter inside the engine
    kv_bytes: float = 2  # per element of the engine's cache
    reference: bool = False  # a frozen copy is scored
    reference_offload: bool = False  # ... and is in host memory outside its own pass
    critic: bool = False  # a second model of the same shape is trained
    critic_offload: bool = False
    lora_rank: int = 0  # 0: all parameters are trained
    entropy: bool = False  # the loss or its metrics compute the entropy of the logits
    engine_sleeps: bool = False  # the engine frees its memory while training runs
    sequences: int = 0  # samples of one step, over all ranks
    prompt_tokens: int = 0  # longest
    response_tokens: int = 0  # longest, of all turns together
