"""Which settings of verl act on its critic, its reference and its reward model, by knob.

The other settings of a trainer's passes and state are the actor's alone. The older workers, whose frames name
their files, were removed in 0.8; their names are those of 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.launchers.frameworks.verl.config import ACTOR, REF
from autotune.policies.values.failure import Component

_OLDER = ("verl/workers/critic/", "verl/workers/fsdp_workers", "verl/workers/megatron_workers")
_CRITIC = {
    "recompute": "critic.model.enable_gradient_checkpointing",
    "activation_offload": "critic.model.enable_activation_offload",
    "tokens_per_microbatch": "++critic.ppo_infer_max_token_len_per_gpu",
    "logprob_tokens": "++critic.ppo_infer_max_token_len_per_gpu",
    "param_offload": "critic.fsdp.param_offload",
    "grad_offload": "critic.fsdp.offload_policy",
    "optimizer_offload": "critic.fsdp.optimizer_offload",
    "sequence_parallel": "critic.fsdp.ulysses_sequence_parallel_size",
}
_OLDER_CRITIC = {
    "recompute": "critic.model.enable_gradient_checkpointing",
    "tokens_per_microbatch": "critic.ppo_max_token_len_per_gpu",
    "logprob_tokens": "critic.forward_max_token_len_per_gpu",
    "microbatch_size": "critic.ppo_micro_batch_size_per_gpu",
    "param_offload": "critic.model.fsdp_config.param_offload",
    "optimizer_offload": "critic.model.fsdp_config.optimizer_offload",
    "sequence_parallel": "critic.ulysses_sequence_parallel_size",
}
_MEGATRON_CRITIC = {
    "param_offload": "critic.megatron.param_offload",
    "optimizer_offload": "critic.megatron.optimizer_offload",
    "tensor_parallel": "critic.megatron.tensor_model_parallel_size",
}
# The state of the actor's optimizer stays on the cards while the reference scores.
_REF = {
    "logprob_tokens": f"{REF}.log_prob_max_token_len_per_gpu",
    "microbatch_size": f"{REF}.log_prob_micro_batch_size_per_gpu",
}
_FSDP_REF = {
    "entropy_chunking": f"{REF}.entropy_from_logits_with_chunking",
    "param_offload": f"{REF}.fsdp_config.param_offload",
    "optimizer_offload": f"{ACTOR}.fsdp_config.optimizer_offload",
    "sequence_parallel": f"{REF}.ulysses_sequence_parallel_size",
}
_MEGATRON_REF = {
    "param_offload": f"{REF}.megatron.param_offload",
    "optimizer_offload": f"{ACTOR}.megatron.optimizer_offload",
}
_REWARD = {
    "memory_fraction": "reward.reward_model.rollout.gpu_memory_utilization",
    "concurrency": "reward.reward_model.rollout.max_num_seqs",
    "rollout_tensor_parallel": "reward.reward_model.rollout.tensor_model_parallel_size",
}
_OLDER_REWARD = {
    "logprob_tokens": "reward_model.forward_max_token_len_per_gpu",
    "microbatch_size": "reward_model.micro_batch_size_per_gpu",
}


def settings_of(component: Component, *, megatron: bool, text: str) -> Mapping[str, str] | None:
    """Return the settings of a part by knob; None of one that is set by the job's own, as the actor is.

    `text`: the log, which shows by its frames whether the older workers ran.
    """
    older = any(trace in text for trace in _OLDER)
    if component is Component.CRITIC:
        own = _OLDER_CRITIC if older else _CRITIC
        passes = {knob: key for knob, key in own.items() if ".fsdp" not in key and "ulysses" not in key}
        return passes | _MEGATRON_CRITIC if megatron else own
    if component is Component.REF:
        return _REF | (_MEGATRON_REF if megatron else _FSDP_REF)
    if component is Component.REWARD:
        return _OLDER_REWARD if older else _REWARD
    return None
