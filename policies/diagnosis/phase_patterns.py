"""Which phase and component the frames, methods and prefixes around a message point to."""

from __future__ import annotations

import functools
import re

import msgspec

from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.failure import Component, Phase

# Ordered by precedence over the whole context, not by depth: recomputation runs forward frames inside
# backward, DeepSpeed builds its state with a dummy optimizer step, an engine wakes inside `generate`.
_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern, re.MULTILINE))
    for phase, pattern in (
        (
            Phase.WEIGHT_SYNC,
            (
                r"\bwake_up\b|create_and_map|resume_memory_occupation|func=resume|sync_model_weights|"
                r"torch_memory_saver\S*, line \d+, in resume\b|"
                r"load_dtensor_weights|unwrap_model_for_generation|_move_(?:full_)?model_to_vllm|"
                r"sharding_manager\S*, line \d+, in (?:__enter__|preprocess_data)|\bupdate_weights?\b|"
                r"update_weights?_(?:from|for|in)_|\b_?sync_weights|_send_hf_params|get_hf_weight_chunks|"
                r"recv_weight|_send_to_colocated|[Uu]pdate[ _]parameters?\b|update_named_params?|"
                r"\brollout_mode\b|_sync_\w+_to_vllm|_?broadcast_(?:to_vllm|weights|model)|refit_policy|"
                r"prepare_for_generation|prepare_weights_for|stream_weights|get_per_tensor_param|"
                r"bucketed_weight_transfer|\ball_gather_param(?:s_async)?\b|FlattenedTensorBucket|_update_weights_from|"
                r"convert_to_hf|per_tensor_generator|Failed to update weights|update_model_weights|"
                r"broadcast_to_inference_engines|update_named_weights"
            ),
        ),
        (
            Phase.INIT,
            (
                r"in from_pretrained\b|_load_pretrained_model|_load_state_dict_into_meta|"
                r"init_model_from_pretrained|modeling_utils\S*, line \d+, in load_state_dict\b"
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
                r"_save_recover|_load_optimizer_and_scheduler|consolidate_and_save|\bsave_16bit_model\b|_zero3_consolidated"
            ),
        ),
        (Phase.WEIGHT_SYNC, r"summon_full_params|GatheredParameters"),
        (
            Phase.ROLLOUT_INIT,
            (
                r"determine_available_memory|determine_num_available_blocks|\bprofile_run\b|"
                r"_initialize_kv_caches|initialize_(?:kv_)?cache|_allocate_kv_cache|capture_model|"
                r"_warmup_and_capture|_dummy_(?:sampler_)?run|dummy_metadata|\bcreate_weights\b|"
                r"init_cuda_graphs|init_device_graphs|[Cc]uda_?[Gg]raph_?[Rr]unner|init_memory_pool|"
                r"_create_buffers|"
                r"Capture \w* ?(?:cuda|CUDA) graph failed|raise_if_cache_size|init_attention_backend|"
                r"check_enough_kv_cache|_wait_server_healthy|start_rollout_servers|"
                r"launch_server_process|start_router|processing method (?:load_model|init_device|initialize)|"
                r"warming up sampler|compile_or_warm_up_model|kernel_warmup|profile_max_num_token|"
                r"creating modelInstanceState|"
                r"\blaunch_server\(|_build_rollout|init_worker\b.*vllm|EngineCore failed to start|"
                r"process_weights_after_loading|engine-init-barrier|server launch failed|"
                r"(?:vllm|sglang|sgl_jax|lmdeploy|tensorrt_llm)/\S+, line \d+, in (?:__init__|load_model|"
                r"_?init(?:ialize)?\w*|get_model|from_engine_args|load_weights?)\b"
            ),
        ),
        (
            Phase.INIT,
            (
                r"initialize_optimizer_states|\b_init_(?:actor|ref|critic|reward)\b|"
                r"_configure_\w*optimizer|_move_model_to_device|_auto_wrap|"
                r"fully_sharded_data_parallel\S*, line \d+, in __init__|"
                r"deepspeed\S*, line \d+, in (?:initialize|_configure_distributed_model)\b|\binit_model\b|"
                r"print_node_ip_and_gpu_id|_init_utils\.py|_build_model_optimizer|_build_fsdp_module|"
                r", in setup\b|Before creating fp16|After creating fp16|set_module_tensor_to_device|"
                r"parallel\S*, line \d+, in (?:__init__|_ddp_init_helper)\b|setup_model_and_optimizer|"
                r"initialize_model_and_optimizer|_create_device_model|method 'initialize'|"
                r"megatron\S*, line \d+, in "
                r"_?get_model\b|prepare_model\b|\bTrainRayActor\.init\(|_fully_shard\b|dispatch_model"
            ),
        ),
        # A gathered or sharded state dict that neither a start nor a weight sync asked for is a checkpoint's.
        (
            Phase.CHECKPOINT,
            (
                r"_state_dict_utils\.py|(?:pre|post)_state_dict_hook|"
                r"checkpoint[/\\]state_dict\.py|module\.py\S*, line \d+, in state_dict\b"
            ),
        ),
        (
            Phase.BACKWARD,
            (
                r"run_backward|(?<![\w.])backward\b(?!\.py)|\.backward\(|\bbackward_step\b|"
                r"custom_backward|_post_backward|_pre_backward|backward_epilogue"
            ),
        ),
        (
            Phase.OPTIMIZER,
            (
                r"optimizer_step|optimizer\.step|_(?:multi|single)_tensor_\w+|_foreach_|"
                r"step_with_ready_grads|torch/optim/(?!lr_sched)\w+\.py|low_level_optim|\boptim\.step|"
                r"distrib_optimizer\.py|accelerate/optimizer\.py|fused_adam|cpu_adam|clip_grad_norm|"
                r"_take_model_step|deepspeed/runtime/\S+, line \d+, in step\b|HybridDeviceOptimizer|"
                r"optimizer_cpu_offload|bitsandbytes/optim|in \w*grad_norm\w*\b"
            ),
        ),
        (Phase.DATA, r"in _?(?:get|process)_rollout_data\b"),
        # A loss computes log-probs too; scoring never computes a loss.
        (
            Phase.FORWARD,
            r"in _?compute_loss\b|policy_loss_function|sft_loss_function|in loss_function\b|train_one_step",
        ),
        (
            Phase.LOG_PROB,
            (
                r"compute_(?:ref_|reference_|actor_|old_)?log_?probs?\b|\bget_logprobs|get_reference_policy_logprobs|"
                r"\bcompute_values\b|(?<!=)\bforward_only\b(?!=(?:False|forward_only)\b)|compute_rm_score|"
                r"compute_scores?\b|compute_logp|"
                r"Computing logprobs|infer_batch\b|_get_per_token_logps|ModelRayActor\.forward\(|"
                r"make_experience|critic_infer|_get_(?:ref|old)_log|"
                r"recompute_logp|actor_fwd|Timer (?:\w+_)?log_probs start|\bget_reward\b|"
                r"reward_model\S*, line"
            ),
        ),
        (
            Phase.ROLLOUT,
            (
                r"generate_sequences|run_busy_loop|_process_engine_step|run_engine_loop|\brun_batch\b|"
                r"forward_batch_generation|_run_engine|event_loop_|forward_thread_func|"
                r"\bforward_(?:extend|decode)\b|logits_processor|start_worker_execution_loop|"
                r"during generation|Method (?:Prefill|Decode)|\b_?generate_rollout|in _?generate\w*\b|"
                r"(?:RolloutManager|HttpServer|LLMRayActor|GenerationWorker)\.(?:async_)?generate|"
                r"run_tp_server|"
                r"AsyncLLM output_handler|Rollout generation failed|Workflow execution failed|infer_engine|"
                r"_engine_infer|\bgenerate_samples|_run_prompt|"
                r"vllm\S*, line \d+, in (?:execute_model|step)\b|"
                r"agenerate\b|generation/utils\.py|encountered a fatal error|exposed_step|"
                r"forward_step\S* .*sglang"
            ),
        ),
        (
            Phase.FORWARD,
            (
                r"grpo_accumulated_loss|forward_step|training_step|fetch_sub_module|"
                r"float_conversion|vocab_parallel|post_language_model|get_log_probs_and_entropy|"
                r"entropy_from_logits|in forward\b|forward_backward|"
                r"train_one_step|_pre_forward|_unshard\b|_call_impl|forward_micro_batch|"
                r"loss\w*\.py\S*, line \d+|in \w*cross_entropy\w*"
            ),
        ),
        # The method that trains: forward, unless frames below it say more.
        (
            Phase.FORWARD,
            (
                r"update_(?:policy|actor|critic)|\bppo_update\b|\btrain_(?:mini_)?batch\b|train_actor|"
                r"RayActor\.(?:train|fit)\(|PolicyWorker\w*\.train\(|policy_worker\S*, line \d+, in train\b|"
                r"ppo_train\b|\btrain_step\b|Actor training failed at step|policy_update|"
                r"Timer actor_train start"
            ),
        ),
        (
            Phase.DATA,
            (
                r"remote_read|[Dd]ata[Ll]oader worker|encountered in worker|"
                r"utils[/\\]data[/\\]|in pin memory thread"
            ),
        ),
        # Engines record their graphs before they serve; a trainer's recording has frames of a pass.
        (Phase.ROLLOUT_INIT, r"cuda/graphs\.py\S*, line \d+, in capture_(?:begin|end)\b"),
        (
            Phase.INIT,
            (
                r"module\.py\S*, line \d+, in (?:convert|_apply|cuda|to)\b|\.to\(device\)|\.cuda\(\)|"
                r"torch/utils/_device\.py"
            ),
        ),
        (
            Phase.COMM,
            (
                r"init_process_group|_new_process_group|nvshmem/src|Hccl(?:Alloc|Comm)|"
                r"\ball_?reduce\b|\b_?all_?gather\w*|barrier|NCCL WARN|"
                r"/dev/shm/nccl|shmutils|reduce_scatter|broadcast_coalesced|distributed_c10d"
            ),
        ),
    )
)
# What engines print when they start; weaker than frames.
STAGE = re.compile(
    r"Capturing cuda ?graphs?|Capture (target|cuda|CUDA|prefill)|Loading safetensors|Load weight (begin|end)|"
    r"Memory pool end|KV Cache is allocated|# GPU blocks"
)
# One of them is in every line of a stage.
STAGE_LITERALS = (
    "Capturing cuda", "Capture target", "Capture cuda", "Capture CUDA", "Capture prefill",
    "Loading safetensors", "Load weight ", "Memory pool end", "KV Cache is allocated", "# GPU blocks",
)  # fmt: skip
_COMPONENTS: tuple[tuple[Component, re.Pattern[str]], ...] = tuple(
    (component, re.compile(pattern, re.MULTILINE))
    for component, pattern in (
        # The role in a worker's id or a method's name says more than the code that both roles share.
        (
            Component.REF,
            (
                r"reference-\d|ReferenceModel|RefActor|_ref_log_prob|get_reference_policy|compute_ref_|"
                r"worker 'ref/|^\[ref\] |\.ref_(?:compute|init|infer)\w*"
            ),
        ),
        (
            Component.CRITIC,
            (
                r"Critic|critic-\d|compute_values|update_critic|worker 'critic/|^\[critic\] |"
                r"\.critic_\w+|_critic\.py|/critic\.py"
            ),
        ),
        (
            Component.REWARD,
            r"RewardModel|reward-\d|compute_rm_score|\.rm_\w+|worker 'reward/|reward_model\S*, line",
        ),
        (
            Component.TRAINER,
            (
                r"worker '(?:actor|train\w*)/|megatron_utils|fsdp_utils/actor|\bTrainRayActor|"
                r"Actor training failed|"
                r"_post_state_dict_hook"
            ),
        ),
        (
            Component.ROLLOUT,
            (
                r"SGLang|vLLMHttp|AsyncVLLM|VllmWorker|VllmGeneration|RayWorkerWrapper|EngineCore|"
                r"APIServer|Worker_TP|LLMRayActor|RolloutManager|RolloutActor|vllm/|sglang/|sgl_jax/|"
                r"cumem|text_generation|AgentLoopWorker|sync_model_weights|generate_sequences|"
                r"in generate\b|wake_up|"
                r"DP\d+ TP\d|TP\d+\]|worker 'rollout/|^\[rollout\] |lmdeploy/|tensorrt_llm/|"
                r"Failed to update (?:parameter|weights)|func=resume|generation/utils\.py"
            ),
        ),
        (Component.DATA, r"[Dd]ata[Ll]oader worker|encountered in worker|remote_read"),
        (
            Component.TRAINER,
            (
                r"WorkerDict|RayActor|PolicyWorker|TrainerActor|ActorWorker|EngineBP|areal/engine|"
                r"torch/nn/parallel|"
                r"fsdp|megatron|deepspeed|torch/optim|backward|optimizer|compute_loss|training_step|"
                r"[Tt]rainer|torch/nn/modules|NCCL|nccl|get_logprobs|torch/serialization|modeling_utils|"
                r"'ppo_update'|_create_device_model|torch/distributed"
            ),
        ),
        (Component.DATA, r"[Dd]ata[Ll]oader"),
        (Component.DRIVER, r"main_task|TaskRunner"),
        # Frames of a training framework and of nothing more telling.
        (
            Component.TRAINER,
            (
                r"\b(?:verl|slime|relax|areal|trl|openrlhf|nemo_rl|swift|llamafactory|torchtune|torchtitan|"
                r"roll|skyrl_train|prime_rl|axolotl)/\w+|ppo_utils"
            ),
        ),
    )
)
_FRAME = re.compile(
    r"File \"[^\"\n]+\", line \d+|File \"?[^\"\s]+\"?(, line |:)\d+|^\S*\.py:\d+:? in |\S+\.py:\d+ \w+|"
    r"\.py\(\d+\): \w+|"
    r"\.py in \w+\(|ray::\w"
)
_ERROR_END = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?!\()(?:: .*)?$")


