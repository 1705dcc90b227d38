"""Every setting of a GRPO job of AReaL 1.0.4, as its dataclasses declare them (areal/api/cli_args.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A class, its base in brackets, and its own fields with their types; `?` allows null, a capital is a section.
_CLASSES = """
GRPOConfig(PPOConfig)
PPOConfig(BaseExperimentConfig)
  gconfig:GenerationHyperparameters eval_gconfig:GenerationHyperparameters? rollout:InferenceEngineConfig
  actor:PPOActorConfig ref:PPOActorConfig? critic:PPOCriticConfig? teacher:TeacherConfig? dynamic_bs:bool
BaseExperimentConfig
  experiment_name:str trial_name:str cluster:ClusterSpecConfig allocation_mode:str seed:int
  enable_offload:bool total_train_epochs:int total_train_steps:int? total_train_n_seqs:int?
  tokenizer_path:str train_dataset:TrainDatasetConfig valid_dataset:ValidDatasetConfig? saver:SaverConfig
  evaluator:EvaluatorConfig stats_logger:StatsLoggerConfig perf_tracer:PerfTracerConfig?
  memory_profiler:MemoryProfilerConfig? recover:RecoverConfig sglang:SGLangConfig vllm:vLLMConfig
  scheduler:SchedulerConfig
ClusterSpecConfig
  name_resolve:NameResolveConfig cluster_name:str fileroot:str n_nodes:int n_gpus_per_node:int
NameResolveConfig
  type:str nfs_record_root:str etcd3_addr:str ray_actor_name:str
TrainDatasetConfig(_DatasetConfig)
_DatasetConfig
  split:str path:str type:str batch_size:int shuffle:bool pin_memory:bool num_workers:int
  num_dataset_workers:int drop_last:bool max_length:int? dataset_kwargs:dict
  scheduling_spec:SchedulingSpec? setup_timeout:float
SchedulingSpec
  cpu:int gpu:int mem:int port_count:int image:str task_type:str env_vars:dict cmd:str?
  srun_additional_args:str additional_bash_cmds:list? container_type:str mount:str nodelist:str?
  exclude:str? ray_placement_strategy:str
ValidDatasetConfig(_DatasetConfig)
SaverConfig(_Timer)
  mode:str
_Timer
  experiment_name:str trial_name:str fileroot:str freq_epochs:int? freq_steps:int? freq_secs:int?
EvaluatorConfig(_Timer)
  eval_before_train:bool
StatsLoggerConfig
  experiment_name:str trial_name:str fileroot:str wandb:WandBConfig swanlab:SwanlabConfig
  tensorboard:TensorBoardConfig trackio:TrackioConfig
WandBConfig
  mode:str wandb_base_url:str wandb_api_key:str entity:str? project:str? name:str? job_type:str?
  group:str? notes:str? tags:list? config:dict? id_suffix:str?
SwanlabConfig
  project:str? name:str? config:dict? logdir:str? mode:str api_key:str?
TensorBoardConfig
  path:str?
TrackioConfig
  mode:str project:str? name:str? space_id:str?
PerfTracerConfig
  experiment_name:str trial_name:str fileroot:str enabled:bool save_interval:int profile_steps:list?
  session_tracer:SessionTracerConfig?
SessionTracerConfig
  enabled:bool flush_threshold:int
MemoryProfilerConfig
  profile_steps:list max_entries:int
RecoverConfig(_Timer)
  mode:str retries:int no_save_optim:bool no_load_optim:bool
SGLangConfig
  model_path:str random_seed:int skip_tokenizer_init:bool disable_cuda_graph:bool disable_radix_cache:bool
  disable_cuda_graph_padding:bool enable_nccl_nvls:bool disable_outlines_disk_cache:bool
  disable_custom_all_reduce:bool disable_overlap_schedule:bool enable_mixed_chunk:bool
  enable_dp_attention:bool enable_ep_moe:bool enable_torch_compile:bool torch_compile_max_bs:int
  cuda_graph_max_bs:int? cuda_graph_bs:list? torchao_config:str enable_nan_detection:bool
  enable_p2p_check:bool triton_attention_reduce_in_fp32:bool triton_attention_num_kv_splits:int
  num_continuous_decode_steps:int enable_memory_saver:bool allow_auto_truncate:bool attention_backend:str?
  enable_multimodal:bool sampling_backend:str? context_length:int? mem_fraction_static:float?
  max_running_requests:int? chunked_prefill_size:int? max_prefill_tokens:int schedule_policy:str
  schedule_conservativeness:float cpu_offload_gb:int dtype:str kv_cache_dtype:str dp_size:int ep_size:int
  enable_lora:bool? max_lora_rank:int? max_loaded_loras:int lora_paths:list? lora_backend:str
  log_level:str log_level_http:str? log_requests:bool log_requests_level:int show_time_cost:bool
  enable_metrics:bool decode_log_interval:int enable_multithread_load:bool
  enable_return_routed_experts:bool
