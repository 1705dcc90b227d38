"""PHASES: the phase that a frame, a method or a message belongs to."""

from __future__ import annotations

from autotune.policies.diagnosis.software.general_wordings import GENERAL_FRAMES
from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.values.failure import Phase

# Packages of inference engines, with their plugins for other vendors' devices.
ENGINES = (
    r"(?:vllm(?:_[a-z]+)?|sglang|sgl_jax|lmdeploy|tensorrt_llm|mlc_llm|aphrodite|xllm|tpu_inference|"
    r"text_generation_server|exllamav\d|mindie\w*|ktransformers|llama_cpp|ctranslate2)"
)
# Ordered by precedence over the whole context, not by depth: recomputation runs forward frames inside
# backward, DeepSpeed builds its state with a dummy optimizer step, an engine wakes inside `generate`.
PHASES: tuple[tuple[Phase, Pattern], ...] = tuple(
    (phase, Pattern(pattern))
    for phase, pattern in (
        (
            Phase.WEIGHT_SYNC,
            (
                r"(?<![a-z])wake_up\b|create_and_map|resume_memory_occupation|func=resume|sync_model_weights|"
                r"torch_memory_saver\S*, line \d+, in resume\b|"
                r"load_dtensor_weights|unwrap_model_for_generation|_move_(?:full_)?model_to_vllm|"
                r"sharding_manager\S*, line \d+, in (?:__enter__|preprocess_data)|"
                r"(?<![a-z])update_weights?\b|"
                r"update_weights?_(?:from|for|in)_|\b_?sync_weights|_send_hf_params|get_hf_weight_chunks|"
                r"recv_weight|_send_to_colocated|[Uu]pdate[ _]parameters?\b|update_named_params?|"
                r"(?<![a-z])rollout_mode\b|_sync_\w+_to_vllm|_?broadcast_(?:to_vllm|weights)|"
                r"\bbroadcast_model\b|"
                r"refit_policy|"
                r"prepare_for_generation|prepare_weights_for|stream_weights|get_per_tensor_param|"
                r"bucketed_weight_transfer|\ball_gather_param(?:s_async)?\b|FlattenedTensorBucket|"
                r"_update_weights_from|"
                r"convert_to_hf|per_tensor_generator|Failed to update weights|update_model_weights|"
                r"broadcast_to_inference_engines|update_named_weights"
            ),
        ),
        (
            Phase.WEIGHT_SYNC,
            (
                r"offload_(?:before|after)_refit|\bprepare_(?:for_)?refit|weights_ipc_handles|"
                r"broadcast_weights|sync_\w*weights|\bsync_\w*weight\b|\bmodel_update\b|start_model_update|broadcast_bucket|"
                r"broadcast_parameter|update_parameter_in_bucket|verl/checkpoint_engine/|"
                r"\b(?:send|receive)_weights\b|update_weight_from_|_update_\w*bucket|\breload_weights\b|"
                r"[Uu]pdating (?:\w+ )?weights\b|Update weights begin|sync_model_(?:to|from)_|"
                r"mbridge/\S+, line \d+, in export_|export_(?:hf_)?weights\b|"
                # a sleeping engine keeps a copy of its weights in host memory
                r"vllm\S*, line \d+, in sleep\b|release_memory_occupation"
            ),
        ),
        (
            Phase.WEIGHT_SYNC,
            (
                r"\b_?wake(?:_up_async|_engine)\b|\bsleep_(?:async|replicas)\b|"
                r"update_weights?_\w|weights?_(?:sync|transfer|updater?|broadcast)|"
                r"(?<!runtime/)checkpoint_engine(?:/|\.py)|in \w*refit\w*\b|\bRefitting |weights_via_\w+|"
                r"\b_?(?:send|receive|recv)_(?:state_dict|chunks)|extract_weights|_handle_cuda_ipc|"
                r"rebuild_(?:ipc|cuda_tensor_from_ipc)|push_params?_to_|collect_lora_params|summon_lora|"
                r"(?:/broadcast|megatron_to_hf|update_weight)/\S+, line \d|"
                r"\bconvert_\w+_to_hf\b|\bparam_generator\b|broadcast_from_megatron_pp|"
                r"merged_lora_(?:per_tensor_)?param|"
                r"(?:on|off)load_(?:weights|kv|rollout)\b|"
                r"rollout/\S+, line \d+, in (?:resume|release|(?:on|off)load)\b|"
                r"[Bb]roadcasting (?:\w+ ){0,3}weights\b"
            ),
        ),
        # Methods of engines between generation and training, by the stem of the verb.
        (
            Phase.WEIGHT_SYNC,
            (
                r"ray::\w*(?:[Vv][Ll][Ll][Mm]|LLM|SG[Ll]ang|[Rr]ollout|Infer|Generat|(?<!FSDP)(?<!Megatron)"
                r"(?<!Archon)Engine)\w*\.\w*(?:wake|onload|backload|reload|resume|restore|sleep|offload)\w*\(|"
                r"(?:rollout|infer|vllm|sglang|generat)\w*[/\w.]*\.py\S*, line \d+, in "
                r"\w*(?:wake|onload|backload|sleep|resume_(?:from|kv|weights|memory))\w*$"
            ),
        ),
        # Unsloth loads the engine within `from_pretrained`.
        (Phase.ROLLOUT_INIT, r"\bin load_vllm\b"),
        (
            Phase.INIT,
            (
                r"in from_pretrained\b|_load_pretrained_model|_load_state_dict_into_meta|"
                r"init_model_from_pretrained|modeling_utils\S*, line \d+, in load_state_dict\b|"
                r"load_checkpoint_(?:and_dispatch|in_model)|create_reference_model|"
                r"core_model_loading\.py|caching_allocator_warmup|fsdp2_load_full_state_dict"
            ),
        ),
        (
            Phase.CHECKPOINT,
            (
                r"(?:save|load)_(?:checkpoint|ckpt)|"
                r"\bSaving (?:\w+ )?(?:checkpoint|model|optim\w*|extra_state)\b|"
                r"\b_?save_model\b|dist_checkpointing|_cuda_deserialize|"
                r"in load_state_dict|torch/serialization\.py|save_hf_model|save_pretrained|"
                r"checkpoint_manager\S*, line \d+|_save_to_dcp|state_dict_saver|_save_model_to_hf|"
                r"(?:ckpt|checkpoint)\w*\.py\S*, line \d+, in _?(?:async_|maybe_)?"
                r"(?:save|write|export|load(?!_(?:base|hf|pretrained|weights|model)))\w*|"
                r"model_merger/|export_model_from_megatron|get_fsdp_full_state_dict|"
                r"convert_megatron_model_to_transformers|"
                r"(?:areal/engine/|megatron_utils/model)\S+, line \d+, in save\b|"
                r"_save_recover|_load_optimizer_and_scheduler|consolidate_and_save|\bsave_16bit_model\b|"
                r"_zero3_consolidated"
            ),
        ),
        (
            Phase.CHECKPOINT,
            (
                r"^\s.*(?:\btorch\.save\(|\.save_pretrained\(|\.load_state_dict\(|\bsave_file\()|"
                r"\bgenerate_state_dict\b|sharded_state_dict|_save_checkpoint\b|"
                r"_save_optimizer_and_scheduler|"
                r"_load_from_checkpoint|_load_best_model|zero_to_fp32|get_fp32_state_dict|"
                r"torch_checkpoint_engine\.py|\[Torch\] (?:Saving|Loading)|training/checkpointing\.py|"
                r"\bdcp(?:_|\.)(?:save|load)\b|_save_hf_\w+"
            ),
        ),
        (Phase.WEIGHT_SYNC, r"summon_full_params|GatheredParameters"),
        # An engine whose loop runs has started, whatever the frames below build.
        (Phase.ROLLOUT, r"\bevent_loop_\w+|\brun_(?:event|busy)_loop\b|_process_engine_step"),
        (
            Phase.ROLLOUT_INIT,
            (
                r"determine_available_memory|determine_num_available_blocks|\bprofile_run\b|"
                r"_initialize_kv_caches|initialize_(?:kv_)?cache|_allocate_kv_cache|capture_model|"
                r"_warmup_and_capture|_dummy_(?:sampler_)?run|dummy_metadata|\bcreate_weights\b|"
                r"init_cuda_graphs|init_device_graphs|init_memory_pool|"
                r"[Cc]uda_?[Gg]raph_?[Rr]unner(?!\S*, line \d+, in (?:replay|forward|execute|run|can_|"
                r"load_))|"
                r"_create_buffers|"
                r"Capture \w* ?(?:cuda|CUDA) graph failed|raise_if_cache_size|init_attention_backend|"
                r"check_enough_kv_cache|_wait_server_healthy|start_rollout_servers|"
                r"launch_server_process|start_router|processing method (?:load_model|init_device|initialize)|"
                r"warming up sampler|compile_or_warm_up_model|kernel_warmup|profile_max_num_token|"
                r"creating modelInstanceState|\bWarm-?up failed\b|\b[Ee]rror (?:when )?loading model\b|"
                r"\blaunch_server\(|in _?launch_servers?\b|in run_server\b|_init_server_adapter|"
                r"in init_(?:hybrid|standalone|colocated)|_?(?:start|create)_(?:vllm_)?engines?\b|"
                r"_init(?:ialize)?_inference_engine|_init_vllm\b|start_external_rollout|"
                r"create_rollout_manager|"
                r"(?:vllm|sglang|trtllm)_\w+\.py\S*, line \d+, in (?:__init__|init|initialize)\b|"
                r"ray::\w*(?:[Vv]LLM|Vllm|SGLang|LLMRay|TRTLLM|Trtllm|Infer|Generation)\w*\.(?:__init__|"
                r"init|initialize)\b|"
                r"_build_rollout|init_worker\b.*vllm|(?:EngineCore|WorkerProc|"
                r"Engine process) failed to start|"
                r"process_weights_after_loading|engine-init-barrier|server launch failed|"
                rf"{ENGINES}/\S+, line \d+, in (?:__init__|load_model|"
                # SGLang's `init_new`, `init_forward_metadata` and others run for every batch
                r"_?init(?!_(?:new|forward|next|load|incremental|attn_metadata))\w*|get_model|"
                r"from_engine_args|load_weights?)\b"
            ),
        ),
        (
            Phase.ROLLOUT_INIT,
            (
                r"^\s.*(?:\b(?:LLM|LLMEngine|AsyncLLM|(?:DP)?EngineCoreProc)\(|\bsgl\w*\.Engine\(|AsyncLLM\w*\.from_)|"
                r"build_cache_engine|\ballocate_(?:gpu|cpu)_cache|_create_weight(?:_func)?\b|"
                r"create_py_executor|"
                r"_run_\w*warmup|configure_kv_cache_capacity|estimate_max_(?:num_)?(?:tokens|kv)|"
                r"memory_pool_host|init_kv_buffer|lmcache/v1/memory_management|"
                rf"{ENGINES}/\S+, line \d+, in (?:build_\w+|_?warm_?up\w*|profile\w*|capture\w*|"
                r"_initialize\w*|_allocate\w*|_create_\w+|create_kv\w*|"
                r"alloc\w*_pools?|create_memory_pool\w*|calculate_pool_sizes|_?capture\w*|\w*autotune\w*|"
                r"load(?!_(?:lora|adapter|batch|kv|cpu|image|video|audio))\w*|post_?load\w*|"
                r"postprocess_weight\w*|\w*weights_iterator|_prepare_weights|\w+_repack)\b|"
                # TensorRT-LLM in C++: functions that its constructors call
                r"tensorrt_llm::\S*::(?:createBuffers|createExecutionContexts|createKvCacheManager|"
                r"allocatePools|createDecoder|loadEngine|createModel|loadModel|initializeExecutionContext)\b|"
                r"tensorrt_llm::\S*?(\w+)::\1\(|RuntimeBuffers::create\b|deserializeCudaEngine|"
                # llama.cpp reserves the buffers of weights, cache and graph before it serves
                r"\bgraph_reserve\b|sched_reserve|alloc_tensor_range|llama_(?:model_load|init_from_model|"
                r"new_context|kv_cache_(?:unified_)?init)\w*: |ErrorLoadingModel|error loading model"
            ),
        ),
        (
            Phase.INIT,
            (
                r"initialize_optimizer_states|\b_init_(?:actor|ref|critic|reward)\b|"
                r"_configure_\w*optimizer|_move_model_to_device|_auto_wrap|"
                r"fully_sharded_data_parallel\S*, line \d+, in __init__|"
                r"deepspeed\S*, line \d+, in (?:initialize|_configure_distributed_model)\b|"
                r"(?<![a-z])init_model\b|"
                r"print_node_ip_and_gpu_id|_build_model_optimizer|_build_fsdp_module|"
                r", in setup\b|Before creating fp16|After creating fp16|set_module_tensor_to_device|"
                r"parallel\S*, line \d+, in (?:__init__|_ddp_init_helper)\b|setup_model_and_optimizer|"
                r"initialize_model_and_optimizer|_create_device_model|method 'initialize'|"
                r"megatron\S*, line \d+, in _?get_model\b|prepare_model\b|"
                r"\bTrainRayActor\.init\(|\b_?fully_shard\b(?![/.])|dispatch_model"
            ),
        ),
        (
            Phase.INIT,
            (
                r"^\s.*(?:= (?:FSDP|FullyShardedDataParallel|DDP|DistributedDataParallel)\(|"
                r"deepspeed\.initialize\(|accelerator\.prepare\(|\.from_pretrained\(|"
                r"= (?:\w+\.)?(?:load|build|create|setup)_\w*model\w*\()|"
                r"(?:nanotron|colossalai|lightning|composer|mmengine|"
                r"fairseq)/\S+, line \d+, in (?:__init__|create_\w+|boost|"
                r"configure_\w+|_?setup\w*)\b|"
                r"_setup_for_real_optimizer|_configure_zero_optimizer|zero/\w+\.py\S*, line \d+, in __init__|"
                r"_create_\w*(?:partitions|groups)\b|_post_init_method|_convert_to_(?:zero|deepspeed)_param|"
                r"_allocate_buffers_for_parameters|param_and_grad_buffer\S*, line \d+, in __init__|"
                r"get_megatron_optimizer|_build_model_and_main_param|"
                r"megatron/core/optimizer/\S+, line \d+, in (?:__init__|_build\w+)|"
                r"_flat_param\S*, line \d+, in (?:__init__|flatten_tensors|_init_\w+|shard)\b|"
                r"_init_sharded_param|_init_utils|\b_prepare_(?:fsdp2?|deepspeed|ddp|megatron_lm|tp)\b|"
                r"accelerator\S*, line \d+, in prepare\b|prepare_model_for_kbit|get_peft_model|"
                r"bitsandbytes/nn/modules|(?<!de)quantize_4bit|\b_?setup_(?:model|optimizer)\b|\b_?init_weights\b|"
                r"initialize_weights|resize_token_embeddings|create_optimizer\b|"
                r"bridge/\S+, line \d+, in (?:load_\w+|import_\w+|provide_\w+)|"
                r"areal/\S+, line \d+, in initialize\b|(?:policy|actor|critic|ref|reward|"
                r"train)\w*_worker\w*\.py\S*, "
                r"line \d+, in (?:__init__|initialize|init_\w+)\b|"
                r"(?:torchtitan|[Tt]rainer|recipes)/\S+, line \d+, in "
                r"(?:__init__|setup\w*)"
            ),
        ),
        (
            Phase.INIT,
            (
                r"in _?build_\w*(?:model|module|optimizer)|load_pretrained_model|\bmeta_device_init\b|"
                r"parallel_(?:load_safetensors|init_module)|create_and_sync_state|\bapply_fsdp2?\b|"
                r"setup_(?:reference_model|fsdp)\w*|import_model_from_hf|handle_model_import|"
                r"finalize_megatron_setup|load_dcp_from_hf|_init_(?:train_|eval_)?model\b|"
                r"\b_?broadcast_(?:params|model)\b|initialize_\w*model|_prepare_fsdp2|_apply_peft_wrapper|"
                r"ray::\w*(?:Worker|Actor)\w*\.(?:__init__|init|initialize)\b|"
                r"_create_llm_\w+|hf_to_megatron/|in to_empty\b|"
                r"(?:engine|strategy|impl|actor)\w*\.py\S*, line \d+, in (?:init|initialize)\b"
            ),
        ),
        # A gathered or sharded state dict that is not part of a start or a weight sync is a checkpoint's.
        (
            Phase.CHECKPOINT,
            (
                r"_state_dict_utils\.py|optim_state_dict|_optim_utils\.py|(?:pre|post)_state_dict_hook|"
                r"checkpoint[/\\]state_dict\.py|module\.py\S*, line \d+, in state_dict\b"
            ),
        ),
        (
            Phase.BACKWARD,
            (
                r"run_backward|(?<![\w.])backward\b(?!\.py)|\.backward\(|\bbackward_step\b|"
                r"custom_backward|_post_backward|_pre_backward|backward_epilogue|"
                r"\b(?:pre|post)_backward\b|foreach_reduce\b|"
                r"reduce_(?:independent|ready|partition|ipg|and_partition)\w*|\w+_partition\w*_epilogue|"
                r"torch::autograd::(?:Engine|generated::\w+Backward)|"
                r"in (?!\w*(?:forward|fwd|loss)_(?:and_)?(?:backward|bwd))\w*(?:backward|_bwd)\w*\b|"
                r"independent_gradient|allreduce_gradients|finalize_model_grads|(?:start|finish)_grad_sync|"
                # recomputation of an activation checkpoint
                r"\bunpack_(?:hook|from_cpu)\b|\brecompute_fn\b|in _recompute\w*\b"
            ),
        ),
        (
            Phase.OPTIMIZER,
            (
                r"optimizer_step|optimizer\.step|_(?:multi|single)_tensor_\w+|_foreach_|"
                r"step_with_ready_grads|torch/optim/(?!lr_sched)\w+\.py|low_level_optim|\boptim\.step|"
                r"distrib_optimizer\.py|accelerate/optimizer\.py|fused_adam|cpu_adam|clip_grad|"
                r"\boptim_step\b|"
                r"_take_model_step|deepspeed/runtime/\S+, line \d+, in step\b|HybridDeviceOptimizer|"
                r"optimizer_cpu_offload|bitsandbytes/optim|in \w*grad_norm\w*\b|^\s.*\bopt\w*\.step\(|"
                r"unscale_and_clip|"
                r"\bunscale_\b|"
                r"\bprepare_grads\b|_copy_(?:model|main)_\w+_to_\w+|grad_scaler\.py|"
                r"\b_?(?:on)?load_\w*optimizer\b|megatron/core/optimizer/|newtonschulz|"
                r"optimizer_states?_\w*swap|swap_tensor/|_move_(?:optimizer_)?states|move_optimizer|"
                r"_step_\w*chunk|"
                r"(?:optim\w*/|\b\w*optim\w*\.py|\b(?:adam|muon|lion|adafactor|shampoo|soap|galore|lamb|"
                r"sgd)\w*)\S*\.py\S*, "
                r"line \d+, in (?:step|_?init\w*|_?update\w*|_?get_state\w*|adam\w*|_prefetch_\w+|"
                r"_to_device)\b"
            ),
        ),
        (Phase.DATA, r"in _?(?:get|process)_rollout_data\b"),
        # Computing a loss includes log-probs; the log-prob phase never computes a loss.
        (
            Phase.FORWARD,
            (
                r"in _?compute_loss\b|policy_loss_function|sft_loss_function|in loss_function\b|"
                r"train_one_step|in _?compute_logprobs_and_loss\b|"
                r"skyrl\w*/workers/\S+, line \d+, in _?forward_backward\w*"
            ),
        ),
        # An engine's sampler returns the log-probs of the sampled tokens.
        (Phase.ROLLOUT, rf"{ENGINES}/\S*\bsampler\.py\S*, line \d+, in \w*logprobs?\b"),
        (
            Phase.LOG_PROB,
            (
                r"compute_(?:ref_|reference_|actor_|old_)?log_?probs?\b|\b_?get_logprobs|"
                r"get_reference_policy_logprobs|"
                r"compute_values\b|(?<!=)\bforward_only\b(?!=(?:False|forward_only)\b)|compute_rm_score|"
                r"compute_scores?\b|compute_logp|"
                r"Computing logprobs|infer_batch\b|_get_per_token_logps|ModelRayActor\.forward\(|"
                r"make_experience|critic_infer|_get_(?:ref|old)_log|"
                r"actor_fwd|Timer (?:\w+_)?log_probs start|\b_?(?:get|calculate|"
                r"compute)_rewards?\b|"
                r"^\s.*\bref(?:erence)?_(?:model|policy)\(|reward_model\S*, line|"
                r"forward\((?:self\.)?ref_(?:policy|model)|prepare_for_lp_inference|"
                r"\b_compute_values\b|fwd_logprobs|_forward_logprobs|compute_\w*logprobs?\b|get_full_logits|"
                r"\b_get_log_probs|value_worker\S*, line \d+, in get_values\b|"
                r"policy_worker\S*, line \d+, in score\b|_worker\S*, line \d+, in (?:run_)?inference\w*\b|"
                r"(?:ppo_(?:actor|critic)|skyrl\w*/workers/\w+)\S*, line \d+, in (?:forward|"
                r"_forward_micro_batch)\b|"
                r"(?:RayActor|ModelActor|WorkerBase)\.(?:forward|execute_batch)\(|get_topk_logits|"
                r"engine\S*, line \d+, in forward_batch\b|_compute_reward_colocate\b"
            ),
        ),
        (
            Phase.ROLLOUT,
            (
                r"generate_sequences|run_busy_loop|run_engine_loop|\brun_batch\b|"
                r"forward_batch_generation|_run_engine|event_loop_|forward_thread_func|"
                r"\bforward_(?:extend|decode)\b|logits_processor\.py|LogitsProcessor|"
                r"start_worker_execution_loop|"
                r"during generation|Method (?:Prefill|Decode)|\b_?generate_rollout|in _?generate\w*\b|"
                r"\b[A-Z]\w+\.(?:async_)?generate|"
                r"run_tp_server|"
                r"Dumping (?:input data|scheduler)|"
                r"AsyncLLM output_handler|Rollout generation failed|Workflow execution failed|infer_engine|"
                r"_engine_infer|\bgenerate_samples|_run_prompt|\b_fit_generate\b|_gen_next_batch\b|"
                r"vllm\S*, line \d+, in (?:execute_model|step)\b|"
                r"create_(?:chat_)?completion\b|async_sampling|"
                r"agenerate\b|generation/utils\.py|encountered a fatal error|exposed_step|"
                r"forward_step\S* .*sglang"
            ),
        ),
        (
            Phase.ROLLOUT,
            (
                rf"{ENGINES}/\S+, line \d+, in (?:execute_\w+|_?prepare_\w*inputs?\w*|_?sample\w*|"
                r"_execute_\w+|_?model_forward|_bookkeeping\w*|propose_\w+|_get_prompt_logprobs\w*|"
                r"_?executor_loop\w*|_async_\w+|async_\w+|_?forward_step\w*|step_\w+|"
                # `run_engine_core` builds the engine, then serves with it
                r"_?run_(?!engine_core\b)\w+)\b|"
                r"tensorrt_llm::\S*::(?:forward|forwardAsync|forwardSync|executeStep|executeBatch|"
                r"executeContext|"
                r"prepareStep|setFromInputs|executionLoop|setupContext)\b|"
                r"[Ee]ncountered an error in forward\w* function|\bbatch_generation\b|_fast_infer\b|"
                r"^\s.*\b(?:\w*model|llm|policy|engine|actor|generator)\.(?:generate|chat)\(|"
                r"\b_infer_(?:single|multi|completion)\w*|generate_and_\w+|completion_stream"
            ),
        ),
        (
            Phase.FORWARD,
            (
                r"forward_with_post_processing|\bmodel_forward\b|extract_logits|logprobs_from_logits|"
                r"gather_logprobs|selective_log_softmax|"
                r"grpo_accumulated_loss|forward_step|training_step|fetch_sub_module|"
                r"float_conversion|vocab_parallel|post_language_model|get_log_probs_and_entropy|"
                r"entropy_from_logits|in forward\b|forward_backward|concatenated_forward|"
                r"_pre_forward|_unshard\b|_call_impl|forward_micro_batch|"
                r"loss\w*\.py\S*, line \d+|in \w*cross_entropy\w*|\bpre_forward\b|\bloss_func\b|_loss_step\b|"
                r"^\s+(?:[\w, ]+ = )?(?:self\.)?(?!\w*(?:load|get|build|create|init|setup|prepare)_)"
                r"(?:\w*model|policy|actor|net|module)\((?!\))|"
                r"\bprediction_step\b|\bpack_(?:hook|to_cpu)\b|fused_linear_\w+|foreach_all_gather|"
                r"torch/nn/functional\.py\S*, line \d+, in (?:log_)?softmax\b"
            ),
        ),
        # Methods that train: forward, unless frames show another phase.
        (
            Phase.FORWARD,
            (
                r"ray::\w*(?:Actor|Policy|Learner|Trainer|Worker)\w*\.\w*(?:train(?:ing)?|learn)\w*\(|"
                r"update_(?:policy|actor|critic)|\bppo_update\b|\btrain_(?:mini_)?batch\b|train_actor|"
                r"(?:Ray|Model)Actor\.(?:train|fit)\b|PolicyWorker\w*\.train\b|"
                r"(?:policy|value)_worker\S*, line \d+, in train\b|train_microbatch|train_critic\b|"
                r"in _?train_(?:lm|dpo|rw)\b|"
                r"ppo_train\b|\btrain_step\b|Actor training failed at step|policy_update|"
                r"Timer actor_train start"
            ),
        ),
        (
            Phase.DATA,
            (
                r"remote_read|[Dd]ata[Ll]oader worker|encountered in worker|\bpt_data_worker\b|"
                r"utils[/\\]data[/\\]|in pin memory thread|in do_one_step\b|"
                r"[/\\](?:pandas|pyarrow|datasets|webdataset|streaming|energon)[/\\]|indexed_dataset|"
                r"\w*dataset\w*\.py\S*, line"
            ),
        ),
        *GENERAL_FRAMES,
        # Engines capture their graphs before they serve; a trainer's capture has frames of its own phase.
        (Phase.ROLLOUT_INIT, r"cuda/graphs\.py\S*, line \d+, in capture_(?:begin|end)\b"),
        (
            Phase.INIT,
            (
                r"module\.py\S*, line \d+, in (?:convert|_apply|cuda|to)\b|\.to\(device\)|\.cuda\(\)|"
                r"torch/utils/_device\.py|"
                r"torch/cuda/__init__\.py\S*, line \d+, in (?:set_device|_lazy_init)\b"
            ),
        ),
        (
            Phase.COMM,
            (
                r"init_process_group|_new_process_group|nvshmem(?:/src| setup)|symmetric heap|deep_ep/buffer|"
                r"symm(?:etric)?_mem|Hccl(?:Alloc|Comm)|EI0007|hccl api failed|"
                r"\ball_?reduce\b|\b_?all_?gather\w*|barrier|NCCL WARN|"
                r"/dev/shm/nccl|shmutils|reduce_scatter|broadcast_coalesced|distributed_c10d"
            ),
        ),
    )
)