_VALIDATES = re.compile(r"\b_?validate\b|\bevaluation_loop\b|\beval_rollout")
# What a driver's message without figures was asked for, where its innermost frame pins host memory.
_PINS = re.compile(
    r"\bpin_memory\b|cudaHost(?:Alloc|Register)|cudaMallocHost|pinned_(?:memory|buffer|tensor)"
)

_SHARED = re.compile(r"shared_memory\.py|shm_broadcast\.py|SharedMemory\(|_share_(?:fd|filename)_")


def phase_of(context: str) -> Phase:
    """Return the phase that a context of frames and methods shows, NONE where it shows none."""
    ranked = min(map(_phase_rank, context.split("\n")))
    return _PHASES[ranked][0] if ranked < len(_PHASES) else Phase.NONE


@functools.lru_cache(1024)  # the context of one message is mostly that of the next
def _phase_rank(line: str) -> int:
    matches = (at for at, (_, pattern) in enumerate(_PHASES) if pattern.search(line))
    return next(matches, len(_PHASES))


def phase_around(context: list[str], line: str) -> Phase:
    """Return the phase of a message: of its traceback as a whole, or of the nearest line that names one."""
    if any(is_frame(text) for text in context):
        return phase_of("\n".join([*context, line]))
    found = (phase_of(text) for text in (line, *reversed(context)))
    return next((phase for phase in found if phase is not Phase.NONE), Phase.NONE)


