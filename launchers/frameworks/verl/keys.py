"""Which settings verl 0.9.1 knows: the keys of its configuration, and those that only `++` reaches."""

from __future__ import annotations

import difflib
from functools import cache

# Composed from verl 0.9.1 (hydra-core 1.3): `<nodes> : <names>`, every name below every node; `.` is the top.
# Keys of the configuration of both model engines, of dp (FSDP) alone, of megatron alone.
_BOTH = """
. : model_engine
actor_rollout_ref : hybrid_engine nccl_timeout
actor_rollout_ref.actor : calculate_entropy calculate_sum_pi_squared clip_ratio clip_ratio_c clip_ratio_high
  clip_ratio_low data_loader_seed entropy_coeff entropy_from_logits_chunk_size
  entropy_from_logits_with_chunking freeze_vision_tower kl_loss_coef kl_loss_type loss_agg_mode
  loss_scale_factor ppo_epochs ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu
  ppo_mini_batch_size rollout_n shuffle strategy tau_neg tau_pos use_dynamic_bsz use_fused_kernels
  use_kl_loss use_prefix_grouper use_torch_compile
actor_rollout_ref.actor.checkpoint : async_save load_contents save_contents strict
actor_rollout_ref.actor.optim critic.optim : betas clip_grad lr lr_warmup_steps lr_warmup_steps_ratio
  optimizer override_optimizer_config total_training_steps weight_decay
actor_rollout_ref.actor.policy_loss : clip_cov_lb clip_cov_ratio clip_cov_ub dro_beta kl_cov_ratio loss_mode
  ppo_kl_coef
actor_rollout_ref.actor.profiler actor_rollout_ref.ref.profiler actor_rollout_ref.rollout.profiler
  critic.profiler : all_ranks enable finish_hook_all_ranks finish_hook_cmd finish_hook_ranks ranks
  relocate_results save_path tool
actor_rollout_ref.actor.profiler.tool_config.npu actor_rollout_ref.ref.profiler.tool_config.npu
  critic.profiler.tool_config.npu : analysis contents discrete level
actor_rollout_ref.actor.profiler.tool_config.nsys actor_rollout_ref.ref.profiler.tool_config.nsys
  critic.profiler.tool_config.nsys global_profiler.global_tool_config.nsys : discrete
actor_rollout_ref.actor.profiler.tool_config.precision_debugger
  actor_rollout_ref.ref.profiler.tool_config.precision_debugger
  actor_rollout_ref.rollout.profiler.tool_config.precision_debugger
  critic.profiler.tool_config.precision_debugger global_profiler.global_tool_config.precision_debugger :
  config_path stages steps strict
actor_rollout_ref.actor.profiler.tool_config.torch actor_rollout_ref.ref.profiler.tool_config.torch
  critic.profiler.tool_config.torch : contents discrete
actor_rollout_ref.actor.profiler.tool_config.torch.schedule
  actor_rollout_ref.ref.profiler.tool_config.torch.schedule critic.profiler.tool_config.torch.schedule :
  active repeat skip_first wait warmup
actor_rollout_ref.actor.profiler.tool_config.torch_memory
  actor_rollout_ref.ref.profiler.tool_config.torch_memory critic.profiler.tool_config.torch_memory :
  memory_snapshot_num_steps stack_depth trace_alloc_max_entries
actor_rollout_ref.actor.qat : activation_observer enable group_size ignore_patterns mode
  quantization_config_path
actor_rollout_ref.model critic.model : custom_chat_template enable_activation_offload
  enable_gradient_checkpointing exclude_modules external_lib hf_config_path lora_adapter_path lora_alpha
  lora_rank override_config path target_modules tokenizer_path trust_remote_code use_fused_kernels use_liger
  use_remove_padding use_shm
actor_rollout_ref.model.fused_kernel_options critic.model.fused_kernel_options : impl_backend
actor_rollout_ref.model.lora critic.model.lora : a2a_experimental adapter_path alpha dropout
  dropout_position dtype exclude_modules freeze_language_model freeze_vision_model freeze_vision_projection
  lora_A_init_method lora_B_init_method merge rank target_modules type
actor_rollout_ref.model.mtp critic.model.mtp : detach_encoder enable enable_rollout enable_train method
  mtp_loss_scaling_factor num_speculative_tokens speculative_algorithm speculative_eagle_topk
  speculative_num_draft_tokens speculative_num_steps
actor_rollout_ref.model.tiled_mlp critic.model.tiled_mlp : enabled num_shards
actor_rollout_ref.ref : entropy_from_logits_chunk_size entropy_from_logits_with_chunking
  log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu
  log_prob_use_dynamic_bsz rollout_n strategy use_torch_compile
actor_rollout_ref.rollout : calculate_log_probs cudagraph_capture_sizes data_parallel_size disable_log_stats
  do_sample dtype enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay enforce_eager
  expert_parallel_size free_cache_engine full_determinism gpu_memory_utilization ignore_eos layered_summon
  load_format log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu
  log_prob_use_dynamic_bsz logprobs_mode max_model_len max_num_batched_tokens max_num_seqs mode
  moe_load_balance_metrics_interval mtp multi_stage_wake_up n n_gpus_per_node name nnodes over_sample_rate
  pipeline_model_parallel_size prompt_length qat quantization quantization_config_file response_length
  router_config_path scheduling_policy seed skip_tokenizer_init temperature tensor_model_parallel_size top_k
  top_p
actor_rollout_ref.rollout.agent : agent_loop_config_path default_agent_loop num_workers
actor_rollout_ref.rollout.agent.custom_async_server custom_reward_function data.custom_cls
  reward.custom_reward_function reward.reward_manager.module trainer.v1.sampler.custom_sampler : name path
actor_rollout_ref.rollout.checkpoint_engine : backend custom_backend_module engine_kwargs
  update_weights_bucket_megabytes
actor_rollout_ref.rollout.disaggregation reward.reward_model.rollout.disaggregation : bootstrap_port
  decode_replicas decode_tensor_model_parallel_size enabled ib_device prefill_replicas transfer_backend
actor_rollout_ref.rollout.engine_kwargs : sglang trtllm vllm
actor_rollout_ref.rollout.multi_turn : enable format function_tool_path max_assistant_turns
  max_parallel_calls max_tool_response_length max_user_turns num_repeat_rollouts
  tokenization_sanity_check_mode tool_config_path tool_response_truncate_side use_inference_chat_template
actor_rollout_ref.rollout.profiler.tool_config.npu : analysis contents discrete level profile_token_end
  profile_token_start
actor_rollout_ref.rollout.profiler.tool_config.torch : contents discrete profile_token_end
  profile_token_start
actor_rollout_ref.rollout.prometheus : enable file port served_model_name
actor_rollout_ref.rollout.trace : backend experiment_name max_samples_per_step_per_worker project_name
  token2text
actor_rollout_ref.rollout.val_kwargs : do_sample n temperature top_k top_p
algorithm : adv_estimator gamma kl_penalty lam norm_adv_by_std_in_grpo use_kl_in_reward use_pf_ppo
algorithm.filter_groups : enable max_inflight_gen_batches max_num_gen_batches metric
algorithm.kl_ctrl : horizon kl_coef target_kl type
algorithm.pf_ppo : reweight_method weight_pow
algorithm.rollout_correction : bypass_mode loss_type rollout_is rollout_is_batch_normalize
  rollout_is_threshold rollout_rs rollout_rs_threshold
critic : cliprange_value data_loader_seed enable forward_max_token_len_per_gpu loss_agg_mode
  loss_scale_factor ppo_epochs ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu
  ppo_mini_batch_size rollout_n shuffle strategy use_dynamic_bsz
critic.checkpoint : async_save load_contents save_contents
data : apply_chat_template_kwargs audio_key dataloader_num_workers filter_overlong_prompts
  filter_overlong_prompts_workers function_tool_path gen_batch_size image_key image_patch_size
  max_prompt_length max_response_length mm_processor_kwargs prompt_key return_full_prompt
  return_multi_modal_inputs return_raw_chat return_raw_input_ids reward_fn_key seed shuffle tokenizer
  tool_config_path train_batch_size train_files train_max_samples truncation trust_remote_code use_shm
  val_batch_size val_files val_max_samples validation_shuffle video_key
distillation : enabled n_gpus_per_node nnodes teacher_key
distillation.distillation_loss : clip_ratio clip_ratio_high clip_ratio_low distillation_loss_coef
  log_prob_min_clamp loss_max_clamp loss_mode policy_loss_mode topk use_policy_gradient use_task_rewards
distillation.teacher_models.teacher_model : key model_path num_replicas
distillation.teacher_models.teacher_model.inference : cudagraph_capture_sizes data_parallel_size
  disable_log_stats dtype enable_chunked_prefill enable_prefix_caching enforce_eager engine_kwargs
  expert_parallel_size free_cache_engine gpu_memory_utilization limit_images load_format max_model_len
  max_num_batched_tokens max_num_seqs name prompt_length response_length skip_tokenizer_init temperature
  tensor_model_parallel_size
global_profiler : finish_hook_all_ranks finish_hook_cmd finish_hook_ranks profile_continuous_steps
  relocate_results save_path steps tool
global_profiler.global_tool_config.nsys.controller_nsight_options : cuda-graph-trace cuda-memory-usage trace
global_profiler.global_tool_config.nsys.worker_nsight_options : capture-range capture-range-end
  cuda-graph-trace cuda-memory-usage kill trace
global_profiler.global_tool_config.torch_memory : context kw_args memory_snapshot_num_steps stack_depth
  stacks trace_alloc_max_entries
ray_kwargs : timeline_json_file
ray_kwargs.ray_init : num_cpus
ray_kwargs.ray_init.runtime_env : py_executable
reward : num_workers
reward.reward_manager : name source
reward.reward_model : enable enable_resource_pool model_path n_gpus_per_node nnodes
reward.reward_model.rollout : cudagraph_capture_sizes data_parallel_size disable_log_stats do_sample dtype
  enable_chunked_prefill enable_prefix_caching enforce_eager engine_kwargs expert_parallel_size
  free_cache_engine full_determinism gpu_memory_utilization ignore_eos layered_summon limit_images
  load_format max_model_len max_num_batched_tokens max_num_seqs mtp multi_stage_wake_up n name
  pipeline_model_parallel_size prompt_length quantization quantization_config_file response_length
  scheduling_policy seed skip_tokenizer_init temperature tensor_model_parallel_size top_k top_p
reward.sandbox_fusion sandbox_fusion : max_concurrent memory_limit_mb url
reward_model : enable enable_resource_pool n_gpus_per_node nnodes num_workers reward_loop_class_name
  reward_loop_module_path reward_loop_source reward_manager
reward_model.model : external_lib path trust_remote_code
reward_model.rollout : cudagraph_capture_sizes data_parallel_size disable_log_stats dtype
  enable_chunked_prefill enable_prefix_caching enforce_eager engine_kwargs expert_parallel_size
  free_cache_engine gpu_memory_utilization limit_images load_format max_model_len max_num_batched_tokens
  max_num_seqs name prompt_length response_length skip_tokenizer_init tensor_model_parallel_size
skip.async_rollout skip.rollout skip.rollout_tq : action dump_dir enable steps
trainer : balance_batch checkpoint_callback_class critic_warmup default_hdfs_dir default_local_dir
  del_local_ckpt_after_load device esi_redundant_time experiment_name log_val_generations logger
  max_actor_ckpt_to_keep max_critic_ckpt_to_keep n_gpus_per_node nnodes project_name
  ray_wait_register_center_timeout resume_from_path resume_mode rollout_data_dir save_freq test_freq
  total_epochs total_training_steps use_v1 val_before_train val_only validation_data_dir
trainer.v1 : sync trainer_mode
trainer.v1.colocate_async : num_warmup_batches
trainer.v1.sampler : max_off_policy_strategy max_off_policy_threshold sampler_kwargs
  sync_refill_failed_groups
trainer.v1.separate_async : num_warmup_batches parameter_sync_step
trainer.v1.separate_async.hybrid_rollout : adaptive_switch_threshold enable_switch switch_cost_window_size
  switch_threshold_ratio switch_threshold_release_steps switch_threshold_step_down switch_threshold_step_up
transfer_queue : enable
transfer_queue.backend : storage_backend
transfer_queue.backend.MooncakeStore : auto_init device_name global_segment_size local_buffer_size
  local_hostname master_server_address metadata_server protocol
transfer_queue.backend.SimpleStorage : num_data_storage_units total_storage_size
transfer_queue.metrics : enabled port
"""
_DP = """
actor_rollout_ref.actor : entropy_checkpointing grad_clip pad_to_length ulysses_sequence_parallel_size
  use_remove_padding
actor_rollout_ref.actor.fsdp_config actor_rollout_ref.ref.fsdp_config critic.fsdp : dtype
  entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking forward_only
  forward_prefetch fsdp_size full_determinism model_dtype offload_policy optimizer_offload pad_to_length
  pad_to_length_bucket param_offload reshard_after_forward seed strategy ulysses_sequence_parallel_size
  use_no_sync_for_gradient_accumulation use_orig_params use_torch_compile
actor_rollout_ref.actor.fsdp_config.qat actor_rollout_ref.ref.fsdp_config.qat critic.fsdp.qat :
  activation_observer enable group_size ignore_patterns mode quantization_config_path
actor_rollout_ref.actor.fsdp_config.turbo_config.distributed
  actor_rollout_ref.ref.fsdp_config.turbo_config.distributed critic.fsdp.turbo_config.distributed :
  expert_fully_shard_parallel_size expert_parallel_size fully_shard_parallel_size tensor_parallel_size
  ulysses_parallel_size
actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.fsdp_plan
  actor_rollout_ref.ref.fsdp_config.turbo_config.distributed.fsdp_plan
  critic.fsdp.turbo_config.distributed.fsdp_plan : fsdp_implementation num_to_backward_prefetch
  num_to_forward_prefetch output_dtype param_dtype reduce_dtype
actor_rollout_ref.actor.fsdp_config.wrap_policy actor_rollout_ref.ref.fsdp_config.wrap_policy
  critic.fsdp.wrap_policy : min_num_params
actor_rollout_ref.actor.optim critic.optim : lr_scheduler_type min_lr_ratio num_cycles optimizer_impl
  warmup_style zero_indexed_step
actor_rollout_ref.ref : entropy_checkpointing pad_to_length ulysses_sequence_parallel_size
critic : forward_micro_batch_size forward_micro_batch_size_per_gpu grad_clip ulysses_sequence_parallel_size
"""
_MEGATRON = """
actor_rollout_ref.actor.checkpoint critic.checkpoint : mbridge_config
actor_rollout_ref.actor.megatron critic.megatron : context_parallel_size dist_checkpointing_path
  dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
  dtype dynamic_context_parallel entropy_from_logits_chunk_size entropy_from_logits_with_chunking
  expert_model_parallel_size expert_tensor_parallel_size forward_only max_seqlen_per_dp_cp_rank
  optimizer_offload override_ddp_config override_mcore_model_config pad_bshd_to_minibatch_max pad_to_length
  pad_to_length_bucket param_offload pipeline_model_parallel_size seed sequence_parallel
  tensor_model_parallel_size use_dist_checkpointing use_distributed_optimizer use_mbridge use_megatron_fsdp
  use_remove_padding vanilla_mbridge virtual_pipeline_model_parallel_size
actor_rollout_ref.actor.megatron.override_transformer_config critic.megatron.override_transformer_config :
  attention_backend recompute_granularity recompute_method recompute_modules recompute_num_layers
actor_rollout_ref.actor.megatron.qat actor_rollout_ref.ref.megatron.qat critic.megatron.qat :
  activation_observer enable group_size ignore_patterns mode quantization_config_path
actor_rollout_ref.actor.megatron.router_replay actor_rollout_ref.ref.megatron.router_replay
  critic.megatron.router_replay : mode record_file replay_file
actor_rollout_ref.actor.optim critic.optim : exp_avg_dtype exp_avg_sq_dtype lr_decay_steps lr_decay_style
  lr_warmup_init lr_wsd_decay_steps lr_wsd_decay_style main_grads_dtype min_lr muon_coefficient_type
  muon_extra_scale_factor muon_fp32_matmul_prec muon_match_adamw_update_rms muon_momentum muon_nesterov
  muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode
  use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer use_precision_aware_optimizer
  weight_decay_incr_style
actor_rollout_ref.ref.megatron : context_parallel_size dist_checkpointing_path dist_checkpointing_prefix
  dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient dtype
  dynamic_context_parallel entropy_from_logits_chunk_size entropy_from_logits_with_chunking
  expert_model_parallel_size expert_tensor_parallel_size forward_only max_seqlen_per_dp_cp_rank
  optimizer_offload override_ddp_config override_mcore_model_config override_transformer_config
  pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket param_offload pipeline_model_parallel_size
  seed sequence_parallel tensor_model_parallel_size use_dist_checkpointing use_distributed_optimizer
  use_mbridge use_megatron_fsdp use_remove_padding vanilla_mbridge virtual_pipeline_model_parallel_size
critic : nccl_timeout
"""
# Fields of its dataclasses that its YAML does not mention: Hydra takes them only with `+` or `++`.
_ADDED_BOTH = """
actor_rollout_ref.actor : engine global_batch_info model_config ppo_infer_max_token_len_per_gpu
  ppo_infer_micro_batch_size_per_gpu use_rollout_log_probs
actor_rollout_ref.actor.checkpoint : save_lora_only
actor_rollout_ref.actor.optim critic.optim : grad_clip
actor_rollout_ref.actor.policy_loss : rollout_correction
actor_rollout_ref.actor.profiler actor_rollout_ref.ref.profiler actor_rollout_ref.rollout.profiler
  critic.profiler : global_tool_config
actor_rollout_ref.actor.profiler.tool_config.npu actor_rollout_ref.actor.profiler.tool_config.torch
  actor_rollout_ref.ref.profiler.tool_config.npu actor_rollout_ref.ref.profiler.tool_config.torch
  critic.profiler.tool_config.npu critic.profiler.tool_config.torch : name profile_token_end
  profile_token_start
actor_rollout_ref.actor.profiler.tool_config.nsys
  actor_rollout_ref.actor.profiler.tool_config.precision_debugger
  actor_rollout_ref.actor.profiler.tool_config.torch.schedule
  actor_rollout_ref.actor.profiler.tool_config.torch_memory actor_rollout_ref.ref.profiler.tool_config.nsys
  actor_rollout_ref.ref.profiler.tool_config.precision_debugger
  actor_rollout_ref.ref.profiler.tool_config.torch.schedule
  actor_rollout_ref.ref.profiler.tool_config.torch_memory actor_rollout_ref.rollout.profiler.tool_config.npu
  actor_rollout_ref.rollout.profiler.tool_config.precision_debugger critic.profiler.tool_config.nsys
  critic.profiler.tool_config.precision_debugger critic.profiler.tool_config.torch.schedule
  critic.profiler.tool_config.torch_memory global_profiler.global_tool_config.nsys
  global_profiler.global_tool_config.precision_debugger : name
actor_rollout_ref.model critic.model : architectures generation_config hf_config load_tokenizer
  local_hf_config_path local_path local_tokenizer_path model_type processor target_parameters tokenizer
actor_rollout_ref.ref : calculate_entropy calculate_sum_pi_squared checkpoint clip_ratio clip_ratio_c
  clip_ratio_high clip_ratio_low data_loader_seed engine entropy_coeff freeze_vision_tower global_batch_info
  kl_loss_coef kl_loss_type loss_agg_mode loss_scale_factor model_config optim policy_loss ppo_epochs
  ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
  ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_mini_batch_size qat shuffle tau_neg tau_pos
  use_dynamic_bsz use_fused_kernels use_kl_loss use_prefix_grouper use_rollout_log_probs
actor_rollout_ref.rollout : checkpoint_manager_class custom enable_sleep_mode layer_name_map limit_images
  moe_tensor_parallel_size repetition_penalty server sglang_engine_mode standalone_gpu_memory_utilization
actor_rollout_ref.rollout.agent : agent_loop_manager_class
actor_rollout_ref.rollout.disaggregation reward.reward_model.rollout.disaggregation : mooncake_protocol
actor_rollout_ref.rollout.profiler.tool_config.torch : name schedule
algorithm : gdpo_reward_keys gdpo_reward_weights
critic : engine ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu
critic.checkpoint : save_lora_only strict
distillation.distillation_loss : chunked_topk_chunk_size global_batch_info loss_settings use_chunked_topk
distillation.teacher_models.teacher_model.inference : agent calculate_log_probs checkpoint_engine
  checkpoint_manager_class custom disaggregation do_sample enable_rollout_routing_replay enable_sleep_mode
  full_determinism ignore_eos layer_name_map layered_summon log_prob_max_token_len_per_gpu
  log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz logprobs_mode mode
  moe_load_balance_metrics_interval moe_tensor_parallel_size mtp multi_stage_wake_up multi_turn n
  n_gpus_per_node nnodes over_sample_rate pipeline_model_parallel_size profiler prometheus qat quantization
  quantization_config_file repetition_penalty router_config_path scheduling_policy seed server
  sglang_engine_mode standalone_gpu_memory_utilization top_k top_p trace val_kwargs
global_profiler : all_ranks enable ranks tool_config
reward.reward_model.rollout : agent calculate_log_probs checkpoint_engine checkpoint_manager_class custom
  enable_rollout_routing_replay enable_sleep_mode layer_name_map log_prob_max_token_len_per_gpu
  log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz logprobs_mode mode
  moe_load_balance_metrics_interval moe_tensor_parallel_size multi_turn n_gpus_per_node nnodes
  over_sample_rate profiler prometheus qat repetition_penalty router_config_path server sglang_engine_mode
  standalone_gpu_memory_utilization trace val_kwargs
"""
_ADDED_DP = """
actor_rollout_ref.actor.fsdp_config actor_rollout_ref.ref.fsdp_config critic.fsdp :
  infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu max_token_len_per_gpu micro_batch_size_per_gpu
  mixed_precision router_replay use_dynamic_bsz use_fused_kernels use_remove_padding
actor_rollout_ref.ref : grad_clip use_remove_padding
"""
_ADDED_MEGATRON = """
actor_rollout_ref.actor actor_rollout_ref.ref : profile
actor_rollout_ref.actor.megatron actor_rollout_ref.ref.megatron critic.megatron : full_determinism
  infer_max_token_len_per_gpu infer_micro_batch_size_per_gpu max_token_len_per_gpu micro_batch_size_per_gpu
  strategy use_dynamic_bsz use_fused_kernels
actor_rollout_ref.actor.optim critic.optim : use_layer_wise_param_layout
"""
# Nodes whose content belongs to others: an inference engine, a model's config, Megatron, Ray, Hydra itself.
_OPEN = (
    "actor_rollout_ref.actor.checkpoint.mbridge_config",
    "actor_rollout_ref.actor.megatron.override_ddp_config",
    "actor_rollout_ref.actor.megatron.override_mcore_model_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.ref.megatron.override_ddp_config",
    "actor_rollout_ref.ref.megatron.override_mcore_model_config",
    "actor_rollout_ref.ref.megatron.override_transformer_config",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs",
    "actor_rollout_ref.rollout.custom",
    "actor_rollout_ref.rollout.engine_kwargs",
    "critic.checkpoint.mbridge_config",
    "critic.megatron.override_ddp_config",
    "critic.megatron.override_mcore_model_config",
    "critic.megatron.override_transformer_config",
    "critic.model.override_config",
    "critic.optim.override_optimizer_config",
    "data.apply_chat_template_kwargs",
    "data.mm_processor_kwargs",
    "distillation.teacher_models",
    "hydra",
    "ray_kwargs.ray_init",
    "reward.custom_reward_function.reward_kwargs",
    "reward.reward_model.rollout.engine_kwargs",
    "trainer.v1.sampler.sampler_kwargs",
)
# Plain nodes: verl never builds an object of them, so what a recipe of one's own adds there does no harm.
_PLAIN = (
    "algorithm.filter_groups",
    "custom_reward_function",
    "data",
    "ray_kwargs",
    "reward",
    "reward_model",
    "sandbox_fusion",
    "skip",
    "trainer",
)
_ENGINES = {"dp": (_BOTH, _DP), "megatron": (_BOTH, _MEGATRON)}
_ADDED = {"dp": (_ADDED_BOTH, _ADDED_DP), "megatron": (_ADDED_BOTH, _ADDED_MEGATRON)}


