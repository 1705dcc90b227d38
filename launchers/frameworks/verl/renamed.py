"""Settings of guides and of older releases that verl 0.9.1 does not know, and what took their place.

A setting that verl still accepts but never reads belongs into UNREAD of rows.py.
"""

from autotune.launchers.frameworks.core.renames import Renamed

_FREED = "it was removed: megatron.param_offload frees the gradient buffers too"
_ACTOR = "actor_rollout_ref.actor"

RENAMED = (
    Renamed(
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        since="0.7.1",
    ),
    Renamed("critic.model.fsdp_config", "critic.fsdp", since="0.8.0"),
    Renamed("trainer.use_legacy_worker_impl", since="0.8.0", hint="it was removed: leave it out"),
    Renamed(f"{_ACTOR}.megatron.grad_offload", since="0.9.1", hint=_FREED),
    Renamed("critic.megatron.grad_offload", since="0.9.1", hint=_FREED),
    Renamed("actor_rollout_ref.ref.megatron.grad_offload", since="0.9.1", hint="it was removed"),
    Renamed("critic.fsdp_config", "critic.fsdp"),
    Renamed(
        f"{_ACTOR}.fsdp_config.cpu_offload",
        hint=f"write {_ACTOR}.fsdp_config.param_offload and {_ACTOR}.fsdp_config.optimizer_offload",
    ),
    Renamed(
        f"{_ACTOR}.fsdp_config.offload_params",
        hint=f"write {_ACTOR}.fsdp_config.param_offload, or with fsdp2 {_ACTOR}.fsdp_config.offload_policy",
    ),
    Renamed(f"{_ACTOR}.model_engine", hint="write model_engine, a setting of the whole job"),
    Renamed("global_profiler.enabled", hint=f"write global_profiler.tool and {_ACTOR}.profiler.enable"),
    Renamed("reward_model.overlong_buffer", "+reward.reward_kwargs.overlong_buffer_cfg"),
)