vLLMConfig
  model:str seed:int skip_tokenizer_init:bool enforce_eager:bool dtype:str
  distributed_executor_backend:str max_num_seqs:int block_size:int cpu_offload_gb:float
  disable_sliding_window:bool max_model_len:int? no_enable_chunked_prefill:bool
  no_enable_prefix_caching:bool gpu_memory_utilization:float worker_extension_cls:str
  enable_sleep_mode:bool uvicorn_log_level:str gdn_prefill_backend:str? enable_lora:bool max_lora_rank:int
  max_loras:int lora_modules:list?
SchedulerConfig
  type:str? endpoint:str deploy_mode:str functioncall_service_domain:str reward_functioncall_config:dict
  reward_model_path:str reward_model_service_url:str
GenerationHyperparameters
  n_samples:int max_new_tokens:int min_new_tokens:int max_tokens:int greedy:bool top_p:float top_k:int
  temperature:float stop_token_ids:list ignore_eos:bool skip_special_tokens:bool stop:list?
  frequency_penalty:float lora_name:str use_beam_search:bool
InferenceEngineConfig
  experiment_name:str? trial_name:str? fileroot:str? max_concurrent_rollouts:int? queue_size:int?
  consumer_batch_size:int max_head_offpolicyness:int enable_rollout_tracing:bool
  check_trajectory_format:bool tokenizer_path:str dump_to_file:bool setup_timeout:float
  request_timeout:float request_retries:int pause_grace_period:float scheduling_spec:list backend:str
  scheduling_strategy:SchedulingStrategy use_lora:bool lora_name:str agent:AgentConfig
  return_routed_experts:bool _version:str model:str routing_strategy:str poll_interval:float
  admin_api_key:str api_url:str? provider_api_key:str?
SchedulingStrategy
  type:str target:str? fork:bool
AgentConfig
  agent_cls_path:str admin_api_key:str scheduling_spec:list mode:str tool_call_parser:str
  reasoning_parser:str chat_template_type:str engine_max_tokens:int? turn_discount:float export_style:str
  subproc_max_workers:int session_timeout_seconds:int set_reward_finish_timeout:float
PPOActorConfig(TrainEngineConfig)
  ppo_n_minibatches:int eps_clip:float eps_clip_higher:float? c_clip:float? m2_threshold:float?
  reward_norm:NormConfig? reward_scaling:float reward_bias:float reward_clip:float
  overlong_reward_penalty:bool overlong_tokens:int? overlong_penalty_factor:float?
  mask_no_eos_with_zero:bool discount:float gae_lambda:float adv_norm:NormConfig? kl_ctl:float
  kl_estimator:str use_sapo_loss:bool sapo_tau_pos:float sapo_tau_neg:float recompute_logprob:bool
  use_decoupled_loss:bool rejection_sampling:RejectionSamplingConfig? importance_sampling_level:str
  prox_logp_method:str log_agent_stats:bool log_agent_stats_keys:list max_new_tokens:int
TrainEngineConfig
  experiment_name:str trial_name:str path:str attn_impl:str use_kernels:bool init_from_scratch:bool
  is_critic:bool temperature:float mb_spec:MicroBatchSpec pad_to_maximum:bool disable_dropout:bool
  gradient_checkpointing:bool dtype:str grad_reduce_dtype:str optimizer_dtype:str
  optimizer:OptimizerConfig? weight_update_mode:str fsdp:FSDPEngineConfig archon:ArchonEngineConfig
  megatron:MegatronEngineConfig offload:bool use_lora:bool lora_rank:int lora_alpha:int
  target_modules:list peft_type:str enable_tree_training:bool scheduling_spec:list backend:str
  _version:str admin_api_key:str log_level:str request_timeout:float setup_timeout:float
  scheduling_strategy:SchedulingStrategy
MicroBatchSpec
  n_mbs:int? granularity:int max_tokens_per_mb:int? n_mbs_divisor:int packing_algorithm:str
OptimizerConfig
  type:str lr:float weight_decay:float beta1:float beta2:float eps:float min_lr_ratio:float
  lr_scheduler_type:str warmup_steps_proportion:float initial_loss_scale:float min_loss_scale:float
  loss_scale_window:float hysteresis:int gradient_clipping:float
FSDPEngineConfig
  wrap_policy:FSDPWrapPolicy? offload_params:bool memory_efficient_load:bool per_layer_optim_step:bool
  optim_step_prefetch_layers:int shard_vision_across_sp:bool
FSDPWrapPolicy
  transformer_layer_cls_to_wrap:list?
