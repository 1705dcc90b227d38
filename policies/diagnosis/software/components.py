"""COMPONENTS: the part of a job that a prefix, a frame or a method belongs to; the first match counts."""

from __future__ import annotations

from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.values.failure import Component

COMPONENTS: tuple[tuple[Component, Pattern], ...] = tuple(
    (component, Pattern(pattern))
    for component, pattern in (
        # The role in a worker's id or a method's name is more specific than code that several roles share.
        (
            Component.REF,
            (
                r"reference-\d|ReferenceModel|RefActor|_ref_log_prob|get_reference_policy|compute_ref_|"
                r"worker 'ref/|^\[ref\] |\.ref_(?:compute|init|infer)\w*|Ref(?:Policy)?(?:Worker|RayActor|"
                r"ModelActor)|"
                r"\bref_log_probs start|\bref_policy\b|\bref(?:erence)?_model\(|self\.ref_(?:model|"
                r"module)\b|\bref_model = |"
                r"\bcompute_reference_|"
                r"create_reference_model|TeacherWorker|TeacherLogp|teacher-\d|\bteacher_log_probs start|"
                r"(?:[Cc]omputing|[Cc]aching|[Bb]efore init|[Aa]fter init|[Bb]uilding|[Ll]oading) (?:the )?"
                r"(?:ref|reference|teacher)\b(?! implementation)"
            ),
        ),
        (
            Component.CRITIC,
            (
                r"Critic|ValueWorker|value_worker|critic-\d|compute_values|update_critic|"
                r"worker 'critic/|^\[critic\] |"
                r"\.critic_\w+|_critic\.py|/critic\.py|(?:[Bb]efore|[Aa]fter|[Bb]uilding|"
                r"[Ll]oading)(?: init)? (?:the )?"
                r"critic\b"
            ),
        ),
        (
            Component.REWARD,
            (
                r"RewardModel|Reward\w*Worker|reward-\d|compute_rm_score|\.rm_\w+|worker 'reward/|"
                r"reward_model\S*, line"
            ),
        ),
        (
            Component.TRAINER,
            (
                r"worker '(?:actor|train\w*)/|megatron_utils|fsdp_utils/actor|TrainRayActor|"
                r"Actor training failed|"
                # gathers a sharded parameter, whichever engine requested it
                r"torch/distributed/\S+, line \d+, in full_tensor\b|"
                r"_post_state_dict_hook|actor_train-\d"
            ),
        ),
        (
            Component.ROLLOUT,
            (
                r"SGLang|[Vv](?:LLM|llm)\w*(?:Server|Actor|Worker|Http|Generation)|Async[Vv]LLM|"
                r"RayWorkerWrapper|"
                r"(?:TRTLLM|Trtllm|Dynamo)\w*(?:Server|Worker)|InferWorker|Rollout(?:RayActor|Worker|"
                r"Replica)|"
                r"\bVLLM::|\bsglang::|ray::(?:[Vv]LLM|Vllm|Rollout|LLM|Infer|AgentLoop)|exllamav|"
                r"ktransformers|"
                r"LLMServer|(?:release|resume)_memory_occupation|dump_input\.py|EngineCore|"
                r"APIServer|Worker(?:_\w+)?_?TP\d|LLMRayActor|RolloutManager|RolloutActor|vllm/|sglang/|"
                r"sgl_jax/|"
                r"cumem|text_generation|AgentLoopWorker|sync_model_weights|generate_sequences|"
                r"in generate\b|wake_up|"
                r"DP\d+ TP\d|TP\d+\]|worker 'rollout/|^\[rollout\] |lmdeploy/|tensorrt_llm/|"
                r"Failed to update (?:parameter|weights)|func=resume|generation/utils\.py|vllm_(?:ascend|"
                r"omni)/|actor_infer-\d|"
                r"GenerationWorker|InferenceWorker|TensorRT-LLM|TRT-LLM|tensorrt_llm|\[TM\]\[|turbomind|"
                # llama.cpp, and the logger formats of vLLM and LMCache
                r"\bggml[_-]|\bllama_\w+: |\bload_tensors: |alloc_tensor_range|^(?:srv|slot) +\w+: |"
                r"\blmcache\b|"
                r"\bcandle_(?:core|nn)::|\bDriverError\(CUDA_|"  # engines in Rust
                r"\bERROR \d\d-\d\d \d\d:\d\d:\d\d \[?[\w/]+\.py:\d+\]|"
                r"\]? (?:ATTN_|MOE_|DP|PP|TP|EP|CP)+\d+ ?(?:TP|EP|PP)\d+\]"
            ),
        ),
        (
            Component.DATA,
            (
                r"[Dd]ata[Ll]oader worker|\bpt_data_worker\b|encountered in worker|remote_read|"
                r"in pin memory thread|</torch_\d|"
                r"lib\.Arrow\w*Error|[/\\](?:pandas|pyarrow|datasets)[/\\]"
            ),
        ),
        (
            Component.TRAINER,
            (
                r"WorkerDict|RayActor|ModelActor|PolicyWorker|TrainerActor|ActorWorker|"
                r"Train(?:ing)?(?:Worker|Actor)|"
                r"(?:Student|SFT)Worker|ray::(?:Megatron|FSDP|DTensor|Policy|Train)|(?:FSDP|Megatron|"
                r"Archon)Engine\b|EngineBP|areal/engine|"
                r"torch/nn/parallel|"
                r"fsdp|megatron|deepspeed|torch/optim|backward|optimizer|compute_loss|training_step|"
                r"[Tt]rainer|torch/nn/modules|NCCL|nccl|get_logprobs|torch/serialization|modeling_utils|"
                r"ray::\w*(?:Actor|Policy|Learner|Trainer)\w*\.\w*(?:train|learn|update_(?:actor|policy))\w*\(|"
                r"'ppo_update'|\bRayRPCServer\b|_create_device_model|torch/distributed|see_memory_usage|"
                r"liger_kernel|unsloth|[/\\]peft[/\\]|bitsandbytes|torch/amp/|accelerate/|"
                r"core_model_loading|[/\\](?:nanotron|colossalai|lightning|composer|"
                r"fairseq|mmengine|open_instruct|rlinf|miles|mindspeed|prime_rl)[/\\]"
            ),
        ),
        (Component.DATA, r"[Dd]ata[Ll]oader"),
        (Component.DRIVER, r"main_task|TaskRunner"),
        # Frames of a training framework, which show nothing more specific.
        (
            Component.TRAINER,
            (
                r"\b(?:verl|slime|relax|areal|trl|openrlhf|nemo_rl|swift|llamafactory|torchtune|torchtitan|"
                r"roll|skyrl_train|prime_rl|axolotl)/\w+|ppo_utils"
            ),
        ),
    )
)