@cache
def configured(engine: str) -> frozenset[str]:
    """Return the keys of the composed configuration of a model engine, dp or megatron."""
    return frozenset(key for text in _ENGINES[engine] for key in _expanded(text))


@cache
def addable(engine: str) -> frozenset[str]:
    """Return the keys that a model engine takes although its configuration does not mention them."""
    return frozenset(key for text in _ADDED[engine] for key in _expanded(text))


def is_open(key: str) -> bool:
    """Return whether a key lies in a node whose content belongs to somebody else."""
    return any(key.startswith(f"{node}.") for node in _OPEN)


def is_plain(key: str) -> bool:
    """Return whether a key lies in a node that verl reads without building an object of it."""
    root = key.split(".")[0]
    known = {name.split(".")[0] for name in configured("dp")}
    return root not in known or any(key.startswith(f"{node}.") for node in _PLAIN)


def taken(key: str) -> str:
    """Return a key as Hydra takes it: plain where a configuration has it, else with `++`; `~` stays."""
    name = key.lstrip("+")
    known = name in configured("dp") or name in configured("megatron")
    return name if key.startswith("~") or (known and not key.startswith("+")) else f"++{name}"


@cache
def _nodes(engine: str) -> frozenset[str]:
    keys = configured(engine)
    return frozenset(
        ".".join(parts[:n]) for key in keys for parts in [key.split(".")] for n in range(1, len(parts))
    )


def is_node(key: str, engine: str) -> bool:
    """Return whether a key names a whole part of the configuration."""
    return key in _nodes(engine)


def similar(key: str, engine: str) -> str:
    """Return the known key that looks most like an unknown one; empty where none does."""
    known = sorted(configured(engine) | addable(engine))
    name = key.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == name]
    found = difflib.get_close_matches(key, same or known, n=1, cutoff=0.6)
    return found[0] if found else ""


def _expanded(text: str) -> list[str]:
    keys = []
    for row in text.replace("\n  ", " ").strip().splitlines():
        nodes, _, names = row.partition(" : ")
        keys += [
            name if node == "." else f"{node}.{name}" for node in nodes.split() for name in names.split()
        ]
    return keys
