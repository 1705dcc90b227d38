"""Flags that releases before 0.10 have under another name, of those that are read or written here.

Read in openrlhf/cli/train_ppo_ray.py of 0.9.10.
"""

from autotune.launchers.frameworks.core.renames import Renamed

_SINCE = "0.10"
# Flags that were their last part alone, and those whose dots were underscores.
_UNSECTIONED = """
    actor.aux_loss_coef ckpt.save_steps data.dataloader_num_workers data.max_len data.max_samples
    ds.adam_offload ds.grad_accum_dtype ds.packing_samples ds.ring_attn_size ds.use_liger_kernel
    ds.zero_stage rollout.max_new_tokens rollout.n_samples_per_prompt train.num_episodes vllm.enforce_eager
"""
_UNDERSCORED = """
    actor.num_gpus_per_node actor.num_nodes ckpt.path ds.tensor_parallel_size eval.dataset eval.steps
    rollout.batch_size rollout.max_tokens_per_gpu train.batch_size train.max_tokens_per_gpu
    vllm.enable_sleep vllm.gpu_memory_utilization vllm.num_engines vllm.tensor_parallel_size
"""
_OTHERWISE = {
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.model_name_or_path": "pretrain",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.kl.init_coef": "init_kl_coef",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.output_dir": "save_path",
    "ckpt.save_hf": "save_hf_ckpt",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.lora.rank": "lora_rank",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.run_name": "wandb_run_name",
    "reward.model_name_or_path": "reward_pretrain",
    "train.async_enable": "async_train",
    "train.colocate_all": "colocate_all_models",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.partial_rollout_enable": "partial_rollout",
}

RENAMED = (
    Renamed("micro_rollout_batch_size", "rollout.micro_batch_size", since=_SINCE),
    Renamed("micro_train_batch_size", "train.micro_batch_size", since=_SINCE),
    *(Renamed(new.rpartition(".")[2], new, since=_SINCE) for new in _UNSECTIONED.split()),
    *(Renamed(new.replace(".", "_"), new, since=_SINCE) for new in _UNDERSCORED.split()),
    *(Renamed(old, new, since=_SINCE) for new, old in _OTHERWISE.items()),
)
