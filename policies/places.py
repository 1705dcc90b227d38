"""Which phase and component the frames, methods and prefixes around a message point to."""

from __future__ import annotations

import re

from policies.types import Component, Phase

# Ordered by precedence over the whole context, not by depth: recomputation runs forward frames inside
# backward, DeepSpeed builds its state with a dummy optimizer step, an engine wakes inside `generate`.
_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern, re.MULTILINE))
    for phase, pattern in (
        (
            Phase.WEIGHT_SYNC,
            (
                r"\bwake_up\b|create_and_map|resume_memory_occupation|func=resume|sync_model_weights|"
                r"load_dtensor_weights|unwrap_model_for_generation|_move_full_model_to|"
                r"sharding_manager\S*, line \d+, in __enter__|\bupdate_weights?\b|"
                r"update_weights?_(from|for)_|\bsync_weights|_send_hf_params|get_hf_weight_chunks|"
                r"recv_weight|_send_to_colocated|update_parameter"
            ),
        ),
        (
            Phase.CHECKPOINT,
            (
                r"save_checkpoint|load_checkpoint|\bsave_model\b|dist_checkpointing|_cuda_deserialize|"
                r"in load_state_dict|torch/serialization\.py|save_hf_model|save_pretrained"
            ),
        ),
        (
            Phase.ROLLOUT_INIT,
            (
                r"determine_available_memory|determine_num_available_blocks|\bprofile_run\b|"
                r"_initialize_kv_caches|initialize_(kv_)?cache|_allocate_kv_cache|capture_model|"
                r"_warmup_and_capture|_dummy_(sampler_)?run|dummy_metadata|\bcreate_weights\b|"
                r"init_cuda_graphs|[Cc]uda_?[Gg]raph_?[Rr]unner|init_memory_pool|_create_buffers|"
                r"Capture (prefill )?(cuda|CUDA) graph failed|raise_if_cache_size|"
                r"check_enough_kv_cache|_wait_server_healthy|start_rollout_servers|"
                r"launch_server_process|start_router|(vllm|sglang)/\S+, line \d+, in (__init__|"
                r"load_model|_?initialize\w*)\b"
            ),
        ),
        (
            Phase.INIT,
            (
                r"initialize_optimizer_states|_configure_\w*optimizer|_move_model_to_device|_auto_wrap|"
                r"fully_sharded_data_parallel\S*, line \d+, in __init__|_init_ref|"
                r"deepspeed\S*, line \d+, in initialize|\binit_model\b|print_node_ip_and_gpu_id|"
                r", in setup\b|Before creating fp16|After creating fp16"
            ),
        ),
        (
            Phase.BACKWARD,
            (
                r"run_backward|(?<![\w.])backward\b(?!\.py)|\.backward\(|\bbackward_step\b|"
                r"custom_backward"
            ),
        ),
        (
            Phase.LOG_PROB,
            (
                r"compute_(ref_|actor_)?log_?probs?\b|\bget_logprobs|get_reference_policy_logprobs|"
                r"\bcompute_values\b|\bforward_only\b|compute_rm_score|compute_scores?\b|compute_logp|"
                r"Computing logprobs"
            ),
        ),
        (
            Phase.OPTIMIZER,
            (
                r"optimizer_step|optimizer\.step|_(multi|single)_tensor_adam|_foreach_|"
                r"step_with_ready_grads|torch/optim/(?!lr_sched)\w+\.py|low_level_optim|\boptim\.step|"
                r"distrib_optimizer\.py|accelerate/optimizer\.py|fused_adam"
            ),
        ),
        (
            Phase.ROLLOUT,
            (
                r"generate_sequences|run_busy_loop|_process_engine_step|run_engine_loop|\brun_batch\b|"
                r"forward_batch_generation|_run_engine|event_loop_|forward_thread_func|"
                r"\bforward_(extend|decode)\b|logits_processor|start_worker_execution_loop|"
                r"during generation|Method (Prefill|Decode)|\bgenerate_rollout|in generate\b|"
                r"RolloutManager\.generate|run_tp_server|AsyncLLM output_handler"
            ),
        ),
        (
            Phase.FORWARD,
            (
                r"compute_loss|grpo_accumulated_loss|forward_step|training_step|fetch_sub_module|"
                r"float_conversion|vocab_parallel|post_language_model|get_log_probs_and_entropy|"
                r"update_(policy|actor|critic)|entropy_from_logits|in forward\b|forward_backward|"
                r"train_one_step|\btrain_batch\b"
            ),
        ),
        (Phase.DATA, r"remote_read|[Dd]ata[Ll]oader worker|encountered in worker"),
        (Phase.INIT, r"module\.py\S*, line \d+, in (convert|_apply|cuda|to)\b|\.to\(device\)|\.cuda\(\)"),
        (Phase.COMM, r"init_process_group|_new_process_group|\ball_?reduce\b|\ball_gather\w*|barrier"),
    )
)
# What engines print when they start; weaker than frames.
_STAGE = re.compile(
    r"Capturing cuda ?graphs?|Capture (target|cuda|CUDA|prefill)|Loading safetensors|Load weight (begin|end)|"
    r"Memory pool end|KV Cache is allocated|# GPU blocks"
)
_COMPONENTS: tuple[tuple[Component, re.Pattern[str]], ...] = tuple(
    (component, re.compile(pattern, re.MULTILINE))
    for component, pattern in (
        (
            Component.REF,
            r"reference-\d|ReferenceModel|RefActor|_ref_log_prob|get_reference_policy|compute_ref_",
        ),
        (Component.CRITIC, r"Critic|critic-\d|compute_values|update_critic"),
        (Component.REWARD, r"RewardModel|reward-\d|compute_rm_score"),
        (
            Component.ROLLOUT,
            (
                r"SGLang|vLLMHttp|AsyncVLLM|VllmWorker|VllmGeneration|RayWorkerWrapper|EngineCore|"
                r"APIServer|Worker_TP|LLMRayActor|RolloutManager|RolloutActor|vllm/|sglang/|sgl_jax/|"
                r"cumem|wake_up|text_generation|sync_model_weights|generate_sequences|in generate\b|"
                r"DP\d+ TP\d|TP\d+\]"
            ),
        ),
        (Component.DATA, r"[Dd]ata[Ll]oader|remote_read"),
        (
            Component.TRAINER,
            (
                r"WorkerDict|TrainRayActor|ActorModelRayActor|PolicyWorker|TrainerActor|ActorWorker|"
                r"fsdp|megatron|deepspeed|torch/optim|backward|optimizer|compute_loss|training_step|"
                r"[Tt]rainer|torch/nn/modules|NCCL|get_logprobs"
            ),
        ),
        (Component.DRIVER, r"main_task|TaskRunner"),
    )
)
_FRAME = re.compile(
    r"File \"?[^\"\s]+\"?(, line |:)\d+|^\S*\.py:\d+:? in |\S+\.py:\d+ \w+|\.py\(\d+\): \w+|"
    r"\.py in \w+\(|ray::\w"
)
_ERROR_END = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?!\()(?:: .*)?$")


def phase_of(context: str) -> Phase:
    """Return the phase that a context of frames and methods shows, NONE where it shows none."""
    for phase, pattern in _PHASES:
        if pattern.search(context):
            return phase
    return Phase.NONE


def component_of(context: str) -> Component:
    """Return the component that a context of prefixes and frames shows."""
    for component, pattern in _COMPONENTS:
        if pattern.search(context):
            return component
    return Component.UNKNOWN


def is_stage(line: str) -> bool:
    """Return whether an engine says with this line that it is starting."""
    return _STAGE.search(line) is not None


def is_frame(line: str) -> bool:
    """Return whether a line belongs to a traceback's frames."""
    return _FRAME.search(line) is not None


def ends_error(line: str) -> bool:
    """Return whether a line is the last of a traceback: what is above belongs to another error."""
    return _ERROR_END.match(line) is not None