def finer(phase: Phase, context: str) -> Phase:
    """Return the phase with frames that come after the message: a training method has several."""
    found = phase_of(context)
    if phase is Phase.NONE:
        return found
    return found if phase is Phase.FORWARD and found in (Phase.BACKWARD, Phase.OPTIMIZER) else phase


def role(phase: Phase, component: Component) -> Phase:
    """Return the phase as its component allows it: reference models only score, engines start."""
    if phase is Phase.INIT and component is Component.ROLLOUT:
        return Phase.ROLLOUT_INIT
    scores = component in (Component.REF, Component.REWARD)
    return Phase.LOG_PROB if scores and phase is Phase.FORWARD else phase


def in_validation(facts: Facts, phase: Phase, context: list[str]) -> Facts:
    """Return the facts with the word on whether a rollout was one of a validation."""
    if phase is Phase.ROLLOUT and any(_VALIDATES.search(text) for text in context):
        return msgspec.structs.replace(facts, validation=True)
    return facts


def pins_host_memory(context: list[str]) -> bool:
    """Return whether the innermost frame of a traceback asks for page-locked host memory."""
    innermost = _innermost(context)
    return any(_PINS.search(line) for line in innermost) and not any("set_device" in x for x in innermost)


def asks_shared_memory(context: list[str]) -> bool:
    """Return whether the innermost frame of a traceback asks for shared memory: its disk is /dev/shm."""
    return any(_SHARED.search(line) for line in _innermost(context))


def _innermost(context: list[str]) -> list[str]:
    """Return the last frame of a context, or its last two lines where it shows the code."""
    return [line for line in context if is_frame(line) or line.startswith("    ")][-2:]


def component_of(context: str) -> Component:
    """Return the component that a context of prefixes and frames shows."""
    ranked = min(map(_component_rank, context.split("\n")))
    return _COMPONENTS[ranked][0] if ranked < len(_COMPONENTS) else Component.UNKNOWN


@functools.lru_cache(1024)
def _component_rank(line: str) -> int:
    matches = (at for at, (_, pattern) in enumerate(_COMPONENTS) if pattern.search(line))
    return next(matches, len(_COMPONENTS))


def is_stage(line: str) -> bool:
    """Return whether an engine says with this line that it is starting."""
    return STAGE.search(line) is not None


def is_frame(line: str) -> bool:
    """Return whether a line belongs to a traceback's frames."""
    return _FRAME.search(line) is not None


def ends_error(line: str) -> bool:
    """Return whether a line is the last of a traceback: what is above belongs to another error."""
    return _ERROR_END.match(line) is not None