ArchonEngineConfig
  attn_type:str offload_params:bool enable_compile:bool ac_mode:str selective_ac_option:str
  ac_memory_budget:float ac_preserve_rng_state:bool ac_debug:bool pp_schedule:str pp_layers_per_stage:int?
  pp_first_stage_less_layers:int pp_last_stage_less_layers:int reshard_after_forward_policy:str
  fp8_config:ArchonFP8Config use_deterministic_algorithms:bool moe_router_dtype:str?
ArchonFP8Config
  mode:str exclude_modules:list include_experts:bool use_triton:bool
MegatronEngineConfig
  wrap_with_ddp:bool use_torch_fsdp2:bool use_custom_fsdp:bool ddp:DistributedDataParallelConfig
  virtual_pipeline_parallel_size:int overlap_param_gather_with_optimizer_step:bool
  use_precision_aware_optimizer:bool main_grads_dtype:str main_params_dtype:str exp_avg_dtype:str
  exp_avg_sq_dtype:str async_save:bool use_checkpoint_opt_param_scheduler:bool
  use_deterministic_algorithms:bool recompute_granularity:str? recompute_method:str?
  recompute_num_layers:int? distribute_saved_activations:bool? recompute_modules:list?
  moe_router_dtype:str? moe_shared_expert_overlap:bool moe_enable_deepep:bool
  moe_token_dispatcher_type:str moe_permute_fusion:bool fp8_config:FP8EngineConfig? bridge_type:str
  use_mbridge_save:bool use_bridge_for_update_weights:bool
DistributedDataParallelConfig
  grad_reduce_in_fp32:bool overlap_grad_reduce:bool overlap_param_gather:bool align_param_gather:bool
  use_distributed_optimizer:bool check_for_nan_in_grad:bool bucket_size:int? average_in_collective:bool
  fp8_param_gather:bool
FP8EngineConfig
  mode:str recipe:str param:bool margin:int amax_history_len:int amax_compute_algo:str wgrad:bool
  dot_product_attention:bool multi_head_attention:bool tp_only_amax_red:bool first_last_layers_bf16:bool
  num_layers_at_start_in_bf16:int num_layers_at_end_in_bf16:int direct_convert:bool
NormConfig
  mean_level:str? mean_leave1out:bool std_level:str? std_unbiased:bool eps:float group_size:int
RejectionSamplingConfig
  level:str action:str metric:str agg:str upper:float lower:float?
PPOCriticConfig(TrainEngineConfig)
  ppo_n_minibatches:int eps_clip:float mask_no_eos_with_zero:bool
TeacherConfig
  engine_type:str rollout:InferenceEngineConfig? train:PPOActorConfig? path:str offload:bool
  rl_loss_weight:float distill_loss_weight:float
"""
ROOT = "GRPOConfig"


def _read(text: str) -> dict[str, dict[str, str]]:
    classes: dict[str, dict[str, str]] = {}
    bases: dict[str, str] = {}
    current: dict[str, str] = {}
    for line in text.strip().splitlines():
        if line.startswith(" "):
            current |= {name: kind for name, _, kind in (field.partition(":") for field in line.split())}
        else:
            name, _, base = line.rstrip(")").partition("(")
            current = classes[name] = {}
            bases[name] = base
    return {name: _inherited(name, classes, bases) for name in classes}


def _inherited(name: str, classes: dict[str, dict[str, str]], bases: dict[str, str]) -> dict[str, str]:
    base = bases[name]
    return (_inherited(base, classes, bases) if base else {}) | classes[name]


CLASSES = _read(_CLASSES)


def fields(section: str = "") -> dict[str, str] | None:
    """Return the keys of a section with their types, by its dotted path; None: there is no such section."""
    present = CLASSES[ROOT]
    for key in section.split(".") if section else ():
        kind = present.get(key, "").rstrip("?")
        if kind not in CLASSES:
            return None
        present = CLASSES[kind]
    return present


def kind_of(path: str) -> str | None:
    """Return the type of a setting, such as `int?`; None where AReaL has no such setting."""
    section, _, key = path.rpartition(".")
    own = fields(section)
    if own is None:
        return "any" if _free(section) else None
    return own.get(key)


def leaves(section: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting below a section."""
    for key, kind in (fields(section) or {}).items():
        path = f"{section}.{key}" if section else key
        yield path
        if kind.rstrip("?") in CLASSES:
            yield from leaves(path)


def is_section(path: str) -> bool:
    """Return whether a path names a section and not a value."""
    return (kind_of(path) or "").rstrip("?") in CLASSES


def _free(section: str) -> bool:
    """Return whether a section takes any key: a dictionary."""
    kind = kind_of(section) if section else None
    return kind is not None and re.fullmatch(r"(dict|any)\??", kind) is not None
